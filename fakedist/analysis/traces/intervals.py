"""Finds which of millions of nested ranges contains a point in time. Uses arrays only, without a loop over ranges."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Intervals:
    """Ranges of several threads, for looking up which one contains a point.

    Args:
        lane: Number of each range's thread, from 0.
        start: When it begins.
        end: When it ends. Two ranges may begin or end together, or overlap.
    """

    def __init__(self, lane: npt.NDArray[np.integer], start: Ints, end: Ints) -> None:
        # One axis for all threads. Each thread has a separate part, so its ranges end before those of the next thread.
        self._first = int(start.min(initial=0))
        self._stride = int(end.max(initial=0)) - self._first + 2
        at = self._at(lane, start)
        until = self._at(lane, end)
        self.order: Ints
        if len(at) and bool((at[1:] >= at[:-1]).all()) and not bool((at[1:] == at[:-1]).any()):
            self.order = np.arange(len(at))
        else:
            self.order = np.lexsort((-until, at))  # of two that begin together, the longer one is the outer
            at, until = at[self.order], until[self.order]
        self._start, self._end = at, until
        self._outer = _last_that_ends_later(until)

    def innermost(self, lane: npt.NDArray[np.integer], time: Ints) -> Ints:
        """For each point, the row of the range that began last among those that contain it; -1 without any."""
        inside = (time >= self._first) & (time < self._first + self._stride)
        point = np.where(inside, self._at(lane, np.where(inside, time, self._first)), -1)
        place = np.searchsorted(self._start, point, side="right") - 1
        place[~inside] = -1
        return self._rows(self._out_of(place, point))

    def parents(self) -> Ints:
        """For each range, the row of the range around it; -1 without one."""
        found = np.empty(len(self.order), np.int64)
        found[self.order] = self._rows(self._outer)
        return found

    def _rows(self, place: Ints) -> Ints:
        if not len(self.order):
            return np.full(len(place), -1, np.int64)
        return np.where(place >= 0, self.order[place], -1)

    def _out_of(self, place: Ints, point: Ints) -> Ints:
        """Go outwards from the last range that began before a point to the first that has not ended by then."""
        waiting = np.flatnonzero(place >= 0)
        while len(waiting):
            over = self._end[place[waiting]] < point[waiting]
            waiting = waiting[over]
            place[waiting] = self._outer[place[waiting]]
            waiting = waiting[place[waiting] >= 0]
        return place

    def _at(self, lane: npt.NDArray[np.integer], time: Ints) -> Ints:
        return lane.astype(np.int64) * self._stride + (time - self._first)


def _last_that_ends_later(end: Ints) -> Ints:
    """For each range, sorted by start, the last range before it that ends no earlier; -1 without one.

    Everything between a range and its candidate ends before the range does. If the candidate does too, so does
    everything between it and its own candidate, which becomes the next candidate. The distance doubles in each round.
    """
    candidate = np.arange(-1, len(end) - 1)
    waiting = np.flatnonzero(candidate >= 0)
    while len(waiting):
        at = candidate[waiting]
        waiting = waiting[end[at] < end[waiting]]
        candidate[waiting] = candidate[candidate[waiting]]
        waiting = waiting[candidate[waiting] >= 0]
    return candidate
