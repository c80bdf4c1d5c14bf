"""The critical path of a traced step: the kernels, launches and work of the host that make it as long as it is.

It is followed backwards from the last kernel. A kernel waited for the one before it on its stream if that was still
running when the host launched it. Else it came as fast as its launch did, and the path goes on backwards in the host's
thread: to the kernel that a call of it waited for, or to the thread that worked while it did not (autograd's, and
back). Where the trace does not tell what streams wait for, a kernel that began late, and just after one of another
stream ended, is taken to have waited for that.

Chooses what of a file is reported: one process on one GPU, and one step of it.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fakedist.errors import ReportError
from fakedist.rundir import time_notes
from fakedist.rundir.families import kernel_family
from fakedist.rundir.notes import Note
from fakedist.rundir.step_time import HostWait, PathPart, TracedProcess, TracedStep, WaitKind
from fakedist.traces.step_trace import (
    DERIVATIVE,
    HOST_WAITS,
    LAYER,
    NODE,
    OPERATION,
    PHASE,
    STEP,
    STREAM_WAITS,
    Activity,
    CudaCalls,
    Intervals,
    Ints,
    ProcessTrace,
    Ranges,
    find_rows,
    taken,
)
from fakedist.traces.traced_step import Trace, TracedPath


@dataclass(frozen=True)
class StepChoice:
    """The part of a file to read: by default the last complete step of the process that ran most kernels on a GPU."""

    step: int | None = None
    process: int | None = None
    device: int | None = None


def choose_process(
    activity: Activity,
    key: Ints,
    described: Callable[[int], tuple[int, int, str]],
    called: Path,
    choice: StepChoice,
) -> tuple[int, list[TracedProcess]]:
    """Choose what one process ran on one GPU: its number in ``key``, and a row for each.

    Args:
        key: For each activity, a number of its process and GPU.
        described: The process, the device and the GPU's name of such a number.

    Raises:
        ReportError: The file has no kernels of such a process or GPU.
    """
    is_collective = np.array([kernel_family(name) == "communication" for name in activity.names] or [False])
    is_fill = np.array([name.startswith("Memset") for name in activity.names] or [False])[activity.name]
    is_collective = is_collective[activity.name] & ~activity.is_copy
    us = (activity.columns["end"] - activity.columns["start"]) / 1000
    rows: dict[int, TracedProcess] = {}
    for number in np.unique(key).tolist():
        own = key == number
        process, device, gpu = described(number)
        kernels, collectives = own & ~activity.is_copy, own & is_collective
        rows[number] = TracedProcess(
            process=process,
            device=device,
            gpu=gpu,
            is_shown=False,
            num_kernels=int(kernels.sum()),
            kernel_us=float(us[kernels].sum()),
            num_copies=int((own & activity.is_copy & ~is_fill).sum()),
            num_fills=int((own & is_fill).sum()),
            num_streams=len(np.unique(activity.columns["streamId"][own])),
            num_collectives=int(collectives.sum()),
            collective_us=float(us[collectives].sum()),
        )
    numbers = sorted(rows, key=lambda number: (-rows[number].num_kernels, rows[number].device))
    matching = [number for number in numbers if choice.process in (None, rows[number].process)]
    if not matching:
        there = ", ".join(map(str, sorted({row.process for row in rows.values()})))
        raise ReportError(f"{called} has no kernels of process {choice.process}", f"it has those of {there}")
    matching = [number for number in matching if choice.device in (None, rows[number].device)]
    if not matching:
        there = ", ".join(map(str, sorted({row.device for row in rows.values()})))
        raise ReportError(f"{called} has no kernels of GPU {choice.device}", f"it has those of {there}")
    rows[matching[0]] = replace(rows[matching[0]], is_shown=True)
    return matching[0], [rows[number] for number in numbers]


def one_step(process: ProcessTrace, choice: StepChoice, called: Path) -> Trace:
    """One step of a process, or everything if no range marks a step; ReportError if there is no such step."""
    ranges = process.ranges.preferring_ours()
    notes: list[Note] = []
    shown = next((row for row in process.processes if row.is_shown), None)
    if shown is not None and len(process.processes) > 1:
        others = [(row.process, row.device) for row in process.processes if not row.is_shown]
        notes.append(time_notes.several_processes(len(process.processes), (shown.process, shown.device), others))
    marked = marked_steps(ranges, process.thread)
    if not len(marked.start) and choice.step is not None:
        raise ReportError("no range of the file names a step", "omit --step: the whole file then counts as one step")
    if len(marked.start):
        row = _chosen_row(marked, int(ranges.end.max()), process.launch, choice.step)
        begin, end, step = int(marked.start[row]), int(marked.end[row]), _number(marked, row)
    else:
        row, step = -1, 1
        notes.append(time_notes.no_steps_traced())
        begin = min(int(process.activity.columns["start"].min()), int(ranges.start.min(initial=np.iinfo(np.int64).max)))
        begin, end = min(begin, int(process.launch.min())), int(process.activity.columns["end"].max())
    memory = process.memory
    if len(memory.get("time", ())):
        during = (memory["time"] >= begin) & (memory["time"] <= end) if row >= 0 else memory["time"] >= 0
        allocated, reserved = (int(memory[name][during].max(initial=0)) for name in ("allocated", "reserved"))
        notes.append(time_notes.memory_traced(allocated, reserved, step if row >= 0 else -1))
    if process.num_unreadable:
        notes.append(time_notes.events_not_read(process.num_unreadable))
    if process.cut_off_after >= 0:
        notes.append(time_notes.trace_cut_off(process.cut_off_after))
    inside = (process.launch >= begin) & (process.launch <= end)
    if not inside.any():
        raise ReportError(f"no kernel of {called} was launched in step {step}", "--step chooses another")
    if process.activity.is_copy[inside].all():
        notes.append(time_notes.no_kernels_traced())
    host = begin, end
    if row >= 0:
        begin = _free_at(process, begin, inside)
    chosen = np.flatnonzero(inside)[np.argsort(process.activity.columns["start"][inside], kind="stable")]
    is_captured = bool((process.made_in[chosen] >= 0).any())
    return Trace(
        ranges=ranges if is_captured else ranges.where((ranges.end >= host[0]) & (ranges.start <= host[1])),
        activity=process.activity.where(chosen),
        thread=process.thread[chosen],
        launch=process.launch[chosen],
        made_in=process.made_in[chosen],
        made_at=process.made_at[chosen],
        begin=begin,
        host=host,
        step=step,
        gpu=process.gpu,
        notes=notes,
        processes=process.processes,
        calls=process.calls,
        syncs=process.syncs,
        steps=[_step_row(process, marked, number, number == row) for number in range(len(marked.start))],
    )


def marked_steps(ranges: Ranges, thread: Ints) -> Ranges:
    """The outermost ranges of steps, in order, of the thread that launches most: data loaders count batches, too."""
    steps = ranges.where(ranges.kind == STEP)
    having = np.unique(steps.thread)
    launching = np.bincount(np.searchsorted(having, thread[np.isin(thread, having)])) if len(having) else having
    if launching.any():
        steps = steps.where(steps.thread == having[launching.argmax()])
    lanes = np.unique(steps.thread, return_inverse=True)[1]
    steps = steps.where(Intervals(lanes, steps.start, steps.end).parents() < 0)
    order = np.argsort(steps.start, kind="stable")
    return replace(steps, **{name: getattr(steps, name)[order] for name in ("meaning", "thread", "start", "end")})


def _number(steps: Ranges, row: int) -> int:
    return steps.meanings[int(steps.meaning[row])].number


def _chosen_row(steps: Ranges, end: int, launch: Ints, step: int | None) -> int:
    """The row of a step: of those with kernels, by default the last that is over before the file ends."""
    numbers = [_number(steps, row) for row in range(len(steps.start))]
    if step is None:
        order = np.sort(launch)
        has_kernels = np.searchsorted(order, steps.end, "right") > np.searchsorted(order, steps.start)
        whole = np.flatnonzero(has_kernels & (steps.end < end))
        return int([len(numbers) - 1, *np.flatnonzero(has_kernels), *whole][-1])
    if step not in numbers:
        there = ", ".join(map(str, sorted(set(numbers))[:12]))
        raise ReportError(f"the file has no step {step}", f"--step is one of {there}")
    return len(numbers) - 1 - numbers[::-1].index(step)


def _free_at(process: ProcessTrace, begin: int, inside: npt.NDArray[np.bool_]) -> int:
    """When the GPU begins a step: it may still be at work on what was launched before the range did."""
    before, first = process.activity.columns["end"][process.launch < begin], process.activity.columns["start"][inside]
    free = int(before.max(initial=begin))
    return max(begin, min(free, int(first.min(initial=free))))


def _step_row(process: ProcessTrace, steps: Ranges, row: int, is_shown: bool) -> TracedStep:
    begin, end = int(steps.start[row]), int(steps.end[row])
    inside = (process.launch >= begin) & (process.launch <= end)
    free = _free_at(process, begin, inside)
    start, until = (process.activity.columns[name][inside] for name in ("start", "end"))
    order = np.argsort(start, kind="stable")
    start, until = start[order], np.maximum.accumulate(until[order])
    before = np.concatenate([start[:1], until[:-1]])
    return TracedStep(
        step=_number(steps, row),
        is_shown=is_shown,
        range_us=(end - begin) / 1000,
        step_us=(max(int(until.max(initial=begin)), free) - free) / 1000,
        num_kernels=int(inside.sum()),
        busy_us=float(np.maximum(until - np.maximum(start, before), 0).sum()) / 1000,
    )


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
        self._start, self._end, self._stream = start.tolist(), end.tolist(), activity["streamId"].tolist()
        self._launch, self._thread = np.where(trace.thread >= 0, trace.launch, start).tolist(), trace.thread.tolist()
        self._before = _before(activity["streamId"])
        order = np.argsort(end, kind="stable")
        self._order, self._ends = order.tolist(), end[order].tolist()
        launched_by = find_rows(calls.correlation, activity["correlationId"])
        self._call = [calls.names[calls.name[row]] if row >= 0 else "" for row in launched_by.tolist()]
        launching = set(np.unique(trace.thread).tolist()) | set(trace.ranges.thread[trace.ranges.kind == NODE].tolist())
        self._busy = {thread: _busy(trace, calls, thread) for thread in launching - {-1}}
        self._awaited = _awaited(trace, calls)
        self.waited: list[tuple[int, int]] = []
        self._waits = self._waits_of(trace, calls, find_rows(activity["correlationId"], calls.correlation))
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
    own = trace.activity.columns["streamId"]
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
    end, stream, launch = trace.activity.columns["end"], trace.activity.columns["streamId"], trace.launch
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
