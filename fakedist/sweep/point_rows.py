"""The row of a point, in bytes and microseconds: how its ranks ended, and its step with the stages that did not run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from fakedist import extras
from fakedist.cost_model.job.job_times import tokens_of
from fakedist.errors import FakedistError, JobError, RunDirectoryError, WorldError
from fakedist.launcher.executors.task import TaskResult
from fakedist.results.job_time import JobTime, stages_of_job, time_job
from fakedist.results.opening import open_run_directory
from fakedist.results.run import Run
from fakedist.results.verdict import need_text
from fakedist.rundir.directory import JOURNAL_NAME, read_journal
from fakedist.rundir.job_time import StageTime
from fakedist.rundir.outcome import Outcome
from fakedist.rundir.plain import LEFT_OUT_IF_EMPTY
from fakedist.rundir.records import OutcomeRecord
from fakedist.rundir.summary import Summary
from fakedist.sweep.command import PointRun, PricedFor
from fakedist.sweep.plan import SweepPlan
from fakedist.sweep.space import Scalar
from fakedist.units import MIB, format_bytes, parse_rank_list


class Status(StrEnum):
    """The result of a point."""

    #: It fits, with the most that NCCL may take.
    FITS = "fits"
    #: It fits only if NCCL takes less than the most that it may.
    MAY_NOT_FIT = "may not fit"
    #: It ran out of memory, or what is reserved and outside is more than the GPU has.
    DOES_NOT_FIT = "does not fit"
    #: The script or a framework refused the layout before the first step.
    INVALID = "invalid layout"
    #: Anything else went wrong.
    FAILED = "failed"
    #: It was not run: it holds no less than a point that does not fit.
    PRUNED = "pruned"
    #: It was not run: it computes no less than a point whose kernels alone are slower than the fastest, or that fits.
    SLOWER = "cannot win"
    #: It was not run, as a point with less memory did not fit.
    SKIPPED = "skipped (monotone)"

    @property
    def ran(self) -> bool:
        """True if its steps ran to the end, or the memory did."""
        return self in (Status.FITS, Status.MAY_NOT_FIT, Status.DOES_NOT_FIT)


class RankKind(StrEnum):
    """The way in which a rank's run counts."""

    RAN = "ran"
    OUT_OF_MEMORY = "out of memory"
    INVALID = "invalid layout"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """The end of one rank of a point. Texts that are not known are empty.

    Attributes:
        reason: Why it did not end well, one line.
        line: The script's line that this happened at.
        output: The end of what it printed, if it failed.
        directory: Its run directory, relative to the sweep's.
        pipeline: One rank of each stage of its pipeline, in order; empty without one.
        worker: The executor's process on ``host`` that ran it.
        wall_s: Seconds that it took there.
        peak_rss_bytes: The most host memory that its processes held.
        sources: The digest of what it read, in the sweep's journal; empty if its list was lost.
        shares: By name, what was asked for, or why it is not known.
        first_try: Failure of its first run, which a signal not the job's own killed. Empty if it ran once.
    """

    rank: int
    kind: RankKind
    outcome: Outcome
    reason: str = ""
    line: str = ""
    layer: str = ""
    output: str = ""
    directory: str = ""
    pipeline: tuple[int, ...] = ()
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    nccl_low_bytes: int = 0
    nccl_high_bytes: int = 0
    context_bytes: int = 0
    capacity_bytes: int = 0
    host: str = ""
    worker: str = ""
    wall_s: float = 0.0
    peak_rss_bytes: int = 0
    first_try: str = ""
    sources: str = ""
    shares: dict[str, float | str] = field(default_factory=dict, metadata=LEFT_OUT_IF_EMPTY)

    @property
    def total_bytes(self) -> int:
        """All that it takes of the GPU, with the most of NCCL."""
        return self.peak_reserved_bytes + self.nccl_high_bytes + self.context_bytes


@dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """The estimated step of a point. None is unknown.

    Attributes:
        low_us: The least of its 90 % interval.
        least_us: As :class:`~fakedist.rundir.job_time.JobStep`; 0 in older sweeps.
        bubble_us: The part of the step in which the slowest rank waits for others.
        bubble_from: "placed" (every stage that exchanges with others was placed), "formula", or "not known".
        communication_us: Communication that nothing hides, of the slowest rank.
        tokens_per_step: Tokens of all ranks.
        samples_per_step: Samples of all ranks.
        sample_shape: Shape of a sample; empty if the samples are not known.
        tflops_per_gpu: The model's TFLOP/s per GPU as Megatron-LM counts; None without a run of every stage.
        mfu: As :class:`~fakedist.rundir.job_time.Throughput`; ``mfu_torchtitan`` is as torchtitan counts.
    """

    step_us: float
    low_us: float | None
    high_us: float | None
    bubble_us: float
    bubble_from: str
    communication_us: float
    tokens_per_step: int | None
    tokens_per_s_per_gpu: float | None
    samples_per_step: int | None
    sample_shape: str
    samples_per_s_per_gpu: float | None
    tflops_per_gpu: float | None
    mfu: float | None
    mfu_torchtitan: float | None
    gpu: str
    fabric: str
    least_us: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One point of a sweep.

    ``id`` tells it from other points: the run, its pricing and what the sweep asks of it. ``key`` tells runs apart.

    Attributes:
        reason: Why, one line; empty if it fits.
        command: The command that runs it alone; empty if an older sweep ran it.
        world_size: Ranks of its job; 0 if an older sweep ran it.
        step: None if it did not end well, or no step was timed.
        is_check: Whether it ran to check an axis that was declared monotone.
    """

    id: str
    key: str
    values: tuple[tuple[str, Scalar], ...]
    pricing: PricedFor
    status: Status
    reason: str = ""
    line: str = ""
    layer: str = ""
    ranks: tuple[RankResult, ...] = ()
    has_every_stage: bool = True
    step: StepEstimate | None = None
    why_no_step: str = ""
    is_check: bool = False
    command: str = ""
    world_size: int = 0

    @property
    def label(self) -> str:
        """The point in one line."""
        return " ".join(f"{name}={value}" for name, value in self.values) or "the only point"

    @property
    def fullest(self) -> RankResult | None:
        """The rank that leaves least of its GPU free; None if none ran to the end."""
        ran = [result for result in self.ranks if result.kind is RankKind.RAN]
        return min(ran, key=lambda rank: rank.capacity_bytes - rank.total_bytes) if ran else None

    @property
    def headroom_bytes(self) -> int | None:
        """Bytes that the fullest rank leaves free; negative if it does not fit."""
        fullest = self.fullest
        return None if fullest is None else fullest.capacity_bytes - fullest.total_bytes

    def share(self, name: str) -> float | None:
        """The least share of its ranks of this name; None if it is not known of one."""
        parts = [rank.shares[name] for rank in self.ranks if name in rank.shares]
        known = [part for part in parts if isinstance(part, float)]
        return min(known) if known and len(known) == len(parts) else None

    @property
    def lacking(self) -> RankResult | None:
        """The rank whose tensors and CUDA context alone exceed its GPU's memory the most; None if none do."""
        known = [
            rank for rank in self.ranks if rank.peak_allocated_bytes + rank.context_bytes > rank.capacity_bytes > 0
        ]
        return max(known, key=lambda rank: rank.peak_allocated_bytes, default=None)

    @property
    def run_directory(self) -> str:
        """A run directory of it, relative to the sweep's: of the fullest rank, or of the one that failed."""
        fullest = self.fullest
        failed = next((result for result in self.ranks if result.kind is not RankKind.RAN), None)
        one = failed or fullest
        return "" if one is None else one.directory


#: A process's CUDA context with PyTorch where nothing is published for the GPU: "around 400MB" with CUDA 11.7 or newer,
#: which load kernels lazily (ptrblck of NVIDIA, pytorch/pytorch#109888).
CONTEXT_BYTES = 400 * MIB
#: By these errors a script or a framework refuses a layout. A subclass, such as JSONDecodeError, says something else.
_REFUSALS = ("AssertionError", "ValueError", "NotImplementedError")
_OUTPUT_CHARACTERS = 2_000
_PACKAGE = str(Path(__file__).parents[1])


def judge(
    result: TaskResult,
    rank: int,
    run_directory: Path,
    sweep: Path,
    context_bytes: int | None,
    *,
    shares: Sequence[str] = (),
) -> RankResult:
    """Judge the end of a rank. ``context_bytes`` is the CUDA context's memory; None for the published figure."""
    judged = RankResult(
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
        return judged  # any files there are of an earlier run, or none
    try:
        run = open_run_directory(run_directory)
    except RunDirectoryError as error:
        return judged if judged.reason else replace(judged, reason=error.message)
    judged = _with_run(judged, run, context_bytes)
    asked = shares if judged.kind is RankKind.RAN else ()
    return replace(judged, shares={name: _share(run, name) for name in asked})


def _share(run: Run, name: str) -> float | str:
    try:
        return float(extras.shares()[name](run))
    except FakedistError as error:
        return error.message


def _with_run(result: RankResult, run: Run, context_bytes: int | None) -> RankResult:
    summary = run.summary
    result = _with_memory(result, summary, context_bytes)
    if summary.exit.outcome is Outcome.OUT_OF_MEMORY:
        asked = summary.out_of_memory
        where = f" in {asked.layer}" if asked is not None and asked.layer else ""
        size = f": {format_bytes(asked.requested_bytes)} were asked for" if asked is not None else ""
        if asked is not None and asked.went_on:
            size = f": {need_text(summary)}"
        return replace(
            result,
            kind=RankKind.OUT_OF_MEMORY,
            reason=f"out of memory{where}{size}",
            layer="" if asked is None else asked.layer,
            line="" if asked is None else asked.line,
        )
    if summary.exit.ended_well:
        if not summary.peak_allocated_bytes and summary.left_during_init is None:
            return replace(result, reason="the script allocated nothing on the GPU")
        return replace(result, kind=RankKind.RAN, reason="", pipeline=_pipeline(run))
    outcome = next(
        (record for record in read_journal(run.path / JOURNAL_NAME) if isinstance(record, OutcomeRecord)), None
    )
    reason = summary.exit.message or result.reason
    if reason.startswith(f"{WorldError.__name__}:"):
        reason += " (--rank stages:all or --with-peers runs more ranks)"
    line = "" if outcome is None or outcome.line.startswith(_PACKAGE) else outcome.line
    result = replace(result, reason=reason, line=line)
    is_refusal = (
        summary.exit.outcome is Outcome.EXCEPTION
        and summary.exit.message.partition(":")[0] in _REFUSALS
        and outcome is not None
        and outcome.last_step == 0
        and not summary.invented_values
        and not outcome.line.startswith(_PACKAGE)
    )
    return replace(result, kind=RankKind.INVALID) if is_refusal else result


def _with_memory(result: RankResult, summary: Summary, context_bytes: int | None) -> RankResult:
    outside = summary.estimated_outside
    published = (outside.context_bytes if outside is not None else None) or 0
    return replace(
        result,
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

    Micro-batches are those of a step; None for those that ran.

    Raises:
        JobError: The pricing is not valid.
    """
    try:
        job = time_job(directories, **asdict(pricing), tokens_per_step=tokens_per_step, micro_batches=micro_batches)
    except FakedistError as error:
        return None, error.message
    stages = results[0].pipeline
    has_every_stage = set(stages) <= {result.rank for result in results}
    slowest = next(stage for stage in job.summary.stages if stage.rank == job.summary.slowest_rank)
    step = _placed(job, slowest)
    if has_every_stage or len(stages) < 2:
        return step, ""
    return _with_formula(step, job, stages), ""


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
        mfu=done.mfu,
        mfu_torchtitan=None if torchtitan is None else torchtitan.mfu,
        gpu=step.gpu,
        fabric=step.fabric,
        least_us=step.least_us,
    )


def _with_formula(step: StepEstimate, job: JobTime, stages: Sequence[int]) -> StepEstimate:
    """The step with the bubble of a pipeline of which only some stages ran.

    A stage waits (p - 1) / v times for what one micro-batch takes on a stage, p stages of v chunks each (Narayanan et
    al., arXiv:2104.04473, section 2.2). The rank that works longest stands for every stage.
    """
    micro_batches = job.summary.throughput.num_micro_batches
    run = next((recorded for recorded in job.runs if recorded.summary.rank == stages[0]), None)
    chunks = _chunks(run, stages) if run is not None else None
    if not micro_batches or not chunks:
        return replace(step, bubble_from="not known")
    working = {stage.rank: job.summary.step_us - stage.bubble_us for stage in job.summary.stages}
    longest = max(working, key=lambda rank: working[rank])
    lanes = job.lanes[(job.lanes["rank"] == longest) & job.lanes["lane"].isin(_IN_PIPELINE)]
    passes_us = float((lanes["end_us"] - lanes["start_us"]).sum())
    bubble_us = (len(stages) - 1) / chunks * passes_us / micro_batches
    step_us = working[longest] + bubble_us
    scale = step_us / step.step_us
    return replace(
        step,
        step_us=step_us,
        low_us=None if step.low_us is None else step.low_us * scale,
        high_us=None if step.high_us is None else step.high_us * scale,
        bubble_us=bubble_us,
        bubble_from="formula",
        communication_us=next(recorded.communication_us for recorded in job.summary.stages if recorded.rank == longest),
        tokens_per_s_per_gpu=_slowed(step.tokens_per_s_per_gpu, scale),
        samples_per_s_per_gpu=_slowed(step.samples_per_s_per_gpu, scale),
        tflops_per_gpu=_slowed(step.tflops_per_gpu, scale),
    )


def _slowed(rate: float | None, scale: float) -> float | None:
    return None if rate is None else rate / scale


def _chunks(run: Run, stages: Sequence[int]) -> int | None:
    """Model chunks of each stage: how often the first sends a micro-batch to the second. None if unseen."""
    groups, calls, launches = run.table("groups"), run.table("calls"), run.table("launches")
    ran = tokens_of({"launches": launches, "work": run.table("work")}).num_micro_batches
    own = [number for number, ranks in enumerate(groups["ranks"]) if ranks and parse_rank_list(ranks) == tuple(stages)]
    is_send = calls["operation"].astype(str).str.startswith("send")
    is_timed = calls["sequence"].isin(launches["call"])
    sent = calls[is_send & is_timed & (calls["peer"] == 1) & calls["group"].isin(own)]
    return max(1, round(len(sent) / ran)) if len(sent) and ran else None


#: As :func:`estimate_step`.
StepEstimator = Callable[
    [Sequence[Path], Sequence[RankResult], PricedFor, int | None, int | None], tuple[StepEstimate | None, str]
]
_STATUS_OF_KIND = {
    RankKind.OUT_OF_MEMORY: Status.DOES_NOT_FIT,
    RankKind.INVALID: Status.INVALID,
    RankKind.FAILED: Status.FAILED,
}


def make_row(
    run: PointRun,
    results: Sequence[RankResult],
    plan: SweepPlan,
    sweep: Path,
    *,
    row_id: str,
    key: str,
    estimate: StepEstimator = estimate_step,
) -> Row:
    """The row of a point."""
    failed = next((result for result in results if result.kind is not RankKind.RAN), None)
    every = set(results[0].pipeline) <= {result.rank for result in results}
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
    directories = [sweep / result.directory for result in results]
    step, why = estimate(directories, results, run.pricing, *plan.counts_at(run.point))
    status, reason = _fit(common)
    return replace(common, status=status, reason=reason, step=step, why_no_step=why)


def _fit(row: Row) -> tuple[Status, str]:
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
