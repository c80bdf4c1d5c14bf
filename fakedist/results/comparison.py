"""Compares runs, the first of which is the base: what was changed, what that gave and, of two runs, why.

Access to a table that is missing or damaged raises RunDirectoryError.

Compares memory snapshots of torch, or one with a run, by source line: what two of them hold, and why.

Access to a table that is missing or damaged raises RunDirectoryError.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from fakedist.analysis.stack_lines import IN_TORCH, NO_STACK
from fakedist.errors import RunDirectoryError
from fakedist.results.compare import changed_memory, changed_times, layer_matching, reasons
from fakedist.results.compare.allocation_streams import Allocation, StreamDifference, compare_streams, own_lines
from fakedist.results.compare.change_tables import SHOWN_AS_NONE_US, ChangeTable, run_names
from fakedist.results.opening import open_run
from fakedist.results.run import Run
from fakedist.results.verdict import communication_word, short_line, step_word
from fakedist.rundir.notes import counted
from fakedist.rundir.step_time import StepTime
from fakedist.units import (
    format_bytes,
    format_change,
    format_number,
    format_relative,
    format_us,
    format_us_change,
)

_NOISE = 1e-4
#: The paths of a run's layers in a comparison, by their rows.
_Paths = dict[int, str]


class StepComparison:
    """The timed steps of runs by their names, of which at least two have one. ``paths`` name each run's layers."""

    def __init__(self, runs: dict[str, Run], paths: Sequence[_Paths]) -> None:
        self.runs, self._paths = runs, paths
        timed = {name: run.summary.timed for name, run in runs.items() if run.summary.timed is not None}
        self.times = {name: time for name, (time, _) in timed.items()}
        self.sources = {name: source for name, (_, source) in timed.items()}

    def _each(self) -> list[StepTime | None]:
        return [self.times.get(name) for name in self.runs]

    @cached_property
    def parts(self) -> pd.DataFrame:
        """The step, and how its time is spent."""
        return changed_times.part_changes(*self._each())

    @cached_property
    def rates(self) -> pd.DataFrame:
        """Tokens or samples per second and in a step, and MFU."""
        return changed_times.rate_changes(*self._each())

    @cached_property
    def phases(self) -> pd.DataFrame:
        """Forward, recompute, backward and so on. The changes add up to the change of all kernels."""
        return changed_times.phase_changes(*self._each())

    @cached_property
    def families(self) -> pd.DataFrame:
        """Families of kernels."""
        return changed_times.family_changes(*self._each())

    @cached_property
    def groups(self) -> pd.DataFrame:
        """Exposed communication by group and operation; no rows unless two runs have it."""
        return changed_times.group_changes(*self._each())

    @cached_property
    def layers(self) -> pd.DataFrame:
        """Own time of layers by family. The changes add up to the change of all kernels."""
        sides = [
            changed_times.layer_parts(run.table("layer_times"), paths)
            if name in self.times
            else pd.DataFrame(columns=["path", "category", "us"])
            for (name, run), paths in zip(self.runs.items(), self._paths, strict=True)
        ]
        return changed_memory.path_changes(*sides, unit="us")

    @cached_property
    def names(self) -> pd.DataFrame:
        """Kernels by name."""
        return changed_times.name_changes(*(run.table("kernel_names") for run in self.runs.values()))

    @property
    def of(self) -> str:
        """Source of these times: "measured" or "estimated", for each run if they differ."""
        return _words({name: source.source for name, source in self.sources.items()})

    @property
    def of_communication(self) -> str:
        """The same of communication, which is estimated between measured kernels too."""
        return _words({name: communication_word(time) for name, time in self.times.items()})

    @cached_property
    def noise_us(self) -> float:
        """Smaller changes are not worth a row: a ten-thousandth of the shortest step, and what is written as 0 µs."""
        return max(_NOISE * min(time.step_us for time in self.times.values()), SHOWN_AS_NONE_US)

    @property
    def noise_text(self) -> str:
        """That threshold in words."""
        share = "" if self.noise_us <= SHOWN_AS_NONE_US else f", {_NOISE:.2%} of the shortest step"
        return f"less than {format_us(self.noise_us)}{share}"

    @property
    def is_changed(self) -> bool:
        """True if the last step differs from the first by more than that."""
        first, *_, last = self.times.values()
        return abs(last.step_us - first.step_us) >= self.noise_us

    @property
    def why(self) -> str:
        """The one line of two runs: "step +10.1 ms (+4.2%), estimated: +12.3 ms in its kernels, gemm of layers.*.mlp".

        Of exposed communication if that changed more: "-9.1 ms of exposed communication, all_gather on dp, -9.0 ms".
        Where the steps have unlike work, the rate comes first: "tokens/s per GPU 1,702 -> 1,498 (-12.0%)".
        """
        before, after = self.times.values()
        cause = self._cause()
        rate = rate_text(before, after)
        of = _words({name: step_word(source) for name, source in self.sources.items()})
        if not cause and format_us(before.step_us) == format_us(after.step_us) and not rate:
            return f"the step takes the same time, {format_us(after.step_us)}, {of}"
        change = after.step_us - before.step_us
        step = f"step {format_us_change(change)} ({format_relative(change, before.step_us)}), {of}"
        step = "; ".join(filter(None, (rate, step)))
        return f"{step}: {cause}" if cause else step

    def _cause(self) -> str:
        cause = reasons.find_cause(self.layers, "change_us")
        exposed = float(self.groups["change_us"].sum())
        if abs(exposed) > (0.0 if cause is None else abs(cause.change)):
            first = self.groups[self.groups["change_us"] * exposed > 0].iloc[0]
            part = f"{first['operation']} on {first['group']}, {format_us_change(float(first['change_us']))}"
            return f"{format_us_change(exposed)} of exposed communication, {part}"
        return "" if cause is None else f"{format_us_change(cause.change)} in its kernels, {cause.phrase(is_time=True)}"

    @property
    def tables(self) -> Iterator[ChangeTable]:
        """Every table, with all its rows. Rates come first where lengths of steps do not compare: of unlike work."""
        of = self.of
        kernels = {"kernels": "num_{}"}
        calls = {"calls": "num_{}", "time": "whole_{}_us"}
        parts = ChangeTable(f"Time of the step, {of}", {"": "name"}, self.parts, "us", is_whole=True)
        work = ChangeTable(f"Work of the step, {of}", {"": "name"}, self.rates, "number", is_whole=True)
        base, *others = self.times.values()
        is_unlike = any(changed_times.unlike_work(base, other) for other in others)
        yield from (work, parts) if is_unlike else (parts, work)
        yield ChangeTable(f"Kernels by phase, {of}", {"phase": "name"}, self.phases, "us")
        yield ChangeTable(f"By family of kernels, {of}", {"family": "family"}, self.families, "us", kernels)
        title = f"Exposed communication by group, {self.of_communication}"
        yield ChangeTable(title, {"group": "group", "operation": "operation"}, self.groups, "us", calls)
        keys = {"layer": "path", "family": "category"}
        yield ChangeTable(f"Time by layer, own, {of}", keys, self.layers, "us")
        if len(self.runs) == 2:
            yield ChangeTable(f"Kernels by name, {of}", {"kernel": "name"}, self.names, "us", kernels)


def _words(words: dict[str, str]) -> str:
    """The word of all runs, or that of each if they differ."""
    if len(set(words.values())) == 1:
        return next(iter(words.values()))
    return ", ".join(f"{name} {word}" for name, word in words.items())


def rate_text(before: StepTime, after: StepTime) -> str:
    """The change of the rate between steps of unlike work, which comes first; empty for steps of the same work."""
    if (names := changed_times.unlike_work(before, after)) is None:
        return ""
    (rate_a, work_a), (rate_b, work_b) = (
        [changed_times.rates_of(time)[name] for name in names] for time in (before, after)
    )
    moved = f"{format_number(rate_a)} -> {format_number(rate_b)} ({format_relative(rate_b - rate_a, rate_a)})"
    return f"{names[0]} {moved}, with {format_number(work_a)} -> {format_number(work_b)} {names[1]}"


class Comparison:
    """The changes from a run to others, by their names A, B, ...; of two runs also the reasons.

    Raises:
        RunDirectoryError: One of them is not a run, or is damaged.
    """

    def __init__(self, *runs: str | os.PathLike[str] | Run) -> None:
        opened = [open_run(run).keeping_tables() for run in runs]
        self.runs = dict(zip(run_names(len(opened)), opened, strict=True))
        self.base, *self.others = opened

    @cached_property
    def differences(self) -> dict[str, list[str]]:
        """Settings that differ: for each the value of every run."""
        unlike: dict[str, dict[int, str]] = {}
        for at, other in enumerate(self.others, 1):
            for name, (mine, theirs) in reasons.different_settings(self.base, other).items():
                unlike.setdefault(name, {0: mine})[at] = theirs
        return {name: [values.get(at, values[0]) for at in range(len(self.runs))] for name, values in unlike.items()}

    @cached_property
    def changes(self) -> list[list[str]]:
        """The changed settings of each run but the base, in a few words each: "--loss-parallel", "rank 0 -> 8"."""
        return [reasons.changed_names(self.base, run) for run in self.others]

    @cached_property
    def warnings(self) -> list[str]:
        """Limits of the figures, one sentence each."""
        return reasons.warnings({name: run.summary for name, run in self.runs.items()})

    @property
    def look_first(self) -> list[str]:
        """Hints beyond the headline: none, since the tables name the layers."""
        return []

    @property
    def headlines(self) -> list[tuple[str, str]]:
        """Names and lines: of two runs the reasons, else for each run but the base what was changed and what it gave.

        "--loss-parallel: -7.32 GiB at the peak: ..."; "B --tp 4: peak -7.32 GiB (-62.1%), step +10.1 ms (+4.2%)".
        """
        texts = [reasons.changed_text(changes) for changes in self.changes]
        if len(self.runs) == 2:
            (name, first), *others = self.whys
            return [(name, f"{texts[0]}: {first}" if texts[0] else first), *others]
        named = zip(list(self.runs)[1:], texts, strict=True)
        return [
            (f"headline-{at}", f"{' '.join(filter(None, (name, changed)))}: {self._gave(name)}")
            for at, (name, changed) in enumerate(named, 1)
        ]

    def _gave(self, name: str) -> str:
        peaks = [run.peak_allocated_bytes for run in (self.base, self.runs[name])]
        parts = [f"peak {_moved(format_change, peaks[0], peaks[1])}"]
        times = {} if self.time is None else self.time.times
        if "A" in times and name in times:
            before, after = times["A"], times[name]
            parts += filter(None, [rate_text(before, after)])
            parts.append(f"step {_moved(format_us_change, before.step_us, after.step_us)}")
        return ", ".join(parts)

    @cached_property
    def figures(self) -> pd.DataFrame:
        """Peaks, capacity, headroom."""
        return changed_memory.figure_changes(*(run.summary for run in self.runs.values()))

    @cached_property
    def categories(self) -> pd.DataFrame:
        """Bytes at the peak by category."""
        return changed_memory.category_changes(*(run.summary.by_category for run in self.runs.values()))

    @cached_property
    def time(self) -> StepComparison | None:
        """Changes of the timed step; None if fewer than two runs have one."""
        if sum(run.summary.timed is not None for run in self.runs.values()) < 2:
            return None
        if len(self.runs) == 2:
            paths = [*layer_matching.layer_paths(*self._pair("layers"), self.matches)]
        else:
            paths = [dict(enumerate(layer_matching.layer_patterns(table))) for table in self._tables("layers")]
        return StepComparison(self.runs, paths)

    @property
    def memory_tables(self) -> Iterator[ChangeTable]:
        """Every table of memory and calls, with all its rows."""
        yield ChangeTable("Memory, measured", {"": "name"}, self.figures, is_whole=True)
        if len(self.runs) == 2:
            keys = {"step": "step", "phase": "phase"}
            yield ChangeTable("By phase, most allocated", keys, self.phases)
        yield ChangeTable("By category at the peak", {"category": "category"}, self.categories)
        title = "By layer at the peak, own bytes"
        keys = {"layer": "name", "category": "category"}
        if len(self.runs) > 2:
            if all(run.by_category is not None for run in self.runs.values()):
                sides = [changed_memory.pattern_parts(table) for table in self._tables("layers")]
                yield ChangeTable(title, keys, changed_memory.path_changes(*sides))
            return
        times = [f" x{number}" if number > 1 else "" for number in self.layers["num_layers"]]
        layers = self.layers.assign(name=self.layers["name"] + times)
        was = {"was": "was"} if any(layers["was"]) else {}
        yield ChangeTable(title, {"layer": "name", **was, "category": "category"}, layers)
        title = "Most that one layer held in the last step, with children"
        yield ChangeTable(title, {"layer": "name"}, self.most, pairs={"layers": "num_{}"})
        keys = {"line": "line", "layer": "path", "category": "category", "operation": "operation"}
        title = "Blocks at the peak, by where they are allocated"
        yield ChangeTable(title, keys, self.blocks, pairs={"blocks": "num_{}"})
        title = "Collectives, simulated: in and out of this rank's calls"
        keys = {"group": "group", "operation": "operation"}
        carried = {f"{side}_bytes": self.collectives.filter(regex=f"^{side}_bytes_").sum(axis=1) for side in "ab"}
        pairs = {"ranks": "{}_group_size", "calls": "{}_num_calls"}
        yield ChangeTable(title, keys, self.collectives.assign(**carried), pairs=pairs)

    # The rest is of two runs.

    @cached_property
    def phases(self) -> pd.DataFrame:
        """Peak by step and phase."""
        return changed_memory.phase_changes(*self._pair("phases"))

    @cached_property
    def matches(self) -> pd.DataFrame:
        """Pairs of layers: which layer of one run is which layer of the other."""
        return layer_matching.match_layers(*self._pair("layers"))

    @cached_property
    def parts(self) -> pd.DataFrame:
        """Own bytes of every layer at the peak, by category."""
        return changed_memory.layer_parts(*self._pair("layers"), self.matches)

    @cached_property
    def layers(self) -> pd.DataFrame:
        """Changes by layer and category."""
        return changed_memory.layer_changes(self.parts)

    @cached_property
    def most(self) -> pd.DataFrame:
        """Changes in the most that one layer held."""
        return changed_memory.most_changes(*self._pair("layers"), self.matches)

    @cached_property
    def renamed(self) -> list[dict[str, str]]:
        """Layers with a new name: ``was``, ``name``, ``how``. Repeated layers once, and only the topmost."""
        return layer_matching.renamed_layers(*self._pair("layers"), self.matches)

    @cached_property
    def blocks(self) -> pd.DataFrame:
        """Changes of the blocks at the peak."""
        paths = layer_matching.layer_paths(*self._pair("layers"), self.matches)
        sides = []
        for run, of_layers in zip(self.runs.values(), paths, strict=True):
            table = run.table("blocks", changed_memory.BLOCK_COLUMNS)
            stacks = run.table("stacks", ("line",))
            sides.append(changed_memory.peak_blocks(table, stacks, of_layers, cwd=run.manifest.cwd))
        return changed_memory.block_changes(*sides)

    @cached_property
    def collectives(self) -> pd.DataFrame:
        """Changes of the collectives."""
        return changed_times.collective_changes(*(run.summary.collectives for run in self.runs.values()))

    @cached_property
    def cause(self) -> reasons.Cause | None:
        """The main cause of the change."""
        return reasons.find_cause(self.parts)

    @property
    def why(self) -> str:
        """The one line: "+2.91 GiB at the peak: activations of layers.*.mlp, +2.88 GiB, first seen at model.py:212"."""
        if self.cause is None:
            moved = "" if self.layers.empty else ", but made of different blocks"
            return f"the peak is the same, {format_bytes(self.others[0].peak_allocated_bytes)}{moved}"
        seen = reasons.origin_of(self.cause, self.blocks).phrase("first seen" if self.cause.part > 0 else "last seen")
        return f"{format_change(self.cause.change)} at the peak: {self.cause.phrase()}{seen}"

    @property
    def whys(self) -> list[tuple[str, str]]:
        """The lines of the peak ("why") and of the step ("time_why"), the step first if only it changed."""
        lines = [("why", self.why)]
        if self.time is not None:
            at = 0 if self.cause is None and self.time.is_changed else 1
            lines.insert(at, ("time_why", self.time.why))
        return lines

    def _tables(self, name: str) -> list[pd.DataFrame]:
        return [run.table(name) for run in self.runs.values()]

    def _pair(self, name: str) -> tuple[pd.DataFrame, pd.DataFrame]:
        a, b = self._tables(name)
        return a, b


def _moved(change: Callable[[float], str], before: float, after: float) -> str:
    relative = format_relative(after - before, before)
    return change(after - before) + (f" ({relative})" if relative else "")


_BLOCK_COLUMNS = ("bytes", "stack", "step", "category", "at_peak")
#: Stand for the lines of what was there before the step of the peak, where a snapshot does not know them.
_EARLIER, _EARLIER_WORKSPACES = "(before the step)", "(workspaces of cuBLAS, before the step)"
_SEGMENT_COLUMNS = ("moment", "bytes", "pool", "private_pool", "is_expandable", "free_bytes")
#: Notes of a snapshot that a reader must know before the figures.
_LIMITS = ("snapshot_starts_late", "snapshot_without_history", "snapshot_action_unknown", "snapshot_of_several_devices")
#: A change below this share of the larger peak is not worth a look.
_MIN_SHARE = 0.01
#: From so many times the bytes that the other casts on, one side has autocast, or casts where the other does not.
_MANY_CASTS = 4
_LACKING = "layers, phases and categories of a snapshot are inferred at best: blocks are compared by source line"
_KINDS = {"appeared": "only in B", "gone": "only in A", "grew": "grew", "shrank": "shrank", "same": "same"}
_RESERVED = {"reserved": "reserved then", "allocated": "allocated then", **changed_memory.UNUSED_NAMES}


class SnapshotComparison:
    """The changes of memory from ``a`` to ``b``, each a snapshot or a run, as far as a snapshot of torch knows them.

    Raises:
        RunDirectoryError: One of them has no memory: it was imported from an Nsight report.
    """

    time = None

    def __init__(self, *paths: str | os.PathLike[str] | Run) -> None:
        a, b = map(open_run, paths)
        for run in (a, b):
            if run.memory is None:
                raise RunDirectoryError(
                    f"{run.path} has no memory to compare: fakedist nsys imported it",
                    "compare the snapshot with a second snapshot, or with a run of fakedist profile",
                )
        self.runs = {"A": a, "B": b}
        self._summaries = a.summary, b.summary

    @cached_property
    def warnings(self) -> list[str]:
        """Limits of the figures, one sentence each."""
        warnings = []
        for side, run in self.runs.items():
            warnings += reasons.warnings({side: run.summary})
            warnings += [f"{side}: {note.text}" for note in run.summary.notes if note.code in _LIMITS]
        return warnings

    @cached_property
    def figures(self) -> pd.DataFrame:
        """Both peaks."""
        return changed_memory.figure_changes(*self._summaries).head(2)

    @cached_property
    def lines(self) -> pd.DataFrame:
        """Changes of the blocks at the peak by source line."""
        return changed_memory.line_changes(*self._blocks)

    @cached_property
    def stream(self) -> StreamDifference:
        """The allocations of a step of both, in order."""
        return compare_streams(*self.runs.values())

    @cached_property
    def kinds(self) -> pd.DataFrame:
        """Blocks that appeared, grew, shrank, went or stayed."""
        return changed_memory.line_kinds(self.lines)

    @cached_property
    def sizes(self) -> pd.DataFrame:
        """Blocks at the peak that only one of them has, by line and size."""
        return changed_memory.size_changes(*self._blocks)

    @cached_property
    def reserved(self) -> pd.DataFrame:
        """Reserved memory at its peak, in parts."""
        return changed_memory.reserved_changes(*self._summaries)

    @cached_property
    def segments(self) -> pd.DataFrame:
        """The segments when most was reserved, by pool and size."""
        return changed_memory.segment_changes(*(run.table("segments", _SEGMENT_COLUMNS) for run in self.runs.values()))

    @property
    def why(self) -> str:
        """The one line: "+12.00 MiB at the peak: 3 more blocks from model.py:12 (forward), +12.00 MiB"."""
        peak = self._summaries[1].peak_allocated_bytes
        total = peak - self._summaries[0].peak_allocated_bytes
        if not total:
            return f"the peak is the same, {format_bytes(peak)}" + (
                "" if self.sizes.empty else ", but made of different blocks"
            )
        way = 1 if total > 0 else -1
        most = self.lines.iloc[int((self.lines["change_bytes"] * way).to_numpy().argmax())]
        return (
            f"{format_change(total)} at the peak: {self._blocks_of(most)}, {format_change(int(most['change_bytes']))}"
        )

    @property
    def headlines(self) -> list[tuple[str, str]]:
        """The line of the peak, as :attr:`Comparison.headlines`, and where the allocations of a step part."""
        return [("why", self.why), ("first_why", self.first_why)]

    @property
    def first_why(self) -> str:
        """Where the allocations of a step part, and whether the dtypes do."""
        if self.stream.first is None:
            return f"all {counted(self.stream.num_a, 'allocation')} of a step have the same size in the same order"
        before, *sides = self.stream.first
        texts = [
            f"{name} requests {self._requested(side)}" if side else f"{name} nothing"
            for name, side in zip("AB", sides, strict=True)
        ]
        text = f"allocations of a step part {f'after {before:,}' if before else 'at the first'}: {', '.join(texts)}"
        return "; ".join(part for part in (text, self._casts()) if part)

    def _requested(self, side: Allocation) -> str:
        cast = "for a cast " if side.is_cast else ""
        return f"{format_bytes(side.bytes_)} {cast}at {self.shown(side.line) or f'no line, in {side.phase}'}"

    def _casts(self) -> str:
        """Which side alone casts, as autocast does; or whose tensors are twice as large."""
        sides = sorted(zip("AB", self.stream.casts, strict=True), key=lambda side: -side[1].total())
        (casting, casts), (other, few) = sides
        if casts.total() > _MANY_CASTS * few.total():
            line = self.shown(max(casts, key=casts.__getitem__)) or "no line"
            text = f"{casting}'s casts in forward take {format_bytes(casts.total())}, most at {line}"
            return f"{text}, {other}'s {format_bytes(few.total())}: as if autocast were on in {casting} alone"
        if not self.stream.half_of:
            return ""
        what = f"much of what {self.stream.half_of} alone allocates is twice as large as what the other does"
        return f"{what}: another dtype, for example without autocast"

    def _blocks_of(self, row: pd.Series) -> str:
        num_a, num_b = int(row["num_a"]), int(row["num_b"])
        line = self.shown(str(row["line"]))
        if not num_a or not num_b:
            return f"{_blocks(num_a or num_b)} from {line}, only in {'A' if num_a else 'B'}"
        if num_a == num_b or (num_b > num_a) != (row["change_bytes"] > 0):
            return f"{'larger' if row['change_bytes'] > 0 else 'smaller'} blocks from {line}"
        return f"{_blocks(abs(num_b - num_a), 'more' if num_b > num_a else 'fewer')} from {line}"

    def shown(self, line: str) -> str:
        """A line as tables show it: relative to the working directory of a run, or to where packages are."""
        for run in self.runs.values():
            line = short_line(line, run.manifest.cwd)
        return line

    @cached_property
    def look_first(self) -> list[str]:
        """Hints beyond the headline, one sentence each."""
        return [text for text in (self._unused(), self._expandable(), self._without_line()) if text]

    def _unused(self) -> str:
        changes = self.reserved.set_index("name")["change_bytes"]
        largest = max(summary.peak_reserved_bytes for summary in self._summaries)
        unused = int(changes.get("reserved", 0) - changes.get("allocated", 0))
        if abs(unused) < max(_MIN_SHARE * largest, 1):
            return ""
        parts = changes[changes.index.isin([*changed_memory.UNUSED_NAMES])] * (1 if unused > 0 else -1)
        name = str(parts.idxmax())
        part = changed_memory.UNUSED_NAMES[name], format_change(int(changes[name]))
        return f"{format_change(unused)} reserved without a tensor in it: {part[0]}, {part[1]}"

    def _expandable(self) -> str:
        uses = [
            bool(run.table("segments", ["is_expandable"])["is_expandable"].to_numpy(bool).any())
            for run in self.runs.values()
        ]
        if uses[0] == uses[1]:
            return ""
        return f"only {'A' if uses[0] else 'B'} has expandable segments (PYTORCH_CUDA_ALLOC_CONF)"

    def _without_line(self) -> str:
        untold = self.lines[self.lines["line"].isin((IN_TORCH, NO_STACK))]
        change = int(untold["change_bytes"].sum())
        if abs(change) < max(_MIN_SHARE * max(summary.peak_allocated_bytes for summary in self._summaries), 1):
            return ""
        return (
            f"{format_change(change)} at the peak has no line of the script: most of backward has no Python stack, and "
            "blocks from before the history have none either"
        )

    @cached_property
    def _blocks(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        has_steps = all((self.stream.step_a, self.stream.step_b))
        starts_late = any(note.code == _LIMITS[0] for summary in self._summaries for note in summary.notes)
        sides = []
        for run in self.runs.values():
            blocks = run.table("blocks", _BLOCK_COLUMNS)
            side, step = changed_memory.lines_at_peak(blocks, own_lines(run)), blocks["step"][blocks["at_peak"]]
            is_earlier = (step < step.max()).to_numpy() & has_steps & starts_late
            category = blocks["category"][blocks["at_peak"]].astype(str).to_numpy()
            earlier = np.where(category == "workspace", _EARLIER_WORKSPACES, _EARLIER)
            sides.append(side.assign(line=side["line"].mask(is_earlier, earlier)))
        return changed_memory.blocks_by_line(sides[0], sides[1], self.stream.same_lines)

    @property
    def memory_tables(self) -> Iterator[ChangeTable]:
        """Every table, with all its rows."""
        yield ChangeTable("Memory, measured", {"": "name"}, self.figures, is_whole=True, remark=_LACKING)
        kinds = self.kinds.assign(name=self.kinds["what"].map(_KINDS))
        keys, blocks = {"lines": "name", "number": "num_lines"}, {"blocks": "num_{}"}
        title = "What is allocated at the peak, by how its source lines changed"
        yield ChangeTable(title, keys, kinds, pairs=blocks, is_whole=True)
        lines, sizes = (
            rows.assign(line=[self.shown(str(line)) for line in rows["line"]]) for rows in (self.lines, self.sizes)
        )
        yield ChangeTable("Blocks at the peak by source line", {"line": "line"}, lines, pairs=blocks)
        title, keys = "Blocks at the peak that only one of them has, by size", {"line": "line", "each": "block_bytes"}
        yield ChangeTable(title, keys, sizes, pairs=blocks)
        reserved = self.reserved.assign(name=self.reserved["name"].map(_RESERVED))
        yield ChangeTable("When most was reserved", {"memory": "name"}, reserved, is_whole=True)
        title, keys = "Segments when most was reserved", {"pool": "kind", "each": "segment_bytes"}
        pairs = {"segments": "num_{}", "free in them": "{}_free_bytes"}
        yield ChangeTable(title, keys, self.segments, pairs=pairs)


def _blocks(number: int, how: str = "") -> str:
    return " ".join(part for part in (f"{number:,}", how, "block" if number == 1 else "blocks") if part)


Compared = Comparison | SnapshotComparison


def open_comparison(*paths: str | os.PathLike[str]) -> Compared:
    """Compare runs with the first; or two by what snapshots know, if one of them is a snapshot.

    Raises:
        RunDirectoryError: One of them is neither, or is damaged; or a snapshot is compared with a run without memory.
    """
    by_line = len(paths) == 2 and any(Path(path).is_file() for path in paths)
    return SnapshotComparison(*paths) if by_line else Comparison(*paths)
