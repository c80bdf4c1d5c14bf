"""The step of a point: its ranks priced together, and the bubble of the stages that did not run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fakedist.analysis.times.throughput import tokens_of
from fakedist.errors import FakedistError
from fakedist.rank_list import parse_rank_list
from fakedist.results.job_time import JobTime, time_job
from fakedist.results.run import Run
from fakedist.run.job_time import StageTime
from fakedist.sweep.command import PricedFor
from fakedist.sweep.records import RankResult, StepEstimate

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
