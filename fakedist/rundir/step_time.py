"""The times of a run's summary: where the timed step goes. Microseconds throughout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from fakedist.rundir.notes import Note

WaitKind = Literal["read", "copy", "synchronize"]
PathKind = Literal["kernels", "collectives", "host", "launch", "idle"]
PATH_KINDS: tuple[PathKind, ...] = get_args(PathKind)


@dataclass(frozen=True)
class Peaks:
    """Peak rates of a GPU.

    Attributes:
        flops: FLOP/s by dtype, dense.
        bytes_per_s: Memory bandwidth.
    """

    flops: dict[str, float]
    bytes_per_s: float


@dataclass(frozen=True)
class Calibration:
    """The GPU that the model of kernel times was calibrated on.

    Attributes:
        gpu: Its name.
        torch: Version of torch.
        date: When.
        driver: Version of the driver.
    """

    gpu: str
    torch: str
    date: str
    driver: str = ""


@dataclass(frozen=True)
class FamilyAccuracy:
    """How close estimates of one family were to measured kernels that were left out.

    Attributes:
        family: What was estimated: products, attention, ...
        gpu: The GPU model that was measured.
        median_error: Median of the relative error's size.
        p95_error: Its 95 % quantile.
    """

    family: str
    gpu: str
    median_error: float
    p95_error: float


@dataclass(frozen=True)
class UncertainPart:
    """A part of a step's interval.

    Attributes:
        kind: kernels, collectives, host, allocator or cpu.
        name: The family of kernels, or what their estimate rests on; the operation of the collectives; the host; the
            allocator's calls; operations on large tensors of the CPU.
        group: The group of the collectives; empty otherwise.
        num_nodes: NVLink domains that it spans; 0 otherwise.
        half_width_us: By how much longer the step may be because of it alone.
        share: Its share of the variance of the step.
    """

    kind: Literal["kernels", "collectives", "host", "allocator", "cpu"]
    name: str
    group: str
    num_nodes: int
    half_width_us: float
    share: float


@dataclass(frozen=True)
class ClockSteadiness:
    """How steady the host clock of the timed step was.

    Attributes:
        num_repeats: Steps that it measured.
        spread: Their standard deviation, over their mean; 0 of one step.
        bound: The most that fakedist's own time may be of the step's, as a fraction.
        is_recorded: It measured the recorded step itself, not steps after it.
        is_second_run: It measured steps of a second run of the script.
    """

    num_repeats: int
    spread: float
    bound: float
    is_recorded: bool = False
    is_second_run: bool = False


@dataclass(frozen=True)
class HostTime:
    """Where the host's time of an estimated step comes from.

    Attributes:
        source: "measured": the host clock on the machine that recorded the run, scaled. "constant": so much for each
            operation and launch.
        model: The host model.
        scale: What was measured, or the constant, takes this many times as long on that host.
        low: The least of the host's time over the estimate (90 % interval).
        high: The most.
        machine_us: A forward of torch's Linear on the machine that recorded the run, where CUDA's own calls take
            nothing; None if it was not measured.
        host_us: The same on the host, by its model; None for the constant.
        clock: How steady the clock was; None for the constant.
        queue_depth: Launches by which the host can be ahead of a stream.
    """

    source: Literal["measured", "constant"]
    model: str
    scale: float
    low: float
    high: float
    machine_us: float | None = None
    host_us: float | None = None
    clock: ClockSteadiness | None = None
    queue_depth: int = 1022


@dataclass(frozen=True)
class CpuWork:
    """Operations on large floats in the host's memory in a step, which are not computed; estimated.

    Attributes:
        num_operations: How many.
        moved_bytes: What they read and write at least.
        time_us: How long they take.
        low_us: The least of the 90 % interval of that.
        high_us: The most of it.
        line: The script's line that runs most of it; empty if it is not known.
    """

    num_operations: int
    moved_bytes: float
    time_us: float
    low_us: float
    high_us: float
    line: str


@dataclass(frozen=True)
class AllocatorTime:
    """Calls of the caching allocator to CUDA in a step in which it gives memory back; estimated.

    Attributes:
        num_retries: Requests that were refused, so that it gave back what it caches and asked again.
        refused_bytes: What they asked for.
        num_given_back: Calls of cudaFree, and pieces of expandable segments that it unmapped.
        given_back_bytes: Their bytes.
        num_taken: Calls of cudaMalloc, and pieces that it mapped.
        taken_bytes: Their bytes.
        time_us: How long all these calls take.
        low_us: The least of the 90 % interval of that.
        high_us: The most of it.
        wait_us: How long the host waits for the GPU before it may give memory back.
    """

    num_retries: int
    refused_bytes: int
    num_given_back: int
    given_back_bytes: int
    num_taken: int
    taken_bytes: int
    time_us: float
    low_us: float
    high_us: float
    wait_us: float


@dataclass(frozen=True)
class TracedProcess:
    """The work of one process on one GPU, in a file of a tool that traced a real machine.

    Attributes:
        process: The system's number of the process; -1 if it is not known.
        device: Number of the GPU.
        gpu: The GPU's name; empty if the file does not have it.
        is_shown: Whether the report is of this one.
        num_kernels: Kernels, collectives among them.
        kernel_us: How long they took, summed.
        num_copies: Copies.
        num_fills: Fills.
        num_streams: Streams that ran any of them.
        num_collectives: The collectives' kernels.
        collective_us: How long those took, summed.
    """

    process: int
    device: int
    gpu: str
    is_shown: bool
    num_kernels: int
    kernel_us: float
    num_copies: int
    num_fills: int
    num_streams: int
    num_collectives: int
    collective_us: float


@dataclass(frozen=True)
class TracedStep:
    """A step that ranges of a trace mark.

    Attributes:
        step: Its number.
        is_shown: Whether the report is of this one.
        range_us: How long its range took on the host.
        step_us: Until the end of everything that was launched in it, from the range's begin; if the GPU was still at
            work on what had been launched before, from the end of that.
        num_kernels: Kernels, copies and fills launched in it.
        busy_us: Time for which at least one of them ran.
    """

    step: int
    is_shown: bool
    range_us: float
    step_us: float
    num_kernels: int
    busy_us: float


@dataclass(frozen=True)
class KernelSource:
    """Where the kernels of the timed step come from.

    Attributes:
        source: measured, simulated or estimated.
        tool: cupti, nsys or model.
        step: The timed step.
        gpu: The GPU's name.
        step_us: From the beginning of the step to the end of everything that it launched.
        step_low_us: The least of its 90 % interval; None if nothing of it is estimated, or that is not known.
        step_high_us: The most of it.
        notes: What limits what these times mean.
        calibrated_on: The GPU that the model was calibrated on; None without calibration.
        fabric: The interconnect that collectives were estimated for; empty if they were not.
        tool_version: Version of the tool; empty if it is not known.
        report: The tool's report.
        accuracy: How close such estimates are, for the families that take most of the step; empty if it is measured.
        uncertain: What the interval is made of, the three largest parts first to last; empty without one.
        clock: The fraction of the full clock that the power limit leaves to products and attention; None if not known.
        watts: The power limit; 0 if not known.
        host: Where the host's time comes from; None if a tool measured it, or nothing is known.
        allocator: The calls of the caching allocator; None if it gives nothing back.
        cpu_work: Operations on large tensors in the host's memory; None without any.
        processes: Of a file of another program: what each process ran on each GPU, the most kernels first.
        steps: Of such a file: its steps in order; empty if no range marks one.
        path: Of such a file: the parts of the step's critical path that are not on the GPU.
        host_waits: Of such a file: where the host waits for the GPU, most idle time of the GPU first.
        loading_us: Of such a file: how long threads are in DataLoaders' iterators.
    """

    source: Literal["measured", "simulated", "estimated"]
    tool: str
    step: int
    gpu: str
    step_us: float
    step_low_us: float | None = None
    step_high_us: float | None = None
    notes: list[Note] = field(default_factory=list)
    calibrated_on: Calibration | None = None
    fabric: str = ""
    tool_version: str = ""
    report: str = ""
    accuracy: list[FamilyAccuracy] = field(default_factory=list)
    uncertain: list[UncertainPart] = field(default_factory=list)
    clock: float | None = None
    watts: float = 0.0
    host: HostTime | None = None
    allocator: AllocatorTime | None = None
    cpu_work: CpuWork | None = None
    processes: list[TracedProcess] = field(default_factory=list)
    steps: list[TracedStep] = field(default_factory=list)
    path: list[PathPart] = field(default_factory=list)
    host_waits: list[HostWait] = field(default_factory=list)
    loading_us: float = 0.0


@dataclass(frozen=True)
class FamilyTime:
    """Kernels of one family in the timed step.

    Attributes:
        family: One of ``run.schema.FAMILIES``.
        num_kernels: How many.
        num_unknown: How many of them are of unknown duration.
        time_us: How long the others took.
        flops: Floating-point operations of those where they are known.
        flops_us: How long those took.
        moved_bytes: Bytes moved by those where they are known.
        moved_us: How long those took.
        compute_us: The time that arithmetic limits.
        memory_us: The time that memory limits.
        launch_us: The time that launches limit.
        share: Of the time of all kernels; None for communication.
    """

    family: str
    num_kernels: int
    num_unknown: int
    time_us: float
    flops: float
    flops_us: float
    moved_bytes: float
    moved_us: float
    compute_us: float
    memory_us: float
    launch_us: float
    share: float | None


@dataclass(frozen=True)
class KernelTime:
    """Kernels of one name, shape and layer in the timed step, most time first.

    Attributes:
        name: Name.
        family: Family.
        shape: Sizes of its work; where they are not known, its grid.
        layer: Their layer; one name for repeated layers: layers.0-79.attention.
        num_kernels: How many.
        num_unknown: How many of them are of unknown duration.
        time_us: How long the others took.
        low_us: The least of the 90 % interval of that; None if it is measured, or not known.
        high_us: The most of it.
        flops: Floating-point operations of those where they are known.
        flops_us: How long those took.
        moved_bytes: Bytes moved by those where they are known.
        moved_us: How long those took.
        least_us: The shortest; None where none is known.
        median_us: The median.
        largest_us: The longest.
        num_layers: Layers that run it.
        bound: What limits most of its time; empty where that is not known.
    """

    name: str
    family: str
    shape: str
    layer: str
    num_kernels: int
    num_unknown: int
    time_us: float
    low_us: float | None
    high_us: float | None
    flops: float
    flops_us: float
    moved_bytes: float
    moved_us: float
    least_us: float | None
    median_us: float | None
    largest_us: float | None
    num_layers: int
    bound: str


@dataclass(frozen=True)
class RangeTime:
    """The script's ranges of one name in the timed step.

    Attributes:
        name: Name.
        num_ranges: How many.
        depth: The fewest ranges around one.
        num_kernels: Kernels that were launched in them, communication left out, ranges inside included.
        num_unknown: How many of them are of unknown duration.
        kernel_us: How long the others took.
        gpu_us: From the begin of the first kernel of each to the end of its last, summed.
        num_calls: Collective calls.
    """

    name: str
    num_ranges: int
    depth: int
    num_kernels: int
    num_unknown: int
    kernel_us: float
    gpu_us: float
    num_calls: int


@dataclass(frozen=True)
class LayerTime:
    """The timed step of a layer, or of several alike that are folded into one row; children included.

    Attributes:
        name: Fully qualified name, with ``0-79`` for the numbers of folded layers.
        class_name: Its class.
        depth: Parents above it.
        num_repeats: Layers in the row.
        generation_us: Time of its kernels in generation; likewise in the other kinds.
        forward_us: In forward.
        recompute_us: In forwards that backward runs again.
        backward_us: In backward.
        optimizer_us: In the optimizer.
        other_us: In anything else.
        bound_compute_us: The time that arithmetic limits.
        bound_memory_us: The time that memory limits.
        bound_launch_us: The time that launches limit.
        num_kernels: Kernels, communication left out.
        flops: Floating-point operations, where they are known.
        moved_bytes: Bytes moved, where they are known.
        num_lacking_flops: Matrix products and attention whose operations are not known.
        launch_gap_us: How long the GPU waited for the host to launch its kernels.
        num_calls: Collective calls.
        num_unknown_calls: Those whose duration is not known.
        communication_us: Duration of the others.
        total_us: Time of all of its kernels.
        own_us: The same without children.
        least_us: The repeat that took least.
        median_us: The median repeat.
        largest_us: The repeat that took most.
        host_us: The host's own time for its launches, waits left out; 0 if it is not known.
    """

    name: str
    class_name: str
    depth: int
    num_repeats: int
    generation_us: float
    forward_us: float
    recompute_us: float
    backward_us: float
    optimizer_us: float
    other_us: float
    bound_compute_us: float
    bound_memory_us: float
    bound_launch_us: float
    num_kernels: int
    flops: float
    moved_bytes: float
    num_lacking_flops: int
    launch_gap_us: float
    num_calls: int
    num_unknown_calls: int
    communication_us: float
    total_us: float
    own_us: float
    least_us: float
    median_us: float
    largest_us: float
    host_us: float = 0.0


@dataclass(frozen=True)
class GroupTime:
    """Collectives of one operation on one group in the timed step.

    Attributes:
        group: The group's description, or its name; empty if a trace does not name it.
        group_size: Its ranks; 0 if a trace does not name them.
        num_nodes: NVLink domains that it spans.
        operation: The operation.
        num_calls: Calls.
        num_unknown: Those whose duration is not known.
        moved_bytes: Bytes of their whole buffers.
        time_us: How long the others take.
        hidden_us: Of that, while something computes, or the step waits for another call.
        exposed_us: Of that, while nothing computes and the step waits for this call. It adds up to
            ``StepTime.communication_us``.
    """

    group: str
    group_size: int
    num_nodes: int
    operation: str
    num_calls: int
    num_unknown: int
    moved_bytes: float
    time_us: float
    hidden_us: float
    exposed_us: float


@dataclass(frozen=True)
class PathPart:
    """A part of the critical path of the timed step.

    Attributes:
        kind: kernels, collectives, host (the GPU waits for what the host launches), launch (in a trace: from the call
            to the kernel) or idle.
        layer: Of kernels and the host, their layer, one name for repeated layers; empty outside of modules.
        group: Of collectives, the group's description, or its name.
        operation: Of collectives, the operation; of a trace also that of the host or its call, and that of kernels if
            no layers are known.
        num_layers: Layers in the row; 0 for collectives and idle time.
        num_launches: Kernels or calls on the path; launches that the GPU waits for.
        lane: In a trace, its stream or thread.
        time_us: How long it is. The parts add up to ``StepTime.step_us``.
    """

    kind: PathKind
    layer: str
    group: str
    operation: str
    num_layers: int
    num_launches: int
    time_us: float
    lane: str = ""


@dataclass(frozen=True)
class HostPart:
    """A part of the host's time in the timed step.

    Attributes:
        name: What it launches for, one of ``run.schema.KINDS``; else that it waits, for the GPU or for a place in the
            launch queue.
        time_us: How long it takes.
    """

    name: str
    time_us: float


@dataclass(frozen=True)
class HostWait:
    """Waits of the host for the GPU at one line in the timed step.

    Attributes:
        line: The innermost line outside of torch; empty if it is not known.
        is_after: The host waits somewhere behind that line's operation, outside of any.
        kind: read (of what the GPU computed), copy (to the GPU, from pageable memory) or synchronize.
        operation: The operation that waits, e.g. aten._local_scalar_dense.default for ``.item()``; outside of one, what
            the host waits for.
        layer: The layer with most of the idle time, one name for repeated layers; empty outside of modules.
        num_layers: Rows of folded layers that wait there.
        num_waits: How many find the GPU at work.
        wait_us: How long the host stands still in them.
        idle_us: How long the GPU is idle because of them: the host launches too late what comes next. A part of
            ``StepTime.launch_gap_us``.
    """

    line: str
    is_after: bool
    kind: WaitKind
    operation: str
    layer: str
    num_layers: int
    num_waits: int
    wait_us: float
    idle_us: float


@dataclass(frozen=True)
class LateLaunches:
    """Launches of one line that come too late for the GPU in the timed step.

    Attributes:
        line: The innermost line outside of torch; of a backward, the line of the forward; empty if it is not known.
        layer: The layer with most of the idle time, one name for repeated layers; empty outside of modules.
        num_layers: Rows of folded layers that it launches for.
        num_launches: How many the GPU waits for.
        late_us: How long it is idle until they come. It adds up to ``StepTime.launch_gap_us`` but for the step's end.
    """

    line: str
    layer: str
    num_layers: int
    num_launches: int
    late_us: float


@dataclass(frozen=True)
class StepLimit:
    """The timed step if all but one of its parts took no time.

    Attributes:
        kind: kernels; collectives (of one group); nics (the collectives of all groups over nodes, where there are
            several); host.
        group: The group's description, or its name; empty for other parts.
        num_nodes: NVLink domains that the group spans; 0 for other parts.
        step_us: The step.
        low_us: The least of its 90 % interval.
        high_us: The most of it.
    """

    kind: Literal["kernels", "collectives", "nics", "host"]
    group: str
    num_nodes: int
    step_us: float
    low_us: float
    high_us: float


@dataclass(frozen=True)
class TimeGain:
    """The timed step with one change, or with the best two of different kinds together.

    Attributes:
        title: The change in words.
        option: The same as an option of ``fakedist time``.
        step_us: The step with it.
        why: Why a faster GPU is not faster, if its power limit holds it; of advice, what it follows from; else empty.
        is_pair: Whether it is two changes.
    """

    title: str
    option: str
    step_us: float
    why: str = ""
    is_pair: bool = False


@dataclass(frozen=True)
class RankThroughput:
    """The work that the job does, if every rank is as fast as this one.

    Attributes:
        tokens_per_step: Tokens of all ranks.
        tokens_from: The arithmetic.
        tokens_per_s_per_gpu: Per second and GPU.
    """

    tokens_per_step: int
    tokens_from: str
    tokens_per_s_per_gpu: float


@dataclass(frozen=True)
class SampleThroughput:
    """The samples that the job reads, if every rank is as fast as this one.

    Attributes:
        samples_per_step: Samples of all ranks: the first dimension of the model's input.
        sample_shape: Shape of a sample, such as "3x224x224".
        samples_per_s_per_gpu: Per second and GPU.
    """

    samples_per_step: int
    sample_shape: str
    samples_per_s_per_gpu: float


@dataclass(frozen=True)
class StepBreakdown:
    """Where the time of the timed step goes, by its kernels, its calls and its host alone.

    ``step_us`` is the sum of ``busy_us``, ``communication_us``, ``launch_gap_us`` and ``wait_us``.

    Attributes:
        step_us: The step.
        step_low_us: The least of its 90 % interval; None if nothing of it is estimated, or that is not known.
        step_high_us: The most of it.
        busy_us: A stream computes.
        communication_us: Only a collective of known duration runs.
        launch_gap_us: The GPU waits for the host.
        wait_us: Everything else.
        num_kernels: Kernels, communication left out.
        num_unknown_kernels: Those of unknown duration.
        kernel_us: The sum of their durations.
        by_kind: Of it, by ``run.schema.KINDS``.
        by_bound: Of it, by what limits it; estimated times only.
        num_calls: Collective calls.
        num_unknown_calls: Those whose duration is not known.
        flops: Floating-point operations, where they are known.
        model_flops: Of them, the model's: matrix products and attention of forward and backward, each result once.
            Without recomputation (the scores in a fused attention's backward, too), optimizers and evaluations.
        num_lacking_flops: Of the model's matrix products and attention, those whose operations are not known.
        moved_bytes: Bytes moved, where they are known.
        peaks: The GPU's peak rates; None if its model is not known.
        model_flops_utilisation: ``model_flops`` over ``busy_us``, as a share of the bf16 peak; None without peaks.
            Reports call it *utilisation*. It is not MFU, which is ``step_flops_utilisation``.
        by_family: Kernels by family, most time first.
        top_kernels: Kernels by name, shape and layer, most time first.
        layers: Layers that run anything.
        by_group: Collectives by group and operation, most exposed first; empty if they were neither priced nor traced.
        ranges: The script's own ranges, most time first.
        critical_path: What makes the step as long as it is, the longest part first; empty if it is not known what
            streams wait for.
        generation_us: Of the step, from the first kernel of a generation to its last, sampling and waiting included;
            the sum over all that other phases separate.
        step_flops_utilisation: MFU in every report: ``model_flops`` over the whole step, as a share of the bf16 peak;
            None if any of it is unknown.
        host: The host's time by what it launches for, and its waits; empty if it is not known.
        host_waits: Where the host waits for the GPU, most idle time of the GPU first.
        late_launches: The lines whose operations the host launches too late, most idle time of the GPU first.
        has_real_collectives: Whether communication is that of kernels that move data between GPUs, such as NCCL's, and
            not of copies that stand for collectives.
        limits: The step if all but one of its parts took no time, the longest first; empty if it is not known what
            streams wait for.
        copies_alone_us: Of ``busy_us`` in a traced step, while copies and fills run and no kernel computes.
        num_copies: Of ``num_kernels`` in a traced step, copies and fills.
    """

    step_us: float
    step_low_us: float | None
    step_high_us: float | None
    busy_us: float
    communication_us: float
    launch_gap_us: float
    wait_us: float
    num_kernels: int
    num_unknown_kernels: int
    kernel_us: float
    by_kind: dict[str, float]
    by_bound: dict[str, float]
    num_calls: int
    num_unknown_calls: int
    flops: float
    model_flops: float
    num_lacking_flops: int
    moved_bytes: float
    peaks: Peaks | None
    model_flops_utilisation: float | None
    by_family: list[FamilyTime] = field(default_factory=list)
    top_kernels: list[KernelTime] = field(default_factory=list)
    layers: list[LayerTime] = field(default_factory=list)
    by_group: list[GroupTime] = field(default_factory=list)
    ranges: list[RangeTime] = field(default_factory=list)
    critical_path: list[PathPart] = field(default_factory=list)
    generation_us: float = 0.0
    step_flops_utilisation: float | None = None
    host: list[HostPart] = field(default_factory=list)
    host_waits: list[HostWait] = field(default_factory=list)
    late_launches: list[LateLaunches] = field(default_factory=list)
    has_real_collectives: bool = False
    limits: list[StepLimit] = field(default_factory=list)
    copies_alone_us: float = 0.0
    num_copies: int = 0


@dataclass(frozen=True)
class StepTime(StepBreakdown):
    """The timed step: where its time goes, and what follows for the job.

    Attributes:
        throughput: Tokens per second; None unless they are certain.
        sample_throughput: Samples per second; None unless they are certain.
        gains: The step with each change that applies and with the best two, the shortest first; empty if none was
            priced.
        loading_us: How long the main thread is in DataLoaders' iterators, measured and scaled as the rest of the host's
            time, of which it is a part. 0 if that was not measured.
        collector_us: How long Python's garbage collector pauses a step, likewise; no part of any other time.
    """

    throughput: RankThroughput | None = None
    sample_throughput: SampleThroughput | None = None
    gains: list[TimeGain] = field(default_factory=list)
    loading_us: float = 0.0
    collector_us: float = 0.0
