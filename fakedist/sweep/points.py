"""The order in which the points of a sweep run: all of them, or those that a monotone axis does not rule out."""

from __future__ import annotations

import enum
import random
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Protocol

from fakedist.sweep.command import PointRun
from fakedist.sweep.point_rows import Row, Status
from fakedist.sweep.space import Point, Scalar, Space

#: One skipped point in this many runs, to check that the axis is monotone.
_ONE_CHECKED_OF = 10


class Wait(enum.Enum):
    """The answer of a source that has no point to run now."""

    #: The next point depends on a row that is still to come.
    FOR_A_ROW = "for a row"
    #: There are no more points.
    NO_MORE = "no more"


class Source(Protocol):
    """The source of points."""

    def next(self) -> PointRun | Wait:
        """The next point to run."""
        ...

    def done(self, run: PointRun, row: Row) -> None:
        """Take in the result of a point."""
        ...


class ListedPoints:
    """Points that all run."""

    def __init__(self, runs: Sequence[PointRun]) -> None:
        self._left = deque(runs)

    def next(self) -> PointRun | Wait:
        """The next point to run."""
        return self._left.popleft() if self._left else Wait.NO_MORE

    def done(self, run: PointRun, row: Row) -> None:
        """Nothing depends on it."""


class MonotonePoints:
    """The points of a space with monotone axes. A point waits for the one before it on each such axis.

    Points beyond one that did not fit go to ``skipped``, each with the point that did not fit.
    """

    def __init__(self, space: Space, runs: Sequence[PointRun]) -> None:
        self._runs = {run.point.values: run for run in runs}
        self._before = {run.point.values: self._neighbours(space, run.point) for run in runs}
        self._after: dict[tuple[tuple[str, Scalar], ...], list[PointRun]] = defaultdict(list)
        for run in runs:
            for values in self._before[run.point.values]:
                self._after[values].append(run)
        self._num_missing = {values: len(before) for values, before in self._before.items()}
        self._ready = deque(run for run in runs if not self._before[run.point.values])
        self._too_large: dict[tuple[tuple[str, Scalar], ...], str] = {}
        self._num_left = len(runs)
        self.skipped: list[tuple[PointRun, str]] = []

    def next(self) -> PointRun | Wait:
        """The next point to run."""
        if self._ready:
            return self._ready.popleft()
        return Wait.FOR_A_ROW if self._num_left else Wait.NO_MORE

    def done(self, run: PointRun, row: Row) -> None:
        """Let the points after it run, or skip them."""
        self._resolve(run, row.label if row.status is Status.DOES_NOT_FIT else "")

    def _resolve(self, run: PointRun, too_large: str) -> None:
        todo = [(run, too_large)]
        while todo:
            one, why = todo.pop()
            self._num_left -= 1
            if why:
                self._too_large[one.point.values] = why
            for after in self._after[one.point.values]:
                self._num_missing[after.point.values] -= 1
                if self._num_missing[after.point.values]:
                    continue
                whys = [self._too_large.get(values, "") for values in self._before[after.point.values]]
                if beyond := next(filter(None, whys), ""):
                    self.skipped.append((after, beyond))
                    todo.append((after, beyond))
                else:
                    self._ready.append(after)

    def _neighbours(self, space: Space, point: Point) -> list[tuple[tuple[str, Scalar], ...]]:
        neighbours = []
        for at, axis in enumerate(space.axes):
            if not axis.is_monotone:
                continue
            name, value = point.values[at]
            lower = axis.values[: axis.values.index(value)]
            candidates = ((*point.values[:at], (name, other), *point.values[at + 1 :]) for other in reversed(lower))
            neighbours += [next((candidate for candidate in candidates if candidate in self._runs), ())]
        return [neighbour for neighbour in neighbours if neighbour]


def sample_to_check(skipped: Sequence[tuple[PointRun, str]], seed: int) -> list[PointRun]:
    """Some of the points that were skipped: one in ten, and at least one."""
    if not skipped:
        return []
    number = -(-len(skipped) // _ONE_CHECKED_OF)
    return [run for run, _ in random.Random(seed).sample(list(skipped), number)]
