"""Places launches in time, and finds the critical path of the step that results.

Host time is fixed for each operation and launch, or measured. Everything is in microseconds from the beginning of the
step. The path is followed backwards from its end: a launch begins when the last thing that it waits for is done (the
launch before it on its stream or communicator, an event, or the host), which comes next. So the parts of the path add
up to the step.
"""

from __future__ import annotations

import typing
from bisect import bisect_left, bisect_right
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.errors import RunDirectoryError
from fakedist.rundir.directory import DAMAGED
from fakedist.rundir.launch_records import LAUNCH_KINDS

Array = npt.NDArray[Any]
_Returned = TypeVar("_Returned")
#: A part of a walk: it yields rendezvous, and is sent when each row of one ends, or None if that is not known yet.
_Walk = Generator["Rendezvous", "Sequence[float] | None", _Returned]

_COLLECTIVE, _RECORDS, _WAITS, _HOST_WAITS, _HOST_WAITS_FOR_DEVICE, _READS = map(
    LAUNCH_KINDS.index,
    ("collective", "stream_records", "stream_waits", "host_waits", "host_waits_for_device", "host_reads"),
)
#: Rows by which streams wait for each other.
EVENTS = (_RECORDS, _WAITS)


#: The host's time, least and most, over the estimate (90 % interval). A host may be twice as fast. A forward of
#: torch's Linear takes 13.5 us on a DGX H100, where 11 are counted, and 33 to 37 on Grace; Transformer Engine's takes
#: 91 to 100 there (NVIDIA/TransformerEngine#2053). Tests of Megatron-LM that the host limits take 4.6 to 6 times what
#: is counted (docs/accuracy/results.md).
HOST_RANGE = (0.5, 6.5)


@dataclass(frozen=True)
class HostCosts:
    """Microseconds of the host, each with its source.

    Attributes:
        operation_us: An operation of torch, without its launches: 4 us (pytorch/pytorch#82793; 2 to 7 us in #41383).
        launch_us: A launch: 3 us (meta-pytorch/tritonbench#1017 gives 1.3 on x86 and 3.0 on GB200 for cuLaunchKernel).
        graph_us: A launch of a CUDA graph: 2.5 us (NVIDIA, "Constant Time Launch for Straight-Line CUDA Graphs"), and
            as much again for torch's replay, an assumption.
    """

    operation_us: float = 4.0
    launch_us: float = 3.0
    graph_us: float = 5.0


def scaled(host: HostCosts, factor: float) -> HostCosts:
    """A host that takes ``factor`` times as long for everything."""
    return HostCosts(host.operation_us * factor, host.launch_us * factor, host.graph_us * factor)


@dataclass(frozen=True)
class Placed:
    """The starts and ends of the launches with work, and the end of the host and all streams.

    Attributes:
        reached_us: When the host comes to each row of ``launches``: the moment of a launch, the beginning of a wait.
        passed_us: When it goes on after each row: later only where it waits for the GPU.
    """

    start_us: Array
    launch_us: Array
    ends_us: Array
    end_us: float
    reached_us: Array
    passed_us: Array


class Rendezvous(NamedTuple):
    """Calls of one rank (rows of ``launches``) that run at once, and that may wait for other ranks.

    ``is_due`` means that this rank can do nothing more before it knows when they end.
    """

    rows: Sequence[int]
    start_us: float
    is_due: bool = False


class _OpenRendezvous:
    """The rendezvous of a rank on its way: which have begun, when they ended, and which streams wait for them."""

    def __init__(self, rows: Mapping[int, Sequence[int]]) -> None:
        self.rows = rows
        self.starts: dict[int, float] = {}
        self.ends: dict[int, Sequence[float]] = {}
        self.slots: dict[int, list[int]] = {}
        self.of_stream: dict[int, set[int]] = {}
        self.of_event: dict[int, set[int]] = {}

    def join(self, first: int, streams: Iterable[int], start_us: float, slot: int) -> _Walk[None]:
        """Begin a rendezvous, or come to another row of it. What follows on its stream and queue waits for its end."""
        if first not in self.slots:
            self.starts[first], self.slots[first] = start_us, []
            ends = yield Rendezvous(self.rows[first], start_us)
            if ends is not None:
                self.ends[first] = ends
            for stream in streams:
                self.of_stream.setdefault(stream, set()).add(first)
        self.slots[first].append(slot)

    def wait(self, firsts: Iterable[int]) -> _Walk[float]:
        """When the last of some rendezvous ends."""
        last = 0.0
        for first in sorted(firsts):
            if first not in self.ends:
                ends = yield Rendezvous(self.rows[first], self.starts[first], is_due=True)
                assert ends is not None
                self.ends[first] = ends
            last = max(last, *self.ends[first])
        return last

    def settle(self, free: list[float], streams: Iterable[int]) -> _Walk[None]:
        """Let streams wait for the rendezvous that they are in."""
        for stream in streams:
            if stream in self.of_stream:
                free[stream] = max(free[stream], (yield from self.wait(self.of_stream.pop(stream))))

    def fill(self, starts: list[float], ends: list[float]) -> _Walk[None]:
        """Write when the rows of all rendezvous begin and end."""
        for first, slots in self.slots.items():
            yield from self.wait((first,))
            for slot, end in zip(slots, self.ends[first], strict=True):
                starts[slot], ends[slot] = self.starts[first], end


class Timeline:
    """The launches of a step, ready to be placed with any durations.

    Args:
        launches: Without ``host_us``, the host's time is not measured; it is divided by ``host_speed``, if there is
            that column. Nothing waits for a row that ``is_apart``, if there is that one, but the launches of its queue.
        queues: The queue of each row, which runs one launch at a time on any stream; -1 without one.

    Raises:
        RunDirectoryError: A row is of a kind that does not exist.
    """

    def __init__(self, launches: pd.DataFrame, queues: Array | None = None) -> None:
        what = pd.Categorical(launches["what"])
        if unknown := set(what.categories) - set(LAUNCH_KINDS):
            raise RunDirectoryError(f"the table launches has a row of the unknown kind {min(unknown)!r}", DAMAGED)
        kinds = np.array([*map(LAUNCH_KINDS.index, what.categories)], "i8")
        self.what: Array = kinds[what.codes] if len(what) else kinds[:0]
        work = launches["work"].to_numpy("i8")
        self.has_work: Array = work >= 0
        self._num_operations = launches["num_operations"].to_numpy("f8")
        self._graph = launches["graph"].to_numpy("i8")
        self._host_measured_us = launches["host_us"].to_numpy("f8") if "host_us" in launches else None
        self._host_speed = launches["host_speed"].to_numpy("f8") if "host_speed" in launches else 1.0
        device, stream = (pd.factorize(launches[name].to_numpy())[0] for name in ("device", "stream"))
        self._streams = device * (int(stream.max(initial=0)) + 1) + stream
        self._num_streams = int(self._streams.max(initial=-1)) + 1
        self._events = launches["event"].to_numpy("u8").tolist()
        # A queue is like a stream that its launches share. One without a queue has its stream for that, too.
        queues = np.full(len(launches), -1) if queues is None else queues
        self._queues: Array = np.where(queues >= 0, self._num_streams + queues, self._streams)
        is_apart = launches["is_apart"].to_numpy(bool) & (queues >= 0) if "is_apart" in launches else False
        #: The lane besides its queue that waits for the end of each row.
        self._lanes_after: Array = np.where(is_apart, self._queues, self._streams)

    def place(self, duration_us: Array, host: HostCosts) -> Placed:
        """Place the launches; a duration is 0 where a row takes no time or that is unknown."""
        walk = self.walk(duration_us, host)
        try:
            while True:  # without rendezvous it yields nothing
                next(walk)
        except StopIteration as end:
            placed = end.value
        assert isinstance(placed, Placed)
        return placed

    def walk(
        self, duration_us: Array, host: HostCosts, rendezvous: Mapping[int, Sequence[int]] = MappingProxyType({})
    ) -> Generator[Rendezvous, Sequence[float] | None, Placed]:
        """Place the launches one by one, and yield where this rank meets others.

        Args:
            duration_us: As for :meth:`place`.
            rendezvous: The rows that meet other ranks: by the first of those that run at once, all of them.

        Yields:
            A rendezvous as it begins. Send back when each of its rows ends, or None if that is not known yet. Then it
            comes again, with ``is_due``, once something waits for its end.
        """
        now, free = 0.0, [0.0] * (max(self._num_streams, int(self._queues.max(initial=-1)) + 1))
        starts: list[float] = []
        ends: list[float] = []
        reached: list[float] = []
        passed: list[float] = []
        done: dict[int, float] = {}
        met = _OpenRendezvous(rendezvous)
        waits = met.of_stream  # empty unless ranks meet
        for what, stream, after, queue, event, host_us, took, first in self._rows(duration_us, host, rendezvous):
            now += host_us
            reached.append(now)
            if what < _RECORDS or what == _READS:
                if waits and first not in met.slots:
                    yield from met.settle(free, (stream, queue))
                start = free[stream]
                if start < free[queue]:
                    start = free[queue]
                if start < now:
                    start = now
                if first >= 0:
                    yield from met.join(first, (after, queue), start, len(ends))
                end = start + took
                starts.append(start)
                ends.append(end)
                free[after] = free[queue] = end
                if what == _READS and now < end:
                    now = end
            elif what == _RECORDS:
                done[event] = max(free[stream], now)
                if met.slots:
                    met.of_event[event] = set(waits.get(stream, ()))
            elif what == _WAITS:
                free[stream] = max(free[stream], done.get(event, 0.0))
                if met.slots and met.of_event.get(event):
                    waits.setdefault(stream, set()).update(met.of_event[event])
            elif what == _HOST_WAITS_FOR_DEVICE:
                yield from met.settle(free, tuple(waits))
                now = max(now, *free)
            else:
                yield from met.settle(free, () if event else (stream,))
                now = max(now, done.get(event, 0.0) if event else free[stream])
                now = max(now, (yield from met.wait(met.of_event.get(event, ()))))
            passed.append(now)
        yield from met.settle(free, tuple(waits))
        yield from met.fill(starts, ends)
        moments, end = np.array(reached, "f8"), max(now, *free, 0.0)
        return Placed(np.array(starts), moments[self.has_work], np.array(ends), end, moments, np.array(passed))

    def _rows(
        self, duration_us: Array, host: HostCosts, rendezvous: Mapping[int, Sequence[int]]
    ) -> Iterable[tuple[int, int, int, int, int, float, float, int]]:
        """Each row of the step, and the first row of its rendezvous, or -1.

        What, stream, the lane besides its queue that waits for it, queue, event, host time, duration, the rendezvous.
        """
        firsts: Iterable[int] = repeat(-1, len(self.what))
        if rendezvous:
            first_rows = np.full(len(self.what), -1)
            for first, rows in rendezvous.items():
                first_rows[list(rows)] = first
            duration_us = np.where(first_rows < 0, duration_us, 0.0)
            firsts = typing.cast(list[int], first_rows.tolist())
        lanes = (self._streams.tolist(), self._lanes_after.tolist(), self._queues.tolist())
        columns = (self.what.tolist(), *lanes, self._events)
        return zip(*columns, self._host_us(host).tolist(), duration_us.tolist(), firsts, strict=True)

    def streams_and_queues(self) -> tuple[Array, Array]:
        """The stream of each launch with work, and its queue: launches of one stream or queue run one by one."""
        return self._streams[self.has_work], self._queues[self.has_work]

    def host_before_us(self, host: HostCosts) -> tuple[Array, Array]:
        """The time of the host before each launch with work: since the launch before it, and since it last waited."""
        reached = np.cumsum(self._host_us(host))
        return self._since(reached, self.has_work), self._since(reached, self.has_work | (self.what >= _HOST_WAITS))

    def _since(self, reached: Array, last: Array) -> Array:
        """For each launch with work, how much a sum has grown since the last of some rows before it."""
        at = np.maximum.accumulate(np.where(last, np.arange(len(last)), -1))
        at = np.concatenate([[-1], at[:-1]])[: len(at)].astype("i8")
        grown: Array = (reached - np.where(at >= 0, reached[at], 0.0))[self.has_work]
        return grown

    def _host_us(self, host: HostCosts) -> Array:
        alone = self.has_work & (self._graph == 0) & (self.what != _COLLECTIVE)
        host_us: Array = self._num_operations * host.operation_us + alone * host.launch_us
        in_graphs = np.flatnonzero(self.has_work & (self._graph != 0))
        graph = self._graph[in_graphs]
        begins = np.concatenate([[True], graph[1:] != graph[:-1]])[: len(graph)]
        host_us[in_graphs[begins]] += host.graph_us
        if self._host_measured_us is not None:
            host_us = np.where(np.isnan(self._host_measured_us), host_us, self._host_measured_us)
        scaled_us: Array = host_us / self._host_speed
        return scaled_us


#: The kinds of parts of the path.
ON_GPU, ON_HOST, IDLE = range(3)
#: The host's times are sums, so the moments that they reach are rounded.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class CriticalPath:
    """The parts of a step that add up to it, the last one first.

    Attributes:
        row: Index in the table ``launches``; of the host's time, the launch that it led to. -1 for idle time.
        what: ON_GPU, ON_HOST or IDLE.
    """

    row: Array
    what: Array
    us: Array


def find_critical_path(timeline: Timeline, placed: Placed, host: HostCosts) -> CriticalPath:
    """Follow the critical path of a step, with the host's costs that it was placed with."""
    rows = np.flatnonzero(timeline.has_work)
    walk = _WayBack(timeline, placed, host)
    if len(rows):
        walk.run()
    number = np.array(walk.numbers, "i8")
    row = np.where(number >= 0, rows[np.maximum(number, 0)], -1) if len(rows) else number
    return CriticalPath(row, np.array(walk.what, "i8"), np.array(walk.us, "f8"))


class _WayBack:
    """The way back. Launches with work are numbered in their order."""

    def __init__(self, timeline: Timeline, placed: Placed, host: HostCosts) -> None:
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
        for index in range(bisect_right(self._sorted, moment + slack) - 1, first - 1, -1):
            if self._order[index] < number:
                return int(self._order[index])
        for index in range(first - 1, -1, -1):
            if self._order[index] < number:
                last = int(self._order[index])
                self._add(-1, IDLE, moment - self._end[last])
                return last
        self._add(-1, IDLE, moment)
        return None


def _before(lanes: Array) -> list[int]:
    order = np.argsort(lanes, kind="stable")
    before_of = np.full(len(lanes), -1)
    same = lanes[order][1:] == lanes[order][:-1]
    before_of[order[1:][same]] = order[:-1][same]
    before: list[int] = before_of.tolist()
    return before
