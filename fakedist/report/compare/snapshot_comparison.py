"""A comparison of which one side is a memory snapshot of torch, or both: by source line, block size and segment."""

from __future__ import annotations

from functools import cached_property

import pandas as pd

from fakedist.analysis.compare import changed_lines, changed_memory, changed_settings
from fakedist.errors import RunDirectoryError
from fakedist.report.compare.comparison import format_change
from fakedist.report.compare.time_comparison import TimeComparison
from fakedist.report.text.reserved_sheets import UNUSED_NAMES
from fakedist.report.text.wording import short_line
from fakedist.results.run import Run
from fakedist.run.schema import MOMENTS
from fakedist.units import format_bytes

_BLOCK_COLUMNS = ("bytes", "stack", "at_peak")
_SEGMENT_COLUMNS = ("moment", "bytes", "pool", "private_pool", "is_expandable", "free_bytes")
#: Notes of a snapshot that a reader must know before the figures.
_LIMITS = (
    "snapshot_starts_late",
    "snapshot_without_history",
    "snapshot_action_unknown",
    "snapshot_of_several_devices",
)
#: A change below this share of the larger peak is not worth a look.
_MIN_SHARE = 0.01
#: What runs have and a snapshot has not.
LACKS = ("differences", "phases", "categories", "layers", "collectives", "time")


class SnapshotComparison:
    """What changed in the memory from one run to another, as far as a snapshot of torch knows it.

    Args:
        a: The reference: a snapshot or a run.
        b: The one in question. Changes are from ``a`` to ``b``.

    Raises:
        RunDirectoryError: One of them has no memory: it was imported from an Nsight report.

    Attributes:
        changed: Empty: a snapshot has no settings.
        time: None: a snapshot has no times.
    """

    changed = ""
    time: TimeComparison | None = None

    def __init__(self, a: Run, b: Run) -> None:
        for run in (a, b):
            if run.memory is None:
                raise RunDirectoryError(
                    f"{run.path} has no memory to compare: fakedist nsys imported it",
                    "compare the snapshot with a second snapshot, or with a run of fakedist profile",
                )
        self.a, self.b = a, b
        self.summaries = a.summary, b.summary

    @cached_property
    def warnings(self) -> list[str]:
        """What a reader must know before the figures, one sentence each."""
        found = []
        for side, run in (("A", self.a), ("B", self.b)):
            if run.summary.rank is not None and (phrase := changed_settings.incomplete(run.summary)):
                found.append(f"{side} {phrase}")
            found += [f"{side}: {note.text}" for note in run.summary.notes if note.code in _LIMITS]
        return found

    @cached_property
    def figures(self) -> pd.DataFrame:
        """Both peaks."""
        return changed_memory.figure_changes(*self.summaries).head(2)

    @cached_property
    def lines(self) -> pd.DataFrame:
        """Changes of the blocks at the peak by source line."""
        return changed_lines.line_changes(*self._blocks)

    @cached_property
    def kinds(self) -> pd.DataFrame:
        """What appeared, grew, shrank, is gone and is the same."""
        return changed_lines.line_kinds(self.lines)

    @cached_property
    def sizes(self) -> pd.DataFrame:
        """Blocks at the peak that only one of them has, by line and size."""
        return changed_lines.size_changes(*self._blocks)

    @cached_property
    def reserved(self) -> pd.DataFrame:
        """What was reserved when most was, in parts."""
        return changed_lines.reserved_changes(*self.summaries)

    @cached_property
    def segments(self) -> pd.DataFrame:
        """The segments when most was reserved, by pool and size."""
        return changed_lines.segment_changes(*(run.table("segments", _SEGMENT_COLUMNS) for run in (self.a, self.b)))

    @property
    def why(self) -> str:
        """The one line: "+12.00 MiB at the peak: 3 more blocks from model.py:12 (forward), +12.00 MiB"."""
        peak = self.summaries[1].peak_allocated_bytes
        total = peak - self.summaries[0].peak_allocated_bytes
        if not total:
            return f"the peak is the same, {format_bytes(peak)}" + (
                "" if self.sizes.empty else ", but made of different blocks"
            )
        way = 1 if total > 0 else -1
        most = self.lines.iloc[int((self.lines["change_bytes"] * way).to_numpy().argmax())]
        return (
            f"{format_change(total)} at the peak: {self._blocks_of(most)}, {format_change(int(most['change_bytes']))}"
        )

    headline = why

    def _blocks_of(self, row: pd.Series) -> str:
        """What changed about a line, in words."""
        num_a, num_b = int(row["num_a"]), int(row["num_b"])
        line = self.shown(str(row["line"]))
        if not num_a or not num_b:
            return f"{_blocks(num_a or num_b)} from {line}, only in {'A' if num_a else 'B'}"
        if num_a == num_b:
            return f"{'larger' if row['change_bytes'] > 0 else 'smaller'} blocks from {line}"
        return f"{_blocks(abs(num_b - num_a), 'more' if num_b > num_a else 'fewer')} from {line}"

    def shown(self, line: str) -> str:
        """A line as tables show it: relative to the working directory of a run, or to where packages are."""
        for run in (self.a, self.b):
            line = short_line(line, run.manifest.cwd)
        return line

    @cached_property
    def look_first(self) -> list[str]:
        """Where to look first, beyond the headline, one sentence each."""
        return [text for text in (self._unused(), self._expandable(), self._without_line()) if text]

    def _unused(self) -> str:
        """The part of reserved memory that holds no tensor, if it changed more than a little."""
        found = self.reserved.set_index("name")["change_bytes"]
        largest = max(summary.peak_reserved_bytes for summary in self.summaries)
        unused = int(found.get("reserved", 0) - found.get("allocated", 0))
        if abs(unused) < max(_MIN_SHARE * largest, 1):
            return ""
        parts = found[found.index.isin(changed_lines.UNUSED_PARTS)] * (1 if unused > 0 else -1)
        name = str(parts.idxmax())
        part = UNUSED_NAMES[name], format_change(int(found[name]))
        return f"{format_change(unused)} reserved without a tensor in it: {part[0]}, {part[1]}"

    def _expandable(self) -> str:
        uses = [
            bool(run.table("segments", ["is_expandable"])["is_expandable"].to_numpy(bool).any())
            for run in (self.a, self.b)
        ]
        if uses[0] == uses[1]:
            return ""
        return f"only {'A' if uses[0] else 'B'} has expandable segments (PYTORCH_CUDA_ALLOC_CONF)"

    def _without_line(self) -> str:
        untold = self.lines[self.lines["line"].isin((changed_lines.IN_TORCH, changed_lines.NO_STACK))]
        change = int(untold["change_bytes"].sum())
        if abs(change) < max(_MIN_SHARE * max(each.peak_allocated_bytes for each in self.summaries), 1):
            return ""
        return (
            f"{format_change(change)} at the peak has no line of the script: most of backward has no Python stack, and "
            "blocks from before the history have none either"
        )

    @cached_property
    def _blocks(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        sides = [
            changed_lines.lines_at_peak(
                run.table("blocks", _BLOCK_COLUMNS), [str(line) for line in run.table("stacks", ["line"])["line"]]
            )
            for run in (self.a, self.b)
        ]
        return changed_lines.blocks_by_line(sides[0], sides[1])


def _blocks(number: int, how: str = "") -> str:
    return " ".join(part for part in (f"{number:,}", how, "block" if number == 1 else "blocks") if part)


def snapshot_object(comparison: SnapshotComparison) -> dict[str, object]:
    """The object that ``fakedist compare --json`` prints if one of both is a snapshot."""
    return {
        "a": str(comparison.a.path),
        "b": str(comparison.b.path),
        "why": comparison.why,
        "warnings": comparison.warnings,
        "look_first": comparison.look_first,
        "lacks": list(LACKS),
        "moment": MOMENTS[0],
        **{
            name: getattr(comparison, name).to_dict("records")
            for name in ("figures", "kinds", "lines", "sizes", "reserved", "segments")
        },
    }
