"""Aligns the launches of a trace with a recorded step that the trace repeats, by dynamic programming.

The trace may begin and end anywhere in a step, have more or fewer kernels, and other work between steps: skipping a
launch on either side costs a little. Recorded launches form a ring, so no marks of steps are needed. A small problem is
solved as a whole. For a large one, products and attention are aligned first, and then all launches within a band
around that. A row of numbers is computed at once.
"""

from __future__ import annotations

import numpy as np

from fakedist.analysis.calibration.scoring import Scores
from fakedist.analysis.calibration.signatures import Sequence
from fakedist.analysis.traces.intervals import Ints

_SKIP_RECORDED, _SKIP_TRACED = 3, 1
_NEVER = -(1 << 28)
_TOOK, _SKIPPED = 1, 2
#: The most cells that are computed as a whole, a byte of memory each.
_MAX_CELLS = 300_000_000
#: Half of the band's width, in launches.
_REACH = 256


def align(recorded: Sequence, traced: Sequence, scores: Scores) -> Ints:
    """For each traced launch, the position of its recorded launch; -1 without one.

    Of a very long trace, only the first launches have one.

    Positions count on from one repetition of the step to the next: the remainder of a division by the number of
    recorded launches is the launch, the quotient the repetition.

    Args:
        recorded: One step.
        traced: Any number of steps.
        scores: Scores of all pairs of signatures (``scoring.score``).
    """
    if not len(recorded) or not len(traced):
        return np.full(len(traced), -1, np.int64)
    scores = np.where(scores > 0, scores, _NEVER)
    if len(recorded) * len(traced) <= _MAX_CELLS:
        return _ring(scores, recorded.signature, traced.signature)
    anchors, marks = (each.of_families("gemm", "attention") for each in (recorded, traced))
    if len(anchors) < 2:
        anchors, marks = np.arange(len(recorded)), np.arange(len(traced))
    num_marks = len(marks)
    marks = marks[: max(_MAX_CELLS // max(len(anchors), 1), 1)]
    rough = _ring(scores, recorded.signature[anchors], traced.signature[marks])
    known = np.flatnonzero(rough >= 0)
    if not len(known):
        return np.full(len(traced), -1, np.int64)
    place, repetition = rough[known] % len(anchors), rough[known] // len(anchors)
    at = repetition * len(recorded) + anchors[place]
    is_cut = len(marks) < num_marks
    num_traced = int(marks[known[-1]]) + 1 if is_cut else len(traced)
    centre = np.interp(np.arange(num_traced), marks[known], at).astype(np.int64)
    return _band(scores, recorded.signature, traced.signature[:num_traced], centre)


def _ring(scores: Scores, recorded: Ints, traced: Ints) -> Ints:
    """Align with a ring of recorded launches. A cell: the best score if this launch was the last one passed."""
    count = len(recorded)
    by_traced = np.ascontiguousarray(scores.T)
    cost = (_SKIP_RECORDED * np.arange(2 * count)).astype(np.int32)
    best = np.zeros(count, np.int32)
    moves = np.empty((len(traced), count), np.uint8)
    twice = np.empty(2 * count, np.int32)
    for number, signature in enumerate(traced.tolist()):
        taken = np.roll(best, 1) + by_traced[signature][recorded]
        kept = best - _SKIP_TRACED
        took = taken > kept
        base = np.where(took, taken, kept)
        twice[:count] = twice[count:] = base
        twice += cost
        best = (np.maximum.accumulate(twice) - cost)[count:]
        moves[number] = took + _SKIPPED * (best > base)
    found = np.full(len(traced), -1, np.int64)
    at = int(best.argmax()) + count * (len(traced) + 1)  # no launch passes more than the whole ring
    for number in range(len(traced) - 1, -1, -1):
        row = moves[number]
        while row[at % count] & _SKIPPED:
            at -= 1
        if row[at % count] & _TOOK:
            found[number] = at
            at -= 1
    return _from_first(found, count)


def _band(scores: Scores, recorded: Ints, traced: Ints, centre: Ints) -> Ints:
    """Align within ``_REACH`` positions of where each traced launch is expected."""
    count, width = len(recorded), 2 * _REACH + 1
    first = np.maximum.accumulate(centre - _REACH)
    offsets = np.arange(width)
    by_traced = np.ascontiguousarray(scores.T)
    cost = (_SKIP_RECORDED * offsets).astype(np.int32)
    best = np.zeros(width, np.int32)
    moves = np.empty((len(traced), width), np.uint8)
    before = int(first[0])
    for number, signature in enumerate(traced.tolist()):
        shift, before = int(first[number]) - before, int(first[number])
        best = _moved(best, shift)
        gains = by_traced[signature][recorded[(before + offsets) % count]]
        taken = np.maximum(_moved(best, -1) + gains, _NEVER)
        kept = np.maximum(best - _SKIP_TRACED, _NEVER)
        took = taken > kept
        base = np.where(took, taken, kept)
        best = np.maximum.accumulate(base + cost) - cost
        moves[number] = took + _SKIPPED * (best > base)
    found = np.full(len(traced), -1, np.int64)
    at = int(first[-1]) + int(best.argmax()) if len(first) else 0
    for number in range(len(traced) - 1, -1, -1):
        row, start = moves[number], int(first[number])
        while 0 <= at - start < width and row[at - start] & _SKIPPED:
            at -= 1
        if not 0 <= at - start < width:
            continue
        if row[at - start] & _TOOK:
            found[number] = at
            at -= 1
    return _from_first(found, count)


def _from_first(positions: Ints, count: int) -> Ints:
    """The positions, counted from the first repetition that has any."""
    known = positions[positions != -1]
    if not len(known):
        return positions
    return np.where(positions != -1, positions - int(known.min()) // count * count, -1)


def _moved(row: Scores, places: int) -> Scores:
    """The row moved to the left by some places. What comes in is out of reach."""
    if not places:
        return row
    found = np.full_like(row, _NEVER)
    if abs(places) < len(row):
        if places > 0:
            found[:-places] = row[places:]
        else:
            found[-places:] = row[:places]
    return found
