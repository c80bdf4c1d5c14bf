"""Prices a run's step for another GPU or fabric. Nothing runs, and the memory stays that of the run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pandas as pd

from fakedist.analysis.memory_tables import fold_layers
from fakedist.analysis.routed_blocks import EXCHANGES
from fakedist.cost_model.busiest_rank import ExpertsLoad, at_pace, recorded_load
from fakedist.cost_model.estimated import (
    Models,
    NetworkChoice,
    StepTimes,
    estimate_times,
    find_gains,
    network_of,
    prices_of,
)
from fakedist.cost_model.hosts import HostModel, host_model
from fakedist.cost_model.job.job_times import rank_throughput
from fakedist.cost_model.nccl.settings import Nccl
from fakedist.cost_model.step import MeasuredPrices, PriceList
from fakedist.errors import JobError, RunDirectoryError
from fakedist.gpu.models.catalogue import find_gpu
from fakedist.gpu.models.spec import GpuSpec
from fakedist.options import Job
from fakedist.options.pricing import Pricing
from fakedist.router_load import RouterLoad, RouterPass
from fakedist.rundir.directory import Manifest
from fakedist.rundir.environment import check_variable
from fakedist.rundir.step_time import StepBreakdown, StepTime
from fakedist.rundir.summary import Summary
from fakedist.rundir.table_rows import TABLES

#: :meth:`fakedist.Run.table`.
ReadTable = Callable[..., pd.DataFrame]
#: Notes that pricing makes anew.
_PRICING_NOTES = ("only_collectives_are_estimated", "collectives_estimated", "nccl_environment", "experts_load")
#: What to type for a run whose launches can be priced.
_HINT = "fakedist profile --device virtual -o RUN ... makes a run whose step any GPU can be priced for"


def gpu_of(manifest: Manifest, name: str | None, power_watts: float | None) -> GpuSpec:
    """The GPU model to price for: a known one or a GPU file, by default the run's own; ``power_watts`` replaces its
    limit.

    Raises:
        JobError: fakedist has no such model, or the file is not valid.
        RunDirectoryError: The run's own GPU model is not known.
    """
    if name is not None:
        return find_gpu(name, power_watts)
    if manifest.gpu_model is None:
        raise RunDirectoryError("the run's own GPU model is not known", "name a GPU: --gpu h100-80g")
    return manifest.gpu_model if power_watts is None else replace(manifest.gpu_model, watts=power_watts)


def check_measured(summary: Summary, pricing: Pricing) -> None:
    """Raise RunDirectoryError if another GPU, power limit, host or table of times is wanted for measured kernels."""
    choices = (pricing.gpu, pricing.power_watts, pricing.times, pricing.host)
    if is_traced(summary) and any(choice is not None for choice in choices):
        raise RunDirectoryError(
            "the run's kernels were measured on a GPU, so only its collectives can be priced again",
            "fakedist time RUN --fabric NAME; fakedist profile --device virtual makes a run for any GPU",
        )


def is_traced(summary: Summary) -> bool:
    """Whether a tool traced the kernels of the timed step, so that only collectives are estimated."""
    return summary.kernels is not None and summary.kernels.tool != "model"


def times_of(manifest: Manifest, gpu: GpuSpec, times: str | None) -> str | None:
    """The calibration table to price by: the given one, else the run's own if this is its GPU."""
    job, own = manifest.job, manifest.gpu_model
    if times is not None or job is None or own is None or own.product != gpu.product:
        return times
    return job.times


def price_again(
    manifest: Manifest, summary: Summary, table: ReadTable, models: Models, *, gains: bool = False
) -> StepTimes:
    """The times of a run's step on a GPU.

    Args:
        gains: Price the changes that may shorten the step, too, unless its kernels were measured.

    Raises:
        JobError: The step lacks what a what-if changes.
        RunDirectoryError: The run has no launches to price, or is damaged.
    """
    tables = tables_to_price(manifest, summary, table, models.network.experts, measured=True)
    job = manifest.job
    assert job is not None
    traced = summary.kernels if is_traced(summary) else None
    if traced is not None:
        traced = replace(traced, notes=[note for note in traced.notes if note.code not in _PRICING_NOTES])
        models = replace(models, prices=MeasuredPrices(traced.gpu, tables["launches"]), host=HostModel())

    def whole(breakdown: StepBreakdown, prices: PriceList) -> StepTime:
        tokens, samples = rank_throughput(tables, breakdown, job.rank, job.world_size)
        scale = 0.0
        before = summary.time
        if summary.timed and (recorded := summary.timed[1].host) is not None:
            speed = math.prod(what_if.host for what_if in models.network.what_ifs)
            scale = models.host.time.scale / recorded.scale / speed
        return StepTime(
            **vars(breakdown),
            loading_us=0.0 if before is None else before.loading_us * scale,
            collector_us=0.0 if before is None else before.collector_us * scale,
            throughput=tokens,
            sample_throughput=samples,
            gains=find_gains(tables, models, job, breakdown, prices) if gains and traced is None else [],
        )

    return estimate_times(tables, fold_layers(tables["layers"]), models, traced=traced, whole=whole)


#: Steps over which a load that is drawn is averaged.
_STEPS = 12


def nccl_of(summary: Summary) -> Nccl:
    """NCCL as the run recorded it."""
    outside = summary.estimated_outside
    return Nccl() if outside is None else Nccl(outside.nccl_environment, outside.nccl_version)


def tables_to_price(
    manifest: Manifest,
    summary: Summary,
    table: ReadTable,
    experts: ExpertsLoad | None = None,
    *,
    measured: bool = False,
) -> dict[str, pd.DataFrame]:
    """The tables that pricing a step needs, at the pace of the busiest rank; its kernels may be measured only if
    ``measured``. ``experts`` is the load; None: the recorded one.

    Raises:
        RunDirectoryError: The run has no launches to price, or is damaged.
        JobError: Nothing is known to follow the load.
    """
    if why := _why_not(manifest, summary, measured=measured):
        raise RunDirectoryError(f"the run has no launches to price: {why}", _HINT)
    launches = table("launches", TABLES["launches"].names)
    if not len(launches):
        reasons = [note.text for note in summary.notes if note.code == "not_timed"]
        raise RunDirectoryError(
            f"the run has no launches to price: {reasons[0] if reasons else 'no step was timed'}", _HINT
        )
    names = ("work", "ranges", "layers", "calls", "groups", "operation_stacks", "routed", "steps")
    tables = {"launches": launches, "stacks": table("stacks", ["line"])} | {name: table(name) for name in names}
    return at_pace(tables, experts or ExpertsLoad())


def _why_not(manifest: Manifest, summary: Summary, *, measured: bool) -> str:
    if manifest.imported is not None:
        return f"it was imported from {manifest.imported.tool}, which measured its kernels"
    if manifest.job is None:
        return "it is a memory snapshot"
    if is_traced(summary) and not measured:
        return "its kernels were measured on a GPU"
    if is_traced(summary) and summary.kernels is not None and not summary.kernels.fabric:
        reasons = [note.text for note in summary.kernels.notes if note.code == "collectives_not_priced"]
        return reasons[0] if reasons else "its kernels were measured by an older fakedist"
    if not manifest.job.kernels:
        return "it was made with --no-kernels"
    if manifest.job.device == "cuda" and not is_traced(summary):
        return "no step was timed on its GPU"
    return "" if manifest.gpu_model else "it never reached its GPU, or an older fakedist made it, which kept none"


def models_of(pricing: Pricing, manifest: Manifest, summary: Summary, experts: ExpertsLoad | None = None) -> Models:
    """The models to price a run with; ``experts`` replaces the load that it is priced for.

    Raises:
        JobError: There is no such GPU model, fabric or what-if, a file is not valid, or a variable of NCCL's makes no
            difference.
        SetupError: The calibration table cannot be read, or is of another GPU.
        RunDirectoryError: The run's own GPU model is not known, or its kernels were measured and another GPU is wanted.
    """
    check_measured(summary, pricing)
    for name, value in pricing.nccl_env.items():
        check_variable(name, value)
    gpu = gpu_of(manifest, pricing.gpu, pricing.power_watts)
    chosen = NetworkChoice(
        fabric=pricing.fabric,
        gpus_per_node=pricing.gpus_per_node,
        interferes=pricing.interference,
        nccl=pricing.nccl_env,
        experts=experts or experts_of(pricing.router_load, manifest.job, summary),
        what_if=pricing.what_if,
    )
    prices = prices_of(gpu, times_of(manifest, gpu, pricing.times))
    network = network_of(gpu, manifest.job, chosen, nccl_of(summary))
    return Models(gpu, prices, network, host_of(pricing, gpu, manifest, summary))


def experts_of(load: str | None, job: Job | None, summary: Summary) -> ExpertsLoad:
    """The load of experts to price a run for; None: the run's own.

    Raises:
        JobError: No router of the run picked experts by made-up values, or the load's file is for another job.
    """
    facts = summary.router_load
    if load is None:
        return ExpertsLoad() if facts is None else recorded_load(facts)
    if facts is None or not facts.num_layers or job is None:
        raise JobError(
            f"--router-load {load} has no router to price: none of the run's picked experts by generated values",
            "leave it out",
        )
    sizes = [call.group_size for call in summary.collectives if call.operation.startswith(EXCHANGES)]
    ranks = facts.ranks or list(range(max((size for size in sizes if facts.num_experts % size == 0), default=1)))
    chosen = RouterLoad(load, job.seed)
    most = 0
    for layer in range(facts.num_layers):
        for step in range(_STEPS):
            call = RouterPass(layer, step, step, facts.tokens, facts.num_experts, facts.top_k)
            most += int(chosen.received(call, ranks).max())
    busiest = most / (facts.num_layers * _STEPS * facts.tokens * facts.top_k)
    return ExpertsLoad(load, busiest, is_recorded=False, seed=job.seed, rank=job.rank, ranks=tuple(ranks))


def host_of(pricing: Pricing, gpu: GpuSpec, manifest: Manifest, summary: Summary) -> HostModel:
    """The host to price a run for: the given one, else the job's, else the usual one of the GPU."""
    chosen = pricing.host or (None if manifest.job is None else manifest.job.host)
    recorded = None if summary.kernels is None else summary.kernels.host
    if recorded is None:
        return host_model(gpu, chosen)
    return host_model(gpu, chosen, recorded.machine_us, recorded.clock, depth=recorded.queue_depth)
