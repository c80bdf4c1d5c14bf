"""Which communication the step waits for: the time of collectives that no kernel covers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def exposed_us(starts: Floats, ends: Floats, busy_starts: Floats, busy_ends: Floats) -> Floats:
    """How long each of some intervals is not covered by others, in microseconds.

    Args:
        starts: When each interval begins.
        ends: When it ends.
        busy_starts: When the intervals that cover begin; they may overlap.
        busy_ends: When they end.
    """
    begins, until = union(busy_starts, busy_ends)
    covered = np.concatenate([[0.0], np.cumsum(until - begins)])
    found: Floats = (ends - starts) - (_covered(ends, begins, covered) - _covered(starts, begins, covered))
    return np.maximum(found, 0.0)


def shared_us(starts: Floats, ends: Floats, busy_starts: Floats, busy_ends: Floats) -> Floats:
    """How long each of some intervals overlaps others, in microseconds; arguments as for :func:`exposed_us`."""
    return (ends - starts) - exposed_us(starts, ends, busy_starts, busy_ends)


def union(starts: Floats, ends: Floats) -> tuple[Floats, Floats]:
    """Disjoint intervals, in order, that together cover what the given ones cover. Empty ones are left out."""
    keep = ends > starts
    starts, ends = starts[keep], ends[keep]
    if not len(starts):
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    first = np.concatenate([[True], starts[1:] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return starts[first], reach[last]


def union_us(starts: Floats, ends: Floats) -> float:
    """Time that at least one of some intervals covers, in microseconds."""
    begins, until = union(starts, ends)
    return float((until - begins).sum())


def _covered(at: Floats, begins: Floats, covered: Floats) -> Floats:
    """How much of the time before each moment disjoint intervals cover."""
    place = np.searchsorted(begins, at, side="right")
    before = np.maximum(place - 1, 0)
    if not len(begins):
        return np.zeros(len(at))
    lengths = np.diff(covered)
    inside = np.minimum(at - begins[before], lengths[before])
    return np.where(place > 0, covered[before] + np.maximum(inside, 0.0), 0.0)
