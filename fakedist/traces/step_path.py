"""The critical path of a traced step: the kernels, launches and work of the host that make it as long as it is.

It is followed backwards from the last kernel. A kernel waited for the one before it on its stream if that was still
running when the host launched it. Else it came as fast as its launch did, and the path goes on backwards in the host's
thread: to the kernel that a call of it waited for, or to the thread that worked while it did not (autograd's, and
back). Where the trace does not tell what streams wait for, a kernel that began late, and just after one of another
stream ended, is taken to have waited for that.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable

import numpy as np

from fakedist.rundir.step_time import HostWait, PathPart, WaitKind
from fakedist.traces.step_trace import (
    DERIVATIVE,
    HOST_WAITS,
    LAYER,
    NODE,
    OPERATION,
    PHASE,
    STREAM_WAITS,
    CudaCalls,
    Intervals,
    Ints,
    find_rows,
    taken,
)
from fakedist.traces.traced_step import Trace, TracedPath

#: A launch reaches an idle GPU within this time, and a kernel begins so soon after the one that its stream waited for.
_LATENCY_NS = 20_000
#: CUDA calls that may wait for the GPU: for what they launch, or for anything.
_COPIES, _WAITS = re.compile("Memcpy"), re.compile("Synchronize|Free(?!Async)")
_BETWEEN = "between operations"
#: A thread is at work in these. Others only say what it does between them.
_HOST_KINDS = (OPERATION, NODE, DERIVATIVE)


#: The script's line that a thread runs at a time, for threads and times; empty texts where it is not known.
LinesAt = Callable[[Ints, Ints], list[str]]


def find_path(trace: Trace, lines_at: LinesAt | None = None) -> TracedPath | None:
    """The critical path of a trace; None if the host's calls were not traced."""
    if trace.calls is None or not len(trace.calls.start) or not len(trace.activity):
        return None
    walk = _WayBack(trace, trace.calls)
    walk.run()
    threads = trace.calls.threads
    parts = [PathPart("idle", "", "", "", 0, 0, ns / 1000, lane=f"stream {stream}") for stream, ns in walk.idle.items()]
    for (thread, name), ns in walk.launches.items():
        number = walk.num_launches[thread, name]
        parts.append(PathPart("launch", "", "", name, 0, number, ns / 1000, lane=threads.get(thread, "")))
    for (thread, name), ns in _by_operation(trace, trace.calls, walk.host).items():
        parts.append(PathPart("host", "", "", name, 0, 0, ns / 1000, lane=threads.get(thread, "")))
    return TracedPath(np.array(walk.kernels) / 1000, parts, _host_waits(trace, trace.calls, walk.waited, lines_at))


class _WayBack:
    """The way back from the last kernel. Times are in nanoseconds.

    Attributes:
        kernels: How much of the path each activity is.
        idle: How much of it nothing explains, by stream.
        launches: How much of it launches took to reach the GPU, by thread and call; ``num_launches`` counts them.
        host: Stretches of it in which the host worked: thread, begin, end.
        waited: Calls that waited for the GPU, and the activity that each waited for.
    """

    def __init__(self, trace: Trace, calls: CudaCalls) -> None:
        activity = trace.activity.columns
        start, end = activity["start"], activity["end"]
        self._begin = trace.begin
        self._start, self._end, self._stream = start.tolist(), end.tolist(), activity["stream"].tolist()
        self._launch, self._thread = np.where(trace.thread >= 0, trace.launch, start).tolist(), trace.thread.tolist()
        self._before = _before(activity["stream"])
        order = np.argsort(end, kind="stable")
        self._order, self._ends = order.tolist(), end[order].tolist()
        launched_by = find_rows(calls.correlation, activity["correlation"])
        self._call = [calls.names[calls.name[row]] if row >= 0 else "" for row in launched_by.tolist()]
        launching = set(np.unique(trace.thread).tolist()) | set(trace.ranges.thread[trace.ranges.kind == NODE].tolist())
        self._busy = {thread: _busy(trace, calls, thread) for thread in launching - {-1}}
        self._awaited = _awaited(trace, calls)
        self.waited: list[tuple[int, int]] = []
        self._waits = self._waits_of(trace, calls, find_rows(activity["correlation"], calls.correlation))
        self._steps_left = 4 * (len(start) + len(calls.start)) + 1000
        self.kernels = [0] * len(start)
        self.idle: Counter[int] = Counter()
        self.launches: Counter[tuple[int, str]] = Counter()
        self.num_launches: Counter[tuple[int, str]] = Counter()
        self.host: list[tuple[int, int, int]] = []

    def _waits_of(self, trace: Trace, calls: CudaCalls, own: Ints) -> dict[int, tuple[list[int], list[int]]]:
        """By thread, when its calls ended that waited for an activity, and for which."""
        known = _synced(trace, calls)
        copies, anything = (
            np.array([bool(pattern.search(name)) for name in calls.names] or [False]) for pattern in (_COPIES, _WAITS)
        )
        waits: dict[int, tuple[list[int], list[int]]] = {}
        chosen = np.flatnonzero((copies | anything)[calls.name])
        for row in chosen[np.argsort(calls.end[chosen], kind="stable")].tolist():
            start, end = int(calls.start[row]), int(calls.end[row])
            index = bisect_right(self._ends, end) - 1
            last = self._order[index] if index >= 0 else -1
            at = int(own[row]) if copies[calls.name[row]] else known.get(int(calls.correlation[row]), last)
            if at >= 0 and start < self._end[at] <= end:
                self.waited.append((row, at))
                ends, activities = waits.setdefault(int(calls.thread[row]), ([], []))
                ends.append(end)
                activities.append(at)
        return waits

    def run(self) -> None:
        """Walk from the end of the step to its beginning."""
        at: int | None = self._order[-1]
        time = self._ends[-1]
        stream = self._stream[self._order[-1]]
        while at is not None and time > self._begin:
            begin = min(max(self._start[at], self._begin), time)
            self.kernels[at] += time - begin
            stream = self._stream[at]
            at, time = self._back(at, begin)
        self.idle += Counter({stream: time - self._begin}) if time > self._begin else Counter()

    def _back(self, at: int, time: int) -> tuple[int | None, int]:
        """The activity that one waited for, perhaps through the host, and when that ended; None at the beginning."""
        before, launch = self._before[at], self._launch[at]
        self._steps_left -= 1
        if self._steps_left < 0:
            return None, time
        is_queued = before >= 0 and self._end[before] > launch
        free = self._end[before] if is_queued else launch
        if self._awaited is None:
            other = self._ended_by(time)
            is_other = time - free > _LATENCY_NS and other >= 0 and time - _LATENCY_NS <= self._end[other]
        else:
            other = self._awaited[at]
            is_other = other >= 0 and free < self._end[other] <= time
        if is_other:
            before, is_queued = other, True
        if is_queued or (self._thread[at] < 0 and before >= 0):
            end = min(self._end[before], time)
            self.idle[self._stream[at]] += time - end
            return before, end
        if launch < self._begin or self._thread[at] < 0:
            return None, time
        key = self._thread[at], self._call[at]
        self.launches[key] += max(time - launch, 0)
        self.num_launches[key] += 1
        return self._on_host(self._thread[at], min(launch, time))

    def _ended_by(self, time: int) -> int:
        """The activity that ended last until a time and began before it; -1 without one."""
        for index in range(bisect_right(self._ends, time) - 1, -1, -1):
            if self._start[self._order[index]] < time:
                return int(self._order[index])
        return -1

    def _on_host(self, thread: int, time: int) -> tuple[int | None, int]:
        nothing: tuple[list[int], list[int]] = [], []
        while time > self._begin:
            self._steps_left -= 1
            starts, ends = self._busy.get(thread, nothing)
            index = bisect_left(starts, time) - 1
            if index >= 0 and ends[index] >= time:
                begin = max(starts[index], self._begin)
                waited, activities = self._waits.get(thread, nothing)
                wait = bisect_right(waited, time) - 1
                if wait >= 0 and waited[wait] > begin:
                    ended = self._end[activities[wait]]
                    self.host.append((thread, ended, time))
                    return activities[wait], ended
                self.host.append((thread, begin, time))
                time = begin
                continue
            since = max(ends[index], self._begin) if index >= 0 else self._begin
            other, ended = self._other_thread(thread, since, time)
            self.host.append((thread, ended, time))
            thread, time = other, ended
        return None, max(time, self._begin)

    def _other_thread(self, thread: int, since: int, time: int) -> tuple[int, int]:
        """The thread that worked last while this one did not, and until when."""
        last = thread, since
        for other, (starts, ends) in self._busy.items():
            index = bisect_left(starts, time) - 1
            if index >= 0 and (ended := min(ends[index], time)) > last[1]:
                last = other, ended
        return last


def _last_on_stream(trace: Trace, stream: Ints, time: Ints) -> list[int]:
    """For each moment, the activity that was launched last on a stream before it (-1: on any); -1 without one."""
    own = trace.activity.columns["stream"]
    order = np.argsort(trace.launch, kind="stable")
    last = np.full(len(stream), -1)
    for number in np.unique(stream).tolist():
        rows = order[(own[order] == number) | (number < 0)]
        asked = stream == number
        index = np.searchsorted(trace.launch[rows], time[asked], side="left") - 1
        last[asked] = np.where(index >= 0, rows[np.maximum(index, 0)], -1) if len(rows) else -1
    activities: list[int] = last.tolist()
    return activities


def _synced(trace: Trace, calls: CudaCalls) -> dict[int, int]:
    """By correlation, the activity that a call of the host waited for, where the trace tells the stream or event."""
    if not trace.syncs:
        return {}
    syncs = trace.syncs
    made = taken(calls.start, find_rows(calls.correlation, syncs["correlation"]))
    recorded = taken(calls.start, find_rows(calls.correlation, syncs["record"]))
    is_event = (syncs["record"] > 0) & (recorded >= 0)
    chosen = (syncs["what"] == HOST_WAITS) & (made >= 0) & (is_event | (syncs["stream"] >= 0))
    stream, time = np.where(is_event, syncs["recorded_on"], syncs["stream"]), np.where(is_event, recorded, made)
    activity = _last_on_stream(trace, stream[chosen], time[chosen])
    return dict(zip(syncs["correlation"][chosen].tolist(), activity, strict=True))


def _awaited(trace: Trace, calls: CudaCalls) -> list[int] | None:
    """For each activity, that of another stream which its stream had to wait for, the last; -1 without one.

    None if the trace does not tell what streams wait for.
    """
    syncs = trace.syncs
    if not len(syncs.get("what", ())):
        return None
    made = taken(calls.start, find_rows(calls.correlation, syncs["correlation"]))
    recorded = taken(calls.start, find_rows(calls.correlation, syncs["record"]))
    chosen = (syncs["what"] == STREAM_WAITS) & (made >= 0) & (recorded >= 0) & (syncs["recorded_on"] >= 0)
    others = _last_on_stream(trace, syncs["recorded_on"][chosen], recorded[chosen])
    awaited = [-1] * len(trace.activity)
    end, stream, launch = trace.activity.columns["end"], trace.activity.columns["stream"], trace.launch
    order = np.argsort(launch, kind="stable")
    rows_of = {number: order[stream[order] == number] for number in np.unique(syncs["stream"][chosen]).tolist()}
    for waiting, at, other in zip(syncs["stream"][chosen].tolist(), made[chosen].tolist(), others, strict=True):
        rows = rows_of[waiting]
        index = int(np.searchsorted(launch[rows], at))
        if other < 0 or index >= len(rows):
            continue
        first = int(rows[index])  # those behind it follow on the stream
        if awaited[first] < 0 or end[awaited[first]] < end[other]:
            awaited[first] = other
    return awaited


def _host_waits(
    trace: Trace, calls: CudaCalls, waited: list[tuple[int, int]], lines_at: LinesAt | None
) -> list[HostWait]:
    """Waits of the host by line, operation and kind, most idle time of the GPU first: from when it could go on."""
    rows_waited = np.array([call for call, _ in waited], np.int64)
    lines = [""] * len(waited)
    if lines_at is not None:
        lines = lines_at(calls.thread[rows_waited], calls.start[rows_waited])
    start, end = trace.activity.columns["start"], trace.activity.columns["end"]
    until = np.maximum.accumulate(end) if len(end) else end
    rows: dict[tuple[str, str, WaitKind], list[float]] = {}
    seen: set[int] = set()
    ranges = trace.ranges.where(trace.ranges.kind == OPERATION)
    lanes = np.unique(np.append(ranges.thread, calls.thread), return_inverse=True)[1]
    around = Intervals(lanes[: len(ranges.thread)], ranges.start, ranges.end)
    called = around.innermost(lanes[len(ranges.thread) :], calls.start).tolist()
    for (call, at), line in zip(waited, lines, strict=True):
        name = calls.names[calls.name[call]]
        to_host = "DtoH" in trace.activity.names[trace.activity.name[at]]
        kind: WaitKind = ("read" if to_host else "copy") if _COPIES.search(name) else "synchronize"
        operation = ranges.meanings[ranges.meaning[called[call]]].name if called[call] >= 0 else name
        index = int(np.searchsorted(start, end[at], side="left"))
        is_idle = index < len(start) and int(until[index - 1]) <= end[at] and at not in seen
        seen.add(at)
        row = rows.setdefault((line, operation.replace("::", ".", 1), kind), [0, 0, 0])
        row[0] += 1
        row[1] += float(end[at] - calls.start[call]) / 1000
        if is_idle:
            row[2] += max(float(min(start[index], trace.launch[index]) - end[at]), 0.0) / 1000
    waits = [
        HostWait(line, False, kind, operation, "", 0, int(num), wait_us, idle_us)
        for (line, operation, kind), (num, wait_us, idle_us) in rows.items()
    ]
    return sorted(waits, key=lambda wait: -wait.idle_us)


def _before(stream: Ints) -> list[int]:
    """For each activity, in order of start, the one before it on its stream; -1 without one."""
    order = np.argsort(stream, kind="stable")
    before = np.full(len(stream), -1)
    is_same = stream[order][1:] == stream[order][:-1]
    before[order[1:][is_same]] = order[:-1][is_same]
    rows: list[int] = before.tolist()
    return rows


def _work(trace: Trace, calls: CudaCalls, thread: int, kinds: tuple[int, ...]) -> tuple[Ints, Ints, Ints]:
    """Start, end and name of a thread's ranges (rows of ``meanings``) and calls (rows of names, behind these)."""
    ranges = trace.ranges
    rows = np.flatnonzero((ranges.thread == thread) & np.isin(ranges.kind, kinds))
    own = np.flatnonzero(calls.thread == thread)
    name = np.concatenate([ranges.meaning[rows], len(ranges.meanings) + calls.name[own]])
    return np.append(ranges.start[rows], calls.start[own]), np.append(ranges.end[rows], calls.end[own]), name


def _busy(trace: Trace, calls: CudaCalls, thread: int) -> tuple[list[int], list[int]]:
    """When a thread is in any operation or call: starts and ends."""
    start, end, _ = _work(trace, calls, thread, _HOST_KINDS)
    order = np.argsort(start, kind="stable")
    start, until = start[order], np.maximum.accumulate(end[order])
    is_first = np.append(True, start[1:] > until[:-1])[: len(start)]
    return start[is_first].tolist(), until[np.append(is_first[1:], True)[: len(start)]].tolist()


def _by_operation(trace: Trace, calls: CudaCalls, host: list[tuple[int, int, int]]) -> Counter[tuple[int, str]]:
    """Stretches of the host's work by thread, and innermost call, operation or range."""
    names = [*(meaning.name or meaning.phase for meaning in trace.ranges.meanings), *calls.names, _BETWEEN]
    sums: Counter[tuple[int, str]] = Counter()
    stretches = np.array([row for row in host if row[2] > row[1]], np.int64).reshape(-1, 3)
    for thread in np.unique(stretches[:, 0]).tolist():
        start, end, name = _work(trace, calls, thread, (*_HOST_KINDS, LAYER, PHASE))
        own = stretches[stretches[:, 0] == thread, 1:]
        own = own[np.argsort(own[:, 0])]
        bounds = np.unique(np.concatenate([start, end, own.ravel()]))
        middle = (bounds[:-1] + bounds[1:]) // 2
        index = np.searchsorted(own[:, 0], middle, side="right") - 1
        is_inside = (index >= 0) & (middle < own[index, 1])
        lane = np.zeros(len(start), np.int64)
        row = Intervals(lane, start, end).innermost(np.zeros(int(is_inside.sum()), np.int64), middle[is_inside])
        said = np.where(row >= 0, name[row], len(names) - 1) if len(name) else row
        for number, ns in enumerate(np.bincount(said, np.diff(bounds)[is_inside], len(names)).tolist()):
            if ns:
                sums[thread, names[number]] += round(ns)
    return sums
