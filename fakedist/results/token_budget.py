"""Time, GPU-hours, energy and cost of training on a number of tokens, from the step of a run or of a job."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fakedist.errors import JobError
from fakedist.results.job_time import JobTime, check_every_stage
from fakedist.results.run import Run

_US_PER_HOUR = 3.6e9
_HINT = "--tokens-per-step N gives them"


@dataclass(frozen=True)
class Estimate:
    """An estimated figure with the ends of its 90 % interval; None where that is not known."""

    value: float
    low: float | None
    high: float | None

    def times(self, factor: float) -> Estimate:
        """The figure and its interval, times a factor."""
        low, high = (None if end is None else end * factor for end in (self.low, self.high))
        return Estimate(self.value * factor, low, high)


@dataclass(frozen=True)
class TokenBudget:
    """Training on a number of tokens, *estimated*: its steps alone.

    Attributes:
        tokens: To train on.
        tokens_per_step: Those of a step of all ranks.
        tokens_from: The arithmetic of these, or "given".
        num_steps: Steps that read as many, the last one perhaps in part.
        num_gpus: GPUs of the job.
        gpu: Their model.
        hours: From the first step to the last.
        gpu_hours: The same, times the GPUs.
        board_watts: The power limit of a GPU.
        most_kwh: The energy of the GPUs if each draws its limit all the time: an upper bound at each end of the
            interval. Hosts, network and cooling are not in it.
        price: Of a GPU for an hour; None if it was not given.
        cost: In the currency of the price; None without one.
        fits: Whether the memory of each rank that ran fits the GPU.
        is_alone: Whether one rank stands for all others.
    """

    tokens: int
    tokens_per_step: int
    tokens_from: str
    num_steps: int
    num_gpus: int
    gpu: str
    hours: Estimate
    gpu_hours: Estimate
    board_watts: float
    most_kwh: Estimate
    price: float | None
    cost: Estimate | None
    fits: bool
    is_alone: bool


def budget_of(job: Run | JobTime, watts: float, tokens: int, price: float | None = None) -> TokenBudget:
    """The budget of a job by its step.

    Args:
        job: A priced run, whose rank is as fast as all others, or the step of ranks of each stage.
        watts: The power limit of the GPU that it is priced for.
        tokens: To train on.
        price: Of a GPU for an hour.

    Raises:
        JobError: The tokens of a step are not known, or stages of the pipeline are missing.
    """
    if isinstance(job, Run):
        gpu, num_gpus, per_step, tokens_from, step = _of_run(job)
        fits = job.fits
    else:
        gpu, num_gpus, per_step, tokens_from, step = _of_job(job)
        fits = all(stage.fits for stage in job.summary.stages)
    num_steps = math.ceil(tokens / per_step)
    hours = step.times(num_steps / _US_PER_HOUR)
    gpu_hours = hours.times(num_gpus)
    return TokenBudget(
        tokens=tokens,
        tokens_per_step=per_step,
        tokens_from=tokens_from,
        num_steps=num_steps,
        num_gpus=num_gpus,
        gpu=gpu,
        hours=hours,
        gpu_hours=gpu_hours,
        board_watts=watts,
        most_kwh=gpu_hours.times(watts / 1000),
        price=price,
        cost=None if price is None else gpu_hours.times(price),
        fits=fits,
        is_alone=isinstance(job, Run),
    )


def _of_run(run: Run) -> tuple[str, int, int, str, Estimate]:
    if run.summary.timed is None or run.manifest.job is None:
        raise JobError(f"{run.path} has no times", "fakedist profile -o RUN ... makes a run with times")
    time, source = run.summary.timed
    done = time.throughput
    if done is None:
        raise JobError("the tokens of a step are not known from one rank", f"{_HINT}; give the runs of all stages")
    step = Estimate(time.step_us, time.step_low_us, time.step_high_us)
    return source.gpu, run.manifest.job.world_size, done.tokens_per_step, done.tokens_from, step


def _of_job(job: JobTime) -> tuple[str, int, int, str, Estimate]:
    summary, done = job.summary, job.summary.throughput
    check_every_stage(job.runs)
    if done.tokens_per_step is None:
        why = next((note.text for note in summary.notes if note.code == "tokens_not_known"), "")
        raise JobError(why.partition(";")[0] or "the tokens of a step are not known", _HINT)
    step = Estimate(summary.step_us, summary.step_low_us, summary.step_high_us)
    return summary.gpu, summary.world_size, done.tokens_per_step, done.tokens_from, step
