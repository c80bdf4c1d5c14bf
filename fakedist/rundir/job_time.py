"""The time of a whole job's step, from several of its ranks: the object of ``fakedist time RUN RUN... --json``."""

from __future__ import annotations

from dataclasses import dataclass, field

from fakedist.rundir.notes import Note


@dataclass(frozen=True)
class StageTime:
    """A rank of the job, usually one of each pipeline stage.

    Its times add up to the job's step.

    Attributes:
        rank: The rank.
        stage: Its stage of the pipeline, from 0; None if that is not known.
        run_directory: Its run.
        peak_allocated_bytes: The most that its tensors held, measured.
        peak_reserved_bytes: The most that the caching allocator held.
        capacity_bytes: The memory of the GPU that it ran on.
        fits: Whether it fits that GPU.
        compute_us: It computes.
        communication_us: It communicates and does not compute.
        bubble_us: It waits for what other ranks send or take part in, or has finished before them.
        host_us: The GPU waits for the rank's own host.
        wait_us: Anything else.
        own_us: When the rank is done.
        num_exchanged: Its sends to and receives from the other ranks.
        num_unmatched: Its calls that wait for something that the other ranks never do; they did not wait.
    """

    rank: int
    stage: int | None
    run_directory: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    capacity_bytes: int
    fits: bool
    compute_us: float
    communication_us: float
    bubble_us: float
    host_us: float
    wait_us: float
    own_us: float
    num_exchanged: int
    num_unmatched: int


@dataclass(frozen=True)
class FlopsRate:
    """FLOP/s of a step by one convention.

    Attributes:
        convention: Whose it is: Megatron-LM or torchtitan.
        tflops_per_gpu: TFLOP/s per GPU.
        mfu: As a share of the GPU's dense bf16 peak; None if that is not known.
    """

    convention: str
    tflops_per_gpu: float
    mfu: float | None


@dataclass(frozen=True)
class Throughput:
    """Work that the job does.

    Attributes:
        tokens_per_step: Tokens of all ranks; None if they are not known.
        tokens_from: Where they are from: the arithmetic, or "given".
        tokens_per_s_per_gpu: Per second and GPU; None if the tokens are not known.
        samples_per_step: Samples of all ranks: the first dimension of the model's input; None if they are not known.
        sample_shape: Shape of a sample, such as "3x224x224"; empty if the samples are not known.
        samples_per_s_per_gpu: Per second and GPU; None if the samples are not known.
        num_micro_batches: Micro-batches of the timed step; None if they are not known.
        rates: FLOP/s by convention; empty if they are not known.
        mfu: The model's FLOPs (``StepTime.model_flops``) of a stage, the mean, as a share of what the GPU's dense bf16
            peak does in the step; None without a run of every stage, or if they are not known.
    """

    tokens_per_step: int | None
    tokens_from: str
    tokens_per_s_per_gpu: float | None
    samples_per_step: int | None
    sample_shape: str
    samples_per_s_per_gpu: float | None
    num_micro_batches: int | None
    rates: list[FlopsRate] = field(default_factory=list)
    mfu: float | None = None


@dataclass(frozen=True)
class JobStep:
    """The step of a job, estimated.

    Attributes:
        world_size: Ranks of the job.
        gpu: The GPU that it is priced for.
        fabric: The interconnect.
        step_us: The step: when all of the ranks are done.
        step_low_us: The least of its 90 % interval; None if that is not known.
        step_high_us: The most of it.
        least_us: The most that the kernels of a rank take on one stream, each alone: no step is shorter.
        stages: The ranks, in order.
        slowest_rank: The rank that waits least for the others.
        memory_rank: The rank whose peak of reserved memory is highest.
        throughput: What the job gets done.
        notes: What limits what these figures mean.
    """

    world_size: int
    gpu: str
    fabric: str
    step_us: float
    step_low_us: float | None
    step_high_us: float | None
    stages: list[StageTime]
    slowest_rank: int
    memory_rank: int
    throughput: Throughput
    least_us: float = 0.0
    notes: list[Note] = field(default_factory=list)
