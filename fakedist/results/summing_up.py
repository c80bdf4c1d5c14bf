"""The figures of a run and its notes, from its recording and its tables."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import numpy as np
import pandas as pd

from fakedist.analysis.advice import find_advice
from fakedist.analysis.blocks import Blocks, host_memory
from fakedist.analysis.evidence import Room, Setup
from fakedist.analysis.memory_tables import Fold, Peak, described_blocks, differences, fold_table
from fakedist.analysis.recording import Recording
from fakedist.analysis.typed_tables import rows_of
from fakedist.cost_model.estimated import StepTimes, recorded_gpu
from fakedist.cost_model.outside_memory import estimate_outside
from fakedist.errors import TRACEBACK, described
from fakedist.options import Job, Until
from fakedist.options.expert_loads import EVEN
from fakedist.rundir import notes as run_note
from fakedist.rundir.host_memory import HostMemory
from fakedist.rundir.memory_records import BeyondCapacityRecord
from fakedist.rundir.notes import Note
from fakedist.rundir.outcome import BEYOND_CAPACITY, Ending, Outcome
from fakedist.rundir.records import GpuRecord, TakenRecord
from fakedist.rundir.rows import InventedRow
from fakedist.rundir.schema import ACTIONS, CATEGORIES, MOMENTS, SEGMENT_STATES
from fakedist.rundir.sources import EVENT_TIME, ROUTED
from fakedist.rundir.step_time import StepTime
from fakedist.rundir.summary import (
    Advice,
    CollectiveTotal,
    HeldSegment,
    LargeBlock,
    LayerMemory,
    LeftDuringInit,
    NamedPhase,
    OutOfMemory,
    Outside,
    PhasePeak,
    Remedy,
    ReservedMoment,
    RouterLoadFacts,
    StepPeak,
    Summary,
)
from fakedist.rundir.table_rows import CollectivesTable
from fakedist.rundir.time_notes import estimate_failed
from fakedist.units import UNLIMITED_BYTES

_Estimate = TypeVar("_Estimate")
NUM_HELD = 10
#: They are rows of another table, which only the page reads.
_ONLY_IN_TABLE = ["first_change", "end_change"]
_SEGMENT_FIELDS = [field.name for field in dataclasses.fields(HeldSegment) if field.name != "block"]


def reserved_moments(tables: dict[str, pd.DataFrame]) -> list[ReservedMoment]:
    """Reserved but not allocated memory at the moments of ``segments``, with blocks, layers and lines."""
    return [_moment(str(name), rows, tables) for name, rows in tables["segments"].groupby("moment", sort=False)]


def _moment(name: str, rows: pd.DataFrame, tables: dict[str, pd.DataFrame]) -> ReservedMoment:
    event = int(rows["event"].iloc[0])
    spans = tables["spans"]
    step, phase = spans[["step", "phase"]].iloc[int(np.searchsorted(spans["first_event"], event, "right")) - 1]
    free = rows.groupby("state")["free_bytes"].sum()
    parts = {state: int(free[state]) for state in SEGMENT_STATES if free.get(state, 0)}
    if waiting := int(rows["waiting_bytes"].sum()):
        parts["waiting"] = waiting
    held = rows[rows["state"].isin(("pinned", "used"))].head(NUM_HELD)
    held = held[held["free_bytes"] > 0]
    blocks = tables["blocks"]
    taken_for = blocks.index[(blocks["alloc_event"] == event) & (name == MOMENTS[0])].tolist()
    described = _described([*held["block"].tolist(), *taken_for], tables)
    return ReservedMoment(
        moment=name,
        step=int(step),
        phase=str(phase),
        reserved_bytes=int(rows["bytes"].sum()),
        allocated_bytes=int(rows["allocated_bytes"].sum()),
        rounding_bytes=int((rows["allocated_bytes"] - rows["requested_bytes"]).sum()),
        unused=parts,
        num_segments=len(rows),
        held=[
            HeldSegment(**{str(key): value for key, value in row.items()}, block=block)
            for row, block in zip(held[_SEGMENT_FIELDS].to_dict("records"), described, strict=False)
        ],
        taken_for=described[-1] if taken_for else None,
    )


def _described(numbers: list[int], tables: dict[str, pd.DataFrame]) -> list[LargeBlock]:
    layers = tables["layers"]
    lines = tables["stacks"]["line"].tolist()
    described = described_blocks(
        tables["blocks"].loc[numbers], tables["shares"], layers["name"].tolist(), layers["parent"].tolist(), lines=lines
    )
    return rows_of(LargeBlock, described)


def estimate_or_note(what: str, estimate: Callable[[], _Estimate], notes: list[Note]) -> _Estimate | None:
    """An estimate; None, and a note with the error and its line, if it fails: measured figures do not depend on it.

    Raises:
        MemoryError: Everything else fails, too.
    """
    try:
        return estimate()
    except MemoryError:
        raise
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        notes.append(estimate_failed(what, described(error)))
        return None


def summarize(
    recording: Recording,
    job: Job | None,
    tables: dict[str, pd.DataFrame],
    folds: list[Fold],
    *,
    ending: Ending,
    left: LeftDuringInit | None,
    peak: Peak,
    times: StepTimes | None,
    notes: list[Note],
    has_steps: bool = True,
) -> Summary:
    """The figures of a run. ``job`` and ``times`` are None for a snapshot; an imported report has no job.

    ``notes`` limit what the figures mean; a failed estimate adds one. Not all snapshots have steps, phases and layers.
    """
    gpu, notes = recording.gpu or GpuRecord(), list(notes)
    held, capacity = _held(peak.reserved_bytes, recording.taken), _capacity(gpu, job)
    outside = _outside(recording, tables, job, (held, capacity), notes) if has_steps else None
    out_of_memory = _out_of_memory(recording, ending, tables, capacity)
    room = room_of(ending, out_of_memory, capacity, outside, None if times is None else times.summary)
    advice, remedy = _advised(tables, folds, room, _setup(recording, job), notes, steps=has_steps and not out_of_memory)
    return Summary(
        world_size=None if job is None else job.world_size,
        rank=None if job is None else job.rank,
        device="cuda" if job is None else job.device,
        gpu=gpu.gpu_name,
        torch=gpu.torch,
        exit=ending,
        left_during_init=left,
        fits=_fits(recording, ending, outside),
        capacity_bytes=capacity,
        peak_allocated_bytes=peak.allocated_bytes,
        peak_reserved_bytes=peak.reserved_bytes,
        peak_step=peak.step,
        peak_phase=peak.phase if has_steps else "",
        estimated_outside=outside,
        by_phase=rows_of(PhasePeak, tables["phases"].astype({"phase": str})) if has_steps else [],
        by_category=peak.by_category,
        layers=layer_memory(tables["layers"], folds) if has_steps else [],
        largest_blocks=rows_of(LargeBlock, tables["largest"]),
        collectives=_collectives(tables),
        steps=rows_of(StepPeak, tables["steps"].drop(columns="start_us")),
        kernels=None if times is None else times.source,
        time=None if times is None else times.summary,
        out_of_memory=out_of_memory,
        advice=advice,
        remedy=remedy,
        invented_values=int(tables["invented"]["num_values"].sum()),
        reserved=reserved_moments(tables),
        notes=notes,
        router_load=None if recording.routers is None else recording.routers.facts,
        host_memory=_host_memory(recording, job, tables, notes),
        named_phases=rows_of(NamedPhase, tables["named_phases"].drop(columns=_ONLY_IN_TABLE)) if has_steps else [],
        asleep_bytes=peak.reserved_bytes - held,
    )


def _fits(recording: Recording, ending: Ending, outside: Outside | None) -> bool:
    lacks_room = outside is not None and outside.beside_reserved == "does not fit"
    return ending.outcome is not Outcome.OUT_OF_MEMORY and recording.beyond is None and not lacks_room


def _host_memory(
    recording: Recording, job: Job | None, tables: dict[str, pd.DataFrame], notes: list[Note]
) -> HostMemory | None:
    """The host's memory, with a note if the node has less than it needs."""
    found = None if job is None else host_memory(recording, job, tables["stacks"]["line"].tolist())
    if found is not None and found.node.limit_bytes is not None and found.node.high_bytes > found.node.limit_bytes:
        notes.append(run_note.node_memory_short(found.node))
    return found


def _capacity(gpu: GpuRecord, job: Job | None) -> int:
    is_unlimited = job is not None and job.gpu_memory_bytes == UNLIMITED_BYTES
    return (is_unlimited and gpu.spec_memory_bytes) or gpu.capacity_bytes


def room_of(
    ending: Ending,
    out_of_memory: OutOfMemory | None,
    capacity_bytes: int,
    outside: Outside | None,
    time: StepTime | None,
) -> Room:
    """The memory that the rank may reserve: not known if it ended before its peak."""
    step_us = None if time is None else time.step_us
    limit = capacity_bytes if out_of_memory is None else out_of_memory.limit_bytes or capacity_bytes
    if outside is not None and limit == capacity_bytes - outside.reserve_bytes:
        limit = capacity_bytes  # the reserve is part of what is outside
    if not limit or not (ending.ended_well or (out_of_memory is not None and out_of_memory.went_on)):
        return Room(step_us=step_us, capacity_bytes=capacity_bytes)
    low, high = (0, 0) if outside is None else (outside.low_bytes, outside.high_bytes)
    return Room(max(limit - high, 0), max(limit - low, 0), step_us, capacity_bytes)


def _advised(
    tables: dict[str, pd.DataFrame], folds: list[Fold], room: Room, setup: Setup, notes: list[Note], *, steps: bool
) -> tuple[list[Advice], Remedy | None]:
    """Advice and remedy; none before a step has ended, where ``steps`` are expected: the peak may be yet to come."""
    if steps and not len(tables["steps"]):
        return [], None
    return estimate_or_note("what would help", lambda: find_advice(tables, folds, room, setup), notes) or ([], None)


def _setup(recording: Recording, job: Job | None) -> Setup:
    gpu = recorded_gpu(recording)
    return setup_of(job, 0.0 if gpu is None else gpu.host_bandwidth)


def setup_of(job: Job | None, host_bandwidth: float) -> Setup:
    """The job's command line and hosts, by the bytes per second of each GPU's link to its host; 0 if not known."""
    if job is None:
        return Setup(host_bandwidth=host_bandwidth)
    return Setup(job.script_arguments, host_bandwidth, min(job.gpus_per_node, job.world_size))


def layer_memory(layers: pd.DataFrame, folds: list[Fold]) -> list[LayerMemory]:
    """Folded layers that held any memory."""
    return [
        LayerMemory(
            name=row["name"],
            class_name=row["class_name"],
            num_repeats=row["num_repeats"],
            peak_bytes=_by_category(row, "peak"),
            peak_own_bytes=row["peak_own_bytes"],
            peak_total_bytes=row["peak_total_bytes"],
            least_peak_bytes=row["least_peak_bytes"],
            median_peak_bytes=row["median_peak_bytes"],
            largest_peak_bytes=row["largest_peak_bytes"],
            most_bytes=_by_category(row, "most_total"),
            most_total_bytes=row["most_total_bytes"],
        )
        for row in fold_table(layers, folds).to_dict("records")
        if row["peak_total_bytes"] or row["most_total_bytes"]
    ]


def _by_category(row: Mapping[Hashable, int], prefix: str) -> dict[str, int]:
    return {name: bytes_ for name in CATEGORIES if (bytes_ := row[f"{prefix}_{name}_bytes"])}


def run_ending(recording: Recording, seen: Ending) -> Ending:
    """The end of the run as the parent saw it, unless the rank itself knows better."""
    outcome = recording.outcome
    if recording.beyond is not None and (seen.ended_well or (seen.outcome is Outcome.RUNNING and outcome is not None)):
        return BEYOND_CAPACITY
    if outcome is None:
        if seen.outcome is Outcome.RUNNING:  # neither the rank nor its parent lived long enough to record more
            return Ending(Outcome.KILLED, seen.code, "with fakedist profile, which was killed")
        return seen
    if seen.outcome in (Outcome.RUNNING, Outcome.EXIT, outcome.outcome):
        return Ending(outcome.outcome, seen.code if seen.code is not None else outcome.code, outcome.message)
    return seen


def left_during_init(recording: Recording, ending: Ending) -> LeftDuringInit | None:
    """The line at which the script ended before its first step; None if it did not or never imported torch."""
    outcome = recording.outcome
    if not ending.ended_by_itself or outcome is None or outcome.last_step or recording.gpu is None:
        return None
    read = sorted(recording.not_sent, key=lambda record: not record.is_read)
    if not read:
        return LeftDuringInit(outcome.line)
    return LeftDuringInit(outcome.line, read[0].text, read[0].command)


def _held(reserved_bytes: int, taken: TakenRecord | None) -> int:
    """Reserved memory, at most, that had memory behind it at one time: all of it if that is not recorded."""
    return min(reserved_bytes, taken.backed_bytes) if taken is not None and taken.backed_bytes else reserved_bytes


def _outside(
    recording: Recording, tables: dict[str, pd.DataFrame], job: Job | None, in_use: tuple[int, int], notes: list[Note]
) -> Outside | None:
    nccl, measured = recording.nccl, recording.outside
    return estimate_or_note(
        "memory outside the caching allocator",
        lambda: estimate_outside(
            tables,
            gpu_name="" if recording.gpu is None else recording.gpu.gpu_name,
            gpus_per_node=1 if job is None else job.gpus_per_node,
            fabric=None if job is None else job.fabric,
            nccl_version="" if nccl is None else nccl.version,
            nccl_environment={} if nccl is None else nccl.environment,
            bound=recording.bound,
            measured_bytes=None if measured is None else measured.used_bytes - measured.reserved_bytes,
            taken=recording.taken,
            reserved_bytes=in_use[0],
            capacity_bytes=in_use[1],
            reserve_bytes=0 if job is None else job.reserve_bytes or 0,
        ),
        notes,
    )


def _collectives(tables: dict[str, pd.DataFrame]) -> list[CollectiveTotal]:
    groups = tables["groups"]
    totals = []
    for row in rows_of(CollectivesTable, tables["collectives"]):
        group = groups.iloc[row.group] if row.group < len(groups) else None
        name = "" if group is None else str(group["description"] or group["name"])
        size = 0 if group is None else int(group["size"])
        totals.append(CollectiveTotal(name, size, row.operation, row.num_calls, row.bytes_in, bytes_out=row.bytes_out))
    return totals


def _out_of_memory(
    recording: Recording, ending: Ending, tables: dict[str, pd.DataFrame], capacity_bytes: int
) -> OutOfMemory | None:
    """The request that did not fit: its size, what made it and where, and the memory held at that moment."""
    beyond, failed = recording.beyond, recording.failed_request
    if beyond is not None:
        return _granted(beyond, recording, tables)
    if failed is None or ending.outcome is not Outcome.OUT_OF_MEMORY:
        return None
    events = tables["events"]
    then = np.flatnonzero(events["action"] == "oom")
    at = int(then[-1]) if len(then) else -1
    held = events.iloc[at] if at >= 0 else {"allocated_bytes": 0, "reserved_bytes": 0}
    step, phase = _moment_of(at, tables)
    return OutOfMemory(
        requested_bytes=failed.requested_bytes,
        layer=failed.layer,
        operation=_operation(recording, failed.op),
        line=failed.line,
        allocated_bytes=int(held["allocated_bytes"]),
        reserved_bytes=int(held["reserved_bytes"]),
        step=step,
        phase=phase,
        limit_bytes=capacity_bytes,
        stack=failed.stack,
    )


def _granted(beyond: BeyondCapacityRecord, recording: Recording, tables: dict[str, pd.DataFrame]) -> OutOfMemory:
    """The first request beyond the GPU's memory. Its block and the events around it say what made it."""
    events, blocks = tables["events"], tables["blocks"]
    is_ours = beyond.device == recording.device
    over = np.flatnonzero((events["reserved_bytes"] > beyond.limit_bytes) & is_ours)
    if not len(over):  # not only the allocator took memory
        over = np.flatnonzero((events["op"] >= beyond.op) & is_ours)
    first = int(over[0]) if len(over) else -1
    made = blocks[blocks["alloc_event"] > first].head(1) if first >= 0 else blocks.head(0)
    own = made.iloc[0] if len(made) else None
    step, phase = _moment_of(first, tables)
    before = events.iloc[first - 1] if first > 0 else {"allocated_bytes": 0, "reserved_bytes": 0}
    of_block = "" if own is None or own["stack"] < 0 else str(tables["stacks"]["line"].iloc[own["stack"]])
    return OutOfMemory(
        requested_bytes=beyond.requested_bytes if own is None else int(own["bytes"]),
        layer="" if own is None else str(tables["layers"]["name"].iloc[own["layer"]]),
        operation=_operation(recording, beyond.op) if own is None else str(own["operation"]),
        line=of_block or next(iter(beyond.stack), ""),
        allocated_bytes=int(before["allocated_bytes"]),
        reserved_bytes=int(before["reserved_bytes"]),
        step=step,
        phase=phase,
        limit_bytes=beyond.limit_bytes,
        went_on=True,
        stack=beyond.stack,
    )


def _moment_of(event: int, tables: dict[str, pd.DataFrame]) -> tuple[int, str]:
    """Step and phase of an event; those before the first step without one."""
    spans = tables["spans"]
    span = int(np.searchsorted(spans["first_event"], event, "right")) - 1
    return (int(spans["step"].iloc[span]), str(spans["phase"].iloc[span])) if event >= 0 <= span else (0, "")


def _operation(recording: Recording, op: int) -> str:
    known = 0 <= op < len(recording.op_operation)
    return recording.operations[recording.op_operation[op]].name if known else ""


def coverage_notes(recording: Recording, outcome: Outcome, until: int | Until | None) -> list[Note]:
    """Notes on what the recording does not cover; ``until`` was to stop the script, other than a number of steps."""
    training = None if recording.outcome is None else recording.outcome.training
    if outcome is Outcome.STOPPED:
        missing = [] if training is not None and training.evaluated else ["validation"]
        missing += [] if until == "save" else ["saving"]
        return [run_note.stopped_before_the_end(len(recording.steps), str(until), missing)]
    if training is None or training.optimizer_steps or training.counts_itself:
        return []
    if outcome in (Outcome.FINISHED, Outcome.EXIT):
        return [run_note.no_optimizer_step()]
    return []


_ALLOC = ACTIONS.index("alloc")


def dropped_notes(recording: Recording) -> list[Note]:
    """Notes on records that the recording may lack."""
    lost = [run_note.no_last_record()] if recording.outcome is None else []
    lost += [run_note.recording_cut()] if recording.truncated else []
    return lost + ([run_note.records_unknown(recording.unknown)] if recording.unknown else [])


def _not_sent_notes(recording: Recording, *, is_cause: bool) -> list[Note]:
    """The note on values that another rank should have sent. Those on the host count only if they may be a cause."""
    read = [record for record in recording.not_sent if record.is_read or is_cause]
    if not read:
        return []
    return [run_note.not_sent([record.text for record in read], read[0].command, is_cause=is_cause)]


def _failure_notes(recording: Recording) -> list[Note]:
    failed, ended = recording.failed_request, recording.outcome
    if failed is None or (ended is not None and ended.outcome is Outcome.OUT_OF_MEMORY):
        return []
    statistics = recording.statistics.get(recording.device)
    times = 1 if statistics is None else statistics.num_ooms or 1
    return [run_note.went_on_without_memory(times, failed.requested_bytes, failed.line)]


#: Operations that pick indices, such as those of a router (gpu/values/routing.py).
_CHOOSES = re.compile(r"\.(topk|sort|argsort|argmax|argmin)\b")


def _router_notes(facts: RouterLoadFacts, rank: int) -> list[Note]:
    """Notes on routers that a load does not reach, and on what the ranks got."""
    notes_made = [run_note.router_not_reached(facts.load, line) for line in facts.unknown]
    if len(facts.ranks) > 1 and rank in facts.ranks:
        hottest = facts.hottest_rank()
        notes_made.append(
            run_note.experts_load_drawn(facts.load, len(facts.ranks), facts.share(rank), hottest, facts.share(hottest))
        )
    return notes_made


def _invention_notes(rows: list[InventedRow], load: str) -> list[Note]:
    """Notes on made-up values: how many, and where the first one was read."""
    times = [row for row in rows if row.operation == EVENT_TIME]
    notes_made = (
        [run_note.event_times_made_up(sum(row.num_values for row in times), _first_line(times))] if times else []
    )
    routed = [row for row in rows if row.operation == ROUTED]
    rows = [row for row in rows if row.operation not in (EVENT_TIME, ROUTED)]
    if invented := sum(row.num_values for row in rows):
        notes_made.append(run_note.values_made_up(invented, _first_line(rows)))
    chosen = [row for row in rows if _CHOOSES.search(row.operation)]
    if chosen:
        operation, line = chosen[0].operation, _first_line(chosen)
        notes_made.append(
            run_note.experts_made_up(operation, line, _first_line(routed), load)
            if routed
            else run_note.indices_made_up(operation, line)
        )
    return notes_made


def _first_line(rows: list[InventedRow]) -> str:
    return next((f"{row.filename}:{row.line}" for row in rows if row.filename), "")


def run_notes(
    recording: Recording,
    blocks: Blocks,
    job: Job | None,
    *,
    ending: Ending,
    left: LeftDuringInit | None,
    of_times: list[Note],
) -> list[Note]:
    """The notes of a run: its own, those on its times, and those that its recording calls for."""
    all_notes = [*recording.notes, *of_times, *differences(recording, blocks)]
    if left is not None and job is not None:
        all_notes.append(run_note.left_during_init("" if recording.outcome is None else recording.outcome.line))
    is_before_forward = not any(scope.phase in ("forward", "generation") for scope in recording.scopes)
    if is_before_forward and len(blocks.frame) and not (blocks.frame["category"] == "parameter").any():
        all_notes.append(run_note.no_forward())
    # A call for all devices, such as torch.cuda.empty_cache(), leaves events where nothing was ever allocated.
    used = [device for device, events in recording.events.items() if (events["action"] == _ALLOC).any()]
    if others := sorted(set(used) - {recording.device}):
        all_notes.append(run_note.used_other_devices(others, recording.device))
    elif recording.events and recording.gpu is not None and recording.device != recording.gpu.device_index:
        all_notes.append(run_note.used_another_device(recording.device))
    all_notes += _failure_notes(recording)
    idle = [row for index, row in enumerate(recording.invented) if index in recording.idle_reads]
    read = [row for index, row in enumerate(recording.invented) if index not in recording.idle_reads]
    all_notes += _invention_notes(read, EVEN if job is None else job.router_load)
    if idle:
        all_notes.append(run_note.values_unused(sum(row.num_values for row in idle), _first_line(idle)))
    if recording.routers is not None and job is not None:
        all_notes += _router_notes(recording.routers.facts, job.rank)
    all_notes += _not_sent_notes(recording, is_cause=left is not None)
    all_notes += [run_note.not_answered(name, calls) for name, calls in sorted(recording.unanswered.items())]
    if job is not None and job.collectives == "noop":
        all_notes.append(run_note.collectives_off())
    if left is None:
        went_on = ending == BEYOND_CAPACITY and recording.outcome is not None
        outcome = recording.outcome.outcome if went_on and recording.outcome else ending.outcome
        all_notes += coverage_notes(recording, outcome, None if job is None else job.until)
    return all_notes
