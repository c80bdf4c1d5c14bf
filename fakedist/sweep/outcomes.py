"""What a sweep writes down: how each rank ended, and the row of each point. Bytes and microseconds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fakedist.rundir.outcome import Outcome
from fakedist.sweep.command import PricedFor
from fakedist.sweep.space import Scalar


class Status(StrEnum):
    """What came of a point."""

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
    #: It was not run, as a point with less memory did not fit.
    SKIPPED = "skipped (monotone)"

    @property
    def ran(self) -> bool:
        """Whether its steps ran to the end, or the memory did."""
        return self in (Status.FITS, Status.MAY_NOT_FIT, Status.DOES_NOT_FIT)


class RankKind(StrEnum):
    """How a rank's run counts."""

    RAN = "ran"
    OUT_OF_MEMORY = "out of memory"
    INVALID = "invalid layout"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """How one rank of a point ended.

    Attributes:
        rank: The rank.
        kind: How it counts.
        outcome: How it ended.
        reason: Why it did not end well, one line.
        line: The script's line that this happened at; empty if it is not known.
        layer: The layer that ran out of memory.
        output: The end of what it printed, if it failed.
        directory: Its run directory, relative to the sweep's.
        pipeline: One rank of each stage of its pipeline, in order; empty without one.
        peak_allocated_bytes: The most that tensors held.
        peak_reserved_bytes: The most that the caching allocator held.
        nccl_low_bytes: The least that NCCL takes, estimated.
        nccl_high_bytes: The most.
        context_bytes: The CUDA context.
        capacity_bytes: The GPU's memory.
        host: The machine that ran it.
        worker: The process on it that ran it for the executor.
        wall_s: Seconds that it took there.
        peak_rss_bytes: The most host memory that its processes held.
        first_try: Why it ran a second time: how a signal killed it that was not the job's own. Empty if it ran once.
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

    @property
    def total_bytes(self) -> int:
        """All that it takes of the GPU, with the most of NCCL."""
        return self.peak_reserved_bytes + self.nccl_high_bytes + self.context_bytes


@dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """The step of a point, estimated.

    Attributes:
        step_us: The step.
        low_us: The least of its 90 % interval; None if that is not known.
        high_us: The most of it.
        bubble_us: Of that, the slowest rank waits for others.
        bubble_from: "placed" (every stage that exchanges with others was placed), "formula", or "not known".
        communication_us: Communication that nothing hides, of the slowest rank.
        tokens_per_step: Tokens of all ranks; None if they are not known.
        tokens_per_s_per_gpu: Per second and GPU.
        samples_per_step: Samples of all ranks; None if they are not known.
        sample_shape: Shape of a sample; empty if the samples are not known.
        samples_per_s_per_gpu: Per second and GPU.
        tflops_per_gpu: The model's TFLOP/s per GPU as Megatron-LM counts; None without a run of every stage.
        mfu: Share of the dense bf16 peak as Megatron-LM counts; None without a run of every stage.
        mfu_torchtitan: The same as torchtitan counts.
        gpu: The GPU that it is priced for.
        fabric: The interconnect.
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


@dataclass(frozen=True, kw_only=True)
class Row:
    """One point of a sweep.

    Attributes:
        id: What tells it from all other points: the run, its pricing and what the sweep asks of it.
        key: What tells its run from all other runs.
        values: The value of each axis.
        pricing: What its step is priced for.
        status: What came of it.
        reason: Why, one line; empty if it fits.
        line: The script's line that failed.
        layer: The layer that ran out of memory.
        ranks: The ranks that ran, in order.
        has_every_stage: Whether every stage of its pipeline ran.
        step: Its step; None if it did not end well, or no step was timed.
        why_no_step: Why there is no step.
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

    @property
    def label(self) -> str:
        """The point in one line."""
        return " ".join(f"{name}={value}" for name, value in self.values) or "the only point"

    @property
    def fullest(self) -> RankResult | None:
        """The rank that leaves least of its GPU free; None if none ran to the end."""
        ran = [each for each in self.ranks if each.kind is RankKind.RAN]
        return min(ran, key=lambda each: each.capacity_bytes - each.total_bytes) if ran else None

    @property
    def headroom_bytes(self) -> int | None:
        """What the fullest rank leaves free; negative if it does not fit."""
        fullest = self.fullest
        return None if fullest is None else fullest.capacity_bytes - fullest.total_bytes

    @property
    def run_directory(self) -> str:
        """A run directory of it, relative to the sweep's: of the fullest rank, or of the one that failed."""
        fullest = self.fullest
        failed = next((each for each in self.ranks if each.kind is not RankKind.RAN), None)
        one = failed or fullest
        return "" if one is None else one.directory
