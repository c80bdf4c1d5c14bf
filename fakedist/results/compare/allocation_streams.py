"""Aligns the allocations of one step of two runs, one of them real: where they part first, and what differs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from fakedist.aligning import align
from fakedist.analysis.stack_lines import script_lines
from fakedist.results.run import Run
from fakedist.rundir.rows import FrameRow

#: How far a place is searched where both sides agree again, and for how many allocations they have to.
_LOOK_AHEAD, _NUM_AGREE = 200, 6
#: How many allocations of a phase are paired to recognise lines with other names. Layers repeat.
_NUM_PAIRED = 1500
_UNIT = 512  # of the allocator's sizes
#: Operations that convert a tensor, as snapshots and runs name them: for autocast, and where a script asks for it.
_CAST = re.compile(r"aten(?:::|\.)(?:_to_copy|to)(?:$|[._])")


@dataclass(frozen=True)
class Allocation:
    """Requested bytes, the line (empty without one), the phase, whether it was alive at the peak, and the operation."""

    bytes_: int
    line: str
    phase: str
    at_peak: bool
    operation: str = ""

    @property
    def is_cast(self) -> bool:
        """Whether it converts a tensor to another dtype."""
        return bool(_CAST.match(self.operation))


@dataclass(frozen=True)
class StreamDifference:
    """The allocations of a step of A and of B, in order.

    Attributes:
        step_a: The step of A; 0 for its whole history.
        num_a: Its allocations; likewise of B.
        num_same: Allocations of the same size, in the same order.
        first: The first of each side that differ (None: the side has none there), and how many agree before them.
        lines: Lines whose allocations differ, the most bytes first: columns line (of B, else of A), phase, num_a,
            a_bytes, num_b, b_bytes, a_peak_bytes, b_peak_bytes (of them at the peak).
        half_of: The side of whose own allocations many have twice the bytes of one that only the other makes: of
            another dtype. Empty if neither has.
        casts: Bytes of the casts of each side's forward, by line.
        same_lines: Lines of A with other names in B, by the allocations that agree.
        workspaces: The workspaces of cuBLAS and the like that each side makes, and their bytes. They are left out,
            since releases of torch differ in them; empty where a side does not know its own.
    """

    step_a: int
    step_b: int
    num_a: int
    num_b: int
    num_same: int
    first: tuple[int, Allocation | None, Allocation | None] | None
    lines: pd.DataFrame
    half_of: str = ""
    casts: tuple[Counter[str], ...] = ()
    same_lines: dict[str, str] = field(default_factory=dict)
    workspaces: tuple[tuple[int, int], ...] = ()


def compare_streams(a: Run, b: Run) -> StreamDifference:
    """Align the allocations of the last complete step of two runs; of their whole histories, if one has no steps."""
    steps = _last_step(a), _last_step(b)
    if not all(steps):
        steps = 0, 0
    knows = all(map(_knows_workspaces, (a, b)))
    read = (_allocations(run, step, with_workspaces=not knows) for run, step in zip((a, b), steps, strict=True))
    rows, workspaces = zip(*read, strict=True)
    sizes = [[_size(row) for row in side] for side in rows]
    same = align(sizes[0], sizes[1], _LOOK_AHEAD, _NUM_AGREE)
    only_a = [row for row, at in zip(rows[0], same, strict=True) if at < 0]
    paired = {at for at in same if at >= 0}
    only_b = [row for at, row in enumerate(rows[1]) if at not in paired]
    first = None
    if only_a or only_b:
        before = next((number for number, at in enumerate(same) if at != number), len(same))
        follows = next((at for at in same[before:] if at >= 0), len(rows[1]))
        own = [before < len(same) and same[before] < 0, before < follows]
        first = before, rows[0][before] if own[0] else None, rows[1][before] if own[1] else None
    halves = _half_of(only_a, only_b)
    pairs = _same_lines(rows[0], rows[1])
    lines = _by_line([replace(row, line=pairs.get(row.line, row.line)) for row in only_a], only_b)
    num_a, num_b = len(rows[0]), len(rows[1])
    return StreamDifference(
        *steps,
        num_a,
        num_b,
        len(paired),
        first,
        lines,
        halves,
        casts=tuple(map(_casts, rows)),
        same_lines=pairs,
        workspaces=workspaces if knows else (),
    )


def _same_lines(a: Sequence[Allocation], b: Sequence[Allocation]) -> dict[str, str]:
    """Lines of ``a`` with other names in ``b``.

    Of the forward's first allocations, and of the optimizer's, as many as possible are paired in order that have one
    size, or one of another dtype.
    """
    votes: Counter[tuple[str, str]] = Counter()
    for phase in ("forward", "optimizer"):
        sides = [[row for row in side if row.phase == phase and row.line and not row.is_cast] for side in (a, b)]
        one, other = (side[:_NUM_PAIRED] for side in sides)
        sizes, others = (np.array([_size(row) for row in side], np.int64) for side in (one, other))
        ratio = sizes[:, None] / others[None]
        score = np.select([ratio == 1, (ratio == 2) | (ratio == 0.5)], [3, 2])
        best = np.zeros((len(one) + 1, len(other) + 1), np.int64)
        for row in range(len(one)):
            best[row + 1, 1:] = np.maximum.accumulate(np.maximum(best[row, 1:], best[row, :-1] + score[row]))
        row, at = len(one), len(other)
        while row and at:
            is_paired = best[row, at] > max(best[row - 1, at], best[row, at - 1])
            votes[one[row - 1].line, other[at - 1].line] += int(is_paired)
            at -= int(is_paired or best[row, at] > best[row - 1, at])
            row -= int(is_paired or best[row, at] == best[row - 1, at])
    rarest_first = sorted(votes, key=votes.__getitem__)
    firsts, lasts = dict(rarest_first), {same: line for line, same in rarest_first}
    return {line: same for line, same in firsts.items() if lasts[same] == line and plain_line(line) != plain_line(same)}


def _casts(rows: Sequence[Allocation]) -> Counter[str]:
    bytes_: Counter[str] = Counter()
    for row in rows:
        bytes_[row.line] += row.bytes_ if row.phase == "forward" and row.is_cast else 0
    return bytes_


def _knows_workspaces(run: Run) -> bool:
    """Whether workspaces are marked apart from tensors: in runs, and in snapshots whose stacks have frames of C++."""
    if all(note.code != "snapshot_inferred" for note in run.summary.notes):
        return run.has("phases")
    return bool(run.table("frames", ["function"])["function"].astype(str).str.startswith("c10::").any())


def own_lines(run: Run) -> list[str]:
    """The line of each stack: the innermost of the script, else of a library; empty without one."""
    stacks = run.table("stacks")
    lines = [str(line) for line in stacks["line"]]
    if not run.has("frames"):
        return lines
    frames = [FrameRow(*row) for row in run.table("frames").itertuples(index=False)]
    return [own or line for own, line in zip(script_lines(frames, stacks["frames"]), lines, strict=True)]


#: From this share of the bytes on, sizes that are halves of others' are worth a word.
_MUCH = 0.3


def _half_of(a: list[Allocation], b: list[Allocation]) -> str:
    for side, halves, wholes in (("B", a, b), ("A", b, a)):
        sizes = {_size(row) for row in halves}
        doubled = [row.bytes_ for row in wholes if _size(row) % 2 == 0 and _size(row) // 2 in sizes]
        if len(doubled) > 1 and sum(doubled) >= _MUCH * sum(row.bytes_ for row in wholes):
            return side
    return ""


def _last_step(run: Run) -> int:
    if not run.has("phases"):
        return 0
    complete = {step.step for step in run.summary.steps}
    blocks = run.table("blocks", ["step", "phase"])
    phases = blocks["phase"].astype(str)
    having = [set(blocks["step"][phases == name].tolist()) for name in ("forward", "backward")]
    steps = having[0] & having[1]
    return int(max(steps & complete or steps, default=0))


def _allocations(run: Run, step: int, *, with_workspaces: bool) -> tuple[list[Allocation], tuple[int, int]]:
    """The allocations of a step, and how many workspaces were left out, with their bytes."""
    columns = ("requested_bytes", "stack", "phase", "at_peak", "operation")
    blocks = run.table("blocks", [*columns, "step", "category"])
    if step:
        is_inside = blocks["phase"].astype(str).isin(("forward", "backward", "optimizer"))
        blocks = blocks[(blocks["step"] == step) & is_inside]
    is_left_out = (blocks["category"].astype(str) == "workspace") & (not with_workspaces)
    left_out = int(is_left_out.sum()), int(blocks["requested_bytes"][is_left_out].sum())
    lines = [*own_lines(run), ""]
    rows = [
        Allocation(int(size), lines[stack], str(phase), bool(held), str(operation))
        for size, stack, phase, held, operation in zip(*(blocks[~is_left_out][name] for name in columns), strict=True)
    ]
    return rows, left_out


def _size(row: Allocation) -> int:
    return -(-max(row.bytes_, 1) // _UNIT)


def _by_line(a: list[Allocation], b: list[Allocation]) -> pd.DataFrame:
    rows = [
        (plain_line(row.line), row.phase, side, row.bytes_, row.at_peak)
        for side, own in ((0, a), (1, b))
        for row in own
    ]
    table = pd.DataFrame(rows, columns=["line", "phase", "side", "bytes", "at_peak"])
    for number, name in enumerate("ab"):
        own = table["side"] == number
        table[f"num_{name}"] = own.astype("int64")
        table[f"{name}_bytes"] = np.where(own, table["bytes"], 0).astype("int64")
        table[f"{name}_peak_bytes"] = np.where(own & table["at_peak"].astype(bool), table["bytes"], 0).astype("int64")
    columns = ["num_a", "a_bytes", "num_b", "b_bytes", "a_peak_bytes", "b_peak_bytes"]
    sums = table.groupby(["line", "phase"], sort=False)[columns].sum().reset_index()
    change = (sums["b_peak_bytes"] - sums["a_peak_bytes"]).abs()
    keys = pd.DataFrame({"peak": -change, "all": -(sums["a_bytes"] + sums["b_bytes"])})
    order = keys.sort_values(["peak", "all"], kind="stable").index
    return sums.loc[order].reset_index(drop=True)


_FOLDERS = re.compile(r"^.*/(?=[^/]+/[^/]+$)")


def plain_line(line: str) -> str:
    """A line without the folders that another machine has elsewhere: its file, and the folder that this is in."""
    path, colon, rest = line.partition(":")
    return f"{_FOLDERS.sub('', path)}{colon}{rest}"
