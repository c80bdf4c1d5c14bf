"""Turns the allocator's events in a trace of torch.profiler (``profile_memory=True``) into a run's records of memory.

An event has an address, a size, a thread and a time, and no stack. The ranges around it tell the rest: the operation,
the layer and the phase, and with ``with_stack=True`` the functions of Python. Categories are inferred as those of a
memory snapshot are.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from fakedist.analysis.recording import NUMPY_TYPES, Array, Recording
from fakedist.analysis.stack_lines import BACKWARD as BACKWARD_FRAME
from fakedist.analysis.stack_lines import frame_lines
from fakedist.rundir.encoding import Record, columns_of
from fakedist.rundir.memory_records import EventsRecord, MarksRecord
from fakedist.rundir.records import OperationNamesRecord, OperationsRecord, RegionsRecord, ScopesRecord, StepRecord
from fakedist.rundir.rows import FrameRow
from fakedist.rundir.schema import ACTIONS
from fakedist.traces.inferring import block_lives, describe
from fakedist.traces.one_step import marked_steps
from fakedist.traces.stack_evidence import (
    FORWARD,
    KINDS,
    UNKNOWN,
    ModuleCall,
    StackEvidence,
    find_places,
)
from fakedist.traces.step_trace import OPERATION, Intervals, Ints, ProcessTrace, Ranges, taken
from fakedist.traces.traced_step import Bools, LaunchSites, LayerNumbers, Trace, launch_sites

_ALLOC, _FREE, _FREED = map(ACTIONS.index, ("alloc", "free_requested", "free_completed"))
_GAINED, _LOST = map(ACTIONS.index, ("segment_alloc", "segment_free"))
#: They allocate for the operation around them.
_MAKERS = re.compile(r"aten::(?:new_)?(?:empty|resize|set)(?:_\w+)?$")
_COMMUNICATES = re.compile(r"c10d\.|nccl:|record_param_comms")
_ZEROES = re.compile(r"Optimizer\.zero_grad#")
_NODE = "torch::autograd::"
#: "train.py(31): main", as torch's tracer of Python names a function by its first line.
_FUNCTION = re.compile(r"(.+)\((\d{1,9})\): (.+)")
#: The module of a forward that runs again, which the trace may not name.
_AGAIN = (ModuleCall("", "", 0),)


def memory_records(process: ProcessTrace, trace: Trace, layers: LayerNumbers) -> list[Record]:
    """The allocator's events until the end of the shown step, without the blocks that were gone when it began.

    Unknown layers are added to ``layers``. Nothing if the trace has no such events.
    """
    if not len(process.memory.get("time", ())):
        return []
    columns, num_before = _with_before(process.memory)
    ranges = process.ranges.preferring_ours()
    shown = ranges.where(~_named(ranges, _MAKERS))
    sites = launch_sites(shown, columns["thread"], columns["time"])
    evidence = _evidence(shown, sites, columns)
    recording = Recording(num_events_before=num_before)
    recording.frames, recording.stacks, stack = _stacks(process, shown, sites, columns)
    recording.events[0] = {
        "action": np.where(columns["bytes"] > 0, _ALLOC, _FREE),
        "address": columns["address"],
        "size": np.abs(columns["bytes"]),
        "stack": stack,
        "time_us": columns["time"] // 1000,
    }
    places = find_places(evidence, is_native=True)
    step = np.where(np.array(places.phase) == "init", 0, _steps(process, ranges, columns["time"]))
    places = replace(places, step=step)
    layer, lives = layers.of(shown, sites.layer), block_lives(recording.events[0]["action"], columns["address"])
    describe(recording, places, layer, evidence, lives)
    is_known = recording.marks["address"] != 0
    recording.marks = {name: column[is_known] for name, column in recording.marks.items()}
    return _records(recording, trace, _event_record(recording, trace, columns, _kept_rows(trace, columns, lives)))


def _with_before(memory: dict[str, Ints]) -> tuple[dict[str, Ints], int]:
    """The events, behind those that stand for blocks from before the trace, and how many these are."""
    alive: set[int] = set()
    before: dict[int, int] = {}
    for at, bytes_ in zip(memory["address"].tolist(), memory["bytes"].tolist(), strict=True):
        if bytes_ > 0:
            alive.add(at)
        elif at in alive:
            alive.remove(at)
        else:
            before.setdefault(at, -bytes_)
    held = int(memory["allocated"][0] - memory["bytes"][0]) - sum(before.values())
    if held > 0:
        before[0] = held
    first = {name: np.full(len(before), column[0]) for name, column in memory.items()}
    first |= {"address": np.array([*before], np.int64), "bytes": np.array([*before.values()], np.int64)}
    first["thread"] = np.full(len(before), -1)
    return {name: np.concatenate([first[name], column]) for name, column in memory.items()}, len(before)


def _named(ranges: Ranges, pattern: re.Pattern[str]) -> Bools:
    """Ranges whose names begin so."""
    is_named: Bools = np.array([bool(pattern.match(each.name)) for each in ranges.meanings] or [False])
    return is_named[ranges.meaning]


def _is_within(ranges: Ranges, mask: Bools, columns: dict[str, Ints]) -> Bools:
    """Whether each event is in one of the chosen ranges of its thread."""
    num = int(mask.sum())
    lanes = np.unique(np.concatenate([ranges.thread[mask], columns["thread"]]), return_inverse=True)[1]
    intervals = Intervals(lanes[:num], ranges.start[mask], ranges.end[mask])
    return np.asarray(intervals.innermost(lanes[num:], columns["time"]) >= 0)


def _evidence(ranges: Ranges, sites: LaunchSites, columns: dict[str, Ints]) -> list[StackEvidence]:
    phases = [*(each.phase for each in ranges.meanings), ""]
    names = [*(each.name.removeprefix(_NODE).replace("::", ".", 1) for each in ranges.meanings), ""]
    meaning = ranges.meaning.astype(np.int64)
    makes_graph = _is_within(ranges, (ranges.kind == OPERATION) & (ranges.sequence >= 0), columns)
    columns_of_events = (
        np.where(sites.in_node, "backward", np.array(phases)[taken(meaning, sites.phase)]),
        taken(meaning, sites.operation),
        (sites.layer >= 0) | makes_graph,
        _is_within(ranges, _named(ranges, _ZEROES), columns),
        sites.recompute,
    )
    return [
        StackEvidence(
            UNKNOWN if zeroes else KINDS.get(phase, FORWARD if is_forward else UNKNOWN),
            _AGAIN if is_again else (),
            is_recompute=is_again,
            zeroes=zeroes,
            purpose="communication" if _COMMUNICATES.match(names[operation]) else "",
            operation=names[operation],
        )
        for phase, operation, is_forward, zeroes, is_again in zip(
            *(column.tolist() for column in columns_of_events), strict=True
        )
    ]


def _steps(process: ProcessTrace, ranges: Ranges, time: Ints) -> Ints:
    """The step of each event: the last that had begun; 0 before the first, 1 if no range marks any."""
    marked = marked_steps(ranges, process.thread)
    numbers = np.array([0, *(marked.meanings[row].number for row in marked.meaning.tolist())])
    begun = np.searchsorted(marked.start, time, side="right")
    return numbers[begun] if len(numbers) > 1 else np.ones(len(time), np.int64)


def _kept_rows(trace: Trace, columns: dict[str, Ints], lives: tuple[Ints, Ints]) -> Ints:
    """Rows of the events until the step's end, without those of blocks that were gone when it began."""
    begin, end = trace.host
    time, (made, freed) = columns["time"], lives
    is_kept = np.zeros(len(time) + 1, bool)
    is_kept[made] = is_kept[freed] = np.append(time, end)[freed] >= begin
    return np.flatnonzero(is_kept[:-1] & (time <= end))


def _event_record(recording: Recording, trace: Trace, columns: dict[str, Ints], rows: Ints) -> EventsRecord:
    """The events of these rows. Segments have no addresses: what is reserved grows and shrinks at address 0."""
    events, is_before = recording.events[0], columns["time"] < trace.host[0]
    held = columns["reserved"][max(int(is_before.sum()) - 1, 0)]
    change = np.zeros(len(is_before), np.int64)
    change[rows] = np.diff(np.where(is_before, held, columns["reserved"])[rows], prepend=0)
    moved, freed = np.flatnonzero(change), rows[events["action"][rows] == _FREE]
    at = np.concatenate([moved, rows, freed])
    table = {name: column[at] for name, column in events.items()}
    table["action"][: len(moved)] = np.where(change[moved] > 0, _GAINED, _LOST)
    table["action"][len(moved) + len(rows) :] = _FREED
    table["address"][: len(moved)] = 0
    table["size"][: len(moved)] = np.abs(change[moved])
    table["stack"] = np.where(table["action"] == _ALLOC, table["stack"], -1)
    table["stream"] = np.zeros(len(at), np.int64)
    order = np.argsort(at, kind="stable")
    packed = _packed(EventsRecord, {name: column[order] for name, column in table.items()})
    return EventsRecord(0, recording.frames, recording.stacks, **packed)  # type: ignore[arg-type]


def _packed(kind: type[Record], columns: Mapping[str, Array]) -> dict[str, bytes]:
    return {
        name: np.ascontiguousarray(columns[name], NUMPY_TYPES[code]).tobytes()
        for name, code in columns_of(kind).items()
    }


def _records(recording: Recording, trace: Trace, events: EventsRecord) -> list[Record]:
    begin, end = (time // 1000 for time in trace.host)
    return [
        OperationNamesRecord(recording.operations),
        ScopesRecord(recording.scopes),
        OperationsRecord(
            0, **_packed(OperationsRecord, {"operation": recording.op_operation, "scope": recording.op_scope})
        ),
        RegionsRecord(recording.regions),
        MarksRecord(**_packed(MarksRecord, recording.marks)),
        events,
        StepRecord(trace.step, begin, end),
    ]


class Functions:
    """Functions of Python that run: which is the innermost of a thread at a time, and its stack."""

    def __init__(self, process: ProcessTrace, threads: Ints) -> None:
        functions = process.functions
        self.frames: dict[FrameRow, int] = {BACKWARD_FRAME: 0}
        of_text: dict[int, int] = {}
        for text in np.unique(functions["text"]).tolist():
            if named := _FUNCTION.fullmatch(process.texts[text]):
                of_text[text] = self.frames.setdefault(FrameRow(named[1], int(named[2]), named[3]), len(self.frames))
        self._threads = np.unique(np.concatenate([functions["thread"], threads]))
        lanes = np.searchsorted(self._threads, functions["thread"])
        self._intervals = Intervals(lanes, functions["start"], functions["end"])
        self._parents = self._intervals.parents().tolist()
        self._frame = [of_text.get(text, -1) for text in functions["text"].tolist()]

    def innermost(self, thread: Ints, time: Ints) -> list[int]:
        """The innermost function at each time; -1 without any."""
        rows: list[int] = self._intervals.innermost(np.searchsorted(self._threads, thread), time).tolist()
        return rows

    def lines(self, thread: Ints, time: Ints) -> list[str]:
        """The innermost line outside of torch at each time, the first of its function; empty without any."""
        lines = frame_lines(list(self.frames))
        rows = self.innermost(thread, time)
        return [next((lines[frame] for frame in self.stack(row) if lines[frame]), "") for row in rows]

    @functools.cache  # noqa: B019 (it lives as long as a file is read)
    def stack(self, row: int) -> tuple[int, ...]:
        """The frames of a function's stack, innermost first."""
        frames = []
        while row >= 0:
            frames += [self._frame[row]] if self._frame[row] >= 0 else []
            row = self._parents[row]
        return tuple(frames)


def _stacks(
    process: ProcessTrace, ranges: Ranges, sites: LaunchSites, columns: dict[str, Ints]
) -> tuple[list[FrameRow], list[tuple[int, ...]], Ints]:
    """Frames, stacks, and the stack of each event by the functions that run in its thread; -1 without any.

    An event of a backward has those of the operation that made its node.
    """
    functions = Functions(process, np.concatenate([columns["thread"], ranges.thread]))
    stacks: dict[tuple[int, ...], int] = {(): -1}
    forward, made = sites.forward >= 0, sites.forward
    time = np.where(forward, taken(ranges.start, made), columns["time"])
    thread = np.where(forward, taken(ranges.thread, made), columns["thread"])
    numbers = []
    for row, is_backward in zip(functions.innermost(thread, time), forward.tolist(), strict=True):
        stack = functions.stack(row)
        stack = (0, *stack) if is_backward and stack else stack
        numbers.append(stacks.setdefault(stack, len(stacks) - 1))
    return list(functions.frames), list(stacks)[1:], np.array(numbers, np.int64)
