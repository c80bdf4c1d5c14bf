"""Infers what a memory snapshot does not say: phases, steps, layers, and what each block is for.

A recording of a rank has these as marks that were set while it ran. Here they follow from stacks, from when blocks are
made and freed, and from their sizes: what an optimizer's step makes and keeps is its state, what a backward makes and
leaves behind is a gradient, and what was made before the first forward, stays, and has the size of a gradient is a
parameter. Everything that follows from them is computed as for any recording.

Turns the allocator's events in a trace of torch.profiler (``profile_memory=True``) into a run's records of memory.

An event has an address, a size, a thread and a time, and no stack. The ranges around it have the rest: the operation,
the layer and the phase, and with ``with_stack=True`` the functions of Python. Categories are inferred as those of a
memory snapshot are.
"""

from __future__ import annotations

import functools
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from fakedist.analysis.recording import NUMPY_TYPES, Array, Recording
from fakedist.analysis.replay import SMALL_BYTES, free_events
from fakedist.analysis.stack_lines import BACKWARD as BACKWARD_FRAME
from fakedist.analysis.stack_lines import frame_lines
from fakedist.rundir.encoding import Record, columns_of
from fakedist.rundir.memory_records import EventsRecord, MarksRecord
from fakedist.rundir.records import (
    NamedPhaseRecord,
    OperationNamesRecord,
    OperationsRecord,
    RegionsRecord,
    ScopesRecord,
    StepRecord,
)
from fakedist.rundir.rows import FrameRow, LayerRow, OperationRow, RegionRow, ScopeRow
from fakedist.rundir.schema import ACTIONS, CATEGORIES, PHASES
from fakedist.traces.one_step import marked_steps
from fakedist.traces.stack_evidence import (
    FORWARD,
    IN_BACKWARD,
    IN_FORWARD,
    IN_INIT,
    IN_OPTIMIZER,
    KINDS,
    NO_STACK,
    SILENT,
    UNKNOWN,
    Bools,
    EventEvidence,
    ModuleCall,
    Places,
    StackEvidence,
    find_places,
    read_evidence,
)
from fakedist.traces.step_trace import (
    LAYER,
    OPERATION,
    PHASE,
    STEP,
    Intervals,
    Ints,
    Meaning,
    ProcessTrace,
    Ranges,
    meaning,
    taken,
)
from fakedist.traces.traced_step import LaunchSites, LayerNumbers, Trace, launch_sites

_ALLOC, _FREE = ACTIONS.index("alloc"), ACTIONS.index("free_requested")
_BEFORE = "from before the history"
_UNIT = 512  # of the allocator's sizes
#: Sizes of cuBLAS's and cuBLASLt's workspaces, by torch's getChosenWorkspaceSize and getCUDABlasLtWorkspaceSize: of
#: Hopper and later, of others, and the smaller ones of cuBLASLt.
_WORKSPACES = frozenset((32 << 20, _ODD := 8_519_680, 1 << 20))  # the odd one is hardly a tensor's


class Annotation(NamedTuple):
    """A range of a snapshot that ``record_function`` named. Times are in microseconds."""

    name: str
    begin_us: int
    end_us: int


def infer(recording: Recording, event_stack: Ints, named: list[Annotation], *, is_native: bool) -> bool:
    """Add to a snapshot's recording what stacks and ranges show. False, and nothing is added, if they show no phase.

    Args:
        event_stack: The stack of each event, also of those that free; -1 without one.
        named: The ranges, in the order in which they end.
        is_native: Stacks have frames of C++.
    """
    events, before = recording.device_events, recording.num_events_before
    facts = [*read_evidence(recording.frames, recording.stacks), NO_STACK]
    evidence = EventEvidence(facts, event_stack % len(facts))  # the last is row -1
    action = events["action"]
    made, freed = block_lives(action, events["address"])
    is_evident = action == _ALLOC
    # Recorded with context="alloc", what frees has the stack of what it frees.
    known_frees = freed[freed < len(action)]
    is_evident[known_frees] = event_stack[known_frees] != event_stack[made[freed < len(action)]]
    is_evident[known_frees] &= event_stack[known_frees] >= 0
    is_evident[:before] = False
    silent, unknown, *phases = range(len(facts), len(facts) + 2 + len(KINDS))
    row = np.where(is_evident, evidence.row, np.where(np.isin(action, (_ALLOC, _FREE)), unknown, silent))
    telling = EventEvidence([*facts, *map(StackEvidence, (SILENT, UNKNOWN, *KINDS.values()))], row)
    of_phase = dict(zip(KINDS, phases, strict=True))
    ranges = [
        (meaning(range_.name), range_.name, *np.searchsorted(events["time_us"], range_[1:]).tolist())
        for range_ in named
    ]
    kinds = telling.kinds()
    for said, _, first, end in sorted(ranges, key=lambda row: row[2] - row[3]):  # inner ones last
        if said.phase and recording.stacks:
            row[first:end][kinds[first:end] < FORWARD] = of_phase[said.phase]
            kinds[first:end] = np.maximum(kinds[first:end], KINDS[said.phase] * (kinds[first:end] < FORWARD))
    places = _with_named_steps(find_places(telling, is_native=is_native), ranges)
    if not np.isin(places.phase, (IN_FORWARD, IN_BACKWARD, IN_OPTIMIZER)).any():
        return False
    layer = _Layers(recording.layers).of(evidence, places)
    describe(recording, places, layer, evidence, (made, freed))
    _add_steps(recording, places)
    recording.named_phases = [
        NamedPhaseRecord(name, step := int(places.step[end - 1]), first, end, end_step=step)
        for said, name, first, end in ranges
        if said.kind in (LAYER, PHASE) and first < end and not name.startswith(_OPTIMIZER)
    ][-_MOST_NAMED:]
    return True


#: The most ranges of a script that are shown, the last of all.
_MOST_NAMED = 100
#: How torch names ranges of its own.
_OPTIMIZER = "Optimizer."


#: The meaning of a range that a snapshot names, its name, the first event in it, and the first behind it.
_Range = tuple[Meaning, str, int, int]


def _with_named_steps(places: Places, ranges: list[_Range]) -> Places:
    """Steps as ranges number them, from 1; else each ends with a range of an optimizer's step, where there are any."""
    events = np.arange(len(places.phase))
    steps = sorted((first, said.number) for said, _, first, _ in ranges if said.kind == STEP)
    ends = sorted(end for _, name, _, end in ranges if name.startswith(f"{_OPTIMIZER}step#"))
    if steps:
        numbers = np.array([0, *(number for _, number in steps)])
        numbers[1:] += not numbers[1:].all()
        step = numbers[np.searchsorted([first for first, _ in steps], events, side="right")]
    elif ends:
        step = 1 + np.searchsorted(ends, events, side="right") - bisect_right(ends, 0)
    else:
        return places
    return replace(places, step=np.where(places.phase == IN_INIT, 0, step))


def describe(
    recording: Recording, places: Places, layer: Ints, evidence: EventEvidence, lives: tuple[Ints, Ints]
) -> None:
    """Add operations, the ranges that save activations, and the marks of blocks, from what is known of each event.

    ``lives`` are those of :func:`block_lives`.
    """
    _add_scopes(recording, places, layer, evidence)
    recording.regions = [RegionRow(first, last, 0) for first, last in places.saved]
    recording.marks = _marks(_Lives.of(recording, places, evidence, lives))


def _add_scopes(recording: Recording, places: Places, layer: Ints, evidence: EventEvidence) -> None:
    """One operation for each event that allocates, by its number among the events."""
    events = recording.device_events
    is_before = np.arange(len(layer)) < recording.num_events_before
    which = np.zeros(len(layer), np.int64)
    for column in (places.step, places.phase, layer, evidence.row, is_before):
        code, values = pd.factorize(column)
        which = pd.factorize(which * len(values) + code)[0]
    # The same few kinds of events repeat a million times: each is looked at once.
    first = np.zeros(int(which.max(initial=-1)) + 1, np.int64)
    first[which[::-1]] = np.arange(len(which))[::-1]
    scopes: dict[tuple[int, str, int, bool], int] = {}
    names: dict[str, int] = {}
    known: list[tuple[int, int]] = []
    columns = (places.step, places.phase, layer, evidence.row, is_before)
    for step, code, of, row, before in zip(*(column[first].tolist() for column in columns), strict=True):
        phase, fact = PHASES[code], evidence.facts[row]
        scope = scopes.setdefault((step, phase, of, fact.is_recompute), len(scopes))
        operation = _BEFORE if before else fact.operation or f"unknown, in {phase}"
        known.append((scope, names.setdefault(operation, len(names))))
    recording.scopes = [ScopeRow(number, *scope[:3], recompute=scope[3]) for scope, number in scopes.items()]
    recording.operations = [OperationRow(number, name) for name, number in names.items()]
    numbers = np.array(known, "u4").reshape(-1, 2)
    recording.op_scope, recording.op_operation = numbers[which, 0], numbers[which, 1]
    events["op"] = np.arange(len(which), dtype="<i8")


def _add_steps(recording: Recording, places: Places) -> None:
    times, step = recording.device_events["time_us"], places.step
    is_over = bool(len(step)) and places.phase[-1] not in _RUNS
    numbers, first = np.unique(step, return_index=True)
    last = len(step) - 1 - np.unique(step[::-1], return_index=True)[1]
    trains = np.isin(numbers, step[np.isin(places.phase, (IN_BACKWARD, IN_OPTIMIZER))])
    is_step = (numbers > 0) & trains & ((numbers < numbers.max(initial=0)) | is_over)
    rows = (numbers, times[first], times[last])
    recording.steps += [StepRecord(*row) for row in zip(*(column[is_step].tolist() for column in rows), strict=True)]


@dataclass
class _Instance:
    """A module's call that goes on."""

    call: ModuleCall
    layer: int
    visited: set[int] = field(default_factory=set)
    children: Counter[tuple[str, str]] = field(default_factory=Counter)


class _Layers:
    """Numbers the modules that run, by the lines that call them, and by how often each ran in its parent's forward.

    Stacks have no names of modules. A module whose forward goes back to a line that it has passed runs again: as the
    next of the layers that one line calls in turn.
    """

    def __init__(self, rows: list[LayerRow]) -> None:
        self._rows = rows
        rows.append(LayerRow(0, "", "", -1))
        self._numbers: dict[tuple[int, str, str, int], int] = {}

    def of(self, evidence: EventEvidence, places: Places) -> Ints:
        """The layer of each event of a forward; 0 outside of modules, and for everything else."""
        layers = np.zeros(len(places.passes), np.int64)
        inside = np.flatnonzero((places.passes >= 0) & evidence.are(lambda fact: bool(fact.modules)))
        number, row = places.passes[inside], evidence.row[inside]
        begins = np.flatnonzero(np.diff(number, prepend=-1) | np.diff(row, prepend=-1))  # others go on
        found: list[int] = []
        running: list[_Instance] = []
        roots: Counter[tuple[str, str]] = Counter()
        last = -1
        for pass_, fact in zip(number[begins].tolist(), row[begins].tolist(), strict=True):
            if pass_ != last:
                running, roots, last = [], Counter(), pass_
            self._follow(evidence.facts[fact].modules, running, roots)
            found.append(running[-1].layer)
        layers[inside] = np.repeat(np.array(found, np.int64), np.diff(begins, append=len(inside)))
        self._name()
        return layers

    def _follow(self, calls: tuple[ModuleCall, ...], running: list[_Instance], roots: Counter[tuple[str, str]]) -> None:
        same = 0
        for call, instance in zip(calls, running, strict=False):
            is_back = call.line < instance.call.line and call.line in instance.visited
            if (call.site, call.own) != (instance.call.site, instance.call.own) or is_back:
                break
            same += 1
        del running[same:]
        for instance, call in zip(running, calls, strict=False):
            instance.call = call
            instance.visited.add(call.line)
        for call in calls[same:]:
            siblings = running[-1].children if running else roots
            key = (call.site, call.own)
            number = self._number(running[-1].layer if running else 0, *key, siblings[key])
            siblings[key] += 1
            running.append(_Instance(call, number, {call.line}))

    def _number(self, parent: int, site: str, own: str, index: int) -> int:
        key = (parent, site, own, index)
        if key not in self._numbers:
            self._numbers[key] = len(self._rows)
            self._rows.append(LayerRow(len(self._rows), "", own, parent))
        return self._numbers[key]

    def _name(self) -> None:
        """Names, such as ``train:20.model:245.3``: the lines that call a module, and the number of its call if any."""
        repeated = {key[:3] for key in self._numbers if key[3]}
        for (parent, site, own, index), number in self._numbers.items():
            above = f"{self._rows[parent].name}." if parent else ""
            label = f"{site}.{index}" if (parent, site, own) in repeated else site
            self._rows[number] = self._rows[number]._replace(name=above + label)


@dataclass
class _Lives:
    """The blocks of a recording: columns by block.

    Attributes:
        made: The event that made it.
        freed: The event that freed it; the number of events if none did.
        size: Bytes, rounded up as the allocator does.
        phase: The phase that made it.
        freed_in: The phase that freed it; -1 if none did.
        is_brief: Nothing else was made or freed while it was alive.
        is_kept: It is alive at the end.
        is_lasting: It was there before the first forward, and after all that trains.
        end: When the run of events of that phase ended.
        used: When the next run of an optimizer or a forward began.
    """

    made: Ints
    freed: Ints
    address: Ints
    size: Ints
    phase: Ints
    freed_in: Ints
    end: Ints
    used: Ints
    evidence: EventEvidence
    zeroed: Bools
    is_brief: Bools
    is_kept: Bools
    is_lasting: Bools
    num_before: int
    first_forward: int
    has_optimizer: bool

    @classmethod
    def of(cls, recording: Recording, places: Places, evidence: EventEvidence, lives: tuple[Ints, Ints]) -> _Lives:
        """The blocks of the rank's device, from the events that made and freed them."""
        events, (made, freed), phase = recording.device_events, lives, places.phase
        is_move = np.isin(events["action"], (_ALLOC, _FREE))
        moves, num = np.cumsum(is_move), len(is_move)
        first_forward = int(np.append(np.flatnonzero(phase != IN_INIT), num)[0])
        trains = np.flatnonzero(np.isin(phase, (IN_FORWARD, IN_BACKWARD, IN_OPTIMIZER)))
        uses = np.append(np.flatnonzero(np.isin(phase, (IN_OPTIMIZER, IN_FORWARD))), num)
        changes = np.append(np.flatnonzero(np.diff(phase)) + 1, num)
        return cls(
            made=made,
            freed=freed,
            address=events["address"][made].astype(np.int64),
            size=-(-events["size"][made].astype(np.int64) // _UNIT) * _UNIT,
            phase=phase[made],
            freed_in=np.append(phase, -1)[freed],
            end=changes[np.searchsorted(changes, made, side="right")],
            used=uses[np.searchsorted(uses, made, side="right")],
            evidence=evidence.at(made),
            zeroed=np.append(evidence.are(lambda fact: fact.zeroes), False)[freed],
            is_brief=np.append(moves, num + 1)[freed] - moves[made] == 1,
            is_kept=freed == num,
            is_lasting=(made < first_forward) & (freed > trains.max(initial=-1)),
            num_before=recording.num_events_before,
            first_forward=first_forward,
            has_optimizer=bool((phase == IN_OPTIMIZER).any()),
        )


def block_lives(action: Array, address: Array) -> tuple[Ints, Ints]:
    """The events that made blocks, and those that freed them; the number of events where none did."""
    made = np.flatnonzero(action == _ALLOC)
    return made, free_events(action, address)[made]


_NONE = len(CATEGORIES)


def _marks(lives: _Lives) -> dict[str, Array]:
    """The marks of blocks whose purpose follows. What has none is a forward's, and saved for backward, or temporary."""
    codes = {name: code for code, name in enumerate(CATEGORIES)} | {"": _NONE}
    purpose = np.array([codes[fact.purpose] for fact in lives.evidence.facts], np.int64)[lives.evidence.row]
    runs, outlives = np.isin(lives.phase, _RUNS), lives.freed > lives.end
    # A gradient exists when the optimizer steps. Where that allocates nothing, it outlives the backward at least.
    kept = lives.size[lives.is_lasting]
    is_gradient = (lives.freed > lives.used) | (outlives & np.isin(lives.size, kept))
    gathered = lives.size[purpose == codes["parameter"]]
    is_gradient |= np.isin(lives.size, gathered) & ~lives.is_brief  # until it is reduced and scattered
    is_added = lives.evidence.are(lambda fact: fact.operation == "AccumulateGrad")
    is_odd = lives.is_kept & (lives.size == _ODD)
    is_workspace = np.isin(lives.size, [*_WORKSPACES]) & (is_odd | (runs & (lives.is_kept | lives.is_brief)))
    in_optimizer = lives.phase == IN_OPTIMIZER
    renewed = (lives.made < lives.first_forward) & (lives.freed_in == IN_OPTIMIZER)  # a step makes its states anew
    tests = [
        (purpose < _NONE) & (runs | (purpose == codes["workspace"])),
        is_workspace,
        is_added | ((lives.phase == IN_BACKWARD) & is_gradient),
        in_optimizer & (outlives | lives.is_kept),
        lives.zeroed,
        renewed,
    ]
    names = ("workspace", "gradient", "optimizer_state", "gradient", "optimizer_state")
    category: Ints = np.select(tests, [purpose, *(np.int64(codes[name]) for name in names)], np.int64(_NONE))
    _mark_kept(lives, category)
    rows = np.flatnonzero(category < _NONE)
    table = {
        "op": lives.made[rows],
        "address": lives.address[rows],
        "category": category[rows],
        "layer": np.full(len(rows), -1),
        "start": np.zeros(len(rows)),
        "size": lives.size[rows],
    }
    return {name: table[name].astype(NUMPY_TYPES[code]) for name, code in columns_of(MarksRecord).items()}


_RUNS = (IN_FORWARD, IN_BACKWARD)
#: From this share of the bytes kept that have a gradient's size on, those are the parameters, and the others are not.
_ALIKE = 0.25


def _as_requested(sizes: Ints, known: Counter[int]) -> Ints:
    """Sizes of blocks as the known ones that were requested. A large block may be given up to 1 MiB more."""
    ordered = np.array(sorted(known) or [0])
    nearest = ordered[np.maximum(np.searchsorted(ordered, sizes, side="right") - 1, 0)]
    is_near = (sizes > SMALL_BYTES) & (sizes >= nearest) & (sizes - nearest <= SMALL_BYTES)
    return np.where(is_near, nearest, sizes)


def _mark_kept(lives: _Lives, category: Ints) -> None:
    """Mark what was made before the first forward and stays: parameters, and states of an optimizer that ran before.

    As many blocks of a size are parameters as a backward leaves gradients of it. If no gradients tell, all are.
    """
    kept = np.flatnonzero(lives.is_lasting & (category == _NONE))
    parameter, state = map(CATEGORIES.index, ("parameter", "optimizer_state"))
    left = np.flatnonzero((category == CATEGORIES.index("gradient")) & (lives.phase == IN_BACKWARD))
    gradients = Counter(lives.size[left[lives.end[left] == lives.end[left[:1]]]].tolist())  # of the first backward
    sizes = _as_requested(lives.size[kept], gradients)
    alike = int(sizes[np.isin(sizes, list(gradients))].sum())
    if not gradients or alike < _ALIKE * int(sizes.sum()):
        category[kept] = parameter
        return
    missing = gradients.copy()
    makes = lives.evidence.at(kept).are(lambda fact: fact.makes_parameters)
    order = np.lexsort((lives.made[kept], ~makes))
    for block, size, is_made in zip(kept[order].tolist(), sizes[order].tolist(), makes[order].tolist(), strict=True):
        if missing[size] > 0 or is_made:
            missing[size] -= 1
            category[block] = parameter
        elif gradients[size] and lives.has_optimizer and lives.made[block] < lives.num_before:
            category[block] = state


_FREED = ACTIONS.index("free_completed")
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
    step = np.where(places.phase == IN_INIT, 0, _steps(process, ranges, columns["time"]))
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


def _evidence(ranges: Ranges, sites: LaunchSites, columns: dict[str, Ints]) -> EventEvidence:
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
    facts = [
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
    return EventEvidence(facts, np.arange(len(facts)))


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
