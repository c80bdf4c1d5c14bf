"""The times of a step: estimated, or measured with estimated collectives, or as a tool saw it.

:func:`estimate_times` prices the launches, places them in time and breaks the step down.

Changes that would shorten a step: each one of its network, host or GPU that applies, and the best two together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from fakedist.analysis.memory_tables import Fold
from fakedist.analysis.recording import Recording
from fakedist.cost_model.accuracy import closest
from fakedist.cost_model.breakdown import break_down, uncertain_parts
from fakedist.cost_model.busiest_rank import ExpertsLoad, recorded_load
from fakedist.cost_model.collectives.collective_times import Fabric, default_fabric, find_fabric
from fakedist.cost_model.collectives.communication import Communication, communication_of
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
    StepLaunches,
    StepPrices,
    price_step,
)
from fakedist.cost_model.timeline import allocator_time
from fakedist.cost_model.what_if import (
    WhatIf,
    changed_fabric,
    changed_launches,
    chosen_layers,
    loop_of_optimizer,
    read_what_if,
    read_what_ifs,
)
from fakedist.errors import FakedistError, JobError
from fakedist.gpu.models.catalogue import GPUS, gpu_of_product
from fakedist.gpu.models.spec import GpuSpec, queue_depth
from fakedist.options import Job
from fakedist.rundir import time_notes
from fakedist.rundir.notes import Note
from fakedist.rundir.records import GpuRecord
from fakedist.rundir.step_time import (
    ClockSteadiness,
    FamilyAccuracy,
    KernelSource,
    LayerTime,
    Peaks,
    StepBreakdown,
    StepTime,
    TimeGain,
    UncertainPart,
)
from fakedist.units import format_us


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


#: Two scores of a machine in one run that differ so many times are noted: one of them is not the machine's own.
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
    source = _widen_by_tool_overhead(_source(priced, models, uncertain, traced), breakdown)
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
    source = None if source is None else _widen_by_tool_overhead(source, breakdown)
    return StepTimes({"kernels": tables["kernels"], **made}, summary, source)


def _is_slowed(source: KernelSource | None) -> bool:
    return source is not None and source.source == "measured"


def _widen_by_tool_overhead(source: KernelSource, step: StepBreakdown | None) -> KernelSource:
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


def provenance(source: KernelSource) -> str:
    """Where the times of the timed step come from, for run.json."""
    if source.source == "estimated":
        return f"estimated: kernels by a model of the GPU, collectives for the fabric {source.fabric}"
    if source.source == "simulated":
        collectives = f"collectives estimated for the fabric {source.fabric}" if source.fabric else _COPIES
        return f"simulated: the virtual GPU as CUPTI saw it, where each kernel takes 1 µs; {collectives}"
    tool = {"cupti": "CUPTI", "nsys": "Nsight Systems"}.get(source.tool, source.tool)
    collectives = f"collectives estimated for the fabric {source.fabric}" if source.fabric else _COPIES
    return f"measured: {tool} on this GPU; {collectives}"


#: GPUs in one NVLink domain of a rack.
_RACK = 72
_MOST_GROUPS = 3
_MOST_GPUS = 3
#: Rows of ``launches`` that all changes together may place: the largest steps try only the first few changes.
_MOST_ROWS = 2_000_000
_PEAK = "bf16"
#: A step, or a clock, above this share of the other is not faster.
_FASTER = 0.99
#: Advice for the host that leaves more than this share of the step is none.
_WORTH = 0.999
_MOST_LINES = 3
#: Of so many of the best changes, every two are priced together.
_PAIRED = 3
#: Published gains of ``separate=``: calls at once share the links, which is estimated.
_SEPARATE = (
    "a communicator per kind of collective: measured throughput was 8.5% and 20% higher with one for FSDP's "
    "reduce-scatters (facebookresearch/fairscale#897), and about 15% together with SHARP (NVIDIA/Megatron-LM#2663)"
)


_Lever = Literal["gpu", "nics", "nvlink", "domains", "host", "streams", ""]


@dataclass(frozen=True)
class _Change:
    """A change in words, and as an option of ``fakedist time``; what it follows from, or its source.

    Two changes of one ``lever`` make no pair, and those without one, which are bounds, make none at all.
    """

    title: str
    option: str
    value: str
    lever: _Lever
    evidence: str = ""


def find_gains(
    tables: Mapping[str, pd.DataFrame], models: Models, job: Job | None, time: StepBreakdown, prices: PriceList
) -> list[TimeGain]:
    """The step with each change that applies and with the best two, the shortest first.

    Only another GPU or fabric has prices of its own. Every other change places the launches again.

    Args:
        tables: ``launches`` (not empty), ``work``, ``calls``, ``groups`` and ``layers``; with lines also
            ``operation_stacks`` and ``stacks``.
        models: What the step was priced with.
        time: The step as it is.
        prices: Its prices.

    Raises:
        RunDirectoryError: The tables are damaged.
    """
    changed = _ChangedStep(tables, models, job, prices)
    most = max(_MOST_ROWS // len(tables["launches"]), 1)
    singles: dict[_Change, TimeGain] = {}
    for change in [*_changes(time, models, tables)][:most]:
        with suppress(JobError):  # the step lacks what the change is about
            gain = changed.priced([change])
            why = "" if gain.step_us < _FASTER * time.step_us else gain.why
            if not change.evidence or gain.step_us < _WORTH * time.step_us:
                singles[change] = replace(gain, why=change.evidence or why)
    apart = [change for change in singles if change.lever == "streams"]
    for bound in [change for change in singles if change.value == "overlap"] if apart else []:
        # Whatever is changed about overlap, this is the most of it.
        best = min([changed.priced([bound, *apart]), *(singles[each] for each in (bound, *apart))], key=_by_step)
        singles[bound] = replace(best, title=bound.title, why="")
    pairs = [changed.priced(pair) for pair in _pairs(singles, time)[: max(most - len(singles), 0)]]
    best_pair = min(pairs, key=_by_step, default=None)
    least_us = _FASTER * min((gain.step_us for change, gain in singles.items() if change.lever), default=0.0)
    gains = [*singles.values()]
    if best_pair is not None and best_pair.step_us < least_us:
        gains.append(replace(best_pair, why="", is_pair=True))
    return sorted(gains, key=_by_step)


def _by_step(gain: TimeGain) -> float:
    return gain.step_us


def _pairs(singles: Mapping[_Change, TimeGain], time: StepBreakdown) -> list[tuple[_Change, _Change]]:
    """Every two of the three changes of different levers that shorten the step most."""
    best: dict[str, _Change] = {}
    for change, gain in sorted(singles.items(), key=lambda item: item[1].step_us):
        if change.lever and gain.step_us < _FASTER * time.step_us:
            best.setdefault(change.lever, change)
    return [*combinations([*best.values()][:_PAIRED], 2)]


class _ChangedStep:
    """A step that is priced with changes; ``tables`` and ``prices`` are those of :func:`find_gains`."""

    def __init__(self, tables: Mapping[str, pd.DataFrame], models: Models, job: Job | None, prices: PriceList) -> None:
        self._tables, self._models, self._job, self._prices = tables, models, job, prices
        of_work = tables["launches"]["work"].to_numpy("i8")
        self._counts = np.bincount(of_work[of_work >= 0], minlength=len(tables["work"]))
        # Pairs have what their parts were priced with.
        self._on_gpu = functools.cache(self._priced_on)
        self._calls: dict[tuple[str, Fabric], Communication] = {}

    def _priced_on(self, gpu: str) -> tuple[Models, pd.DataFrame]:
        models = _on(GPUS[gpu], self._models, self._job)
        return models, models.prices.price(self._tables["work"], self._counts)

    def _communication(self, gpu: GpuSpec, network: JobNetwork) -> Communication:
        key = gpu.name, network.fabric
        if key not in self._calls:
            self._calls[key] = communication_for(self._tables, gpu, network)
        return self._calls[key]

    def priced(self, changes: Sequence[_Change]) -> TimeGain:
        """The step with all of some changes; JobError if it lacks what one is about."""
        models = self._models
        prices = self._prices.work
        why = ""
        for change in (each for each in changes if each.option == "--gpu"):
            models, prices = self._on_gpu(change.value)
            why = _why_not_faster(models)
        what_ifs = [change for change in changes if change.option == "--what-if"]
        network = _with(models, [change.value for change in what_ifs])
        is_alike = models is self._models and network.fabric == models.network.fabric
        calls = self._prices.calls if is_alike else None
        calls = calls or self._communication(models.gpu, network)
        rows = self._tables["launches"]
        for what_if in network.what_ifs:
            rows, calls = changed_launches(what_if, rows, calls, self._tables)
        step = StepLaunches(rows, self._tables["work"], prices, calls).place(models.host.costs)
        titles = [
            f"{change.title}, fabric {models.network.fabric.name}" if change.option == "--gpu" else change.title
            for change in changes
        ]
        options = [f"--gpu {change.value}" for change in changes if change.option == "--gpu"]
        options += [f"--what-if {'+'.join(change.value for change in what_ifs)}"] if what_ifs else []
        return TimeGain(" and ".join(titles), " ".join(options), step.placed.end_us, why)


def _changes(time: StepBreakdown, models: Models, tables: Mapping[str, pd.DataFrame]) -> Iterator[_Change]:
    """The changes that may matter: of links that calls use, of a host that is waited for, of the GPU."""
    between, within = (
        [row for row in time.by_group if row.group_size > 1 and (row.num_nodes > 1) is over] for over in (True, False)
    )
    if between:
        yield _Change("twice the NIC bandwidth", "--what-if", "bandwidth=2x", "nics")
    if within and (models.network.fabric.nvlink_bandwidth or models.gpu.nvlink_bandwidth):
        yield _Change("twice the NVLink bandwidth", "--what-if", "bandwidth=nvlink:2x", "nvlink")
    if between and models.gpu.nvlink_bandwidth and models.network.fabric.gpus_per_node < _RACK:
        yield _Change(f"NVLink domains of {_RACK} GPUs", "--what-if", f"gpus-per-node={_RACK}", "domains")
    if time.launch_gap_us or any(part.kind == "host" for part in time.critical_path):
        yield _Change("a host that launches in no time", "--what-if", "no-host-waits", "")
        yield _Change("a host twice as fast", "--what-if", "host=2x", "host")
        yield _Change("a host that never waits for the GPU", "--what-if", "no-sync", "")
        yield from _host_changes(time, tables)
    for spec in faster_gpus(models.gpu):
        yield _Change(spec.name, "--gpu", spec.name, "gpu")
    kinds: dict[str, set[str]] = {}
    for row in time.by_group:
        kinds.setdefault(row.group, set()).add(row.operation)
    for group in [name for name, operations in kinds.items() if len(operations) > 1 and name][:_MOST_GROUPS]:
        title = f"a communicator per kind of collective: {group}"
        yield _Change(title, "--what-if", f"separate={group}", "streams", _SEPARATE)
    if any(row.exposed_us for row in time.by_group):
        yield _Change("at most, with perfect overlap: nothing waits for a collective", "--what-if", "overlap", "")
    if time.by_group:
        yield _Change("no overlap: everything one after another", "--what-if", "no-overlap", "")


def _host_changes(time: StepBreakdown, tables: Mapping[str, pd.DataFrame]) -> Iterator[_Change]:
    """Advice on a late host, each piece with what it follows from."""
    for wait in [wait for wait in time.host_waits if wait.idle_us and wait.line][:_MOST_LINES]:
        line = wait.line.partition(" (")[0].rpartition("/")[2]
        title = {
            "read": f"no value of the GPU is read at {line}",
            "copy": f"the copy at {line} is pinned and non-blocking",
            "synchronize": f"the host does not synchronize {'after' if wait.is_after else 'at'} {line}",
        }[wait.kind]
        times = "once" if wait.num_waits == 1 else f"{wait.num_waits:,} times"
        yield _Change(
            title,
            "--what-if",
            f"no-sync={line}",
            "host",
            f"{line}: the host waits {times}, and the GPU is idle for {format_us(wait.idle_us)} because of it",
        )
    launches, work = tables["launches"], tables["work"]
    loop, per_parameter = loop_of_optimizer(launches, work)
    if loop.any():
        why = f"the optimizer launches {int(loop.sum()):,} kernels, {per_parameter:.0f} for each parameter"
        yield _Change("an optimizer with foreach=True or fused=True", "--what-if", "foreach", "host", why)
    bound = max(launch_bound(time.layers), key=lambda row: row.launch_gap_us, default=None)
    if bound is None:
        return
    why = f"{bound.name}: the host takes {format_us(bound.host_us)} to launch {format_us(bound.total_us)} of kernels"
    yield _Change(f"CUDA graphs for {bound.name}", "--what-if", f"cuda-graphs={bound.name}", "host", why)
    if not _is_compiled(tables, bound):
        title = f"torch.compile for {bound.name}: launches without torch's operations, no kernel fused"
        yield _Change(title, "--what-if", f"compile={bound.name}", "host", why)


def launch_bound(layers: Sequence[LayerTime]) -> list[LayerTime]:
    """The layers whose kernels take less time than the host takes to launch them, in their order.

    A layer that is in another such layer counts with that one; a whole model does not count, only what is in it.
    """
    bound: list[LayerTime] = []
    inside = -1  # depth of the last one: deeper rows after it are in it
    for row in layers:
        if inside >= 0 and row.depth > inside:
            continue
        inside = -1
        if row.depth and row.name and row.host_us > row.total_us and row.launch_gap_us:
            bound.append(row)
            inside = row.depth
    return bound


def _is_compiled(tables: Mapping[str, pd.DataFrame], bound: LayerTime) -> bool:
    """Whether any of a layer's kernels is one that Inductor made."""
    own = chosen_layers(bound.name, tables["layers"])
    rows = tables["launches"][own[tables["launches"]["layer"].to_numpy("i8")]]
    names = tables["work"]["name"].astype(str).iloc[rows["work"][rows["work"] >= 0].to_numpy("i8")]
    return bool(names.str.startswith("triton_").any())


def faster_gpus(gpu: GpuSpec) -> list[GpuSpec]:
    """The next models for a data centre, by their bf16 peak and memory bandwidth; of a GPU file, the one it is like."""
    own = GPUS.get(gpu.like or gpu.name, gpu)
    if not own.nvlink_bandwidth:
        return []
    faster = [
        spec
        for spec in GPUS.values()
        if spec.nvlink_bandwidth
        and spec.name != own.name
        and spec.compute_capability >= own.compute_capability
        and spec.peak_flops[_PEAK] >= own.peak_flops[_PEAK]
        and spec.memory_bandwidth >= own.memory_bandwidth
    ]
    return faster[:_MOST_GPUS]


def _on(gpu: GpuSpec, models: Models, job: Job | None) -> Models:
    chosen = NetworkChoice(interferes=models.network.interferes, experts=models.network.experts)
    network = network_of(gpu, job, chosen, models.network.nccl)
    return Models(gpu, prices_of(gpu), network, models.host.next_to(gpu))


def _why_not_faster(models: Models) -> str:
    clock = models.prices.clock if isinstance(models.prices, KernelTimes) else None
    if clock is None or clock.fraction > _FASTER:
        return ""
    return f"{models.gpu.name} is held by its power limit of {clock.watts:,.0f} W at {clock.fraction:.0%} of the clock"


def _with(models: Models, changes: Sequence[str]) -> JobNetwork:
    """The network with changes, of which the step's launches may have a part."""
    what_ifs = tuple(map(read_what_if, changes))
    fabric = models.network.fabric
    for what_if in what_ifs:
        fabric = changed_fabric(what_if, fabric, models.gpu.nvlink_bandwidth)
        if what_if.gpus_per_node is not None:
            per_gpu = fabric.nics_per_node / fabric.gpus_per_node
            nics = max(math.floor(what_if.gpus_per_node * per_gpu + 0.5), 1)
            fabric = replace(fabric, gpus_per_node=what_if.gpus_per_node, nics_per_node=nics)
    return replace(models.network, fabric=fabric, what_ifs=what_ifs)
