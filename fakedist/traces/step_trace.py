"""The contents of a trace: ranges on the host and activity on the GPU. Times are in nanoseconds with one origin."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from fakedist.rundir.launch_records import LAUNCH_KINDS
from fakedist.rundir.step_time import TracedProcess
from fakedist.rundir.trace_records import (
    CALL_RANGE,
    LAYER_RANGE,
    OWN_RANGE,
    PHASE_RANGE,
    SCRIPT_RANGE,
    SCRIPT_RANGE_END,
    STEP_RANGE,
)

Ints = npt.NDArray[np.int64]


class Intervals:
    """Ranges of several threads (``lane``, from 0), for looking up which one contains a point. They may overlap."""

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
        index = np.searchsorted(self._start, point, side="right") - 1
        index[~inside] = -1
        return self._rows(self._out_of(index, point))

    def parents(self) -> Ints:
        """For each range, the row of the range around it; -1 without one."""
        rows = np.empty(len(self.order), np.int64)
        rows[self.order] = self._rows(self._outer)
        return rows

    def _rows(self, index: Ints) -> Ints:
        if not len(self.order):
            return np.full(len(index), -1, np.int64)
        return np.where(index >= 0, self.order[index], -1)

    def _out_of(self, index: Ints, point: Ints) -> Ints:
        """Go outwards from the last range that began before a point to the first that has not ended by then."""
        waiting = np.flatnonzero(index >= 0)
        while len(waiting):
            over = self._end[index[waiting]] < point[waiting]
            waiting = waiting[over]
            index[waiting] = self._outer[index[waiting]]
            waiting = waiting[index[waiting] >= 0]
        return index

    def _at(self, lane: npt.NDArray[np.integer], time: Ints) -> Ints:
        return lane.astype(np.int64) * self._stride + (time - self._first)


def _last_that_ends_later(end: Ints) -> Ints:
    """For each range, sorted by start, the last range before it that ends no earlier; -1 without one.

    Everything between a range and its candidate ends before the range. If the candidate does too, its own candidate is
    next: the distance doubles in each round.
    """
    candidate = np.arange(-1, len(end) - 1)
    waiting = np.flatnonzero(candidate >= 0)
    while len(waiting):
        at = candidate[waiting]
        waiting = waiting[end[at] < end[waiting]]
        candidate[waiting] = candidate[candidate[waiting]]
        waiting = waiting[candidate[waiting] >= 0]
    return candidate


IGNORED, STEP, PHASE, LAYER, OPERATION, NODE, DERIVATIVE, CALL, SCRIPTS, SCRIPTS_END = range(10)
#: torch.autograd.profiler.emit_nvtx writes "aten::mm, seq = 12, op_id = 7, sizes = [...]".
TAILS = (", seq = ", ", op_id = ", ", sizes = ", ", input_op_ids = ")
_SEQUENCE = re.compile(r", seq = (\d+)")
#: torch.profiler's frames of modules, with with_stack=True: "nn.Module: Linear_17".
MODULE = "nn.Module: "
_NODE = "autograd::engine::evaluate_function: "
_STEP = re.compile(
    r"(?:(?:global|train(?:ing)?|eval|prefill|decode|engine)[ _-]?)?"
    r"(?:step|iter|iteration|batch|ProfilerStep)[ _:#=-]*(\d+)(?:/\d+)?",
    re.IGNORECASE,
)
_DERIVATIVE = re.compile(r"\w+Backward\d*$|torch::autograd::")
_OPERATION = re.compile(r"\w+::[\w<]|nccl\w*:|Optimizer\.zero_grad#|(?:detach|CompiledFunction|Torch-Compiled)\b")
_PHASES = (
    ("optimizer", re.compile(r"optimi[sz]er|^optim\b|\boptim[._-]?step|Engine\.step$|^Adam|^SGD", re.IGNORECASE)),
    ("backward", re.compile(r"backward|(?:^|[\W_])bwd(?:[\W_]|$)", re.IGNORECASE)),
    ("forward", re.compile(r"forward|(?:^|[\W_])fwd(?:[\W_]|$)", re.IGNORECASE)),
)
#: A range that is only a phase: it consists of the phase's words and these.
_FILLERS = re.compile(
    r"(?:forward|backward|fwd|bwd|optimi[sz]er|optim|step|pass|compute|func|model|loss|micro|batch|\d|[\W_])+",
    re.IGNORECASE,
)
#: Between a word and its number: "block 3" and "block_3" are shown as "block.3", and fold like modules in a list.
_NUMBERED = re.compile(r"(?<=[a-z])[ _:#=-]+(?=\d{1,9}$)")
#: Domains of libraries, whose ranges are not the program's layers.
_LIBRARY = re.compile(r"nccl|cccl|cub\b|thrust|cu(?:blas|dnn|sparse|solver|fft|tensor|da)|nvshmem|libcu", re.IGNORECASE)


@dataclass(frozen=True)
class Meaning:
    """The meaning of a range's text.

    Attributes:
        kind: STEP, PHASE, LAYER, OPERATION, NODE (autograd runs a node), DERIVATIVE (that node's own function), CALL
            (one of fakedist's collectives), SCRIPTS and SCRIPTS_END (marks around a range of the script) or IGNORED.
        name: Of the layer, operation or range; empty without one.
        phase: forward, backward or optimizer, if the text names it. fakedist's own ranges can name any phase.
        number: Of the step, call or range; -1 without one.
        is_ours: fakedist emitted the range.
    """

    kind: int
    name: str = ""
    phase: str = ""
    number: int = -1
    is_ours: bool = False


def without_numbers(text: str) -> tuple[str, int]:
    """A range's text without the parts that make each one unique, and autograd's sequence number; -1 without one."""
    sequence = _SEQUENCE.search(text) if ", " in text else None
    for tail in TAILS:
        if tail in text:
            text = text[: text.index(tail)]
            break
    return text, int(sequence[1]) if sequence else -1


def meaning(text: str, domain: str = "") -> Meaning:
    """The meaning of a range, from its text without numbers and the name of its domain."""
    if text.startswith(OWN_RANGE):
        return _own(text)
    if domain and _LIBRARY.match(domain):
        return Meaning(OPERATION, text)
    if text.startswith(_NODE):
        return Meaning(NODE, text.removeprefix(_NODE), "backward")
    if _DERIVATIVE.match(text):
        return Meaning(DERIVATIVE, text, "backward")
    if text.startswith(MODULE):
        return Meaning(LAYER, text.removeprefix(MODULE))
    if step := _STEP.fullmatch(text.strip()):
        return Meaning(STEP, number=int(step[1]))
    phase = _phase(text)
    if text.startswith("Optimizer.step#"):
        return Meaning(PHASE, phase="optimizer")
    if _OPERATION.match(text):
        return Meaning(OPERATION, text)
    if _FILLERS.fullmatch(text) and text.strip():
        return Meaning(PHASE, phase=phase) if phase else Meaning(IGNORED)
    return Meaning(LAYER, _NUMBERED.sub(".", text), phase) if text.strip() else Meaning(IGNORED)


def _own(text: str) -> Meaning:
    if text.startswith(SCRIPT_RANGE):
        number, _, name = text.removeprefix(SCRIPT_RANGE).partition(":")
        return Meaning(SCRIPTS, name, number=int(number), is_ours=True) if number.isdecimal() else Meaning(IGNORED)
    for kind, prefix in ((STEP, STEP_RANGE), (CALL, CALL_RANGE), (SCRIPTS_END, SCRIPT_RANGE_END)):
        if text.startswith(prefix) and text.removeprefix(prefix).isdecimal():
            return Meaning(kind, number=int(text.removeprefix(prefix)), is_ours=True)
    if text.startswith(PHASE_RANGE):
        return Meaning(PHASE, phase=text.removeprefix(PHASE_RANGE), is_ours=True)
    if text.startswith(LAYER_RANGE):
        return Meaning(LAYER, text.removeprefix(LAYER_RANGE), is_ours=True)
    return Meaning(IGNORED)


def _phase(text: str) -> str:
    matches = [phase for phase, words in _PHASES if words.search(text)]
    return matches[0] if len(matches) == 1 else ""  # "forward-backward" is neither


def find_rows(keys: Ints, asked: Ints) -> Ints:
    """For each number, its first row of ``keys``; -1 if it is missing."""
    if not len(keys):
        return np.full(len(asked), -1, np.int64)
    order = np.argsort(keys, kind="stable")
    index = np.minimum(np.searchsorted(keys[order], asked), len(keys) - 1)
    return np.where(keys[order[index]] == asked, order[index], -1)


T = TypeVar("T")


class TextNumbers(dict[T, int]):
    """Numbers of values, in the order of their first appearance."""

    def __missing__(self, value: T) -> int:
        number = self[value] = len(self)
        return number


def linked_rows(keys: Ints, asked: Ints) -> Ints:
    """The first row of ``keys`` of each positive number; -1 if it is missing."""
    return np.where(asked > 0, find_rows(keys, asked), -1)


def chosen(columns: Mapping[str, Ints], rows: npt.NDArray[np.bool_] | Ints) -> dict[str, Ints]:
    """The rows of columns that a mask selects, or the given rows in their order."""
    return {name: column[rows] for name, column in columns.items()}


def taken(column: Ints, rows: Ints) -> Ints:
    """The given rows of a column; -1 for row -1."""
    return np.where(rows >= 0, column[rows], -1) if len(column) else np.full(len(rows), -1, np.int64)


STREAM_RECORDS, STREAM_WAITS, HOST_WAITS, HOST_WAITS_FOR_DEVICE = map(
    LAUNCH_KINDS.index, ("stream_records", "stream_waits", "host_waits", "host_waits_for_device")
)
#: No correlation of a call is this large.
_NEVER_RECORDED = 1 << 62
#: Columns of ``rundir.trace_records.TracedWaits``.
TracedWaitColumns = Mapping[str, Ints]


@dataclass
class Ranges:
    """The ranges with a meaning.

    Attributes:
        meaning: Rows of ``meanings``.
        thread: Any number except -1.
        end: The end of the trace for a range that never ends.
        sequence: Autograd's sequence number in the text; -1 without one.
        num_ignored: Ranges without a meaning, which are left out.
        flops: Of each operation, 0 where they are not counted; None if the trace has none.
    """

    meanings: list[Meaning]
    meaning: npt.NDArray[np.int32]
    thread: Ints
    start: Ints
    end: Ints
    sequence: Ints
    num_ignored: int = 0
    flops: Ints | None = None

    @property
    def kind(self) -> npt.NDArray[np.int8]:
        """STEP, PHASE, ... of each range."""
        return np.array([meaning.kind for meaning in self.meanings] or [IGNORED], np.int8)[self.meaning]

    def with_functions(self) -> Ranges:
        """Treat the script's autograd functions as operations. torch names them after their class and numbers them."""
        ours = np.array([meaning.is_ours for meaning in self.meanings] or [False])[self.meaning]
        rows = np.flatnonzero((self.kind == LAYER) & (self.sequence >= 0) & ~ours)
        if not len(rows):
            return self
        distinct, which = np.unique(self.meaning[rows], return_inverse=True)
        meaning = self.meaning.copy()
        meaning[rows] = len(self.meanings) + which
        functions = [Meaning(OPERATION, self.meanings[number].name) for number in distinct.tolist()]
        return dataclasses.replace(self, meanings=[*self.meanings, *functions], meaning=meaning)

    def preferring_ours(self) -> Ranges:
        """Drop the script's own steps, phases and layers if fakedist's are in the trace."""
        ours = np.array([meaning.is_ours for meaning in self.meanings] or [False])[self.meaning]
        return self.where(ours | ~np.isin(self.kind, (STEP, PHASE, LAYER))) if ours.any() else self

    def where(self, mask: npt.NDArray[np.bool_]) -> Ranges:
        """The ranges that a mask selects."""
        arrays = {name: getattr(self, name)[mask] for name in ("meaning", "thread", "start", "end", "sequence")}
        if self.flops is not None:
            arrays["flops"] = self.flops[mask]
        return dataclasses.replace(self, **arrays)


@dataclass
class Waits:
    """Events that the host recorded on streams, and waits for them. Times as of the ranges.

    Attributes:
        what: An index of ``rundir.launch_records.LAUNCH_KINDS``, one of those that launch nothing.
        stream: The stream that records or waits, or that the host waits for; -1 without one.
        event: 0 without one. Each record of an event has a number of its own.
    """

    what: Ints
    stream: Ints
    event: Ints
    start: Ints
    end: Ints

    @classmethod
    def of(cls, waits: TracedWaitColumns, records: Mapping[int, int]) -> Waits:
        """The waits and their events, by when each was recorded; one from before the trace takes no time."""
        stream, event, start = waits["stream"], np.maximum(waits["record"], 0), waits["start"]
        record, first = np.unique(event, return_index=True)
        at = np.array([records.get(number, -1) for number in record.tolist()], np.int64)
        first = first[(record > 0) & (at >= 0)]
        at = at[(record > 0) & (at >= 0)]
        # What waits for an event of before the trace still has one, or the host would wait for a whole stream.
        is_lost = (event == 0) & (waits["what"] != HOST_WAITS_FOR_DEVICE) & (stream < 0)
        event = np.where(is_lost | ((event == 0) & (waits["what"] == STREAM_WAITS)), _NEVER_RECORDED, event)
        recorded = np.full(len(first), STREAM_RECORDS)
        return cls(
            np.concatenate([recorded, waits["what"]]),
            np.concatenate([waits["recorded_on"][first], stream]),
            np.concatenate([event[first], event]),
            np.concatenate([at, start]),
            np.concatenate([at, waits["end"]]),
        )


@dataclass
class CudaCalls:
    """Calls of CUDA on the host.

    Attributes:
        correlation: What activity refers to.
        name: Rows of ``names``.
        threads: What to call a thread.
    """

    thread: Ints
    start: Ints
    end: Ints
    correlation: Ints
    name: Ints
    names: list[str]
    threads: dict[int, str]

    @classmethod
    def of(cls, columns: Mapping[str, Ints], named: Callable[[int], str], thread: Callable[[int], object]) -> CudaCalls:
        """The calls of columns thread, start, end, correlation and text, a number that ``named`` knows."""
        texts, name = np.unique(columns["text"], return_inverse=True)
        own = {key: columns[key] for key in ("thread", "start", "end", "correlation")}
        threads = {number: f"thread {thread(number)}" for number in np.unique(columns["thread"]).tolist()}
        return cls(**own, name=name, names=[named(number) for number in texts.tolist()], threads=threads)


#: The text of a whole graph, of which only the launch was traced.
WHOLE_GRAPH = "CUDA graph"


@dataclass
class Activity:
    """Activity on the GPU: kernels, copies, fills and whole graphs, in order of start.

    Attributes:
        columns: start, end, stream, correlation, node (of a CUDA graph), bytes (-1: unknown; of a copy within the GPU's
            memory, those that it reads and writes; of a collective, its whole buffer), collective, and others that a
            trace has.
        name: Rows of ``names``.
        shape: Rows of ``shapes``, grid and block as text.
        is_copy: Copies and fills.
        is_graph: Whole graphs, of which only the launch was traced.
        collectives: Operations and groups that the column ``collective`` numbers; empty texts for what is none.
    """

    columns: dict[str, Ints]
    name: npt.NDArray[np.int64]
    shape: npt.NDArray[np.int64]
    is_copy: npt.NDArray[np.bool_]
    is_graph: npt.NDArray[np.bool_]
    names: list[str] = field(default_factory=list)
    shapes: list[tuple[str, str]] = field(default_factory=list)
    collectives: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.name)

    @classmethod
    def of(cls, device: Mapping[str, Ints], texts: list[str]) -> Activity:
        """Activity of a trace.

        Args:
            device: Columns start, end, stream, correlation, node, bytes (of copies, fills and named collectives), and
                text, grid, block, and perhaps collective as rows of ``texts``; and others, which are kept.
        """
        names, name = np.unique(device["text"], return_inverse=True)
        shapes, shape = np.unique(np.stack([device["grid"], device["block"]]), axis=1, return_inverse=True)
        labels = [texts[number] for number in names.tolist()]
        is_copy = np.array([label.startswith(("Memcpy", "Memset")) for label in labels], bool)[name]
        twice = np.array(["DtoD" in label or "DeviceToDevice" in label for label in labels], bool)[name] & (
            device["bytes"] > 0
        )
        columns = {key: column for key, column in device.items() if key not in ("text", "grid", "block")}
        known, columns["collective"] = np.unique(device.get("collective", np.zeros(len(name))), return_inverse=True)
        collectives = [texts[int(number)] if "collective" in device else "" for number in known]
        has_bytes = is_copy | np.array([bool(text) for text in collectives], bool)[columns["collective"]]
        columns["bytes"] = np.where(has_bytes, np.where(twice, 2 * device["bytes"], device["bytes"]), -1)
        sides = [(texts[grid], texts[block]) for grid, block in shapes.T.tolist()]
        is_graph = np.array([label == WHOLE_GRAPH for label in labels], bool)[name]
        return cls(columns, name, shape.ravel(), is_copy, is_graph, labels, sides, collectives)

    def where(self, mask: npt.NDArray[np.bool_] | Ints) -> Activity:
        """The rows that a mask selects, or the given rows in their order."""
        arrays = {name: getattr(self, name)[mask] for name in ("name", "shape", "is_copy", "is_graph")}
        return dataclasses.replace(self, columns=chosen(self.columns, mask), **arrays)


_NO_OPERATIONS = (IGNORED, STEP, PHASE, CALL, NODE, SCRIPTS, SCRIPTS_END)


def find_launches(calls: CudaCalls, activity: Activity, thread: Ints, time: Ints) -> tuple[Ints, Ints]:
    """The thread and time of each activity's launch: of its CUDA call, else those given."""
    call = linked_rows(calls.correlation, activity.columns["correlation"])
    is_known = call >= 0
    return np.where(is_known, taken(calls.thread, call), thread), np.where(is_known, taken(calls.start, call), time)


@dataclass
class ProcessTrace:
    """The trace of one process on one GPU. Times are in nanoseconds.

    Attributes:
        tool: torch.profiler or nsys.
        gpu: Empty if the trace does not give it.
        thread: The thread that launched each activity; -1 if unknown.
        launch: When each was launched; if unknown, when it began.
        linked: The row of ``ranges`` that the tool links with each activity; -1 without one.
        made_in: For nodes of a CUDA graph, the thread that captured them; -1 for everything else.
        made_at: When they were captured.
        inputs: For each range, the row of ``shapes`` of an operation's arguments; -1 if they were not traced.
        rank: -1 if the trace names none.
        process: The reader's own number of the process; -1 without one.
        processes: A row for what each process of the file ran on each GPU.
        world_size: 0 if the trace does not name it.
        memory: Requests to the allocator on the GPU, by time: device, process, thread, time, address, bytes (negative:
            freed), allocated and reserved (afterwards).
        syncs: As those of ``traced_step.Trace``.
        functions: Calls of Python functions: process, thread, start, end and text, a row of ``texts``.
        num_elsewhere: Activities of other processes and GPUs, which are left out.
        num_unreadable: Damaged events.
        cut_off_after: The events of a file that is cut off; -1 of a whole one.
    """

    tool: str
    gpu: str
    ranges: Ranges
    activity: Activity
    calls: CudaCalls
    thread: Ints
    launch: Ints
    linked: Ints
    made_in: Ints
    made_at: Ints
    inputs: Ints
    shapes: list[tuple[tuple[int, ...], ...]] = field(default_factory=list)
    tool_version: str = ""
    driver: str = ""
    torch: str = ""
    rank: int = -1
    process: int = -1
    processes: list[TracedProcess] = field(default_factory=list)
    world_size: int = 0
    memory: dict[str, Ints] = field(default_factory=dict)
    functions: dict[str, Ints] = field(default_factory=dict)
    syncs: dict[str, Ints] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    num_elsewhere: int = 0
    num_unreadable: int = 0
    cut_off_after: int = -1

    def by_launch(self) -> ProcessTrace:
        """The same, with its activity in the order of launches."""
        order = np.lexsort((self.activity.columns["start"], self.launch))
        arrays = {name: getattr(self, name)[order] for name in ("thread", "launch", "linked", "made_in", "made_at")}
        return dataclasses.replace(self, activity=self.activity.where(order), **arrays)

    def operations(self) -> tuple[Ints, list[tuple[str, ...]], Ints]:
        """The operations around each launch.

        Returns:
            The row of ``ranges`` of the innermost one (-1 without any); distinct chains of names, innermost first, the
            first empty; the row of the chains of each launch.
        """
        ranges = self.ranges
        rows = np.flatnonzero(~np.isin(ranges.kind, _NO_OPERATIONS))
        captured = self.made_in != -1
        thread = np.where(captured, self.made_in, self.thread)
        time = np.where(captured, self.made_at, self.launch)
        threads, lanes = np.unique(np.concatenate([ranges.thread[rows], thread]), return_inverse=True)
        lane = np.where(thread == -1, len(threads), lanes[len(rows) :])
        intervals = Intervals(lanes[: len(rows)], ranges.start[rows], ranges.end[rows])
        index_of = np.full(len(ranges.meaning), -1, np.int64)
        index_of[rows] = np.arange(len(rows))
        innermost_index = intervals.innermost(lane, time)
        linked = np.where(self.linked >= 0, index_of[self.linked], -1) if len(index_of) else self.linked
        innermost_index = np.where(linked >= 0, linked, innermost_index)
        chains, chain = self._chains(rows, intervals.parents(), innermost_index)
        innermost = np.where(innermost_index >= 0, rows[innermost_index], -1) if len(rows) else innermost_index
        return innermost, chains, chain

    def _chains(self, rows: Ints, parents: Ints, innermost: Ints) -> tuple[list[tuple[str, ...]], Ints]:
        meaning = self.ranges.meaning[rows]
        numbers: dict[tuple[str, ...], int] = {(): 0}
        of_range = {-1: 0}
        for index in np.unique(innermost).tolist():
            names: list[str] = []
            at = index
            while at >= 0:
                name = self.ranges.meanings[meaning[at]].name
                if name not in names:
                    names.append(name)
                at = int(parents[at])
            of_range[index] = numbers.setdefault(tuple(names), len(numbers))
        distinct, where = np.unique(innermost, return_inverse=True)
        chain = np.array([of_range[index] for index in distinct.tolist()], np.int64)
        return list(numbers), chain[where] if len(innermost) else np.zeros(0, np.int64)
