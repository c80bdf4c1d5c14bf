"""Turns a trace into the journal's records of a timed step: its kernels, and the host's work between launches."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fakedist.rundir import time_notes
from fakedist.rundir.encoding import Columns, Record, columns_of
from fakedist.rundir.families import kernel_family
from fakedist.rundir.notes import Note
from fakedist.rundir.outcome import Outcome
from fakedist.rundir.records import GpuRecord, LayersRecord, NoteRecord, OutcomeRecord
from fakedist.rundir.rows import LayerRow
from fakedist.rundir.schema import FAMILIES, PHASES
from fakedist.rundir.step_time import HostWait, KernelSource, PathPart, TracedProcess, TracedStep
from fakedist.rundir.trace_records import (
    HostCalls,
    HostRanges,
    HostRecord,
    HostWaits,
    KernelsRecord,
    ProfilerRecord,
    TracedActivity,
    TracedCalls,
    TracedOperations,
    TracedWaits,
)
from fakedist.traces.step_trace import (
    CALL,
    DERIVATIVE,
    IGNORED,
    LAYER,
    NODE,
    OPERATION,
    PHASE,
    SCRIPTS,
    SCRIPTS_END,
    STEP,
    Activity,
    CudaCalls,
    Intervals,
    Ints,
    Ranges,
    Waits,
    find_rows,
    meaning,
    taken,
)

Bools = npt.NDArray[np.bool_]
_OURS = "fakedist::"
#: Ranges that torch opens around a batch that the script takes.
_LOADS = "enumerate(DataLoader)"


@dataclass
class LaunchSites:
    """Origins of launches: rows of ranges, -1 without one.

    Attributes:
        forward: Inside a node, the operation of the forward that created the node.
        phase: The range that gives the phase. Inside a node the phase is backward in any case.
        in_node: Autograd was running a node.
        recompute: It belongs to a forward that is recomputed inside a node.
        call: Number of fakedist's collective that it is part of; -1 if none.
        unknown: A node launched it whose forward operation is unknown.
    """

    layer: Ints
    forward: Ints
    operation: Ints
    phase: Ints
    in_node: Bools
    recompute: Bools
    call: Ints
    in_collective: Bools
    unknown: Bools


class _Chosen:
    """A subset of the ranges, for looking up which of them a launch is in."""

    def __init__(self, ranges: Ranges, lanes: Ints, mask: Bools, one_lane: bool = False) -> None:
        self.rows = np.flatnonzero(mask)
        self.lane = np.zeros(len(self.rows), np.int64) if one_lane else lanes[self.rows]
        self.start, self.end = ranges.start[self.rows], ranges.end[self.rows]
        self._one_lane = one_lane
        self._intervals = Intervals(self.lane, self.start, self.end)

    def innermost(self, lane: Ints, time: Ints) -> Ints:
        """For each launch, the row of its innermost range; -1 without one."""
        index = self._intervals.innermost(np.zeros_like(lane) if self._one_lane else lane, time)
        if not len(self.rows):
            return index
        return np.where(index >= 0, self.rows[index], -1)

    def is_inside(self) -> Bools:
        """Mask of the chosen ranges inside another chosen range."""
        return self._intervals.parents() >= 0

    def before(self, lane: Ints, time: Ints) -> Ints:
        """For each point, the row of the last range that began before it in its thread, ended or not; -1 if none."""
        rows = np.full(len(lane), -1, np.int64)
        for thread in np.unique(lane):
            mine, asked = np.flatnonzero(self.lane == thread), lane == thread
            order = mine[np.argsort(self.start[mine], kind="stable")]
            index = np.searchsorted(self.start[order], time[asked], side="left") - 1
            if len(order):
                rows[asked] = np.where(index >= 0, self.rows[order[index]], -1)
        return rows


def launch_sites(ranges: Ranges, thread: Ints, time: Ints) -> LaunchSites:
    """Find where launches happened, by their threads (-1: unknown) and times in nanoseconds."""
    threads, lanes = np.unique(np.concatenate([ranges.thread, thread]), return_inverse=True)
    lanes, lane = lanes[: len(ranges.thread)].astype(np.int64), lanes[len(ranges.thread) :].astype(np.int64)
    lane[thread == -1] = len(threads)
    kind = ranges.kind
    layers = _Chosen(ranges, lanes, kind == LAYER)
    nodes = _Chosen(ranges, lanes, kind == NODE)
    operations = _Chosen(ranges, lanes, (kind == OPERATION) | (kind == DERIVATIVE))
    layer, node, operation = (ranges_of_kind.innermost(lane, time) for ranges_of_kind in (layers, nodes, operations))
    main = _busiest(lanes[kind == LAYER], lane)
    elsewhere = (node < 0) & ~np.isin(lane, layers.lane) & (thread != -1)
    layer[elsewhere] = layers.innermost(np.full(int(elsewhere.sum()), main), time[elsewhere])
    start = np.append(ranges.start, -1)  # row -1: before everything
    in_node = node >= 0
    # A layer deeper than the node belongs to a recomputed forward, which has its own ranges.
    of_node = in_node & (start[layer] < start[node])
    sequence = _numbers_of_nodes(ranges, lanes, nodes)
    forward = np.full(len(lane), -1, np.int64)
    forward[of_node] = _forwards_of_nodes(_Forward(ranges, lanes), nodes, sequence, node[of_node])
    is_made = forward >= 0
    layer[is_made] = layers.innermost(lanes[forward[is_made]], ranges.start[forward[is_made]])
    with_gradient = _Chosen(ranges, lanes, _with_gradient(ranges)).innermost(lane, time)
    ours = _Chosen(ranges, lanes, _of_ours(ranges)).innermost(lane, time)
    return LaunchSites(
        layer=layer,
        forward=forward,
        operation=np.where(start[node] > start[operation], node, operation),
        phase=_phase_ranges(ranges, lanes, lane, time),
        in_node=in_node,
        recompute=in_node & (start[with_gradient] > start[node]),
        call=_calls(ranges, lanes, ours),
        in_collective=ours >= 0,
        unknown=of_node & ~is_made,
    )


def _busiest(ranges: Ints, launches: Ints) -> int:
    """The thread in which the program pushes its ranges: of the threads with ranges, the one with the most launches."""
    having = launches[np.isin(launches, ranges)]
    chosen = having if len(having) else ranges
    return int(np.bincount(chosen).argmax()) if len(chosen) else -1


def _with_gradient(ranges: Ranges) -> Bools:
    """Operations that autograd may create a node for: those with numbers. Inside a node, they are recomputed."""
    mask: Bools = (ranges.kind == OPERATION) & (ranges.sequence >= 0)
    return mask


def _numbers_of_nodes(ranges: Ranges, lanes: Ints, nodes: _Chosen) -> Ints:
    """For each range that is a node, the number of the forward operation that created it; -1 without one.

    torch.profiler writes the number on the node, emit_nvtx on the function that the node calls.
    """
    numbers = np.where(ranges.kind == NODE, ranges.sequence, -1)
    functions = np.flatnonzero((ranges.kind == DERIVATIVE) & (ranges.sequence >= 0))
    functions = functions[np.argsort(-ranges.start[functions], kind="stable")]  # a node's first function is its own
    node = nodes.innermost(lanes[functions], ranges.start[functions])
    numbers[node[node >= 0]] = ranges.sequence[functions[node >= 0]]
    return numbers


def _of_ours(ranges: Ranges) -> Bools:
    of_meaning: Bools = np.array([meaning.name.startswith(_OURS) for meaning in ranges.meanings] or [False])
    return of_meaning[ranges.meaning]


def _calls(ranges: Ranges, lanes: Ints, ours: Ints) -> Ints:
    """The number in the mark emitted just before each collective began."""
    marks = _Chosen(ranges, lanes, ranges.kind == CALL)
    number = np.array([meaning.number for meaning in ranges.meanings] or [-1], np.int64)
    calls = np.full(len(ours), -1, np.int64)
    inside = ours >= 0
    mark = marks.before(lanes[ours[inside]], ranges.start[ours[inside]])
    calls[inside] = np.where(mark >= 0, number[ranges.meaning[mark]], -1) if len(ranges.meaning) else -1
    return calls


def _phase_ranges(ranges: Ranges, lanes: Ints, lane: Ints, time: Ints) -> Ints:
    """The range that gives the phase: in the launch's thread, else in any (threads wait for each other)."""
    says = np.array([meaning.phase != "" and meaning.kind in (PHASE, LAYER) for meaning in ranges.meanings] or [False])
    mask = says[ranges.meaning]
    rows = _Chosen(ranges, lanes, mask).innermost(lane, time)
    none = rows < 0
    rows[none] = _Chosen(ranges, lanes, mask, one_lane=True).innermost(lane[none], time[none])
    return rows


class _Forward:
    """Looks up the operation that created an autograd node by its sequence number. Each thread counts separately."""

    def __init__(self, ranges: Ranges, lanes: Ints) -> None:
        rows = np.flatnonzero(_with_gradient(ranges))
        # The last operation with a number created the node. Those before it created none.
        rows = rows[np.lexsort((ranges.start[rows], ranges.sequence[rows], lanes[rows]))]
        last = np.ones(len(rows), bool)
        last[:-1] = (lanes[rows[1:]] != lanes[rows[:-1]]) | (ranges.sequence[rows[1:]] != ranges.sequence[rows[:-1]])
        self._rows = rows[last]
        self.ranges, self.lanes = ranges, lanes
        self._main = int(np.bincount(lanes[rows]).argmax()) if len(rows) else -1

    def operation(self, node: Ints, sequence: Ints, inner: Bools) -> Ints:
        """The operation's range for each node. ``inner`` marks nodes that run inside another node."""
        lane = np.where(inner, self.lanes[node], self._main)  # an inner backward is of what was recomputed there
        key = self._keys(lane, sequence)
        known = self._keys(self.lanes[self._rows], self.ranges.sequence[self._rows])
        index = np.minimum(np.searchsorted(known, key), max(len(known) - 1, 0))
        if not len(known):
            return np.full(len(node), -1, np.int64)
        return np.where((known[index] == key) & (sequence >= 0), self._rows[index], -1)

    @staticmethod
    def _keys(lane: Ints, sequence: Ints) -> Ints:
        return (lane << 44) | np.maximum(sequence, 0)


def _forwards_of_nodes(forward: _Forward, nodes: _Chosen, sequence: Ints, node: Ints) -> Ints:
    """For each launch from a node, the operation of the forward that created it.

    Gradient accumulation counts for the node that ran before it.
    """
    asked, which = np.unique(node, return_inverse=True)
    ranges, lanes = forward.ranges, forward.lanes
    numbered = _Chosen(ranges, lanes, sequence >= 0)
    bare = sequence[asked] < 0
    before = numbered.before(lanes[asked[bare]], ranges.start[asked[bare]])
    asked[bare] = np.where(before >= 0, before, asked[bare])
    inner = nodes.is_inside()[np.searchsorted(nodes.rows, asked)]
    return forward.operation(asked, sequence[asked], inner)[which]


OUTSIDE = 0


class LayerNumbers:
    """Rows of the table ``layers`` by name; without those ``known`` of a recording, by all the ranges around them."""

    def __init__(self, known: list[LayerRow] | None = None) -> None:
        self.rows = known if known is not None else [LayerRow(OUTSIDE, "", "", -1)]
        self._by_name = {name: number for number, name, *_ in self.rows}
        self._is_recorded = known is not None

    def of(self, ranges: Ranges, rows: Ints) -> Ints:
        """The layer of each of these rows of ``ranges``. Row -1 is outside of modules."""
        if not len(ranges.meaning):
            return np.full(len(rows), OUTSIDE, np.int64)
        asked = rows >= 0
        numbers = np.full(len(rows), OUTSIDE, np.int64)
        if self._is_recorded:
            of_meaning = np.array([self._by_name.get(meaning.name, OUTSIDE) for meaning in ranges.meanings], np.int64)
            numbers[asked] = of_meaning[ranges.meaning[rows[asked]]]
        else:
            ours = np.array([meaning.is_ours for meaning in ranges.meanings])[ranges.meaning[rows[asked]]]
            numbers[np.flatnonzero(asked)[~ours]] = self._by_path(ranges, rows[asked][~ours])
            numbers[np.flatnonzero(asked)[ours]] = self._by_own_name(ranges, rows[asked][ours])
        return numbers

    def _by_own_name(self, ranges: Ranges, rows: Ints) -> Ints:
        """Layers from fakedist's own ranges, whose names are qualified, without the run that the report belongs to."""
        names = [meaning.name for meaning in ranges.meanings if meaning.is_ours and meaning.kind == LAYER]
        root = next((name for name in names if name.startswith("(") and name.endswith(")")), "")
        distinct, which = np.unique(ranges.meaning[rows], return_inverse=True)
        return np.array([self._qualified(ranges.meanings[number].name, root) for number in distinct], np.int64)[which]

    def _qualified(self, name: str, root: str) -> int:
        if name not in self._by_name:
            above = name.rpartition(".")[0] or (root if name != root and not name.startswith("(") else "")
            self._append(name, self._qualified(above, root) if above else OUTSIDE)
        return self._by_name[name]

    def _by_path(self, ranges: Ranges, rows: Ints) -> Ints:
        """Layers named after the ranges around them, outermost first."""
        of_layers = np.flatnonzero(ranges.kind == LAYER)
        lanes = np.unique(ranges.thread[of_layers], return_inverse=True)[1]
        parents = Intervals(lanes, ranges.start[of_layers], ranges.end[of_layers]).parents()
        meaning = ranges.meaning[of_layers]
        wanted = np.searchsorted(of_layers, rows)
        chain, levels = np.unique(wanted), []
        while len(chain):
            levels.append(chain)
            above = parents[chain]
            chain = np.unique(above[above >= 0])
        number = np.full(len(of_layers), OUTSIDE, np.int64)
        needed = np.unique(np.concatenate(levels)) if levels else np.zeros(0, np.int64)
        ready = needed[parents[needed] < 0]
        while len(ready):
            above = np.where(parents[ready] >= 0, number[parents[ready]], OUTSIDE)
            keys, which = np.unique(np.stack([above, meaning[ready]]), axis=1, return_inverse=True)
            numbers = [self._number(parent, ranges.meanings[own].name) for parent, own in keys.T.tolist()]
            number[ready] = np.array(numbers, np.int64)[which.ravel()]
            ready = needed[np.isin(parents[needed], ready)]
        return number[wanted]

    def _number(self, parent: int, name: str) -> int:
        above = self.rows[parent].name
        path = name if not above or name.startswith(above + ".") else f"{above}.{name}"
        if path not in self._by_name:
            self._append(path, parent)
        return self._by_name[path]

    def _append(self, name: str, parent: int) -> None:
        self._by_name[name] = len(self.rows)
        self.rows.append(LayerRow(len(self.rows), name, "", parent))


class TracedPath(NamedTuple):
    """How much of a critical path each activity is, in microseconds, and its other parts. They add up to the step.

    ``waits`` are those of the host for the GPU, also off the path.
    """

    kernel_us: npt.NDArray[np.float64]
    parts: list[PathPart]
    waits: list[HostWait]


@dataclass
class Trace:
    """The trace of one step; ``waits`` is None if the tool did not trace what streams wait for.

    Attributes:
        thread: The thread that launched each activity; -1 if unknown.
        launch: When each was launched; if unknown, when it began.
        made_in: For nodes of a CUDA graph, the thread that captured them; -1 for everything else.
        begin: When it began; on the GPU, once what was launched before had ended.
        host: When its range began and ended on the host; zeros if that is not known.
        gpu: The GPU's name; empty if the trace does not give it.
        processes: What each process of the file ran on each GPU.
        steps: The steps of the file.
        path: Its critical path; None if the host's calls were not traced.
        syncs: Columns of waits, a row for each call that waits or makes a stream wait: what (as of ``Waits``), stream,
            recorded_on, record (correlations of the calls that recorded the event) and correlation; empty if the tool
            did not trace them.
    """

    ranges: Ranges
    activity: Activity
    thread: Ints
    launch: Ints
    made_in: Ints
    made_at: Ints
    begin: int
    step: int
    host: tuple[int, int] = (0, 0)
    gpu: str = ""
    notes: list[Note] = field(default_factory=list)
    waits: Waits | None = None
    processes: list[TracedProcess] = field(default_factory=list)
    steps: list[TracedStep] = field(default_factory=list)
    calls: CudaCalls | None = None
    path: TracedPath | None = None
    syncs: dict[str, Ints] = field(default_factory=dict)


@dataclass(frozen=True)
class Tool:
    """Source of a trace: ``name`` is cupti, nsys or torch.profiler, ``source`` measured or simulated."""

    name: str
    source: Literal["measured", "simulated"] = "measured"
    version: str = ""
    report: str = ""


def kernel_record(trace: Trace, layers: LayerNumbers, tool: Tool) -> KernelsRecord:
    """The journal's record of a step's kernels. Unknown layers are added to ``layers``."""
    activity, ranges = trace.activity, trace.ranges
    captured = trace.made_in != -1
    sites = launch_sites(
        ranges, np.where(captured, trace.made_in, trace.thread), np.where(captured, trace.made_at, trace.launch)
    )
    texts: dict[str, int] = {"": 0}
    phase = _phases(ranges, sites)
    operation, family = _operations_and_families(activity, ranges, sites, phase, texts)
    if "collective" in activity.columns:
        called = _numbered(activity.collectives, texts)[activity.columns["collective"]]
        operation = np.where(called > 0, called, operation)  # text 0 is empty
    name = _numbered(activity.names, texts)[activity.name] if len(activity) else activity.name
    grid = _numbered([grid for grid, _ in activity.shapes], texts)[activity.shape]
    block = _numbered([block for _, block in activity.shapes], texts)[activity.shape]
    start, end = activity.columns["start"], activity.columns["end"]
    bytes_ = activity.columns["bytes"]
    columns: dict[str, npt.NDArray[np.generic]] = {
        "name": name,
        "family": family,
        "stream": activity.columns["stream"],
        "start_us": (start - trace.begin) / 1000,
        "duration_us": (end - start) / 1000,
        "launch_us": np.where(trace.thread != -1, (trace.launch - trace.begin) / 1000, np.nan),
        "grid": grid,
        "block": block,
        "operation": operation,
        "op": np.full(len(activity), -1),
        "step": np.full(len(activity), trace.step),
        "phase": phase,
        "recompute": sites.recompute,
        "layer": layers.of(ranges, sites.layer),
        "call": sites.call,
        "flops": _flops(ranges, sites, family, end - start),
        "moved_bytes": np.where(bytes_ >= 0, bytes_, np.nan),
        "bound": np.zeros(len(activity)),
        "path_us": np.full(len(activity), np.nan) if trace.path is None else trace.path.kernel_us,
    }
    until = max(int(end.max(initial=trace.begin)), trace.begin)
    source = KernelSource(
        source=tool.source,
        tool=tool.name,
        step=trace.step,
        gpu=trace.gpu,
        step_us=(until - trace.begin) / 1000,
        notes=[*trace.notes, *_notes(trace, sites, phase)],
        tool_version=tool.version,
        report=tool.report,
        processes=trace.processes,
        steps=trace.steps,
        path=[] if trace.path is None else trace.path.parts,
        host_waits=[] if trace.path is None else trace.path.waits,
        loading_us=_loading_us(ranges, trace.begin, until),
    )
    packed = {
        name: np.ascontiguousarray(columns[name], code).tobytes() for name, code in columns_of(KernelsRecord).items()
    }
    return KernelsRecord(source, list(texts), **packed)


def _loading_us(ranges: Ranges, begin: int, until: int) -> float:
    """How long torch.profiler saw a thread in DataLoaders' iterators between two moments in nanoseconds."""
    loads = np.array([meaning.name.startswith(_LOADS) for meaning in ranges.meanings] or [False])[ranges.meaning]
    inside = np.minimum(ranges.end, until) - np.maximum(ranges.start, begin)
    return float(np.maximum(inside[loads], 0).sum()) / 1000


def _numbered(names: list[str], texts: dict[str, int]) -> Ints:
    return np.array([texts.setdefault(text, len(texts)) for text in names], np.int64)


def _phases(ranges: Ranges, sites: LaunchSites) -> npt.NDArray[np.uint8]:
    other = PHASES.index("other")
    of_meaning = np.array([PHASES.index(m.phase) if m.phase in PHASES else other for m in ranges.meanings] or [other])
    of_range = of_meaning[ranges.meaning][sites.phase] if len(ranges.meaning) else np.full(len(sites.phase), other)
    phases = np.where(sites.phase >= 0, of_range, other)
    return np.where(sites.in_node, PHASES.index("backward"), phases).astype(np.uint8)


def _operations_and_families(
    activity: Activity, ranges: Ranges, sites: LaunchSites, phase: npt.NDArray[np.uint8], texts: dict[str, int]
) -> tuple[Ints, npt.NDArray[np.uint8]]:
    """Numbers of the operations' texts, and families. Each distinct kernel of an operation is classified once."""
    meaning_numbers = np.full(len(activity), -1, np.int64)
    known = sites.operation >= 0
    meaning_numbers[known] = ranges.meaning[sites.operation[known]]
    keys = np.stack([activity.name, meaning_numbers, phase.astype(np.int64), sites.in_collective.astype(np.int64)])
    distinct, which = np.unique(keys, axis=1, return_inverse=True)
    operations, families = [], []
    for name, text, in_phase, in_collective in distinct.T.tolist():
        operation = "" if text < 0 else _operation(ranges.meanings[text].name)
        family = kernel_family(activity.names[name], operation, PHASES[in_phase])
        operations.append(texts.setdefault(operation, len(texts)))
        families.append(FAMILIES.index("communication" if in_collective else family))
    which = which.ravel()
    family_of = np.array(families, np.uint8)[which]
    family_of[activity.is_graph] = FAMILIES.index("other")  # whatever it contains
    return np.array(operations, np.int64)[which], family_of


def _flops(ranges: Ranges, sites: LaunchSites, family: npt.NDArray[np.uint8], time: Ints) -> npt.NDArray[np.float64]:
    """The part of each matrix product and attention, by time, of its operation's FLOPs; NaN if not counted."""
    flops = np.full(len(time), np.nan)
    if ranges.flops is None or not len(ranges.flops):
        return flops
    known = (sites.operation >= 0) & (ranges.flops[sites.operation] > 0)
    counted = [FAMILIES.index(name) for name in ("gemm", "attention")]
    known &= np.isin(family, counted)  # excludes kernels that fill a product's workspace
    operation, weight = sites.operation[known], np.maximum(time[known], 1)
    whole = np.bincount(operation, weight)
    flops[known] = ranges.flops[operation] * weight / whole[operation]
    return flops


def _operation(name: str) -> str:
    return name.replace("::", ".", 1) if name.startswith("aten::") else name


def _notes(trace: Trace, sites: LaunchSites, phase: npt.NDArray[np.uint8]) -> list[Note]:
    """Notes that count the kernels whose attribution is coarse."""
    notes: list[Note] = []
    columns, count = trace.activity.columns, len(trace.activity)
    if unknown := int((trace.thread == -1).sum()):
        notes.append(time_notes.kernels_without_launch(unknown, count))
    in_graph = (columns["node"] > 0) & (trace.made_in == -1)
    if coarse := int(in_graph.sum()):
        notes.append(time_notes.kernels_of_graphs(coarse))
    if graphs := int(trace.activity.is_graph.sum()):
        notes.append(time_notes.graphs_as_a_whole(graphs))
    if count and not (sites.layer >= 0).any():
        notes.append(time_notes.no_layers_traced())
    if unknown := int((sites.unknown & (sites.layer < 0)).sum()):
        notes.append(time_notes.forward_not_traced(unknown))
    if count and bool((phase == PHASES.index("other")).all()):
        notes.append(time_notes.no_phases_traced())
    if count and not (trace.ranges.kind == OPERATION).any():
        notes.append(time_notes.no_operations_traced())
    return notes


_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True)
class ImportedStep:
    """A step of a file that belongs to no recorded run, as records of a journal."""

    file: Path
    tool: str
    records: list[Record]
    kernels: KernelsRecord

    @classmethod
    def of(cls, file: Path, trace: Trace, tool: Tool, layers: LayerNumbers | None = None) -> ImportedStep:
        """The step of a trace; its layers are those that its ranges name, and are added to ``layers``."""
        layers = layers or LayerNumbers()
        kernels = kernel_record(trace, layers, tool)
        facts = GpuRecord(gpu_name=trace.gpu)
        ended = OutcomeRecord(Outcome.FINISHED, 0, last_phase="other", last_step=trace.step)
        return cls(file, tool.name, [facts, LayersRecord(layers.rows), kernels, ended], kernels)


def host_record(trace: Trace) -> HostRecord:
    """The journal's record of what the host did."""
    ranges = trace.ranges
    waits, calls = Columns(HostWaits), Columns(HostCalls)
    known = trace.waits or Waits(_NONE, _NONE, _NONE, _NONE, _NONE)
    times = [((column - trace.begin) / 1000).tolist() for column in (known.start, known.end)]
    streams = np.maximum(known.stream, 0).tolist()
    waits.extend(list(zip(known.what.tolist(), streams, known.event.tolist(), *times, strict=True)))
    marks = np.flatnonzero(ranges.kind == CALL)
    numbers = [ranges.meanings[meaning].number for meaning in ranges.meaning[marks].tolist()]
    calls.extend(list(zip(numbers, ((ranges.start[marks] - trace.begin) / 1000).tolist(), strict=True)))
    texts: dict[str, int] = {}
    inside = _script_ranges(trace, ranges, texts)
    made = (waits.made(), calls.made(), inside.made())
    return HostRecord(trace.step, trace.waits is not None, list(texts), *made)


def _script_ranges(trace: Trace, ranges: Ranges, texts: dict[str, int]) -> Columns[HostRanges]:
    """Ranges in the order in which they began. One that does not end lasts until the last range does."""
    begins: dict[int, tuple[int, int, str]] = {}
    ends: dict[int, int] = {}
    for row in np.flatnonzero(np.isin(ranges.kind, (SCRIPTS, SCRIPTS_END))).tolist():
        script_range, at = ranges.meanings[ranges.meaning[row]], int(ranges.start[row])
        if script_range.kind == SCRIPTS:
            begins[script_range.number] = at, int(ranges.thread[row]), script_range.name
        else:
            ends[script_range.number] = at
    threads: dict[int, int] = {}
    table, last = Columns(HostRanges), int(ranges.end.max(initial=trace.begin))
    for number, (at, thread, name) in sorted(begins.items(), key=lambda item: item[1][0]):
        table.add(
            name=texts.setdefault(name, len(texts)),
            thread=threads.setdefault(thread, len(threads)),
            begin_us=(at - trace.begin) / 1000,
            end_us=(max(ends.get(number, last), at) - trace.begin) / 1000,
        )
    return table


def profiler_trace(record: ProfilerRecord) -> Trace:
    """The trace of the timed step."""
    operations, calls, device = (_columns(table) for table in (record.operations, record.calls, record.activity))
    texts = record.texts
    ranges, steps = _ranges(operations, texts)
    thread, launch = _launches(operations, calls, device)
    begin, step = steps[-1] if steps else (int(launch.min(initial=0)), 0)
    order = np.argsort(device["start"], kind="stable")
    activity = Activity.of(device | {"bytes": device["size"]}, texts).where(order)
    none = np.full(len(order), -1, np.int64)
    return Trace(
        ranges=ranges.with_functions().preferring_ours(),
        activity=activity,
        thread=thread[order],
        launch=launch[order],
        made_in=none,
        made_at=none,
        begin=begin,
        step=step,
        gpu=record.gpu,
        waits=_waits(record, calls) if record.has_events else None,
    )


def _waits(record: ProfilerRecord, calls: dict[str, Ints]) -> Waits:
    started = dict(zip(calls["correlation"].tolist(), calls["start"].tolist(), strict=True))
    waits = _columns(record.waits)
    called = [started.get(correlation, -1) for correlation in waits["correlation"].tolist()]
    waits["start"] = np.where(np.array(called, np.int64) >= 0, called, waits["start"])
    return Waits.of(waits, started)


def _ranges(operations: dict[str, Ints], texts: list[str]) -> tuple[Ranges, list[tuple[int, int]]]:
    """The ranges (a phase lasts until the next one), and (start, number) of the steps."""
    meanings = [meaning(text) for text in texts]
    kinds = np.array([m.kind for m in meanings] or [IGNORED])[operations["text"]]
    start, end = operations["start"], operations["end"].copy()
    marks = np.flatnonzero(kinds == PHASE)
    ours = np.array([m.is_ours for m in meanings] or [False])
    marks = marks[ours[operations["text"][marks]]]
    marks = marks[np.argsort(start[marks], kind="stable")]
    end[marks] = np.append(start[marks[1:]], end.max(initial=0))[: len(marks)]
    steps = [
        (int(start[row]), meanings[operations["text"][row]].number)
        for row in np.flatnonzero(kinds == STEP)
        if meanings[operations["text"][row]].is_ours
    ]
    says = kinds != IGNORED
    thread, sequence = operations["thread"][says], operations["sequence"][says]
    meaning_numbers = operations["text"][says].astype(np.int32)
    ranges = Ranges(
        meanings, meaning_numbers, thread, start[says], end[says], sequence, flops=operations["flops"][says]
    )
    return ranges, steps


def _columns(table: TracedOperations | TracedCalls | TracedActivity | TracedWaits) -> dict[str, Ints]:
    return {
        name: np.frombuffer(getattr(table, name), code).astype(np.int64)
        for name, code in columns_of(type(table)).items()
    }


def _launches(operations: dict[str, Ints], calls: dict[str, Ints], device: dict[str, Ints]) -> tuple[Ints, Ints]:
    """The thread (CUPTI's number) and time of each activity's CUDA call, else of its operation (torch's number)."""
    call = find_rows(calls["correlation"], device["correlation"])
    linked = np.where(call >= 0, taken(calls["operation"], call), device["operation"])
    linked = np.where(linked > 0, linked, device["operation"])
    operation = np.where(linked > 0, find_rows(operations["id"], linked), -1)
    thread = np.where(operation >= 0, taken(operations["thread"], operation), taken(calls["thread"], call))
    at = np.where(operation >= 0, taken(operations["start"], operation), device["start"])
    at = np.where(call >= 0, taken(calls["start"], call), at)
    return np.where((call >= 0) | (operation >= 0), thread, -1), at


def traced_records(profiled: ProfilerRecord, layers: list[LayerRow]) -> list[Record]:
    """The kernels, and what else the host did; a note if torch.profiler saw no kernels."""
    if not profiled.activity.start:
        return [NoteRecord(time_notes.profiler_saw_no_kernels())]
    trace = profiler_trace(profiled)
    if profiled.source == "simulated":
        trace.notes.append(time_notes.times_are_not_a_gpus())
    tool = Tool("cupti", profiled.source)
    return [kernel_record(trace, LayerNumbers(layers), tool), host_record(trace)]
