"""Two runs on one axis: the same phase of the same step is at the same position, however many events each run has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from fakedist.analysis.recording import Array


@dataclass(frozen=True)
class Stretch:
    """A piece of the common axis.

    Attributes:
        phase: Empty if the two runs have different phases in this step.
        events: For each run, the first event and the first after the piece; equal without events.
        at: Begin and end on the axis, from 0 to 1.
    """

    step: int
    phase: str
    events: tuple[tuple[int, int], tuple[int, int]]
    at: tuple[float, float] = (0.0, 0.0)


def common_axis(spans: tuple[pd.DataFrame, pd.DataFrame], num_events: tuple[int, int]) -> list[Stretch]:
    """The pieces of an axis that two runs share, in order, each as wide as the run with more events in it."""
    steps = [_by_step(table, total) for table, total in zip(spans, num_events, strict=True)]
    pieces: list[Stretch] = []
    for step in sorted(set(steps[0]) | set(steps[1])):
        sides = [spans_of.get(step, []) for spans_of in steps]
        phases = [[phase for phase, _, _ in side] for side in sides]
        if phases[0] == phases[1]:
            for (phase, *one), (_, *other) in zip(*sides, strict=True):
                pieces.append(Stretch(step, phase, ((one[0], one[1]), (other[0], other[1]))))
            continue
        whole = [(side[0][1], side[-1][2]) if side else (0, 0) for side in sides]
        pieces.append(Stretch(step, "", (whole[0], whole[1])))
    widths = np.array([max(end - first for first, end in piece.events) for piece in pieces], "f8")
    ends = np.cumsum(widths) / max(widths.sum(), 1)
    starts = ends - widths / max(widths.sum(), 1)
    return [
        Stretch(piece.step, piece.phase, piece.events, (float(start), float(end)))
        for piece, start, end in zip(pieces, starts, ends, strict=True)
    ]


def _by_step(spans: pd.DataFrame, num_events: int) -> dict[int, list[tuple[str, int, int]]]:
    if not len(spans):
        return {0: [("", 0, num_events)]} if num_events else {}
    first = [int(event) for event in spans["first_event"]]
    ends = [*first[1:], num_events]
    by_step: dict[int, list[tuple[str, int, int]]] = {}
    for step, phase, start, end in zip(spans["step"].tolist(), spans["phase"].astype(str), first, ends, strict=True):
        by_step.setdefault(int(step), []).append((phase, start, end))
    return by_step


def on_axis(curve: Array, pieces: list[Stretch], side: int, num_columns: int) -> tuple[Array, Array]:
    """The minimum and maximum in each column of the common axis of a curve over events of run ``side``, 0 or 1.

    A column without events keeps the last value of the column before.
    """
    column = np.zeros(len(curve), "i8")
    for piece in pieces:
        first, end = piece.events[side]
        positions = piece.at[0] + (np.arange(end - first) + 0.5) / max(end - first, 1) * (piece.at[1] - piece.at[0])
        column[first:end] = np.minimum((positions * num_columns).astype("i8"), num_columns - 1)
    least, most = np.full(num_columns, np.iinfo("i8").max), np.full(num_columns, -1)
    last = np.full(num_columns, -1)
    np.minimum.at(least, column, curve)
    np.maximum.at(most, column, curve)
    last[column] = curve  # of several events in a column, the last one counts
    known = np.maximum.accumulate(np.where(last >= 0, np.arange(num_columns), -1))
    before = np.where(known >= 0, last[np.maximum(known, 0)], 0)
    empty = most < 0
    return np.where(empty, before, least), np.where(empty, before, most)
