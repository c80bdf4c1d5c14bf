"""The times of a recorded step: estimated, or measured with its collectives estimated, or as a tool traced them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pandas as pd

from fakedist.analysis.recording import Recording
from fakedist.analysis.times.estimated import estimate_times, measured_prices, network_of, prices_of
from fakedist.analysis.times.totals import Times, find_times
from fakedist.analysis.times.traced_launches import traced_launches
from fakedist.errors import FakedistError
from fakedist.gpu_models.known import gpu_of_product
from fakedist.gpu_models.spec import GpuSpec
from fakedist.job import Job
from fakedist.run import time_notes
from fakedist.run.notes import Note
from fakedist.run.records import GpuRecord
from fakedist.run.step_time import KernelSource, Peaks, StepTime
from fakedist.run.trace_records import HostRecord
from fakedist.time.step import Prices

_COPIES = "copies stand for collectives"


@dataclass(frozen=True)
class RecordedTimes:
    """The times of a recorded step.

    Attributes:
        tables: The tables that they make or complete.
        summary: Where the time goes; None if no step was timed.
        source: Where the kernels come from; None without kernels.
        gpu: The GPU model; None for an unknown one.
        notes: Notes that belong to the run.
    """

    tables: dict[str, pd.DataFrame]
    summary: StepTime | None
    source: KernelSource | None
    gpu: GpuSpec | None
    notes: list[Note] = field(default_factory=list)


def recorded_times(recording: Recording, tables: Mapping[str, pd.DataFrame], job: Job | None) -> RecordedTimes:
    """Find the times of a recorded step.

    Args:
        recording: The recording.
        tables: The run's other tables; ``kernels`` as a tool saw them, ``ranges`` without times.
        job: The job; None for an imported trace.
    """
    gpu, source, host = recording.gpu or GpuRecord(), recording.kernel_source, recording.host
    model, nccl = gpu.model, {} if recording.nccl is None else recording.nccl.environment
    if source is None and model is not None and len(tables["launches"]):
        prices, told = _prices(model, job)
        found = estimate_times(tables, model, prices, network_of(model, job, nccl=nccl))
        return RecordedTimes(_made(found.kernels, found.times), found.times.summary, found.source, model, told)
    if source is None or host is None:  # nothing was timed, or the trace was imported
        times = find_times(tables["kernels"], tables["layers"], source, _peaks(gpu, source), ranges=tables["ranges"])
        return RecordedTimes(_made(tables["kernels"], times), times.summary, source, model)
    model = model or gpu_of_product(gpu.gpu_name)
    step = _traced_tables(tables, host)
    whole = {**tables, **step}
    if model is not None and host.has_events:
        measured = measured_prices(source.gpu, step["launches"])
        found = estimate_times(whole, model, measured, network_of(model, job, nccl=nccl), traced=source)
        return RecordedTimes(step | _made(found.kernels, found.times), found.times.summary, found.source, model)
    if (step["launches"]["call"] >= 0).any():
        why = "" if model is None else "where events were recorded was not traced"
        source = replace(source, notes=[*source.notes, time_notes.collectives_not_priced(why)])
    times = find_times(step["kernels"], tables["layers"], source, _peaks(gpu, source), ranges=step["ranges"])
    return RecordedTimes(step | _made(step["kernels"], times), times.summary, source, model)


def _made(kernels: pd.DataFrame, times: Times) -> dict[str, pd.DataFrame]:
    made = {"kernels": kernels, "layer_times": times.layers, "kernel_names": times.names}
    return made | {"ranges": times.ranges}


def _traced_tables(tables: Mapping[str, pd.DataFrame], host: HostRecord) -> dict[str, pd.DataFrame]:
    """The tables of a traced step that are made of its kernels and of what the host did."""
    found = traced_launches(tables["kernels"], host, tables["calls"])
    return {"launches": found.launches, "work": found.work, "ranges": found.ranges, "kernels": found.kernels}


def _prices(gpu: GpuSpec, job: Job | None) -> tuple[Prices, list[Note]]:
    """The prices of kernels, with the job's own times before them. If their file has gone, a note tells it."""
    if job is None or not job.times:
        return prices_of(gpu), []
    try:
        return prices_of(gpu, job.times), []
    except FakedistError as error:
        return prices_of(gpu), [time_notes.own_times_not_used(error.message)]


def _peaks(gpu: GpuRecord, source: KernelSource | None) -> Peaks | None:
    """The GPU's peak rates; None for simulated times, which cannot be compared with them."""
    return None if source is not None and source.source == "simulated" else gpu.peaks


def where_from(source: KernelSource) -> str:
    """Where the times of the timed step come from, for run.json."""
    if source.source == "estimated":
        return f"estimated: kernels by a model of the GPU, collectives for the fabric {source.fabric}"
    if source.source == "simulated":
        collectives = f"collectives estimated for the fabric {source.fabric}" if source.fabric else _COPIES
        return f"simulated: the virtual GPU as CUPTI saw it, where each kernel takes 1 µs; {collectives}"
    tool = {"cupti": "CUPTI", "nsys": "Nsight Systems"}.get(source.tool, source.tool)
    collectives = f"collectives estimated for the fabric {source.fabric}" if source.fabric else _COPIES
    return f"measured: {tool} on this GPU; {collectives}"
