"""Places launches in time, and finds the critical path of the step that results.

Host time is measured, or fixed for each operation and launch (:mod:`fakedist.cost_model.hosts`). The host cannot run
ahead of a stream by more launches than its launch queue holds. Everything is in microseconds from the beginning of the
step. The path is followed backwards from its end: a launch begins when the last thing that it waits for is done (the
launch before it on its stream or communicator, an event, or the host), which comes next. So the parts of the path add
up to the step.

The time of the caching allocator's calls to CUDA, in a step whose memory does not suffice.

A steady step makes none. Near the GPU's limit, a request that is refused has the allocator wait for the GPU, give back
what it caches and ask again (``num_alloc_retries``), and later requests take that memory anew. So does
``torch.cuda.empty_cache``, at the script's will. A step in which nothing is given back only makes its caches grow, as
the first ones do, which later steps need not repeat: its calls take no time here.

No call was measured on an H100. What was published, in microseconds:

=====================  ======================  ==========  =======================  =========  ========
call                   notes [1], by size      A100 [2]    RTX PRO 6000 [3]         [2], other  [4]
=====================  ======================  ==========  =======================  =========  ========
cudaMalloc             223 + 0.10 a MiB
cudaFree               75 + 0.37 a MiB
cuMemCreate            71                      193         14                       7.6        29
cuMemMap               3.4                     1.5         1.0                      1.1
cuMemSetAccess         91 + 0.036 a MiB        36          69 for each piece        21         38
cuMemUnmap             37                      26          39                       11         34
cuMemRelease           26 + 0.37 a MiB
=====================  ======================  ==========  =======================  =========  ========

[1] "VMM call latency", public notes on cudaMalloc and virtual memory, 2 MiB to 4 GiB, medians of 20 to 50 samples on an
unnamed GPU with driver 580.178. Back to back, 62 of 160 calls of cuMemSetAccess and cuMemUnmap took about 2 ms, most of
them after memory was freed, and 23 % of the calls of cudaMalloc took more than 1 ms. [2] ovg-project/kvcached,
benchmarks/bench_vmm, pieces of 2 MiB; the other GPU is not named. [3] vmm_probe.cu, a public feasibility test with its
results, driver 580.82.07, pieces of 2 to 64 MiB. It also found that mapping waits for no kernel. [4] vAttention (arXiv
2405.04437), pieces of 2 MiB, as [1] quotes it.

A piece costs the same whatever its size (pytorch/pytorch#96995). Estimates are geometric means over the sources. The
least is the shortest, the most the longest with 62 of 160 calls 2 ms longer: no source says on which GPUs calls stall
like that. ``cudaFree`` waits for the whole device (NVIDIA's blog on RMM); before it unmaps a piece, torch waits for its
stream (``ExpandableSegment::unmapHandles``).
"""

from __future__ import annotations

import copy
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

from fakedist.cost_model.cpu_work import cpu_work_us
from fakedist.cost_model.hosts import CallCosts, HostCosts
from fakedist.errors import RunDirectoryError
from fakedist.rundir.directory import DAMAGED
from fakedist.rundir.launch_records import ALLOCATOR_CALLS, ALLOCATOR_WAITS, LAUNCH_KINDS
from fakedist.rundir.step_time import AllocatorTime

_MIB = 1 << 20
#: How much longer a call takes on average if 62 of 160 take 2 ms more.
_STALLS_US = 62 / 160 * 2000


@dataclass(frozen=True)
class CallCost:
    """Microseconds of a call, at least, as estimated and at most, and those for each MiB."""

    least_us: float
    us: float
    most_us: float
    mib_us: float = 0.0


#: cudaMalloc takes the same steps as a mapping in one call [1], so both have one least. The time of a refusal was not
#: published: as long as cuMemCreate, or nothing.
_LEAST_MAP_US = 7.6 + 1.1 + 21.0
COSTS = {
    "refused": CallCost(0.0, 33.0, 193.0),
    "malloc": CallCost(_LEAST_MAP_US, 223.0, 223.0 + _STALLS_US, 0.10),
    "free": CallCost(11.0, 75.0, 75.0 + _STALLS_US, 0.37),
    "map": CallCost(_LEAST_MAP_US, 91.0, 193.0 + 1.5 + 36.0 + _STALLS_US, 0.036),
    "unmap": CallCost(11.0, 27.0 + 26.0, 39.0 + 26.0 + _STALLS_US, 0.37),
}
assert tuple(COSTS) == ALLOCATOR_CALLS


class _Calls(NamedTuple):
    name: str
    number: int
    num_bytes: int


def _read(text: str) -> Iterable[_Calls]:
    """The calls of a text of ``LaunchesRecord.allocator``."""
    for part in filter(None, text.split(", ")):
        if part != ALLOCATOR_WAITS:
            name, number, num_bytes = part.split(" ")
            yield _Calls(name, int(number), int(num_bytes))


def allocator_us(launches: pd.DataFrame) -> npt.NDArray[Any]:
    """The least, the estimate and the most of the allocator's calls before each launch: an array of 3 x rows."""
    if "allocator" not in launches:
        return np.zeros((3, len(launches)))
    texts = pd.Categorical(launches["allocator"]).remove_unused_categories()  # texts of a record are grids, too
    calls = [list(_read(str(text))) for text in texts.categories]
    gives_back = np.array([any(call.name in ("free", "unmap") for call in each) for each in calls], bool)
    if not gives_back[texts.codes].any():
        return np.zeros((3, len(launches)))
    of_text = np.array([[_sum_us(each, bound) for each in calls] for bound in ("least_us", "us", "most_us")])
    found: npt.NDArray[Any] = of_text[:, texts.codes]
    return found


def _sum_us(calls: Iterable[_Calls], bound: str) -> float:
    return sum(
        call.number * float(getattr(COSTS[call.name], bound)) + call.num_bytes / _MIB * COSTS[call.name].mib_us
        for call in calls
    )


def waits_of_allocator(launches: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """The rows at which the host waits so that the allocator may give memory back."""
    if "allocator" not in launches:
        return np.zeros(len(launches), bool)
    waits = launches["what"].astype(str).str.startswith("host_waits").to_numpy(bool)
    return waits & (launches["allocator"].astype(str) != "").to_numpy(bool)


def allocator_time(launches: pd.DataFrame, waited_us: npt.NDArray[Any]) -> AllocatorTime | None:
    """The allocator's calls in a step, which waits ``waited_us`` at each row; None if it gives nothing back."""
    least_us, us, most_us = (float(each.sum()) for each in allocator_us(launches))
    if not us:
        return None
    number, num_bytes = dict.fromkeys(ALLOCATOR_CALLS, 0), dict.fromkeys(ALLOCATOR_CALLS, 0)
    for text, rows in launches["allocator"].astype(str).value_counts().items():
        for call in _read(str(text)):
            number[call.name] += call.number * int(rows)
            num_bytes[call.name] += call.num_bytes * int(rows)
    return AllocatorTime(
        num_retries=number["refused"],
        refused_bytes=num_bytes["refused"],
        num_given_back=number["free"] + number["unmap"],
        given_back_bytes=num_bytes["free"] + num_bytes["unmap"],
        num_taken=number["malloc"] + number["map"],
        taken_bytes=num_bytes["malloc"] + num_bytes["map"],
        time_us=us,
        low_us=least_us,
        high_us=most_us,
        wait_us=float(waited_us[waits_of_allocator(launches)].sum()),
    )


Array = npt.NDArray[Any]
_Returned = TypeVar("_Returned")
#: A part of a walk: it yields rendezvous, and is sent when each row of one ends, or None if that is not known yet.
_Walk = Generator["Rendezvous", "Sequence[float] | None", _Returned]

_COLLECTIVE, _RECORDS, _WAITS, _HOST_WAITS, _HOST_WAITS_FOR_DEVICE, _READS = map(
    LAUNCH_KINDS.index,
    ("collective", "stream_records", "stream_waits", "host_waits", "host_waits_for_device", "host_reads"),
)
_LEAST, _ESTIMATE, _MOST = range(3)
#: Parts of the host's time that have intervals of their own: the allocator's calls, and work on the CPU.
PARTS_APART = ("allocator", "cpu")
#: Rows by which streams wait for each other.
EVENTS = (_RECORDS, _WAITS)


@dataclass(frozen=True)
class Placed:
    """The starts and ends of the launches with work, and the end of the host and all streams.

    Attributes:
        launch_us: When the host makes each launch, once the stream's launch queue has room.
        queued_behind: The launch, counted among those with work, whose end let the host make this one, because the
            stream's launch queue was full until then; -1 where it was not.
        reached_us: When the host comes to each row of ``launches``: a launch, the beginning of a wait.
        passed_us: When it goes on after each row: later only where it waits for the GPU.
    """

    start_us: Array
    launch_us: Array
    ends_us: Array
    end_us: float
    queued_behind: Array
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
        launches: The host's time is ``host_us`` where a tool measured it; else ``dispatch_us``, which the host clock
            measured on the machine that recorded the run; else constant. It is divided by ``host_speed``, if there is
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
        self._dispatch_us = launches["dispatch_us"].to_numpy("f8") if "dispatch_us" in launches else None
        self._host_speed = launches["host_speed"].to_numpy("f8") if "host_speed" in launches else 1.0
        device, stream = (pd.factorize(launches[name].to_numpy())[0] for name in ("device", "stream"))
        self._streams = device * (int(stream.max(initial=0)) + 1) + stream
        self._num_streams = int(self._streams.max(initial=-1)) + 1
        # A queue is like a stream that its launches share. One without a queue has its stream for that, too.
        queues = np.full(len(launches), -1) if queues is None else queues
        self._queues: Array = np.where(queues >= 0, self._num_streams + queues, self._streams)
        #: The least, the estimate and the most of these parts before each row.
        self._apart_us = dict(zip(PARTS_APART, (allocator_us(launches), cpu_work_us(launches)), strict=True))
        self._bounds = dict.fromkeys(self._apart_us, _ESTIMATE)
        is_apart = launches["is_apart"].to_numpy(bool) & (queues >= 0) if "is_apart" in launches else False
        self._full_behind = dict[int, list[int]]()
        #: The lane besides its queue that waits for the end of each row.
        lanes_after: Array = np.where(is_apart, self._queues, self._streams)
        events = launches["event"].to_numpy("u8")
        self._columns = [each.tolist() for each in (self.what, self._streams, lanes_after, self._queues, events)]

    def bounds(self, part: str) -> list[Timeline]:
        """This step with a part of the host's time at its least and at its most; empty if it takes none."""
        if not self._apart_us[part].any():
            return []
        bounds = [copy.copy(self), copy.copy(self)]
        for timeline, bound in zip(bounds, (_LEAST, _MOST), strict=True):
            timeline._bounds = self._bounds | {part: bound}
        return bounds

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
        starts, ends, passed = list[float](), list[float](), list[float]()
        done, host_us = dict[int, float](), self._host_us(host)
        met = _OpenRendezvous(rendezvous)
        waits = met.of_stream  # empty unless ranks meet
        rows = self._rows(duration_us, host_us, host.queue_depth, rendezvous)
        for what, stream, after, queue, event, full, before_us, took, first in rows:
            now += before_us
            if what < _RECORDS or what == _READS:
                if full >= 0 and now < ends[full]:
                    now = ends[full]
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
                until = done.get(event, 0.0)
                free[stream] = until if until > free[stream] else free[stream]
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
        launch_us, *on_host = self._on_host(np.array(ends, "f8"), np.array(passed, "f8"), host_us, host.queue_depth)
        yield from met.fill(starts, ends)
        return Placed(np.array(starts, "f8"), launch_us, np.array(ends, "f8"), max(now, *free, 0.0), *on_host)

    def _on_host(self, ends_us: Array, passed_us: Array, host_us: Array, depth: int) -> tuple[Array, ...]:
        """``launch_us`` and the last attributes of :class:`Placed`: all follows from when the host goes on."""
        reached_us = np.concatenate([[0.0], passed_us])[:-1] + host_us
        full = np.array(self._behind_in_launch_queue(depth), "i8")[self.has_work]
        launch_us = reached_us[self.has_work]
        queued_behind = np.full(len(full), -1)
        was_full = full >= 0
        was_full[was_full] = launch_us[was_full] < ends_us[full[was_full]]
        launch_us[was_full], queued_behind[was_full] = ends_us[full[was_full]], full[was_full]
        return launch_us, queued_behind, reached_us, passed_us

    def _rows(
        self, duration_us: Array, host_us: Array, depth: int, rendezvous: Mapping[int, Sequence[int]]
    ) -> Iterable[tuple[int, int, int, int, int, int, float, float, int]]:
        """Each row of the step, and the first row of its rendezvous, or -1.

        What, stream, the lane besides its queue that waits for it, queue, event, the launch that must end before it,
        host time, duration, the rendezvous.
        """
        firsts: Iterable[int] = repeat(-1, len(self.what))
        if rendezvous:
            first_rows = np.full(len(self.what), -1)
            for first, rows in rendezvous.items():
                first_rows[list(rows)] = first
            duration_us = np.where(first_rows < 0, duration_us, 0.0)
            firsts = typing.cast(list[int], first_rows.tolist())
        columns = (*self._columns, self._behind_in_launch_queue(depth), host_us.tolist(), duration_us.tolist())
        return zip(*columns, firsts, strict=True)

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

    def _behind_in_launch_queue(self, depth: int) -> list[int]:
        """For each row, the launch ``depth`` before it on its stream, counted among those with work; -1 without one.

        Of a CUDA graph's launches, the first one stands for the graph.
        """
        if depth in self._full_behind:
            return self._full_behind[depth]
        behind = np.full(len(self.what), -1)
        slot = np.cumsum(self.has_work) - 1
        rows = np.sort(np.concatenate([np.flatnonzero(self.has_work & (self._graph == 0)), self._graph_begins()]))
        order = rows[np.argsort(self._streams[rows], kind="stable")]
        before, after = order[:-depth], order[depth:]
        same = self._streams[before] == self._streams[after]
        behind[after[same]] = slot[before[same]]
        places: list[int] = behind.tolist()
        self._full_behind[depth] = places
        return places

    def _graph_begins(self) -> Array:
        """The row of the first launch of each CUDA graph."""
        in_graphs = np.flatnonzero(self.has_work & (self._graph != 0))
        graph = self._graph[in_graphs]
        begins: Array = in_graphs[np.concatenate([[True], graph[1:] != graph[:-1]])[: len(graph)]]
        return begins

    def _host_us(self, host: HostCosts) -> Array:
        """The host's time before each row, its own call included."""
        begins = self._graph_begins()
        host_us: Array = self._num_operations * host.operation_us
        if self._dispatch_us is None or np.isnan(self._dispatch_us).all():
            alone = self.has_work & (self._graph == 0) & (self.what != _COLLECTIVE)
            host_us = host_us + alone * host.launch_us
            host_us[begins] += host.graph_us
        else:
            host_us = np.where(np.isnan(self._dispatch_us), host_us, self._dispatch_us * host.dispatch)
            host_us = host_us + np.where(self._graph == 0, self._call_us(host.calls), 0.0)
            host_us[begins] += host.calls.graph_us
        if self._host_measured_us is not None:
            host_us = np.where(np.isnan(self._host_measured_us), host_us, self._host_measured_us)
        apart_us: Array = sum(us[self._bounds[part]] for part, us in self._apart_us.items())
        return host_us / self._host_speed + apart_us

    def _call_us(self, calls: CallCosts) -> Array:
        """The time of CUDA's own call of each row, outside of graphs."""
        by_kind = {
            **dict.fromkeys(("kernel", "library"), calls.launch_us),
            "product": calls.launch_us + calls.product_us,
            **dict.fromkeys(("copy", "fill", "host_reads"), calls.copy_us),
            "collective": calls.collective_us,
            **dict.fromkeys(("stream_records", "stream_waits"), calls.event_us),
            **dict.fromkeys(("host_waits", "host_waits_for_device"), calls.event_us),
        }
        of_kind: Array = np.array([by_kind[kind] for kind in LAUNCH_KINDS])
        call_us: Array = of_kind[self.what]
        return call_us


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
        self._queued_behind = placed.queued_behind.tolist()
        self._host, self._since_wait = (each.tolist() for each in timeline.host_before_us(host))
        self._before = [_before(each) for each in timeline.streams_and_queues()]
        order = np.argsort(placed.ends_us, kind="stable")
        self._order, self._sorted = order.tolist(), placed.ends_us[order].tolist()

    def run(self) -> None:
        """Walk from the end of the step to its beginning."""
        last = self._order[-1]
        self._add(last, ON_HOST, self._whole - self._end[last])
        start = self._start
        end = self._end
        launch = self._launch
        on_stream = self._before[0]
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
            if self._queued_behind[number] >= 0:
                return int(self._queued_behind[number])
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
