"""Compares memory snapshots of torch, or one with a run, by source line: what two of them hold, and why.

Access to a table that is missing or damaged raises RunDirectoryError.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from fakedist.analysis.stack_lines import IN_TORCH, NO_STACK
from fakedist.errors import RunDirectoryError
from fakedist.results.compare import changed_memory, reasons
from fakedist.results.compare.allocation_streams import Allocation, StreamDifference, compare_streams, own_lines
from fakedist.results.compare.side_by_side import ChangeTable
from fakedist.results.comparison import Comparison
from fakedist.results.opening import open_run
from fakedist.results.run import Run
from fakedist.results.verdict import short_line
from fakedist.rundir.notes import counted
from fakedist.units import format_bytes, format_change

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
