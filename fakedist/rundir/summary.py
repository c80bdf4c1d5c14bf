"""The figures of a run: what ``--json`` prints and what every report reads. Bytes and microseconds throughout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from fakedist.rundir.host_memory import HostMemory
from fakedist.rundir.notes import Note
from fakedist.rundir.outcome import Ending
from fakedist.rundir.schema import CATEGORIES, PHASES, SCHEMA_VERSION, Int32, RowOf
from fakedist.rundir.step_time import KernelSource, StepTime


@dataclass(frozen=True)
class LeftDuringInit:
    """A rank whose script ended by itself before a first step, such as a spare rank.

    Attributes:
        line: Where it did, ``file:line (function)``; empty at the script's end.
        not_sent: Where it read integers or flags that another rank should have sent, and which; empty if it did not.
        command: The command that supplies them; may be empty.
    """

    line: str
    not_sent: str = ""
    command: str = ""


@dataclass(frozen=True)
class Communicator:
    """The GPU's memory that one NCCL communicator takes, *estimated*.

    Attributes:
        group: The process group's description, or its name.
        group_size: Ranks in it.
        local_size: Ranks of it on this node.
        num_nodes: Nodes that it spans.
        channels: Least and most channels.
        parts: Least and most bytes by what they are for.
        low_bytes: The least that it takes.
        high_bytes: The most that it takes.
    """

    group: str
    group_size: int
    local_size: int
    num_nodes: int
    channels: tuple[int, int]
    parts: dict[str, tuple[int, int]]
    low_bytes: int
    high_bytes: int


@dataclass(frozen=True)
class Outside:
    """Device memory outside of the caching allocator, *estimated* but for ``taken``. No other figure contains it.

    Attributes:
        low_bytes: The least.
        high_bytes: The most.
        context_bytes: The CUDA context's part; None where it is not known.
        context_source: Who published that.
        nccl_version: Version of NCCL.
        nccl_environment: NCCL's variables as the script left them.
        communicators: What each communicator takes, most first.
        num_unused_groups: Groups without any call, and so without memory.
        left_out: What is not known, one sentence each.
        measured_bytes: On a real GPU, what it held at the end less reserved, other processes included; else None.
        beside_reserved: Whether this fits in addition to what is reserved.
        taken: On a virtual GPU, *measured*: the most that the script and its libraries took by owner, such as "user
            buffers". At one time they took at most ``taken_bytes``, which ``low_bytes`` and ``high_bytes`` include.
        taken_bytes: The most that was taken at one time.
        reserve_bytes: What the rank could not have because of ``--reserve``, all of the above included;
            ``low_bytes`` and ``high_bytes`` are at least that.
    """

    low_bytes: int
    high_bytes: int
    context_bytes: int | None
    context_source: str
    nccl_version: str
    nccl_environment: dict[str, str]
    communicators: list[Communicator]
    num_unused_groups: int
    left_out: list[str]
    measured_bytes: int | None
    beside_reserved: Literal["fits", "may not fit", "does not fit"] = "fits"
    taken: dict[str, int] = field(default_factory=dict)
    taken_bytes: int = 0
    reserve_bytes: int = 0


@dataclass(frozen=True)
class RouterLoadFacts:
    """The routers that picked experts by made-up values, and what their load sent to whom; *simulated*.

    Attributes:
        load: As ``--router-load`` gives it.
        num_layers: Layers with such a router.
        num_experts: Experts of the first of them.
        top_k: Experts that a token of it picks.
        tokens: Tokens of a rank and a call of it.
        ranks: The ranks that exchange its tokens; empty if the load is even, or if none were seen to.
        received: What each of them received over all recorded calls of all layers: tokens, once for each expert.
        hottest: What the rank that received most received, summed over these calls.
        unknown: Where a router picked experts that the load does not reach.
    """

    load: str
    num_layers: int
    num_experts: int
    top_k: int
    tokens: int
    ranks: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    hottest: int = 0
    unknown: list[str] = field(default_factory=list)

    def hottest_rank(self) -> int:
        """The rank that received the most tokens, of equals the lowest."""
        return max(self.ranks, key=lambda rank: (self.share(rank), -rank))

    def share(self, rank: int) -> float:
        """A rank's tokens, in times the mean of all ranks."""
        if rank not in self.ranks or not sum(self.received):
            return 1.0
        return self.received[self.ranks.index(rank)] * len(self.ranks) / sum(self.received)

    def busiest(self) -> float:
        """Tokens of the busiest rank of each call, in times the mean of all ranks. All others wait for it."""
        return self.hottest * len(self.ranks) / sum(self.received) if sum(self.received) else 1.0


@dataclass(frozen=True)
class PhasePeak:
    """A phase of a step, in the order in which they began.

    Attributes:
        step: Step.
        phase: Phase.
        peak_allocated_bytes: Most that was allocated during it.
        peak_reserved_bytes: Most that was reserved during it.
        end_allocated_bytes: Allocated when it ended.
    """

    step: Int32
    phase: Annotated[str, PHASES]
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    end_allocated_bytes: int


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """VLLM's engine, as it ran and as it measured itself.

    Attributes:
        version: vLLM's.
        utilization: Its ``gpu_memory_utilization``.
        weights_bytes: Its weights.
        activations_bytes: What the peak of its profiling run had beyond what it kept.
        graphs_bytes: What its CUDA graphs took.
        num_blocks: Blocks of its KV cache.
        block_tokens: Tokens of a block.
        cache_dtype: Type of the KV cache's elements, such as "bfloat16" or "fp8".
        enforce_eager: Whether it makes no CUDA graphs.
        can_sleep: Whether its sleep mode is on.
        max_model_len: Most tokens of a request.
        process: Name of the process that the script started and that has it; empty for the rank's.
        model_config: The ``config.json`` of its model.
        ranks: GPUs that share its layers (tensor parallelism).
        max_running: Most requests that it computes at once.
        step_tokens: Most tokens that one of its steps computes.
    """

    version: str
    utilization: float
    weights_bytes: int
    activations_bytes: int
    graphs_bytes: int
    num_blocks: int
    block_tokens: int
    cache_dtype: str
    enforce_eager: bool
    can_sleep: bool
    max_model_len: int
    process: str = ""
    model_config: str = ""
    ranks: int = 1
    max_running: int = 0
    step_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class EngineMemory(EngineSettings):
    """Memory of vLLM's engine, and which ``gpu_memory_utilization`` it may have, in multiples of 0.0001; *estimated*
    from what it and the virtual GPU measured in this run.

    Attributes:
        cache_bytes: Its KV cache.
        peak_awake_bytes: Most that was in use of the GPU with the KV cache, by all processes, without their contexts.
        peak_asleep_bytes: Most that was in use without the KV cache, from when the engine had one.
        peak_phase: Phase with the most in use with the KV cache; empty if that was outside of any.
        least_utilization: The least with which it starts: one request of ``max_model_len`` has room in the KV cache.
        largest_utilization: The largest with which all fits the GPU, without CUDA contexts and what
            ``estimated_outside`` has; None if it is not known.
        largest_in_addition: The largest with which all fits in addition to the most of ``estimated_outside``.
        largest_num_blocks: Blocks of the KV cache with ``largest_utilization``; 0 if it is not known.
        largest_cache_bytes: Their bytes.
        unknown_because: Why ``largest_utilization`` is not known; empty if it is.
    """

    cache_bytes: int
    peak_awake_bytes: int
    peak_asleep_bytes: int
    peak_phase: str
    least_utilization: float | None
    largest_utilization: float | None
    largest_in_addition: float | None
    largest_num_blocks: int
    largest_cache_bytes: int
    unknown_because: str


@dataclass(frozen=True)
class EngineSleep:
    """How an engine sleeps, *measured* on the virtual GPU.

    Attributes:
        process: As of :class:`EngineMemory`.
        how: "level 2" of vLLM's ``sleep``, or "kv_cache paused" of torch_memory_saver.
        times: How often it did.
        freed_bytes: What it gave back of the GPU the last time.
        kept: Bytes that its process still had in use then, by kind, without its CUDA context. Behind the allocator's
            segments: the engine's tensors and others (tensors, in a process that the script started), private pools
            (of CUDA graphs), what is free; and outside of the allocator, by owner.
    """

    process: str
    how: str
    times: int
    freed_bytes: int
    kept: dict[str, int]


@dataclass(frozen=True)
class NamedPhase:
    """A phase that the script named (``fakedist.phase``).

    Attributes:
        phase: The script's name.
        step: Step in which it began.
        end_step: Step in which it ended.
        first_event: Row of ``events`` that was the first in it.
        end_event: Row of ``events`` that was the first after it; the number of events if none was.
        handover_allocated_bytes: Most that was allocated from where the last phase before it began or ended, or the
            run began, to its begin.
        handover_reserved_bytes: Most that was reserved then.
        peak_allocated_bytes: Most that was allocated during it.
        peak_reserved_bytes: Most that was reserved during it.
        peak_used_bytes: Most that was in use of the virtual GPU, by all processes, without their contexts; 0: unknown.
        end_backed_bytes: In use at its end: memory behind the caching allocator's segments. Those that sleep have none.
        end_outside_bytes: In use at its end: this process's memory outside the caching allocator.
        end_others_bytes: In use at its end: memory of other processes.
    """

    phase: str
    step: Int32
    end_step: Int32
    first_event: Annotated[int, RowOf("events", may_end=True)]
    end_event: Annotated[int, RowOf("events", may_end=True)]
    handover_allocated_bytes: int
    handover_reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_used_bytes: int
    end_backed_bytes: int
    end_outside_bytes: int
    end_others_bytes: int


@dataclass(frozen=True)
class LayerMemory:
    """A layer, or several alike that are folded into one row.

    Attributes:
        name: Fully qualified name, with ``0-79`` for the numbers of folded layers.
        class_name: Its class.
        num_repeats: Layers in the row.
        peak_bytes: Bytes at the peak by category, children included; the sum of the repeats.
        peak_own_bytes: Bytes at the peak without children; the sum of the repeats.
        peak_total_bytes: Bytes at the peak, children included; the sum of the repeats.
        least_peak_bytes: The repeat with the least at the peak, children included.
        median_peak_bytes: The median repeat.
        largest_peak_bytes: The repeat with the most.
        most_bytes: Most bytes at once in the last step by category, of the repeat that held most.
        most_total_bytes: Most bytes at once in the last step, children included, of the repeat that held most.
    """

    name: str
    class_name: str
    num_repeats: int
    peak_bytes: dict[str, int]
    peak_own_bytes: int
    peak_total_bytes: int
    least_peak_bytes: int
    median_peak_bytes: int
    largest_peak_bytes: int
    most_bytes: dict[str, int]
    most_total_bytes: int


@dataclass(frozen=True)
class LargeBlock:
    """The largest blocks at the peak, largest first.

    Attributes:
        bytes: Bytes.
        category: What it is for.
        layer: The layer that owns it; of several, how many: "12 layers of layers.3".
        phase: Phase that allocated it.
        step: Step that allocated it.
        operation: Operation that allocated it.
        line: The innermost line outside of torch: ``file:line (function)``.
    """

    bytes: int
    category: Annotated[str, CATEGORIES]
    layer: str
    phase: Annotated[str, PHASES]
    step: Int32
    operation: str
    line: str


@dataclass(frozen=True)
class HeldSegment:
    """A segment with free memory that blocks in it keep reserved; part of a row of the table ``segments``.

    Attributes:
        bytes: Its size.
        state: pinned (less than half of it is allocated) or used.
        stream: The CUDA stream whose blocks it serves.
        allocated_bytes: In blocks that tensors hold.
        free_bytes: In holes between blocks.
        num_blocks: Blocks in it.
        num_holes: Pieces that the free memory is in.
        largest_hole_bytes: The largest of them.
        block: The largest block in it.
    """

    bytes: int
    state: str
    stream: int
    allocated_bytes: int
    free_bytes: int
    num_blocks: int
    num_holes: int
    largest_hole_bytes: int
    block: LargeBlock


@dataclass(frozen=True)
class ReservedMoment:
    """Why more was reserved than allocated, at one moment.

    Attributes:
        moment: peak_reserved (the first time that the most was reserved) or peak_allocated.
        step: Step.
        phase: Phase.
        reserved_bytes: Reserved then.
        allocated_bytes: Allocated then.
        rounding_bytes: The part of allocated that nothing asked for: requests are rounded up.
        unused: The difference in parts, which add up to it: free bytes by the state of their segment (a column of the
            table ``segments``), and as ``waiting`` what was freed while another stream still used it.
        num_segments: Segments.
        held: Segments of the large pool that blocks keep reserved, most free memory first.
        taken_for: The block that the last segment was taken for; None at other moments.
    """

    moment: str
    step: int
    phase: str
    reserved_bytes: int
    allocated_bytes: int
    rounding_bytes: int
    unused: dict[str, int]
    num_segments: int
    held: list[HeldSegment]
    taken_for: LargeBlock | None


@dataclass(frozen=True)
class CollectiveTotal:
    """All calls of one operation on one group, *simulated*.

    Attributes:
        group: The group's description, or its name.
        group_size: Ranks in it.
        operation: all_reduce, all_gather_into_tensor, ...
        num_calls: Calls.
        bytes_in: Bytes of this rank's inputs.
        bytes_out: Bytes of this rank's outputs.
    """

    group: str
    group_size: int
    operation: str
    num_calls: int
    bytes_in: int
    bytes_out: int


@dataclass(frozen=True)
class StepPeak:
    """A training step that ended; a row of the table ``steps``.

    Attributes:
        step: Number, from 1.
        wall_us: How long it took here, recording included; not a real GPU's time.
        peak_allocated_bytes: Most that was allocated during it.
        peak_reserved_bytes: Most that was reserved during it.
        samples: First dimension of the model's input, summed over its forwards with gradients; 0 if not known.
        sample_shape: The input's other dimensions, such as "3x224x224"; empty if not known.
        name: What the script calls it; "evaluation" if one ran before its training; else empty.
        elements: Elements of all inputs of the model, summed over its forwards with gradients; 0 or NaN if not known.
    """

    step: int
    wall_us: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    samples: int = 0
    sample_shape: str = ""
    name: str = ""
    elements: float = 0.0


@dataclass(frozen=True)
class OutOfMemory:
    """The first request that did not fit, if the run went on beyond the GPU's memory; else the one that ended it.

    Attributes:
        requested_bytes: What was asked for.
        layer: The layer that asked.
        operation: The operation that asked.
        line: The line that asked.
        allocated_bytes: Allocated at that moment.
        reserved_bytes: Reserved at that moment, after the allocator had freed its caches.
        step: The step that asked; 0 is before the first step.
        phase: The phase that asked; empty if it is not known.
        limit_bytes: The GPU's memory, or the part of it that the script allowed its process.
        went_on: Whether the run went on, so that its peaks are what the rank needs.
        stack: The script's lines, innermost first; in a backward, those that called it.
    """

    requested_bytes: int
    layer: str
    operation: str
    line: str
    allocated_bytes: int
    reserved_bytes: int
    step: int = 0
    phase: str = ""
    limit_bytes: int = 0
    went_on: bool = False
    stack: list[str] = field(default_factory=list)

    @property
    def least_bytes(self) -> int:
        """The least that the rank would have had to reserve to get past this request."""
        return self.reserved_bytes + self.requested_bytes


@dataclass(frozen=True)
class Advice:
    """One change to the job that would lower a peak, *estimated* by itself from this run.

    Attributes:
        rule: The rule that found it.
        title: What to change.
        text: Why, and how.
        gives_bytes: How much lower the peak would be; the most, if it is known only by bounds.
        of: Which peak: peak_allocated_bytes, peak_reserved_bytes or peak_used_bytes (of the GPU, by all processes).
            cache_bytes: vLLM's KV cache gets so much larger. host_bytes: so much less of the host's memory is pinned.
        line: The line that allocates what it saves: ``file:line (function)``; empty if there is no such line.
        is_upper_bound: Whether ``gives_bytes`` is only the most that it can be.
        needs_low_bytes: The least that it would then need reserved once the allocator has freed its caches.
        needs_high_bytes: The most.
        fits: Whether the rank would then fit; empty if that is not known.
        price_us: How much longer the step would take at least, *estimated*; None if that is not known.
        step_share: The same as a share of the step.
        gives_low_bytes: How much lower the peak would be at least; None if that is not known.
        price_high_us: How much longer the step would take at most.
        step_share_high: The same as a share of the step.
        spent_on: The work that takes that time.
    """

    rule: str
    title: str
    text: str
    gives_bytes: int
    of: str = "peak_allocated_bytes"
    line: str = ""
    is_upper_bound: bool = False
    needs_low_bytes: int = 0
    needs_high_bytes: int = 0
    fits: Literal["fits", "may fit", "does not fit", ""] = ""
    price_us: float | None = None
    step_share: float | None = None
    gives_low_bytes: int | None = None
    price_high_us: float | None = None
    step_share_high: float | None = None
    spent_on: str = ""


@dataclass(frozen=True)
class Remedy:
    """The fewest changes after which a rank that does not fit would fit, *estimated* together from this run.

    Attributes:
        rules: Their rules.
        titles: What to change.
        gives_bytes: How much lower the allocated peak would be; the most, if it is known only by bounds.
        needs_low_bytes: The least that it would then need reserved once the allocator has freed its caches.
        needs_high_bytes: The most.
        fits: Whether that fits the GPU.
        price_us: How much longer the step would take at least, without the changes in ``unpriced``.
        step_share: The same as a share of the step; None if no step was timed.
        unpriced: Rules of changes whose price is not known.
        gives_low_bytes: How much lower the allocated peak would be at least.
        price_high_us: How much longer the step would take at most, without the changes in ``unpriced``.
        step_share_high: The same as a share of the step.
        spent_on: The work that takes that time.
    """

    rules: list[str]
    titles: list[str]
    gives_bytes: int
    needs_low_bytes: int
    needs_high_bytes: int
    fits: Literal["fits", "may fit", "does not fit", ""]
    price_us: float
    step_share: float | None
    unpriced: list[str]
    gives_low_bytes: int = 0
    price_high_us: float = 0.0
    step_share_high: float | None = None
    spent_on: str = ""


@dataclass(frozen=True)
class Summary:
    """The figures of a run.

    Attributes:
        world_size: Ranks in the job; None where that is not known (a snapshot, another tool's report).
        rank: The one that ran.
        device: cuda or virtual.
        gpu: The GPU's name; empty if the rank never reached it.
        torch: Version of torch.
        exit: How the rank ended.
        left_during_init: Where the script ended by itself before a first step; None if it did not.
        fits: Whether the peak fits the GPU in addition to the least of ``estimated_outside``; False if the rank ran out
            of memory or went on beyond it.
        capacity_bytes: The GPU's memory.
        peak_allocated_bytes: Most that tensors held at once.
        peak_reserved_bytes: Most that the caching allocator held at once.
        peak_step: Step of the allocated peak; 0 is before the first step.
        peak_phase: Phase of the allocated peak.
        estimated_outside: Device memory outside of the caching allocator; None for a snapshot.
        by_phase: Peaks of each phase.
        by_category: Bytes at the allocated peak by category; they add up to it.
        layers: Layers that held anything.
        largest_blocks: The largest blocks at the peak.
        collectives: This rank's calls by group and operation.
        steps: Steps that ended.
        kernels: Where the table ``kernels`` comes from; None without one.
        time: Where the time of the timed step goes; None without one.
        out_of_memory: The first request that did not fit; None if all did, or if the script handled the error.
        advice: What would lower the peak.
        remedy: The fewest changes after which the rank would fit; None if it fits, or if none of them are enough.
        invented_values: Values that the virtual GPU made up.
        reserved: Why more was reserved than allocated, at both peaks.
        notes: What limits what these figures mean.
        named_phases: The phases that the script named, in the order in which they ended.
        asleep_bytes: Reserved at the reserved peak, at least, without memory behind it: an inference engine slept.
        engine: vLLM's engine; None without one.
        engine_sleeps: What engines keep asleep.
        router_load: How many tokens experts got; None if no router picked by made-up values.
        host_memory: The host's memory of the rank and of its node; None if it was not recorded.
        schema_version: Version of this layout.
    """

    schema_version: int = field(default=SCHEMA_VERSION, kw_only=True)
    world_size: int | None
    rank: int | None
    device: str
    gpu: str
    torch: str
    exit: Ending
    left_during_init: LeftDuringInit | None
    fits: bool
    capacity_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_step: int
    peak_phase: str
    estimated_outside: Outside | None
    by_phase: list[PhasePeak]
    by_category: dict[str, int]
    layers: list[LayerMemory]
    largest_blocks: list[LargeBlock]
    collectives: list[CollectiveTotal]
    steps: list[StepPeak]
    kernels: KernelSource | None
    time: StepTime | None
    out_of_memory: OutOfMemory | None
    advice: list[Advice]
    invented_values: int
    reserved: list[ReservedMoment] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    remedy: Remedy | None = None
    router_load: RouterLoadFacts | None = None
    host_memory: HostMemory | None = None
    named_phases: list[NamedPhase] = field(default_factory=list)
    engine: EngineMemory | None = None
    engine_sleeps: list[EngineSleep] = field(default_factory=list)
    asleep_bytes: int = 0

    @property
    def timed(self) -> tuple[StepTime, KernelSource] | None:
        """Where the time of the timed step goes, and where it comes from; None without kernels."""
        return None if self.time is None or self.kernels is None else (self.time, self.kernels)
