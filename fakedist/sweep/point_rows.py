"""The row of a point: how its ranks ended, and what the step takes with the stages that did not run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fakedist.cost_model.job.job_times import tokens_of
from fakedist.errors import FakedistError, JobError, RunDirectoryError, WorldError
from fakedist.launcher.executors.task import TaskResult
from fakedist.rank_list import parse_rank_list
from fakedist.results.job_time import JobTime, stages_of_job, time_job
from fakedist.results.opening import open_run_directory
from fakedist.results.run import Run
from fakedist.rundir.directory import JOURNAL_NAME
from fakedist.rundir.job_time import StageTime
from fakedist.rundir.journal import read_journal
from fakedist.rundir.outcome import Outcome
from fakedist.rundir.records import OutcomeRecord
from fakedist.rundir.summary import Summary
from fakedist.sweep.command import PointRun, PricedFor
from fakedist.sweep.outcomes import RankKind, RankResult, Row, Status, StepEstimate
from fakedist.sweep.plan import SweepPlan
from fakedist.units import MIB, format_bytes

#: A process's CUDA context with PyTorch where nothing is published for the GPU: "around 400MB" with CUDA 11.7 or newer,
#: which load kernels lazily (ptrblck of NVIDIA, pytorch/pytorch#109888).
CONTEXT_BYTES = 400 * MIB
#: By these errors a script or a framework refuses a layout. A subclass, such as JSONDecodeError, says something else.
_REFUSALS = ("AssertionError", "ValueError", "NotImplementedError")
_OUTPUT_CHARACTERS = 2_000
_PACKAGE = str(Path(__file__).parents[1])


def judge(result: TaskResult, rank: int, run_directory: Path, sweep: Path, context_bytes: int | None) -> RankResult:
    """How a rank ended.

    Args:
        result: What the executor says.
        rank: The rank.
        run_directory: Its run directory, which may be missing.
        sweep: The sweep's directory.
        context_bytes: Memory of the CUDA context; None for what is published.
    """
    found = RankResult(
        rank=rank,
        kind=RankKind.FAILED,
        outcome=result.outcome,
        reason=result.failure,
        output="" if result.ended_well else result.output[-_OUTPUT_CHARACTERS:],
        directory=str(run_directory.relative_to(sweep)),
        host=result.host,
        worker=result.worker,
        wall_s=result.wall_s,
        peak_rss_bytes=result.peak_rss_bytes,
    )
    if result.outcome is Outcome.ERROR:
        return found  # any files there are of an earlier run, or none
    try:
        run = open_run_directory(run_directory)
    except RunDirectoryError as error:
        return found if found.reason else replace(found, reason=error.message)
    return _with_run(found, run, context_bytes)


def _with_run(found: RankResult, run: Run, context_bytes: int | None) -> RankResult:
    summary = run.summary
    found = _with_memory(found, summary, context_bytes)
    if summary.exit.outcome is Outcome.OUT_OF_MEMORY:
        asked = summary.out_of_memory
        where = f" in {asked.layer}" if asked is not None and asked.layer else ""
        size = f": {format_bytes(asked.requested_bytes)} were asked for" if asked is not None else ""
        return replace(
            found,
            kind=RankKind.OUT_OF_MEMORY,
            reason=f"out of memory{where}{size}",
            layer="" if asked is None else asked.layer,
            line="" if asked is None else asked.line,
        )
    if summary.exit.ended_well:
        if not summary.peak_allocated_bytes and summary.left_during_init is None:
            return replace(found, reason="the script allocated nothing on the GPU")
        return replace(found, kind=RankKind.RAN, reason="", pipeline=_pipeline(run))
    told = next((each for each in read_journal(run.path / JOURNAL_NAME) if isinstance(each, OutcomeRecord)), None)
    reason = summary.exit.message or found.reason
    if reason.startswith(f"{WorldError.__name__}:"):
        reason += " (--rank stages:all or --with-peers runs more ranks)"
    line = "" if told is None or told.line.startswith(_PACKAGE) else told.line
    found = replace(found, reason=reason, line=line)
    is_refusal = (
        summary.exit.outcome is Outcome.EXCEPTION
        and summary.exit.message.partition(":")[0] in _REFUSALS
        and told is not None
        and told.last_step == 0
        and not summary.invented_values
        and not told.line.startswith(_PACKAGE)
    )
    return replace(found, kind=RankKind.INVALID) if is_refusal else found


def _with_memory(found: RankResult, summary: Summary, context_bytes: int | None) -> RankResult:
    outside = summary.estimated_outside
    published = (outside.context_bytes if outside is not None else None) or 0
    return replace(
        found,
        peak_allocated_bytes=summary.peak_allocated_bytes,
        peak_reserved_bytes=summary.peak_reserved_bytes,
        nccl_low_bytes=0 if outside is None else outside.low_bytes - published,
        nccl_high_bytes=0 if outside is None else outside.high_bytes - published,
        context_bytes=context_bytes if context_bytes is not None else published or CONTEXT_BYTES,
        capacity_bytes=summary.capacity_bytes,
    )


def _pipeline(run: Run) -> tuple[int, ...]:
    """One rank of each stage; empty if the groups show no pipeline, or it is not certain which it is."""
    try:
        return stages_of_job(run.path).ranks
    except (JobError, RunDirectoryError):
        return ()


_IN_PIPELINE = ("forward", "recompute", "backward")


def estimate_step(
    directories: Sequence[Path],
    results: Sequence[RankResult],
    pricing: PricedFor,
    tokens_per_step: int | None,
    micro_batches: int | None,
) -> tuple[StepEstimate | None, str]:
    """The step of a point, or why there is none.

    Args:
        directories: The run directories of its ranks.
        results: How the ranks ended, in the same order.
        pricing: What to price for.
        tokens_per_step: Tokens of a step, of all ranks; None to find them in the runs.
        micro_batches: Micro-batches of a step; None for those that ran.

    Raises:
        JobError: What to price for is not valid.
    """
    try:
        job = time_job(
            directories,
            pricing.gpu,
            power_watts=pricing.power_watts,
            times=pricing.times,
            fabric=pricing.fabric,
            gpus_per_node=pricing.gpus_per_node,
            moe_imbalance=pricing.moe_imbalance,
            tokens_per_step=tokens_per_step,
            micro_batches=micro_batches,
        )
    except FakedistError as error:
        return None, error.message
    stages = results[0].pipeline
    has_every_stage = set(stages) <= {each.rank for each in results}
    slowest = next(each for each in job.summary.stages if each.rank == job.summary.slowest_rank)
    found = _placed(job, slowest)
    if has_every_stage or len(stages) < 2:
        return found, ""
    return _with_formula(found, job, stages), ""


def _placed(job: JobTime, slowest: StageTime) -> StepEstimate:
    step = job.summary
    done = step.throughput
    rates = {rate.convention: rate for rate in done.rates}
    megatron, torchtitan = rates.get("Megatron-LM"), rates.get("torchtitan")
    return StepEstimate(
        step_us=step.step_us,
        low_us=step.step_low_us,
        high_us=step.step_high_us,
        bubble_us=slowest.bubble_us,
        bubble_from="placed",
        communication_us=slowest.communication_us,
        tokens_per_step=done.tokens_per_step,
        tokens_per_s_per_gpu=done.tokens_per_s_per_gpu,
        samples_per_step=done.samples_per_step,
        sample_shape=done.sample_shape,
        samples_per_s_per_gpu=done.samples_per_s_per_gpu,
        tflops_per_gpu=None if megatron is None else megatron.tflops_per_gpu,
        mfu=None if megatron is None else megatron.mfu,
        mfu_torchtitan=None if torchtitan is None else torchtitan.mfu,
        gpu=step.gpu,
        fabric=step.fabric,
    )


def _with_formula(found: StepEstimate, job: JobTime, stages: Sequence[int]) -> StepEstimate:
    """The step with the bubble of a pipeline of which only some stages ran.

    A stage waits (p - 1) / v times for what one microbatch takes on a stage, p stages of v chunks each (Narayanan et
    al., arXiv:2104.04473, section 2.2). The rank that works longest stands for every stage.
    """
    microbatches = job.summary.throughput.num_micro_batches
    run = next((each for each in job.runs if each.summary.rank == stages[0]), None)
    chunks = _chunks(run, stages) if run is not None else None
    if not microbatches or not chunks:
        return replace(found, bubble_from="not known")
    working = {stage.rank: job.summary.step_us - stage.bubble_us for stage in job.summary.stages}
    longest = max(working, key=lambda rank: working[rank])
    lanes = job.lanes[(job.lanes["rank"] == longest) & job.lanes["lane"].isin(_IN_PIPELINE)]
    passes_us = float((lanes["end_us"] - lanes["start_us"]).sum())
    bubble_us = (len(stages) - 1) / chunks * passes_us / microbatches
    step_us = working[longest] + bubble_us
    scale = step_us / found.step_us
    return replace(
        found,
        step_us=step_us,
        low_us=None if found.low_us is None else found.low_us * scale,
        high_us=None if found.high_us is None else found.high_us * scale,
        bubble_us=bubble_us,
        bubble_from="formula",
        communication_us=next(each.communication_us for each in job.summary.stages if each.rank == longest),
        tokens_per_s_per_gpu=_slowed(found.tokens_per_s_per_gpu, scale),
        samples_per_s_per_gpu=_slowed(found.samples_per_s_per_gpu, scale),
        tflops_per_gpu=_slowed(found.tflops_per_gpu, scale),
    )


def _slowed(rate: float | None, scale: float) -> float | None:
    """A rate of a step that takes ``scale`` times as long."""
    return None if rate is None else rate / scale


def _chunks(run: Run, stages: Sequence[int]) -> int | None:
    """Model chunks of each stage: how often the first sends a microbatch to the second. None if it is not seen."""
    groups, calls, launches = run.table("groups"), run.table("calls"), run.table("launches")
    ran = tokens_of(launches, run.table("work")).num_micro_batches
    own = [number for number, ranks in enumerate(groups["ranks"]) if ranks and parse_rank_list(ranks) == tuple(stages)]
    is_send = calls["operation"].astype(str).str.startswith("send")
    is_timed = calls["sequence"].isin(launches["call"])
    sent = calls[is_send & is_timed & (calls["peer"] == 1) & calls["group"].isin(own)]
    return max(1, round(len(sent) / ran)) if len(sent) and ran else None


_STATUS_OF_KIND = {
    RankKind.OUT_OF_MEMORY: Status.DOES_NOT_FIT,
    RankKind.INVALID: Status.INVALID,
    RankKind.FAILED: Status.FAILED,
}


def make_row(run: PointRun, names: tuple[str, str], results: Sequence[RankResult], plan: SweepPlan, sweep: Path) -> Row:
    """The row of a point.

    Args:
        run: What it ran.
        names: The row's ID, and the key of its run.
        results: How its ranks ended, in the order in which they ran.
        plan: The sweep.
        sweep: The sweep's directory.
    """
    row_id, key = names
    failed = next((each for each in results if each.kind is not RankKind.RAN), None)
    every = set(results[0].pipeline) <= {each.rank for each in results}
    common = Row(
        id=row_id,
        key=key,
        values=run.point.values,
        pricing=run.pricing,
        status=Status.FITS,
        ranks=tuple(results),
        has_every_stage=every,
    )
    if failed is not None:
        reason = failed.reason if len(results) == 1 else f"rank {failed.rank}: {failed.reason}"
        return replace(common, status=_STATUS_OF_KIND[failed.kind], reason=reason, line=failed.line, layer=failed.layer)
    directories = [sweep / each.directory for each in results]
    step, why = estimate_step(directories, results, run.pricing, *plan.counts_at(run.point))
    status, reason = _fit(common)
    return replace(common, status=status, reason=reason, step=step, why_no_step=why)


def _fit(row: Row) -> tuple[Status, str]:
    """Whether the fullest rank fits: what is reserved, NCCL and the context together."""
    fullest = row.fullest
    if fullest is None or not fullest.capacity_bytes:
        return Status.FITS, ""
    free = fullest.capacity_bytes - fullest.total_bytes
    if free >= 0:
        return Status.FITS, ""
    short = f"rank {fullest.rank} lacks {format_bytes(-free)}"
    parts = (
        f"{format_bytes(fullest.peak_reserved_bytes)} reserved, up to {format_bytes(fullest.nccl_high_bytes)} of NCCL, "
        f"{format_bytes(fullest.context_bytes)} of CUDA context"
    )
    fits_least = free + fullest.nccl_high_bytes - fullest.nccl_low_bytes >= 0
    return Status.MAY_NOT_FIT if fits_least else Status.DOES_NOT_FIT, f"{short}: {parts}"
