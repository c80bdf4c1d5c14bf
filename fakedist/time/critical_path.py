"""The critical path of a step: the kernels, the collectives and the host's work that make it as long as it is.

It is followed backwards from the end of the step. A launch begins when the last thing that it waits for is done: the
launch before it on its stream or communicator, a launch whose event its stream waits for, or the host. Whatever that is
comes next on the path, so the parts of the path add up to the step.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np

from fakedist.time.timeline import Array, HostTimes, Placed, Timeline

#: What a part of the path is.
ON_GPU, ON_HOST, IDLE = range(3)
#: The host's times are sums, so the moments that they reach are rounded.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class CriticalPath:
    """The parts of a step that add up to it, the last one first.

    Attributes:
        row: Place of each in the table ``launches``; of the host's time, the launch that it led to. -1 for idle time.
        what: ON_GPU, ON_HOST or IDLE.
        us: How long it is.
    """

    row: Array
    what: Array
    us: Array


def find_critical_path(timeline: Timeline, placed: Placed, host: HostTimes) -> CriticalPath:
    """Follow the critical path of a step.

    Args:
        timeline: Its launches.
        placed: Where they are.
        host: What the host takes, as they were placed with.
    """
    rows = np.flatnonzero(timeline.has_work)
    walk = _Walk(timeline, placed, host)
    if len(rows):
        walk.run()
    number = np.array(walk.numbers, "i8")
    row = np.where(number >= 0, rows[np.maximum(number, 0)], -1) if len(rows) else number
    return CriticalPath(row, np.array(walk.what, "i8"), np.array(walk.us, "f8"))


class _Walk:
    """The way back. Launches with work are numbered in their order.

    Attributes:
        numbers: Of each part, its launch.
        what: What it is.
        us: How long it is.
    """

    def __init__(self, timeline: Timeline, placed: Placed, host: HostTimes) -> None:
        self.numbers: list[int] = []
        self.what: list[int] = []
        self.us: list[float] = []
        self._start, self._end = placed.start_us.tolist(), placed.ends_us.tolist()
        self._launch, self._whole = placed.launch_us.tolist(), placed.end_us
        self._host, self._since_wait = (each.tolist() for each in timeline.host_before_us(host))
        self._before = [_before(each) for each in timeline.streams_and_queues()]
        order = np.argsort(placed.ends_us, kind="stable")
        self._order, self._sorted = order.tolist(), placed.ends_us[order].tolist()

    def run(self) -> None:
        """Walk from the end of the step to its beginning."""
        last = self._order[-1]
        self._add(last, ON_HOST, self._whole - self._end[last])
        start, end, launch, on_stream = self._start, self._end, self._launch, self._before[0]
        add_number, add_what, add_us = self.numbers.append, self.what.append, self.us.append
        at: int | None = last
        while at is not None:
            begin = start[at]
            if end[at] > begin:
                add_number(at)
                add_what(ON_GPU)
                add_us(end[at] - begin)
            before = on_stream[at]
            is_next = launch[at] < begin and before >= 0 and end[before] == begin  # almost always
            at = before if is_next else self._back(at)

    def _add(self, number: int, what: int, us: float) -> None:
        if us > 0:
            self.numbers.append(number)
            self.what.append(what)
            self.us.append(us)

    def _back(self, number: int) -> int | None:
        """The launch on the GPU that a launch waited for, perhaps through the host; None at the step's beginning."""
        start = self._start[number]
        if self._launch[number] < start:
            for before in self._before:
                if before[number] >= 0 and self._end[before[number]] == start:
                    return int(before[number])
            return self._ended_at(start, number)
        return self._back_on_host(number)

    def _back_on_host(self, number: int) -> int | None:
        while True:
            at = self._launch[number]
            before = self._launch[number - 1] if number else 0.0
            if at - before <= self._host[number] + _ROUNDING * at:  # it never waited
                self._add(number, ON_HOST, at - before)
                if not number:
                    return None
                number -= 1
                continue
            took = min(self._since_wait[number], at)
            self._add(number, ON_HOST, took)
            return self._ended_at(at - took, number)

    def _ended_at(self, moment: float, number: int) -> int | None:
        """The launch before this one that ended at a moment; before that, the GPU and the host were idle."""
        slack = _ROUNDING * max(moment, 1.0)
        first = bisect_left(self._sorted, moment - slack)
        for place in range(bisect_right(self._sorted, moment + slack) - 1, first - 1, -1):
            if self._order[place] < number:
                return int(self._order[place])
        for place in range(first - 1, -1, -1):
            if self._order[place] < number:
                found = int(self._order[place])
                self._add(-1, IDLE, moment - self._end[found])
                return found
        self._add(-1, IDLE, moment)
        return None


def _before(lanes: Array) -> list[int]:
    """For each launch, the one before it in its lane; -1 for the first."""
    order = np.argsort(lanes, kind="stable")
    found = np.full(len(lanes), -1)
    same = lanes[order][1:] == lanes[order][:-1]
    found[order[1:][same]] = order[:-1][same]
    before: list[int] = found.tolist()
    return before
