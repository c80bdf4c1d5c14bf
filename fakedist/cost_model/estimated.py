"""The times of a step: estimated, or measured with estimated collectives, or as a tool saw it.

:func:`estimate_times` prices the launches, places them in time and breaks the step down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd

from fakedist.analysis.memory_tables import Fold
from fakedist.analysis.recording import Recording
from fakedist.cost_model.accuracy import closest
from fakedist.cost_model.allocator_times import allocator_time
from fakedist.cost_model.breakdown import break_down, uncertain_parts
from fakedist.cost_model.busiest_rank import ExpertsLoad, recorded_load
from fakedist.cost_model.collectives.communication import Communication, communication_of
from fakedist.cost_model.collectives.fabric import Fabric, default_fabric, find_fabric
from fakedist.cost_model.cpu_work import cpu_work
from fakedist.cost_model.hosts import HostModel, host_model
from fakedist.cost_model.kernels.calibration_table import calibrated_prices_of
from fakedist.cost_model.kernels.kernel_times import KernelTimes
from fakedist.cost_model.nccl.settings import TIME_VARIABLES, Nccl, read_settings
from fakedist.cost_model.step import (
    MeasuredPrices,
    PricedStep,
    PriceList,
    Prices,
    StepPrices,
    price_step,
)
from fakedist.cost_model.what_if import WhatIf, changed_fabric, changed_launches, read_what_ifs
from fakedist.errors import FakedistError
from fakedist.gpu.models.catalogue import gpu_of_product
from fakedist.gpu.models.spec import GpuSpec, queue_depth
from fakedist.options import Job
from fakedist.rundir import time_notes
from fakedist.rundir.notes import Note
from fakedist.rundir.records import GpuRecord
from fakedist.rundir.step_time import (
    ClockSteadiness,
    FamilyAccuracy,
    KernelSource,
    Peaks,
    StepBreakdown,
    StepTime,
    UncertainPart,
)


def prices_of(gpu: GpuSpec, times: str | None = None) -> Prices:
    """The model of a GPU's kernel times; SetupError if the user's own cannot be read, or are of another GPU."""
    model = KernelTimes(gpu)
    return calibrated_prices_of(model, Path(times)) if times else model


@dataclass(frozen=True)
class JobNetwork:
    """The job's network, and the load of the experts that exchange tokens over it."""

    fabric: Fabric
    interferes: bool = True
    nccl: Nccl = field(default_factory=Nccl)
    experts: ExpertsLoad = field(default_factory=ExpertsLoad)
    what_ifs: tuple[WhatIf, ...] = ()


@dataclass(frozen=True)
class NetworkChoice:
    """A user's choices about the network; None and True keep the usual.

    Attributes:
        fabric: A preset or a fabric file.
        gpus_per_node: GPUs in one NVLink domain.
        nccl: Variables, which replace the run's own.
        experts: As in :class:`JobNetwork`.
        what_if: As ``fakedist.cost_model.what_if`` reads it.
    """

    fabric: str | None = None
    gpus_per_node: int | None = None
    interferes: bool = True
    nccl: Mapping[str, str] = field(default_factory=dict)
    experts: ExpertsLoad = field(default_factory=ExpertsLoad)
    what_if: str | None = None


def network_of(
    gpu: GpuSpec,
    job: Job | None,
    chosen: NetworkChoice | None = None,
    nccl: Nccl | None = None,
) -> JobNetwork:
    """The network of a job: the user's choices, else the GPU model's usual fabric and the run's own ``nccl``.

    The job's nodes are NVLink domains unless the fabric's domains span hosts.

    Raises:
        JobError: There is no such fabric or what-if, the file is not valid, or the GPU lacks the link that a what-if
            changes.
    """
    chosen = NetworkChoice() if chosen is None else chosen
    what_ifs = () if chosen.what_if is None else read_what_ifs(chosen.what_if)
    for what_if in what_ifs:
        per_node = what_if.gpus_per_node or chosen.gpus_per_node
        chosen = replace(chosen, fabric=what_if.fabric or chosen.fabric, gpus_per_node=per_node)
    name = chosen.fabric or (job.fabric if job is not None else None) or default_fabric(gpu.like or gpu.name).name
    fabric = find_fabric(name, chosen.gpus_per_node, 0 if job is None else job.world_size)
    if chosen.gpus_per_node is None and job is not None and not fabric.spans_hosts:
        fabric = find_fabric(name, job.gpus_per_node)
    for what_if in what_ifs:
        fabric = changed_fabric(what_if, fabric, gpu.nvlink_bandwidth)
    nccl = Nccl() if nccl is None else nccl
    nccl = replace(nccl, environment={**nccl.environment, **chosen.nccl})
    return JobNetwork(fabric, chosen.interferes, nccl, chosen.experts, what_ifs)


@dataclass(frozen=True)
class Models:
    """The models that a step is priced with."""

    gpu: GpuSpec
    prices: Prices
    network: JobNetwork
    host: HostModel = field(default_factory=HostModel)


def recorded_models(recording: Recording, launches: pd.DataFrame, job: Job | None) -> tuple[Models | None, list[Note]]:
    """The models (None: nothing to price) and notes on them. Of traced kernels, only the collectives are priced."""
    gpu = recorded_gpu(recording)
    source = recording.kernel_source
    host = recording.host
    if gpu is None or (source is None and not len(launches)) or (source and not (host and host.has_events)):
        return None, []
    loaded = recording.nccl
    routers = None if recording.routers is None else recording.routers.facts
    experts = ExpertsLoad() if routers is None or job is None else recorded_load(routers)
    nccl = None if loaded is None else Nccl(loaded.environment, loaded.version)
    network = network_of(gpu, job, NetworkChoice(experts=experts), nccl)
    if source is not None:
        return Models(gpu, MeasuredPrices(source.gpu, launches), network), []
    clock = _clock_of(recording, launches)
    depth = queue_depth("" if recording.gpu is None else recording.gpu.launch_queues)
    scores = _machine_scores(recording, clock)
    least, most = min(scores, default=None), max(scores, default=0.0)
    at_one_pace = clock is not None and recording.host_clock is not None and recording.host_clock.pace_us > 0
    machine_us = scores[0] if scores and at_one_pace else least
    notes = (
        [time_notes.machine_scores_differ(least, most)] if least is not None and most > _SCORES_DIFFER * least else []
    )
    chosen = host_model(gpu, None if job is None else job.host, machine_us, clock, depth=depth)
    if job is None or not job.times:
        return Models(gpu, prices_of(gpu), network, chosen), notes
    try:
        return Models(gpu, prices_of(gpu, job.times), network, chosen), notes
    except FakedistError as error:  # the file has gone since the job began
        notes.append(time_notes.calibration_table_not_used(error.message))
        return Models(gpu, prices_of(gpu), network, chosen), notes


def _clock_of(recording: Recording, launches: pd.DataFrame) -> ClockSteadiness | None:
    """How steady the timed step's host clock was; None without one."""
    clock = recording.host_clock
    if clock is None or not launches["dispatch_us"].notna().any():
        return None
    bound = clock.bound_us / clock.step_us if clock.step_us else 0.0
    return ClockSteadiness(
        clock.num_repeats, clock.spread, bound, is_recorded=clock.is_recorded, is_second_run=clock.is_second_run
    )


#: Two scores of a machine in one run that differ so many times are said: one of them is not the machine's own.
_SCORES_DIFFER = 2


def _machine_scores(recording: Recording, clock: ClockSteadiness | None) -> list[float]:
    """The machine's scores: that of the clock's own steps, if it has one, and that at the end, at the same pace."""
    at_end = 0.0 if recording.machine is None else recording.machine.linear_us
    if clock is None or recording.host_clock is None:
        return [at_end] if at_end else []
    around, pace_us = recording.host_clock.linear_us, recording.host_clock.pace_us
    if recording.machine is not None and recording.machine.pace_us and pace_us:
        at_end *= pace_us / recording.machine.pace_us
    return [score for score in (around, at_end) if score]


def recorded_gpu(recording: Recording) -> GpuSpec | None:
    """The GPU model that a step ran on or is priced for; None for an unknown one."""
    gpu = recording.gpu or GpuRecord()
    was_traced = recording.kernel_source is not None and recording.host is not None
    return gpu.model or (gpu_of_product(gpu.gpu_name) if was_traced else None)


@dataclass(frozen=True)
class StepTimes:
    """The tables kernels, layer_times, kernel_names and ranges of a step, and its summary (None if none was timed).

    ``prices`` are what it was priced by, before any what-if; None of a step that was not priced.
    """

    tables: dict[str, pd.DataFrame]
    summary: StepTime | None
    source: KernelSource | None
    prices: PriceList | None = None


def price_tables(tables: Mapping[str, pd.DataFrame], models: Models) -> PricedStep:
    """Price the collectives and kernels of ``launches`` (not empty), ``work``, ``calls``, ``groups``; place them.

    Raises:
        RunDirectoryError: The tables are damaged.
        JobError: The step lacks the groups of a what-if.
    """
    launches = tables["launches"]
    network = models.network
    communication = calls = communication_for(tables, models.gpu, network)
    for what_if in network.what_ifs:
        launches, communication = changed_launches(what_if, launches, communication, tables)
    prices = StepPrices(models.prices, network.experts, models.host.costs)
    priced = price_step(launches, tables["work"], prices, communication)
    return replace(priced, price_list=replace(priced.price_list, calls=calls))


def _alone(breakdown: StepBreakdown, _prices: PriceList) -> StepTime:
    """A step of which nothing follows for a job."""
    return StepTime(**vars(breakdown))


def estimate_times(
    tables: Mapping[str, pd.DataFrame],
    folds: list[Fold],
    models: Models,
    *,
    traced: KernelSource | None = None,
    whole: Callable[[StepBreakdown, PriceList], StepTime] = _alone,
) -> StepTimes:
    """Estimate the times of a step: price it, and break it down.

    Args:
        tables: ``launches`` (not empty), ``work``, ``ranges``, ``layers``, ``calls`` and ``groups``.
        traced: Where the kernels come from, if a tool traced them; None if they are estimated.
        whole: Adds what follows from the step and its prices.

    Raises:
        RunDirectoryError: The tables are damaged.
        JobError: The step lacks the groups of a what-if.
    """
    priced = price_tables(tables, models)
    peaks = Peaks(dict(models.gpu.peak_flops), models.gpu.memory_bandwidth)
    is_simulated = traced is not None and traced.source == "simulated"
    made, breakdown = break_down(
        priced.kernels, tables, folds, priced, None if is_simulated else peaks, is_slowed=_is_slowed(traced)
    )
    uncertain = uncertain_parts(priced, [] if breakdown is None else breakdown.by_group, tables)
    summary = None if breakdown is None else whole(breakdown, priced.price_list)
    source = _without_the_tool(_source(priced, models, uncertain, traced), breakdown)
    return StepTimes({"kernels": priced.kernels, **made}, summary, source, priced.price_list)


def recorded_times(recording: Recording, tables: Mapping[str, pd.DataFrame], folds: list[Fold]) -> StepTimes:
    """The times of a recorded step as a tool saw them, from ``kernels``, ``launches``, ``ranges`` and ``layers``."""
    source = recording.kernel_source
    if source is not None and recording.host is not None and (tables["launches"]["call"] >= 0).any():
        why = "" if recorded_gpu(recording) is None else "where events were recorded was not traced"
        source = replace(source, notes=[*source.notes, time_notes.collectives_not_priced(why)])
    peaks = (recording.gpu or GpuRecord()).peaks
    if source is not None and source.source == "simulated":  # simulated times cannot be compared with peak rates
        peaks = None
    made, breakdown = break_down(tables["kernels"], tables, folds, source, peaks, is_slowed=_is_slowed(source))
    summary = None if breakdown is None else StepTime(**vars(breakdown))
    source = None if source is None else _without_the_tool(source, breakdown)
    return StepTimes({"kernels": tables["kernels"], **made}, summary, source)


def _is_slowed(source: KernelSource | None) -> bool:
    return source is not None and source.source == "measured"


def _without_the_tool(source: KernelSource, step: StepBreakdown | None) -> KernelSource:
    """The source of a step, a measured one with the interval that the tool leaves."""
    if step is None or not _is_slowed(source):
        return source
    notes = [*source.notes, time_notes.host_is_slowed()]
    return replace(source, step_low_us=step.step_low_us, step_high_us=step.step_high_us, notes=notes)


def _source(
    priced: PricedStep, models: Models, uncertain: list[UncertainPart], traced: KernelSource | None
) -> KernelSource:
    """Source of a priced step's times; of a traced one, only its collectives are estimated."""
    network = models.network
    variables = {name: network.nccl.environment[name] for name in TIME_VARIABLES if name in network.nccl.environment}
    notes = [*priced.notes, *([time_notes.nccl_environment(variables)] if variables else [])]
    if traced is not None:
        return replace(
            traced,
            step_us=priced.step_us,
            step_low_us=priced.step_low_us,
            step_high_us=priced.step_high_us,
            fabric=network.fabric.name,
            uncertain=uncertain,
            notes=[*traced.notes, time_notes.only_collectives_are_estimated(), *notes],
        )
    rows = closest(models.gpu, priced.families)
    allocator = allocator_time(priced.launches, priced.placed.passed_us - priced.placed.reached_us)
    retries = [] if allocator is None else [time_notes.allocator_retries(allocator)]
    on_cpu = cpu_work(priced.launches)
    retries += [] if on_cpu is None else [time_notes.cpu_work_estimated(on_cpu)]
    clock = models.prices.clock if isinstance(models.prices, KernelTimes) else None
    return KernelSource(
        source="estimated",
        tool="model",
        step=int(priced.launches["step"].iloc[0]),
        gpu=models.prices.product,
        step_us=priced.step_us,
        step_low_us=priced.step_low_us,
        step_high_us=priced.step_high_us,
        calibrated_on=models.prices.calibrated_on,
        clock=clock.fraction if clock else None,
        watts=clock.watts if clock else 0.0,
        accuracy=[FamilyAccuracy(row.family, row.gpu, row.median, row.p95) for row in rows],
        uncertain=uncertain,
        fabric=network.fabric.name,
        notes=[*retries, *notes, time_notes.host_time(models.host.time)],
        host=models.host.time,
        allocator=allocator,
        cpu_work=on_cpu,
    )


def communication_for(tables: Mapping[str, pd.DataFrame], gpu: GpuSpec, network: JobNetwork) -> Communication:
    """Price the collectives of a step, from the tables ``launches``, ``calls`` and ``groups``."""
    calls = tables["calls"]
    own = calls[calls["sequence"].isin(tables["launches"]["call"])]
    return communication_of(
        own,
        tables["groups"],
        gpu,
        network.fabric,
        interferes=network.interferes,
        nccl=read_settings(network.nccl),
    )


_COPIES = "copies stand for collectives"


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
