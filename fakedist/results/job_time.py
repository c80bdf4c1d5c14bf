"""Several ranks of one job, priced together: the step of the whole job."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import pandas as pd

from fakedist.analysis.topology import Pipeline, find_pipeline
from fakedist.cost_model.breakdown import PEAK_DTYPE
from fakedist.cost_model.estimated import Models
from fakedist.cost_model.hosts import HostModel
from fakedist.cost_model.job.job_times import JobRank, JobTimes, job_times, tokens_text
from fakedist.errors import FakedistError, JobError, RunDirectoryError
from fakedist.findings.finding_all import find_job_faults
from fakedist.gpu.models.spec import GpuSpec
from fakedist.options.pricing import Pricing, PricingOptions
from fakedist.results.job_ranks import JobKinds, check_one_job, find_job_kinds, rank_program
from fakedist.results.opening import open_run_directory
from fakedist.results.repricing import experts_of, host_of, models_of, tables_to_price
from fakedist.results.run import Run, findings_of
from fakedist.rundir import time_notes
from fakedist.rundir.directory import rank_directories
from fakedist.rundir.finding import Finding
from fakedist.rundir.job_time import FlopsRate, JobStep, StageTime, Throughput
from fakedist.rundir.notes import Note, listed
from fakedist.rundir.plain import to_plain
from fakedist.rundir.step_time import HostTime
from fakedist.units import format_us

if TYPE_CHECKING:
    from fakedist.report.figures.time_figures import Figure


def stages_of_job(path: Path) -> Pipeline:
    """The pipeline that a run's rank is in.

    Raises:
        JobError: Its groups show none, or several could be one.
        RunDirectoryError: It is not a run directory, or is damaged.
    """
    run = open_run_directory(path)
    job = run.manifest.job
    rank = 0 if job is None else job.rank
    pipeline = find_pipeline(run.table("groups"), run.table("calls"), rank)
    if pipeline is None:
        raise JobError(
            f"the groups of rank {rank} show no pipeline: none is named for one, and it sends to no other rank",
            "name the ranks to run: --rank 0,64",
        )
    return pipeline


class JobTime:
    """The step of a job, from runs in the order of their ranks. ``fakedist.time_job`` returns one.

    ``lanes`` has columns ``rank``, ``lane`` (forward, recompute, backward, optimizer, other, communication, bubble),
    ``start_us``, ``end_us``. Stretches of different lanes may overlap.
    """

    def __init__(self, summary: JobStep, runs: Sequence[Run], lanes: pd.DataFrame) -> None:
        self.summary = summary
        self.runs = list(runs)
        self.lanes = lanes

    def stages(self) -> pd.DataFrame:
        """A row for each rank: the attributes of :class:`fakedist.rundir.job_time.StageTime`."""
        return pd.DataFrame(to_plain(self.summary.stages))

    def figure(self) -> Figure:
        """The ranks' activity during the step, a lane for each, as a plotly figure."""
        from fakedist.report.figures.time_figures import stage_lanes  # plotly is imported when a chart is wanted

        return stage_lanes(self.summary, self.lanes)

    def __repr__(self) -> str:
        return f"{type(self).__name__}" + "".join(f"\n  {name}: {text}" for name, text in self._figures())

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in self._figures())
        return f"<table>{rows}</table>{self.stages().to_html(index=False)}"

    def _figures(self) -> list[tuple[str, str]]:
        step, done = self.summary, self.summary.throughput
        rows = [("ranks", f"{', '.join(str(stage.rank) for stage in step.stages)} of {step.world_size:,}")]
        rows += [("GPU", f"{step.gpu}, fabric {step.fabric}"), ("step", format_us(step.step_us))]
        if step.step_low_us is not None and step.step_high_us is not None:
            rows.append(("90 % interval", f"{format_us(step.step_low_us)} to {format_us(step.step_high_us)}"))
        if done.tokens_per_s_per_gpu is not None:
            rows.append(("tokens/s per GPU", f"{done.tokens_per_s_per_gpu:,.0f}"))
        return [*rows, ("slowest", f"rank {step.slowest_rank}"), ("most memory", f"rank {step.memory_rank}")]


def time_job(
    runs: Sequence[str | os.PathLike[str] | Run],
    gpu: str | None = None,
    *,
    tokens_per_step: int | None = None,
    micro_batches: int | None = None,
    **options: Unpack[PricingOptions],
) -> JobTime:
    """Estimate the step of a job from the runs of several of its ranks: one of each pipeline stage.

    Args:
        runs: The runs, or their directories.
        gpu: A known GPU model, such as "b200", or a GPU file; None for the runs' own.
        tokens_per_step: Of all ranks; None to find them in the runs.
        micro_batches: Those beyond the recorded ones repeat a steady one. None for those that were recorded.
        options: See :class:`fakedist.options.definition.Pricing`.

    Raises:
        JobError: The runs are not of one job, or of one rank; there is no such GPU, fabric or what-if; or the recorded
            micro-batches do not show what a further one would do.
        SetupError: The calibration table cannot be read, or is of another GPU.
        RunDirectoryError: A run has no launches to price, or is damaged.
    """
    opened = [one if isinstance(one, Run) else open_run_directory(Path(one)) for one in runs]
    first, ranks = check_one_job(opened)
    job = first.manifest.job
    assert job is not None
    models, tables = price_together(ranks, Pricing(gpu, **options))
    times = job_times(tables, frozenset(ranks), job.world_size, models, micro_batches=micro_batches)
    pipeline = _pipeline(first, job.rank)
    stages = [_stage(ranks[one.rank], one, pipeline) for one in times.ranks]
    notes, throughput = _throughput(times, job.world_size, models.gpu, pipeline, tokens_per_step)
    throughput = _with_samples(throughput, times, job.world_size, micro_batches)
    if micro_batches is not None:
        throughput = replace(throughput, num_micro_batches=micro_batches)
    summary = JobStep(
        world_size=job.world_size,
        gpu=models.prices.product,
        fabric=models.network.fabric.name,
        step_us=times.step_us,
        step_low_us=times.low_us,
        step_high_us=times.high_us,
        least_us=times.least_us,
        stages=stages,
        slowest_rank=min(stages, key=lambda stage: stage.bubble_us).rank,
        memory_rank=max(stages, key=lambda stage: stage.peak_reserved_bytes).rank,
        throughput=throughput,
        notes=[*_notes(times, micro_batches), *notes, time_notes.host_time(models.host.time)],
    )
    lanes = pd.concat([one.lanes.assign(rank=one.rank) for one in times.ranks], ignore_index=True)
    return JobTime(summary, [ranks[one.rank] for one in times.ranks], lanes[["rank", "lane", "start_us", "end_us"]])


def price_together(
    ranks: Mapping[int, Run], pricing: Pricing
) -> tuple[Models, Iterator[tuple[int, dict[str, pd.DataFrame]]]]:
    """The models that the runs of one job are priced with, and the tables of each rank, read one by one."""
    first = next(iter(ranks.values()))
    models = models_of(pricing, first.manifest, first.summary)
    clocked = next((run for run in ranks.values() if _host_of(run).clock is not None), first)
    models = replace(models, host=host_of(pricing, models.gpu, first.manifest, clocked.summary))
    return models, _tables(ranks, models.host.time.machine_us, pricing.router_load)


@dataclass(frozen=True)
class JobRuns:
    """The runs of several ranks of a job, by rank.

    Attributes:
        path: The directory that has them; None if they are from several.
        job: The step of the whole job; None if these are not the runs of a rank of each pipeline stage.
        why_no_step: Why there is none.
        kinds: Which ranks of the job run alike; None where the runs do not show it.
    """

    path: Path | None
    runs: Sequence[Run]
    job: JobTime | None = None
    why_no_step: str = ""
    kinds: JobKinds | None = None

    @property
    def findings(self) -> list[Finding]:
        """Faults that the rules of docs/findings.md see by comparing the ranks."""
        return self._found[0]

    @property
    def finding_notes(self) -> list[Note]:
        """Rules of these that failed."""
        return self._found[1]

    @cached_property
    def _found(self) -> tuple[list[Finding], list[Note]]:
        cases = {}
        for run in self.runs:
            if (rank := run.summary.rank) is not None:
                cases[rank] = run.case
                run.case.calls = partial(rank_program, rank, run)
        return findings_of(partial(find_job_faults, cases)) if len(cases) > 1 else ([], [])


def open_job_runs(path: Path, ranks: Collection[int] | None = None) -> JobRuns:
    """Open a directory of several ranks' runs. The job's step is priced if a rank of each stage ran to its end.

    Args:
        path: The directory.
        ranks: Those to open; None for all.

    Raises:
        RunDirectoryError: It has no ranks' runs, or one of them is damaged.
    """
    opened = [open_run_directory(run).keeping_tables() for run in rank_directories(path)]
    runs = [run for run in opened if ranks is None or run.summary.rank in ranks]
    if not runs:
        raise RunDirectoryError(f"{path} holds no runs of ranks", "fakedist profile --rank stages -o DIR makes one")
    found = JobRuns(path.resolve(), runs, kinds=_kinds_of(runs))
    try:
        return replace(found, job=_job_of(runs))
    except FakedistError as error:
        return replace(found, why_no_step=error.message)


def _kinds_of(runs: Sequence[Run]) -> JobKinds | None:
    try:
        _, by_rank = check_one_job(runs)
        return find_job_kinds(by_rank, {rank: rank_program(rank, run) for rank, run in by_rank.items()})
    except FakedistError:
        return None


def _job_of(runs: Sequence[Run]) -> JobTime:
    first, by_rank = check_one_job(runs)
    if failed := [rank for rank, run in by_rank.items() if not run.summary.exit.ended_well]:
        raise JobError(f"rank {failed[0]} did not end well", "")
    pipeline = stages_of_job(first.path).ranks
    if missing := [rank for rank in pipeline if rank not in by_rank]:
        raise JobError(
            f"the runs of ranks {', '.join(map(str, missing))}, other stages of the pipeline, are missing", ""
        )
    return time_job([by_rank[rank] for rank in pipeline])


def check_every_stage(runs: Sequence[Run]) -> None:
    """Raise JobError if stages of the pipeline that the runs' ranks are in are missing."""
    ranks = {run.summary.rank for run in runs}
    pipeline = None if runs[0].summary.rank is None else _pipeline(runs[0], runs[0].summary.rank)
    if pipeline and (missing := [str(rank) for rank in pipeline.ranks if rank not in ranks]):
        lacking = f"{listed(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        raise JobError(
            f"the step of the job needs a rank of each stage of its pipeline: {lacking}",
            "fakedist profile --rank stages runs them",
        )


def _tables(
    runs: Mapping[int, Run], machine_us: float | None, load: str | None
) -> Iterator[tuple[int, dict[str, pd.DataFrame]]]:
    """The tables of each rank, with the host's time as if the machine of this score had recorded it."""
    for rank, run in runs.items():
        experts, own_us = experts_of(load, run.manifest.job, run.summary), _host_of(run).machine_us
        tables = tables_to_price(run.manifest, run.summary, run.table, experts)
        launches = tables["launches"]
        if machine_us is not None and own_us is not None and "dispatch_us" in launches:
            tables["launches"] = launches.assign(dispatch_us=launches["dispatch_us"] * (machine_us / own_us))
        yield rank, tables


def _host_of(run: Run) -> HostTime:
    kernels = run.summary.kernels
    return HostModel().time if kernels is None or kernels.host is None else kernels.host


def _pipeline(run: Run, rank: int) -> Pipeline | None:
    try:
        return find_pipeline(run.table("groups"), run.table("calls"), rank)
    except JobError:
        return None


def _stage(run: Run, times: JobRank, pipeline: Pipeline | None) -> StageTime:
    parts = times.parts
    return StageTime(
        rank=times.rank,
        stage=pipeline.ranks.index(times.rank) if pipeline and times.rank in pipeline.ranks else None,
        run_directory=str(run.path),
        peak_allocated_bytes=run.peak_allocated_bytes,
        peak_reserved_bytes=run.peak_reserved_bytes,
        capacity_bytes=run.capacity_bytes,
        fits=run.fits,
        compute_us=parts.compute_us,
        communication_us=parts.communication_us,
        bubble_us=parts.bubble_us,
        host_us=parts.host_us,
        wait_us=parts.wait_us,
        own_us=parts.own_us,
        num_exchanged=times.num_exchanged,
        num_unmatched=times.num_unmatched,
    )


def _notes(times: JobTimes, micro_batches: int | None) -> list[Note]:
    notes = []
    if micro_batches is not None and micro_batches > times.ranks[0].num_recorded:
        notes.append(time_notes.micro_batches_repeated(times.ranks[0].num_recorded, micro_batches))
    notes += [time_notes.exchanges_elsewhere(rank.rank, rank.elsewhere) for rank in times.ranks if rank.elsewhere]
    notes += [time_notes.unmatched_calls(rank.rank, rank.num_unmatched) for rank in times.ranks if rank.num_unmatched]
    if lacking := [rank.rank for rank in times.ranks if rank.num_lacking]:
        notes.append(time_notes.receives_lacking(lacking))
    if len(times.ranks) > 1 and not any(rank.num_exchanged for rank in times.ranks):
        notes.append(time_notes.exchange_nothing([rank.rank for rank in times.ranks]))
    return notes


def _throughput(
    times: JobTimes, world_size: int, gpu: GpuSpec, pipeline: Pipeline | None, given: int | None
) -> tuple[list[Note], Throughput]:
    notes = []
    tokens, source, why = (given, "given", "") if given is not None else _tokens(times)
    if why:
        notes.append(time_notes.tokens_not_known(why))
    micro_batches = {rank.tokens.num_micro_batches for rank in times.ranks if rank.tokens.number}
    rates, why = _rates(times, gpu, pipeline)
    if why:
        notes.append(time_notes.flops_not_counted(why))
    per_s = None if tokens is None else tokens / times.step_us * 1e6 / world_size
    done = Throughput(
        tokens_per_step=tokens,
        tokens_from=source,
        tokens_per_s_per_gpu=per_s,
        samples_per_step=None,
        sample_shape="",
        samples_per_s_per_gpu=None,
        num_micro_batches=micro_batches.pop() if len(micro_batches) == 1 else None,
        rates=rates,
        mfu=_mfu(times, gpu) if rates else None,
    )
    return notes, done


def _with_samples(throughput: Throughput, times: JobTimes, world_size: int, micro_batches: int | None) -> Throughput:
    """Add the samples of all ranks, if the first rank's groups and inputs show them."""
    first = times.ranks[0]
    samples = first.samples.number * first.replicas.number
    if not samples:
        return throughput
    if micro_batches is not None:
        if not first.num_recorded:
            return throughput
        samples = samples * micro_batches // first.num_recorded
    per_s = samples / times.step_us * 1e6 / world_size
    shape = first.samples.shape
    return replace(throughput, samples_per_step=samples, sample_shape=shape, samples_per_s_per_gpu=per_s)


def _tokens(times: JobTimes) -> tuple[int | None, str, str]:
    embedding = [rank for rank in times.ranks if rank.tokens.number]
    if not embedding:
        return None, "", f"rank {times.ranks[0].rank}: {times.ranks[0].tokens.why}"
    if len(embedding) > 1:
        return None, "", f"ranks {' and '.join(str(rank.rank) for rank in embedding)} both embed tokens"
    (first,) = embedding
    if not first.replicas.number:
        return None, "", first.replicas.text
    text = tokens_text(first.tokens, first.rank, first.replicas)
    return first.tokens.number * first.replicas.number, text, ""


def _mfu(times: JobTimes, gpu: GpuSpec) -> float | None:
    """Of the runs of every stage."""
    counted, peak = [rank.flops.models for rank in times.ranks], gpu.peak_flops.get(PEAK_DTYPE)
    if peak is None or any(models.num_lacking for models in counted):
        return None
    return sum(models.flops for models in counted) / len(counted) / (times.step_us * 1e-6 * peak)


def _rates(times: JobTimes, gpu: GpuSpec, pipeline: Pipeline | None) -> tuple[list[FlopsRate], str]:
    ranks = {rank.rank for rank in times.ranks}
    expected = set(pipeline.ranks) if pipeline else ranks
    if expected != ranks or (pipeline is None and len(ranks) > 1):
        named = f"the stages {sorted(expected)}" if pipeline else "one rank of each pipeline stage"
        return [], f"they need the runs of {named}"
    if lacking := sum(rank.flops.num_lacking for rank in times.ranks):
        return [], f"the FLOPs of {lacking:,} products and attentions are not known"
    peak = gpu.peak_flops.get(PEAK_DTYPE)
    made = []
    for convention, name in (("Megatron-LM", "megatron"), ("torchtitan", "torchtitan")):
        flops = sum(float(getattr(rank.flops, name)) for rank in times.ranks) / len(times.ranks)
        if not flops:
            return [], "no product was seen in a forward pass"
        rate = flops / times.step_us * 1e6
        made.append(FlopsRate(convention, rate / 1e12, rate / peak if peak else None))
    return made, ""
