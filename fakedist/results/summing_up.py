"""The figures of a run, computed from its recording and its tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping

import numpy as np
import pandas as pd

from fakedist.analysis.advice import find_advice
from fakedist.analysis.layer_table import fold_layers, fold_table, rows_of, unfolded
from fakedist.analysis.memory_tables import Peak, described_blocks
from fakedist.analysis.recording import Recording
from fakedist.cost_model.outside_memory import beside_reserved, estimate_outside
from fakedist.options import Job
from fakedist.rundir.manifest import Manifest
from fakedist.rundir.outcome import Ending, Outcome
from fakedist.rundir.records import GpuRecord
from fakedist.rundir.schema import CATEGORIES, MOMENTS, SEGMENT_STATES
from fakedist.rundir.summary import (
    CollectiveTotal,
    HeldSegment,
    LargeBlock,
    LayerMemory,
    LeftDuringInit,
    OutOfMemory,
    Outside,
    PhasePeak,
    ReservedMoment,
    StepPeak,
    Summary,
)
from fakedist.units import UNLIMITED_BYTES

NUM_HELD = 10
_SEGMENT_FIELDS = [field.name for field in dataclasses.fields(HeldSegment) if field.name != "block"]


def reserved_moments(tables: dict[str, pd.DataFrame]) -> list[ReservedMoment]:
    """What was reserved but not allocated, at the moments of the table ``segments``.

    Args:
        tables: Tables by name: segments, blocks, shares, layers, stacks, spans.
    """
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
    """Blocks by their rows in the table ``blocks``: what each is, what allocated it and where."""
    layers = tables["layers"]
    lines = tables["stacks"]["line"].tolist()
    found = described_blocks(
        tables["blocks"].loc[numbers], tables["shares"], layers["name"].tolist(), layers["parent"].tolist(), lines=lines
    )
    return rows_of(LargeBlock, found)


def summarize(recording: Recording, manifest: Manifest, tables: dict[str, pd.DataFrame], peak: Peak) -> Summary:
    """The figures of a run, without its times and notes.

    Args:
        recording: The recording.
        manifest: run.json as the parent left it.
        tables: Tables by name.
        peak: The result of :func:`fakedist.analysis.memory_tables.find_peak`.
    """
    job, gpu = manifest.job, recording.gpu or GpuRecord()
    ending = _ending(recording, manifest.exit)
    capacity = gpu.capacity_bytes
    if job is not None and job.gpu_memory_bytes == UNLIMITED_BYTES:
        capacity = gpu.spec_memory_bytes or capacity
    outside = beside_reserved(peak.reserved_bytes, _outside(recording, tables, job), capacity)
    return Summary(
        world_size=None if job is None else job.world_size,
        rank=None if job is None else job.rank,
        device="cuda" if job is None else job.device,
        gpu=gpu.gpu_name,
        torch=gpu.torch,
        exit=ending,
        left_during_init=_left_during_init(recording, ending),
        fits=ending.outcome is not Outcome.OUT_OF_MEMORY and outside.beside_reserved != "does not fit",
        capacity_bytes=capacity,
        peak_allocated_bytes=peak.allocated_bytes,
        peak_reserved_bytes=peak.reserved_bytes,
        peak_step=peak.step,
        peak_phase=peak.phase,
        estimated_outside=outside,
        by_phase=rows_of(PhasePeak, tables["phases"].astype({"phase": str})),
        by_category=peak.by_category,
        layers=layer_memory(tables["layers"]),
        largest_blocks=rows_of(LargeBlock, tables["largest"]),
        collectives=_collectives(tables),
        steps=rows_of(StepPeak, tables["steps"].drop(columns="start_us")),
        kernels=None,
        time=None,
        out_of_memory=_out_of_memory(recording, ending, tables["events"]),
        advice=find_advice(tables),
        invented_values=int(tables["invented"]["num_values"].sum()),
        reserved=reserved_moments(tables),
    )


def layer_memory(layers: pd.DataFrame, *, fold: bool = True) -> list[LayerMemory]:
    """Layers that held any memory. Repeated layers fold into one row unless ``fold`` is False."""
    rows = fold_table(layers, fold_layers(layers) if fold else unfolded(layers)).to_dict("records")
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
        for row in rows
        if row["peak_total_bytes"] or row["most_total_bytes"]
    ]


def _by_category(row: Mapping[Hashable, int], prefix: str) -> dict[str, int]:
    return {name: bytes_ for name in CATEGORIES if (bytes_ := row[f"{prefix}_{name}_bytes"])}


def _ending(recording: Recording, seen: Ending) -> Ending:
    """How the run ended: as the parent saw it, unless the rank itself knows better."""
    told = recording.outcome
    if told is None:
        if seen.outcome is Outcome.RUNNING:  # neither the rank nor its parent lived long enough to record more
            return Ending(Outcome.KILLED, seen.code, "with fakedist profile, which was killed")
        return seen
    if seen.outcome in (Outcome.RUNNING, Outcome.EXIT, told.outcome):
        return Ending(told.outcome, seen.code if seen.code is not None else told.code, told.message)
    return seen


def _left_during_init(recording: Recording, ending: Ending) -> LeftDuringInit | None:
    """Where the script ended by itself before its first step; None if it did not or never imported torch."""
    told = recording.outcome
    if not ending.ended_by_itself or told is None or told.last_step or recording.gpu is None:
        return None
    read = sorted(recording.not_sent, key=lambda record: not record.is_read)
    if not read:
        return LeftDuringInit(told.line)
    return LeftDuringInit(told.line, read[0].text, read[0].command)


def _outside(recording: Recording, tables: dict[str, pd.DataFrame], job: Job | None) -> Outside:
    nccl, found = recording.nccl, recording.outside
    return estimate_outside(
        tables,
        gpu_name="" if recording.gpu is None else recording.gpu.gpu_name,
        gpus_per_node=1 if job is None else job.gpus_per_node,
        fabric=None if job is None else job.fabric,
        nccl_version="" if nccl is None else nccl.version,
        nccl_environment={} if nccl is None else nccl.environment,
        bound=recording.bound,
        measured_bytes=None if found is None else found.used_bytes - found.reserved_bytes,
    )


def _collectives(tables: dict[str, pd.DataFrame]) -> list[CollectiveTotal]:
    groups = tables["groups"]
    found = []
    for row in rows_of(_Calls, tables["collectives"]):
        group = groups.iloc[row.group] if row.group < len(groups) else None
        name = "" if group is None else str(group["description"] or group["name"])
        size = 0 if group is None else int(group["size"])
        found.append(CollectiveTotal(name, size, row.operation, row.num_calls, row.bytes_in, bytes_out=row.bytes_out))
    return found


@dataclasses.dataclass(frozen=True)
class _Calls:
    """A row of the table ``collectives``."""

    group: int
    operation: str
    num_calls: int
    bytes_in: int
    bytes_out: int


def _out_of_memory(recording: Recording, ending: Ending, events: pd.DataFrame) -> OutOfMemory | None:
    """The request that ended the run: its size, what made it, and the memory held at that moment."""
    failed = recording.failed_request
    if failed is None or ending.outcome is not Outcome.OUT_OF_MEMORY:
        return None
    operation = ""
    if 0 <= failed.op < len(recording.op_operation):
        operation = recording.operations[recording.op_operation[failed.op]].name
    then = events[events["action"] == "oom"]
    allocated, reserved = (
        int(then[name].iloc[-1]) if len(then) else 0 for name in ("allocated_bytes", "reserved_bytes")
    )
    return OutOfMemory(
        requested_bytes=failed.requested_bytes,
        layer=failed.layer,
        operation=operation,
        line=failed.line,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
    )
