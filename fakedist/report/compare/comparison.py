"""A comparison of two runs for the reports: every table of changes, and one line with the reason."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path

import pandas as pd

from fakedist.analysis.compare import (
    changed_blocks,
    changed_calls,
    changed_memory,
    changed_settings,
    headline,
    matching,
    why,
)
from fakedist.report.compare.time_comparison import TimeComparison
from fakedist.report.text.group_sheets import CallsText, RunTopology
from fakedist.results.opening import open_run_directory
from fakedist.run.plain import to_plain
from fakedist.run.tables import read_table
from fakedist.units import format_bytes

#: Columns of the table `blocks` that a comparison of blocks needs.
BLOCK_COLUMNS = ("bytes", "alloc_event", "operation", "phase", "layer", "category", "stack", "at_peak")
_TIME_TABLES = ("parts", "phases", "families", "groups", "layers", "names")
_CATEGORY_WORDS = {
    "parameter": "parameters",
    "optimizer_state": "optimizer states",
    "gradient": "gradients",
    "workspace": "workspaces",
    "activation": "activations",
    "communication": "communication buffers",
    "temporary": "temporaries",
    "other": "other blocks",
}


class Comparison:
    """What changed from one run to another.

    Args:
        a: Directory of the reference run.
        b: Directory of the run in question. Changes are from ``a`` to ``b``.

    Raises:
        RunDirectoryError: One of them is not a run directory, or is damaged.
    """

    def __init__(self, a: Path, b: Path) -> None:
        self.a, self.b = open_run_directory(a), open_run_directory(b)
        self.summaries = self.a.summary, self.b.summary

    @cached_property
    def differences(self) -> list[dict[str, str]]:
        """Settings that differ: ``name``, ``a``, ``b``."""
        return changed_settings.different_settings(self.a.manifest, self.b.manifest, self.summaries)

    @cached_property
    def changes(self) -> list[str]:
        """What was changed, in a few words each: "--loss-parallel", "world size 64 -> 128"."""
        return headline.changed_names(self.a.manifest, self.b.manifest, self.differences)

    @property
    def changed(self) -> str:
        """All of it in one phrase; empty if both runs have the same settings."""
        return headline.changed_text(self.changes)

    @cached_property
    def warnings(self) -> list[str]:
        """What a reader must know before the figures, one sentence each."""
        sides = zip("AB", self.summaries, strict=True)
        found = [f"{side} {phrase}" for side, each in sides if (phrase := changed_settings.incomplete(each))]
        return found + changed_settings.unlike_times(*self.summaries)

    @property
    def look_first(self) -> list[str]:
        """Where to look first, beyond the headline: nothing, since the tables say it by layer."""
        return []

    @cached_property
    def figures(self) -> pd.DataFrame:
        """Peaks, capacity, headroom."""
        return changed_memory.figure_changes(*self.summaries)

    @cached_property
    def categories(self) -> pd.DataFrame:
        """Bytes at the peak by category."""
        return changed_memory.category_changes(*(each.by_category for each in self.summaries))

    @cached_property
    def phases(self) -> pd.DataFrame:
        """Peak by step and phase."""
        return changed_memory.phase_changes(*self._tables("phases"))

    @cached_property
    def matches(self) -> pd.DataFrame:
        """Which layer of one run is which layer of the other."""
        return matching.match_layers(*self._tables("layers"))

    @cached_property
    def parts(self) -> pd.DataFrame:
        """Own bytes of every layer at the peak, by category."""
        return changed_memory.layer_parts(*self._tables("layers"), self.matches)

    @cached_property
    def layers(self) -> pd.DataFrame:
        """Changes by layer and category."""
        return changed_memory.layer_changes(self.parts)

    @cached_property
    def most(self) -> pd.DataFrame:
        """Changes in the most that one layer held."""
        return changed_memory.most_changes(*self._tables("layers"), self.matches)

    @cached_property
    def renamed(self) -> list[dict[str, str]]:
        """Layers with a new name: ``was``, ``name``, ``how``. Repeated layers once, and only the topmost."""
        return matching.renamed_layers(*self._tables("layers"), self.matches)

    @cached_property
    def blocks(self) -> pd.DataFrame:
        """Changes of the blocks at the peak."""
        paths = changed_memory.layer_paths(*self._tables("layers"), self.matches)
        sides = []
        for run, of_layers in zip((self.a, self.b), paths, strict=True):
            table = read_table(run.path, "blocks", BLOCK_COLUMNS).to_pandas()
            stacks = read_table(run.path, "stacks", ("line",)).to_pandas()
            cwd = run.manifest.cwd
            job = run.manifest.job
            script_folder = os.path.dirname(os.path.join(cwd, job.target)) if job else cwd
            sides.append(changed_blocks.peak_blocks(table, stacks, of_layers, cwd=cwd, script_folder=script_folder))
        return changed_blocks.block_changes(*sides)

    @cached_property
    def collectives(self) -> pd.DataFrame:
        """Changes of the collectives."""
        return changed_calls.collective_changes(*(each.collectives for each in self.summaries))

    @cached_property
    def streams(self) -> list[tuple[str, CallsText]]:
        """Calls of a step, their streams and what can run at once, of "A" and of "B"; empty if both are the same."""
        told = [RunTopology(run).told() for run in (self.a, self.b)]
        places = [[(row.group, row.operation, row.stream, row.beside) for row in rows] for rows in told]
        if places[0] == places[1]:
            return []
        return [(side, row) for side, rows in zip("AB", told, strict=True) for row in rows]

    @cached_property
    def time(self) -> TimeComparison | None:
        """Changes of the timed step; None if one of the runs has none."""
        if any(each.timed is None for each in self.summaries):
            return None
        paths = changed_memory.layer_paths(*self._tables("layers"), self.matches)
        return TimeComparison((self.a, self.b), paths)

    @cached_property
    def cause(self) -> why.Cause | None:
        """What accounts for most of the change."""
        return why.find_cause(self.parts)

    @property
    def why(self) -> str:
        """The one line: "+2.91 GiB at the peak: activations of layers.*.mlp, +2.88 GiB, first seen at model.py:212"."""
        if self.cause is None:
            peak = self.summaries[1].peak_allocated_bytes
            moved = "" if self.layers.empty else ", but made of different blocks"
            return f"the peak is the same, {format_bytes(peak)}{moved}"
        return say_cause(self.cause, why.origin_of(self.cause, self.blocks))

    @property
    def headline(self) -> str:
        """What was changed, and the reason: "--loss-parallel: -7.32 GiB at the peak: temporaries ..."."""
        return f"{self.changed}: {self.why}" if self.changed else self.why

    def _tables(self, name: str) -> tuple[pd.DataFrame, pd.DataFrame]:
        return self._kept.setdefault(name, (self.a.table(name), self.b.table(name)))

    @cached_property
    def _kept(self) -> dict[str, tuple[pd.DataFrame, pd.DataFrame]]:
        return {}


def say_cause(cause: why.Cause, place: why.Origin) -> str:
    """A change of the peak, what accounts for it and where that is allocated, in one line."""
    seen = place.phrase("first seen" if cause.part > 0 else "last seen")
    return f"{format_change(cause.change)} at the peak: {say_part(cause)}{seen}"


def say_part(cause: why.Cause, *, is_change: bool = True) -> str:
    """What accounts for a change, or for a figure: "activations of layers.*.mlp, +2.88 GiB"."""
    amount = format_change(cause.part) if is_change else format_bytes(cause.part)
    return f"{_CATEGORY_WORDS[cause.category]} {why.of_layers(cause.layer)}, {amount}"


def format_change(bytes_: float) -> str:
    """Bytes with a sign: "+2.91 GiB", "-512 B", "0 B"."""
    return ("+" if bytes_ > 0 else "") + format_bytes(bytes_)


def format_relative(bytes_: float, of: float) -> str:
    """A change in percent of the former value; empty if that was 0."""
    return f"{bytes_ / of:+.1%}".replace("-0.0%", "0.0%").replace("+0.0%", "0.0%") if of else ""


def time_object(comparison: Comparison) -> dict[str, object] | None:
    """The part of that object about the timed step; null if one of the runs has none."""
    time = comparison.time
    if time is None:
        return None
    tables = {name: getattr(time, name).to_dict("records") for name in _TIME_TABLES}
    return {"sources": list(time.words), "why": time.why, **tables}


def comparison_object(comparison: Comparison) -> dict[str, object]:
    """The object that ``fakedist compare --json`` prints."""
    return {
        "a": str(comparison.a.path),
        "b": str(comparison.b.path),
        "changes": comparison.changes,
        "why": comparison.why,
        "warnings": comparison.warnings,
        "differences": comparison.differences,
        "renamed_layers": comparison.renamed,
        "streams": [{"side": side, **to_plain(row)} for side, row in comparison.streams],
        **{
            name: getattr(comparison, name).to_dict("records")
            for name in ("figures", "categories", "phases", "layers", "most", "blocks", "collectives")
        },
        "time": time_object(comparison),
    }
