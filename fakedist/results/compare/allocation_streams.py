"""Aligns the allocations of one step of two runs, one of them real: where they part first, and what differs."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pandas as pd

from fakedist.aligning import align
from fakedist.results.run import Run

#: How far a place is searched where both sides agree again, and for how many allocations they have to.
_LOOK_AHEAD, _NUM_AGREE = 200, 6
_UNIT = 512  # of the allocator's sizes


@dataclass(frozen=True)
class Allocation:
    """Requested bytes, the line (empty without one), the phase, and whether it was alive at the peak."""

    bytes_: int
    line: str
    phase: str
    at_peak: bool


@dataclass(frozen=True)
class StreamDifference:
    """The allocations of a step of A and of B, in order.

    Attributes:
        step_a: The step of A; 0 for its whole history.
        num_a: Its allocations; likewise of B.
        num_same: Allocations of the same size, in the same order.
        first: The first of each side that differ (None: the side has none there), and how many agree before them.
        lines: Lines whose allocations differ, the most bytes first: columns line, phase, num_a, a_bytes, num_b,
            b_bytes, a_peak_bytes, b_peak_bytes (of them at the peak).
        half_of: The side of whose own allocations many have twice the bytes of one that only the other makes: of
            another dtype. Empty if neither has.
    """

    step_a: int
    step_b: int
    num_a: int
    num_b: int
    num_same: int
    first: tuple[int, Allocation | None, Allocation | None] | None
    lines: pd.DataFrame
    half_of: str = ""


def compare_streams(a: Run, b: Run) -> StreamDifference:
    """Align the allocations of the last complete step of two runs; of their whole histories, if one has no steps."""
    steps = _last_step(a), _last_step(b)
    if not all(steps):
        steps = 0, 0
    rows = [_allocations(run, step) for run, step in zip((a, b), steps, strict=True)]
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
    num_a, num_b = len(rows[0]), len(rows[1])
    return StreamDifference(*steps, num_a, num_b, len(paired), first, _by_line(only_a, only_b), halves)


#: From this share of the bytes on, sizes that are halves of others' are worth a word.
_MUCH = 0.3


def _half_of(a: list[Allocation], b: list[Allocation]) -> str:
    for side, halves, wholes in (("B", a, b), ("A", b, a)):
        sizes = {_size(row) for row in halves}
        doubled = sum(row.bytes_ for row in wholes if _size(row) % 2 == 0 and _size(row) // 2 in sizes)
        if doubled and doubled >= _MUCH * sum(row.bytes_ for row in wholes):
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


def _allocations(run: Run, step: int) -> list[Allocation]:
    blocks = run.table("blocks", ["requested_bytes", "step", "phase", "stack", "at_peak"])
    if step:
        is_inside = blocks["phase"].astype(str).isin(("forward", "backward", "optimizer"))
        blocks = blocks[(blocks["step"] == step) & is_inside]
    lines = [*map(str, run.table("stacks", ["line"])["line"]), ""]
    columns = ("requested_bytes", "stack", "phase", "at_peak")
    return [
        Allocation(int(size), lines[stack], str(phase), bool(held))
        for size, stack, phase, held in zip(*(blocks[name] for name in columns), strict=True)
    ]


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
