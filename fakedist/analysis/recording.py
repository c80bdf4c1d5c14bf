"""Reads a journal into memory: the rank's whole recording, as arrays."""

from __future__ import annotations

import dataclasses
import typing
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from fakedist.analysis.replay import Pool, Segment
from fakedist.analysis.stack_lines import forward_of, joined_to_forward
from fakedist.rundir.collector import no_collector
from fakedist.rundir.directory import JOURNAL_NAME, KERNELS_NAME, SMI_NAME, damaged, read_journal
from fakedist.rundir.encoding import Record, columns_of
from fakedist.rundir.launch_records import HostClockRecord, LaunchesRecord, LaunchKeysRecord, MachineScoreRecord
from fakedist.rundir.memory_records import (
    AllocatorSettingsRecord,
    BeyondCapacityRecord,
    EventsRecord,
    FailedRequestRecord,
    GeneratedRecord,
    GraphsRecord,
    HeldRecord,
    HostBlocksRecord,
    HostLookRecord,
    HostPlacesRecord,
    MarksRecord,
    NodeRunsRecord,
    NodesRecord,
    OperationStacksRecord,
    PlacingsRecord,
    SaveRecord,
    StatisticsRecord,
)
from fakedist.rundir.notes import Note
from fakedist.rundir.records import (
    AsleepRecord,
    BoundRecord,
    CallLinesRecord,
    CallsRecord,
    CallTermsRecord,
    CallWaitsRecord,
    DeviceUseRecord,
    EngineCacheRecord,
    EngineRecord,
    EngineSleepRecord,
    EngineUseRecord,
    GpuRecord,
    GroupsRecord,
    InventedRecord,
    LayersRecord,
    NamedPhaseRecord,
    NcclRecord,
    NoteRecord,
    NotSentRecord,
    OperationNamesRecord,
    OperationsRecord,
    OtherGroupsRecord,
    OutcomeRecord,
    OutsideRecord,
    RegionsRecord,
    RouterLoadRecord,
    RouterPassesRecord,
    ScopesRecord,
    StepRecord,
    StepWentOnRecord,
    TakenRecord,
    UnansweredRecord,
)
from fakedist.rundir.rows import (
    CallRow,
    CallTerms,
    CallWait,
    FrameRow,
    GraphRow,
    GroupRow,
    HeldRow,
    InventedRow,
    LayerRow,
    OperationRow,
    OtherGroupRow,
    PlacingRow,
    RegionRow,
    RouterPassRow,
    ScopeRow,
    merged,
)
from fakedist.rundir.schema import ACTIONS, CATEGORIES
from fakedist.rundir.smi_calls import calls_notes
from fakedist.rundir.step_time import KernelSource
from fakedist.rundir.trace_records import HostRecord, KernelsRecord, ProfilerRecord, TimedStepRecord
from fakedist.traces.traced_step import traced_records

Array = npt.NDArray[Any]  # of any type: a column's is known only at run time

#: Type codes of ``array.array`` as numpy's types.
NUMPY_TYPES = {"B": "u1", "I": "<u4", "Q": "<u8", "q": "<i8", "i": "<i4", "d": "<f8"}


_SNAPSHOT = ACTIONS.index("snapshot")


def empty_columns(kind: type) -> dict[str, Array]:
    """The columns of a record, or of a table of it, without rows."""
    return {name: np.zeros(0, NUMPY_TYPES[code]) for name, code in columns_of(kind).items()}


@dataclass
class Recording:
    """The recording of one rank. A field's type says what it keeps of a journal: the last record of a kind, all records
    of a kind, or with ``Annotated`` their rows or their joined columns.

    Attributes:
        gpu: The GPU and the software; None if the rank died before they were known.
        regions: Ranges of operations that saved activations.
        call_terms: A row for each call, in order; none in a recording of an earlier version.
        call_waits: The waits for them, in order.
        call_lines: Lines of the script by their number in ``calls``, innermost first.
        placings: Lists of layers for the modules of compiled graphs.
        held: Inputs whose memory compiled graphs use again.
        marks: Columns of ``MarksRecord``.
        events: By device, columns of ``EventsRecord``.
        pools: By device: private pools of segments, by the event that made the segment or mapped its pages.
        segments_before: Of a foreign snapshot, the segments before its history.
        num_events_before: Of a foreign snapshot, the events that stand for what was alive before its history.
        stacks: Rows of ``frames``, innermost first. Those of a backward have the forward's below
            ``stack_lines.BACKWARD``.
        operation_stacks: Columns of ``OperationStacksRecord``: those of operations of timed steps.
        kernels: Columns of ``KernelsRecord``: the timed step's kernels as a tool saw them.
        launches: The timed step's launches on the virtual GPU; None on a real one, or if none was timed.
        machine: How fast the machine that recorded the run is; None if that was not measured.
        profiled: torch.profiler's trace of the timed step; None if it did not run.
        host: The host in a timed step that a tool traced; None if none was, or the trace was imported.
        timed_step: The step that was timed separately, after the recorded ones; -1 if none was.
        failed_request: The last request that the allocator could not serve.
        beyond: The first request that did not fit and was granted all the same; None if none was.
        nccl: NCCL's version and environment; None if the rank died before they were known.
        bound: Numbers of groups that were bound to a device.
        outside: Memory of the real GPU at the end; None on a virtual GPU.
        outcome: How the rank ended; None if it was killed.
        not_sent: Lines that read integers or flags that another rank should have sent.
        routers: Routers that picked experts by made-up values; None without any.
        router_passes: Their calls, in order.
        host_blocks: Columns of ``HostBlocksRecord``: what happened to the host's memory.
        host_places: Its steps and phases.
        settings_changes: Settings of the allocator that the script set, in order.
        host_looks: What of it no event has, in order.
        saves: Checkpoints that were written.
        made_by: Operations of backwards in order (``op``), and the one that made the node that ran each (``forward``).
        unanswered: Number of calls of each CUDA function that was refused.
        truncated: The journal ends in the middle of a record.
        unknown: The kinds of records that were left out, because nothing reads them.
    """

    gpu: GpuRecord | None = None
    layers: list[LayerRow] = field(default_factory=list)
    operations: Annotated[list[OperationRow], OperationNamesRecord] = field(default_factory=list)
    scopes: Annotated[list[ScopeRow], ScopesRecord] = field(default_factory=list)
    regions: Annotated[list[RegionRow], RegionsRecord] = field(default_factory=list)
    calls: Annotated[list[CallRow], CallsRecord] = field(default_factory=list)
    call_terms: Annotated[list[CallTerms], CallTermsRecord] = field(default_factory=list)
    call_waits: Annotated[list[CallWait], CallWaitsRecord] = field(default_factory=list)
    call_lines: list[list[str]] = field(default_factory=list)
    groups: Annotated[list[GroupRow], GroupsRecord] = field(default_factory=list)
    other_groups: Annotated[list[OtherGroupRow], OtherGroupsRecord] = field(default_factory=list)
    invented: list[InventedRow] = field(default_factory=list)
    idle_reads: set[int] = field(default_factory=set)
    not_sent: list[NotSentRecord] = field(default_factory=list)
    generated: list[GeneratedRecord] = field(default_factory=list)
    placings: Annotated[list[PlacingRow], PlacingsRecord] = field(default_factory=list)
    graphs: Annotated[list[GraphRow], GraphsRecord] = field(default_factory=list)
    held: Annotated[list[HeldRow], HeldRecord] = field(default_factory=list)
    op_operation: Array = field(default_factory=lambda: np.zeros(0, "u4"))
    op_scope: Array = field(default_factory=lambda: np.zeros(0, "u4"))
    marks: Annotated[dict[str, Array], MarksRecord] = field(default_factory=lambda: empty_columns(MarksRecord))
    events: dict[int, dict[str, Array]] = field(default_factory=dict)
    pools: dict[int, dict[int, Pool]] = field(default_factory=dict)
    segments_before: list[Segment] = field(default_factory=list)
    num_events_before: int = 0
    frames: list[FrameRow] = field(default_factory=list)
    stacks: list[tuple[int, ...]] = field(default_factory=list)
    operation_stacks: Annotated[dict[str, Array], OperationStacksRecord] = field(
        default_factory=lambda: empty_columns(OperationStacksRecord)
    )
    kernels: dict[str, Array] = field(default_factory=lambda: empty_columns(KernelsRecord))
    kernel_texts: list[str] = field(default_factory=list)
    kernel_source: KernelSource | None = None
    launches: LaunchesRecord | None = None
    host_clock: HostClockRecord | None = None
    machine: MachineScoreRecord | None = None
    profiled: ProfilerRecord | None = None
    host: HostRecord | None = None
    routers: RouterLoadRecord | None = None
    router_passes: Annotated[list[RouterPassRow], RouterPassesRecord] = field(default_factory=list)
    host_blocks: Annotated[dict[str, Array], HostBlocksRecord] = field(
        default_factory=lambda: empty_columns(HostBlocksRecord)
    )
    host_places: Annotated[list[ScopeRow], HostPlacesRecord] = field(default_factory=list)
    settings_changes: list[AllocatorSettingsRecord] = field(default_factory=list)
    host_looks: list[HostLookRecord] = field(default_factory=list)
    saves: list[SaveRecord] = field(default_factory=list)
    made_by: dict[str, Array] = field(default_factory=lambda: {"op": np.zeros(0, "i8"), "forward": np.zeros(0, "i8")})
    timed_step: int = -1
    steps: list[StepRecord] = field(default_factory=list)
    named_phases: list[NamedPhaseRecord] = field(default_factory=list)
    engines: list[EngineRecord] = field(default_factory=list)
    engine_caches: list[EngineCacheRecord] = field(default_factory=list)
    asleep: list[AsleepRecord] = field(default_factory=list)
    engine_sleeps: list[EngineSleepRecord] = field(default_factory=list)
    engine_use: EngineUseRecord | None = None
    statistics: dict[int, StatisticsRecord] = field(default_factory=dict)
    failed_request: FailedRequestRecord | None = None
    beyond: BeyondCapacityRecord | None = None
    nccl: NcclRecord | None = None
    bound: set[int] = field(default_factory=set)
    outside: OutsideRecord | None = None
    taken: TakenRecord | None = None
    device_use: DeviceUseRecord | None = None
    outcome: OutcomeRecord | None = None
    unanswered: dict[str, int] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    truncated: bool = False
    unknown: list[str] = field(default_factory=list)

    @property
    def device(self) -> int:
        """The device whose memory is reported: the rank's own, or the one it used instead."""
        own = 0 if self.gpu is None else self.gpu.device_index
        if own in self.events or not self.events:
            return own
        return max(self.events, key=lambda device: len(self.events[device]["op"]))

    @property
    def device_events(self) -> dict[str, Array]:
        """Events of :attr:`device`; empty columns if the device was never used."""
        return self.events.get(self.device) or empty_columns(EventsRecord)

    @property
    def event_ops(self) -> Array:
        """For each of :attr:`device_events` the last operation that had begun by then, in ascending order."""
        ops = self.device_events["op"]
        return np.maximum.accumulate(ops) if len(ops) else ops


def read_recording(run_directory: Path, *, may_be_empty: bool = True) -> Recording:
    """Read the journal of a run directory. A cut-off journal yields the records it has.

    With ``may_be_empty``, a rank that was killed before its first record yields an empty recording.

    Raises:
        RunDirectoryError: The journal is missing, damaged, or not fakedist's.
    """
    reading = JournalReading()
    with no_collector():
        for name in (JOURNAL_NAME, KERNELS_NAME):
            reading.read(run_directory / name, may_be_empty=may_be_empty)
    recording = reading.recording
    recording.notes += calls_notes(run_directory / SMI_NAME)
    if recording.profiled is not None:
        for record in traced_records(recording.profiled, recording.layers):
            reading.take(record)
    reading.join()
    return recording


def recorded_so_far(run_directory: Path) -> tuple[object, ...]:
    """Identities, sizes and times of the files that :func:`read_recording` reads, to be compared."""
    paths = (run_directory / name for name in (JOURNAL_NAME, KERNELS_NAME, SMI_NAME))
    statuses = (path.stat() if path.exists() else None for path in paths)
    return tuple(status and (status.st_ino, status.st_size, status.st_mtime_ns) for status in statuses)


def _kept_by() -> tuple[dict[type[Record], str], ...]:
    """The fields of a recording by the kind of record: those of last records, of lists, of rows and of columns."""
    last: dict[type[Record], str] = {}
    listed, rows, columns = dict(last), dict(last), dict(last)
    for name, hint in typing.get_type_hints(Recording, include_extras=True).items():
        origin, of = typing.get_origin(hint), typing.get_args(hint)
        if origin is Annotated:
            (rows if typing.get_origin(of[0]) is list else columns)[of[1]] = name
        elif of and isinstance(of[0], type) and issubclass(of[0], Record):
            (listed if origin is list else last)[of[0]] = name
    return last, listed, rows, columns


_LAST, _LISTED, _ROWS, _COLUMNS = _kept_by()
#: Records of columns, whose columns other figures are made of.
_NOT_KEPT: tuple[type[Record], ...] = (OperationsRecord, NodesRecord, NodeRunsRecord)


class JournalReading:
    """Takes a journal's records one by one. The recording's columns are complete after :meth:`join`."""

    def __init__(self) -> None:
        self.recording = Recording()
        self._pieces: dict[type[Record], list[Record]] = defaultdict(list)
        self._events: dict[int, list[EventsRecord]] = defaultdict(list)
        self._kernels: KernelsRecord | None = None

    def read(self, path: Path, *, may_be_empty: bool) -> None:
        """Take the records of a file."""
        is_empty = True
        if path.exists():
            reader = read_journal(path)
            for record in reader:
                is_empty = False
                self.take(record)
            self.recording.truncated |= reader.truncated
            self.recording.unknown += reader.unknown
        elif path.name == JOURNAL_NAME:
            raise damaged(path, "is missing")
        if is_empty and path.name == JOURNAL_NAME and not may_be_empty:
            raise damaged(path, "holds no record")

    def join(self) -> None:
        """Join the pieces of all records into columns."""
        recording = self.recording
        joined = {kind: _joined(kind, self._pieces[kind]) for kind in (*_COLUMNS, *_NOT_KEPT)}
        for kind, name in _COLUMNS.items():
            setattr(recording, name, joined[kind])
        ran = joined[OperationsRecord]
        recording.op_operation, recording.op_scope = ran["operation"], ran["scope"]
        events = {device: _joined(EventsRecord, self._events[device]) for device in sorted(self._events)}
        # torch.cuda.memory_snapshot() in the script leaves an event on every device, used or not.
        recording.events = {
            device: columns for device, columns in events.items() if (columns["action"] != _SNAPSHOT).any()
        }
        made, ran = joined[NodesRecord], joined[NodeRunsRecord]
        backward = np.flatnonzero([row.phase == "backward" for row in recording.scopes])
        recording.made_by = forward_of(made, ran, np.isin(recording.op_scope, backward))
        called = [*recording.events.values(), recording.operation_stacks]
        joined_to_forward(recording.frames, recording.stacks, called, made, ran)
        if self._kernels is not None:
            recording.kernels = _joined(KernelsRecord, [self._kernels])
            recording.kernel_texts, recording.kernel_source = self._kernels.texts, self._kernels.source

    def take(self, record: Record) -> None:
        """Take a record."""
        recording = self.recording
        kind = type(record)
        if isinstance(record, EventsRecord | NodesRecord | HostBlocksRecord):
            recording.frames += record.frames
            recording.stacks += record.stacks
        if kind in _LAST:
            setattr(recording, _LAST[kind], record)
        elif kind in _LISTED:
            getattr(recording, _LISTED[kind]).append(record)
        elif kind in _ROWS:
            getattr(recording, _ROWS[kind]).extend(getattr(record, "rows"))  # noqa: B009
        elif kind in _COLUMNS or kind in _NOT_KEPT:
            self._pieces[kind].append(record)
        else:
            self._take_special(record)

    def _take_special(self, record: Record) -> None:
        recording = self.recording
        match record:
            case NoteRecord():
                recording.notes.append(record.note)
            case LayersRecord():
                for row in record.rows:
                    if 0 <= row.layer < len(recording.layers):  # it has another name now
                        recording.layers[row.layer] = row
                    else:
                        recording.layers.append(row)
            case InventedRecord():
                recording.idle_reads |= {len(recording.invented) + index for index in record.idle}
                recording.invented += record.rows
            case CallLinesRecord():
                recording.call_lines.append(record.lines)
            case BoundRecord():
                recording.bound.add(record.group)
            case UnansweredRecord():
                recording.unanswered |= {row.function: row.num_calls for row in record.rows}
            case EventsRecord():
                self._take_events(record)
            case StatisticsRecord():
                recording.statistics[record.device] = record
            case TimedStepRecord():
                recording.timed_step = record.step
            case KernelsRecord():
                self._kernels = record
            case StepWentOnRecord():
                self._go_on(record.step)
            case LaunchKeysRecord():  # what a second run of the script reads; earlier versions wrote it always
                pass
            case _:
                raise TypeError(f"{type(record).__name__} is not a record of a journal")

    def _take_events(self, record: EventsRecord) -> None:
        pieces = self._events[record.device]
        first = sum(len(piece.action) for piece in pieces)
        pools = self.recording.pools.setdefault(record.device, {})
        pools |= {first + row.event: (row.first, row.second) for row in record.pools}
        pieces.append(record)

    def _go_on(self, step: int) -> None:
        """Undo the end of a step: what the next step recorded belongs to it, and its times are incomplete."""
        recording = self.recording
        recording.steps = [ended for ended in recording.steps if ended.step != step]
        recording.scopes = [merged(scope, step) for scope in recording.scopes]
        recording.host_places = [merged(place, step) for place in recording.host_places]
        if self._kernels is not None and self._kernels.source.step == step:
            self._kernels = None
        if recording.launches is not None and recording.launches.step == step:
            recording.launches = None


def _joined(kind: type[Record], records: Sequence[Record]) -> dict[str, Array]:
    return {
        name: np.frombuffer(b"".join([getattr(record, name) for record in records]), NUMPY_TYPES[code])
        for name, code in columns_of(kind).items()
    }


#: By what a model is known to be trained: the first of these that any has. SGD keeps no state.
_TRAINED_BY = tuple(CATEGORIES.index(name) for name in ("optimizer_state", "gradient"))


def number_trained_models_first(recording: Recording) -> None:
    """Number the layers of trained models first, parents before children. The first model's names lose its own."""
    if len(recording.layers) < 2:
        return
    parents = [row.parent for row in recording.layers]
    roots = _roots(parents)
    trained = _trained(recording.marks, roots)
    short = next((root for root, row in zip(roots, recording.layers, strict=True) if row.name[:1] not in "("), roots[1])

    def rank(layer: int) -> int:
        if not layer or not trained:
            return 0
        return 3 if roots[layer] not in trained else 1 if roots[layer] == short else 2

    order = _parents_first(sorted(range(len(parents)), key=rank), parents)
    if order == sorted(order):
        return
    new = np.empty(len(order), "i4")
    new[order] = np.arange(len(order))
    names = _names([row.name for row in recording.layers], roots, short, order[1] if trained else short)
    if (failed := recording.failed_request) is not None:
        recording.failed_request = dataclasses.replace(failed, layer=names.get(failed.layer, failed.layer))
    recording.layers = [
        LayerRow(number, names[row.name], row.class_name, int(new[row.parent]) if row.parent >= 0 else row.parent)
        for number, row in enumerate(recording.layers[layer] for layer in order)
    ]
    recording.scopes = [row._replace(layer=int(new[row.layer])) for row in recording.scopes]
    recording.regions = [row._replace(layer=int(new[row.layer])) for row in recording.regions]
    recording.held = [row._replace(layer=int(new[row.layer])) for row in recording.held]
    recording.placings = [
        row._replace(layers=tuple(int(new[layer]) for layer in row.layers)) for row in recording.placings
    ]
    for columns in (recording.marks, recording.kernels):
        columns["layer"] = _renumbered(columns["layer"], new)
    if recording.launches is not None:
        layer = np.frombuffer(recording.launches.layer, NUMPY_TYPES[columns_of(LaunchesRecord)["layer"]])
        recording.launches = dataclasses.replace(recording.launches, layer=_renumbered(layer, new).tobytes())


def _roots(parents: list[int]) -> list[int]:
    roots = list(range(len(parents)))
    for layer in roots:
        while parents[roots[layer]] > 0:
            roots[layer] = parents[roots[layer]]
    return roots


def _parents_first(order: list[int], parents: list[int]) -> list[int]:
    ordered: dict[int, None] = {}
    for layer in order:
        above = [layer]
        while parents[above[-1]] >= 0:
            above.append(parents[above[-1]])
        ordered |= dict.fromkeys(reversed(above))
    return list(ordered)


def _names(names: list[str], roots: list[int], short: int, first: int) -> dict[str, str]:
    """Old names to new once ``first`` has the short names, which root ``short`` had (``record/module_names.py``)."""
    new_names = {}
    for name, root in zip(names, roots, strict=True):
        below = name.removeprefix(f"{names[first]}.")
        if root == first and not below.startswith("("):  # what it only calls keeps its name: "(GPT).(Softmax)"
            new_names[name] = below
        elif root == short != first and not name.startswith("("):
            new_names[name] = f"{names[root]}.{name}"
        else:
            new_names[name] = name
    return new_names


def _trained(marks: dict[str, Array], roots: list[int]) -> set[int]:
    """The roots with optimizer state; without any, those with gradients."""
    for category in _TRAINED_BY:
        layers = np.unique(marks["layer"][(marks["category"] == category) & (marks["layer"] > 0)])
        if len(layers):
            return {roots[layer] for layer in layers}
    return set()


def _renumbered(layers: Array, new: Array) -> Array:
    return np.where(layers >= 0, new[layers], layers).astype(layers.dtype)
