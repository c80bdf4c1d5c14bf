"""The tables of a run directory, each declared once, by a class as :mod:`fakedist.rundir.schema` reads it.

Schema, reader, writer and docs/run-directory follow. Tables whose rows are also a record's have the record's class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fakedist.rundir.host_memory import HostPhase, Save
from fakedist.rundir.launch_records import ALLOCATOR_CALLS, ALLOCATOR_WAITS, LAUNCH_KINDS, RangeRow, WorkRow
from fakedist.rundir.rows import FrameRow, UnansweredRow
from fakedist.rundir.schema import (
    ACTIONS,
    BOUNDS,
    CATEGORIES,
    COMPUTE_FAMILIES,
    FAMILIES,
    HOST_KINDS,
    HOST_PHASES,
    KINDS,
    MOMENTS,
    PHASES,
    SEGMENT_STATES,
    USE_PARTS,
    ColumnMark,
    Each,
    Int32,
    RowOf,
    Table,
    UInt64,
)
from fakedist.rundir.step_time import KernelTime
from fakedist.rundir.summary import LargeBlock, NamedPhase, PhasePeak

_STATES = "; ".join(f"{name}: {text}" for name, text in SEGMENT_STATES.items()) + "."
_CALLED = (
    "What the caching allocator called since the row before, with the number of calls and their bytes: "
    f"{', '.join(ALLOCATOR_CALLS)}; {ALLOCATOR_WAITS} where the row is a wait of its own; empty for nothing."
)


class BlocksTable:
    """A block of device memory that the caching allocator gave away, in the order of allocation."""

    address: Annotated[UInt64, "Device address."]
    requested_bytes: Annotated[int, "What was asked for."]
    bytes: Annotated[int, "What the allocator gave: the request rounded up, or a free block's whole rest."]
    alloc_event: Annotated[int, "Row of `events` that made it.", RowOf("events")]
    free_event: Annotated[
        int, "Row of `events` that asked to free it; the number of events if none did.", RowOf("events", may_end=True)
    ]
    reuse_event: Annotated[
        int,
        "Row of `events` from which its memory could be given again; the number of events if none.",
        RowOf("events", may_end=True),
    ]
    op: Annotated[int, "Number of the operation that allocated it; -1 if none was running."]
    operation: Annotated[str, "That operation, e.g. aten.mm.default."]
    step: Annotated[Int32, "Training step; 0 is before the first one."]
    phase: Annotated[str, "init, generation, forward, backward, optimizer or other.", PHASES]
    recompute: Annotated[bool, "Allocated while backward ran a checkpointed forward again."]
    layer: Annotated[Int32, "Row of `layers`; for marked blocks the layer that owns it.", RowOf("layers")]
    category: Annotated[str, "What it is for: {words}.", CATEGORIES]
    stream: Annotated[UInt64, "CUDA stream; 0 is the default one."]
    stack: Annotated[Int32, "Row of `stacks`; -1 without Python frames.", RowOf("stacks", least=-1)]
    at_peak: Annotated[bool, "Whether it was alive at the peak."]


class SharesTable:
    """A layer's share of a block that several layers own (a flat buffer); other blocks have no row."""

    block: Annotated[int, "Row of `blocks`.", RowOf("blocks")]
    layer: Annotated[Int32, "Row of `layers`.", RowOf("layers")]
    bytes: Annotated[int, "Its share; the shares of a block add up to the block."]


class AsleepTable:
    """A stretch of events in which a block had no memory behind it, because an inference engine slept, between two
    changes of what sleeps. It is allocated and reserved nevertheless. No rows without a virtual GPU.
    """

    block: Annotated[int, "Row of `blocks`.", RowOf("blocks")]
    first_event: Annotated[int, "Row of `events` that is the first in it.", RowOf("events", may_end=True)]
    end_event: Annotated[int, "Row of `events` that is the first after it.", RowOf("events", may_end=True)]


class EventsTable:
    """An action of the allocator, in order."""

    action: Annotated[str, "The allocator's own word: {words}.", ACTIONS]
    address: Annotated[UInt64, "Of the block or segment."]
    size_bytes: Annotated[int, "Requested bytes of a block; bytes of a segment."]
    stream: Annotated[UInt64, "CUDA stream."]
    time_us: Annotated[int, "Unix time."]
    op: Annotated[int, "Number of the operation that ran; -1 if none did."]
    stack: Annotated[Int32, "Row of `stacks` (allocations only); -1 if none.", RowOf("stacks", least=-1)]
    allocated_bytes: Annotated[int, "In blocks that tensors hold, after the event."]
    reserved_bytes: Annotated[int, "In segments, after the event."]


class SegmentsTable:
    """A segment that the caching allocator held at one of two moments, those with the most free memory first. Those of
    a moment add up to what is reserved. Adjacent pages of an expandable segment are one row.
    """

    moment: Annotated[
        str,
        "peak_reserved: the first time that the most was reserved, with the block that it was reserved for; "
        "peak_allocated: the first time that the most was allocated.",
        MOMENTS,
    ]
    event: Annotated[int, "Row of `events` after which it is.", RowOf("events")]
    address: Annotated[UInt64, "Device address; 0 if unknown."]
    bytes: Annotated[int, "Its size."]
    state: Annotated[str, _STATES, tuple(SEGMENT_STATES)]
    pool: Annotated[str, "small, large or unknown."]
    private_pool: Annotated[str, "Id of its private pool; empty outside of private pools."]
    is_expandable: Annotated[bool, "Whether it consists of mapped pages (expandable_segments)."]
    stream: Annotated[UInt64, "The CUDA stream whose blocks it serves."]
    allocated_bytes: Annotated[int, "In blocks that tensors hold."]
    requested_bytes: Annotated[int, "What was asked for with those; the rest is rounding."]
    waiting_bytes: Annotated[int, "In blocks that were freed while another stream still used them."]
    free_bytes: Annotated[int, "The rest."]
    num_blocks: Annotated[int, "Blocks in it, allocated or waiting."]
    num_holes: Annotated[int, "Pieces that the free memory is in."]
    largest_hole_bytes: Annotated[int, "The largest of them."]
    block: Annotated[int, "Row of `blocks`: the largest one in it; -1 if it is empty.", RowOf("blocks", least=-1)]


class StacksTable:
    """A Python stack."""

    frames: Annotated[list[Int32], "Rows of `frames`, innermost first.", RowOf("frames")]
    line: Annotated[
        str,
        "The innermost line outside of torch: file:line (function); file:line (function, backward) for what the "
        "backward of that line's operation allocates.",
    ]


class OperationStacksTable:
    """An operation of the timed step that launched something, and the Python stack that called it; of an operation that
    a node of autograd's graph runs in a backward, the stack of the forward's that made the node. Only on the virtual
    GPU.
    """

    op: Annotated[int, "Number of the operation, as in `kernels`."]
    stack: Annotated[Int32, "Row of `stacks`.", RowOf("stacks")]


class LayersTable:
    """A module, by its fully qualified name; parents before children, models that an optimizer trains before others.
    Row 0 is outside of any module.
    """

    name: Annotated[str, "Name without wrappers; a root module is called by its class in parentheses."]
    class_name: Annotated[str, "Class."]
    parent: Annotated[Int32, "Row of the parent; -1 for row 0.", RowOf("layers", least=-1, is_earlier=True)]
    peak: Annotated[int, "Bytes of category {} at the peak, the layer's own.", Each("peak_{}_bytes", CATEGORIES)]
    most: Annotated[
        int, "Most bytes of category {} in the last step, the layer's own.", Each("most_{}_bytes", CATEGORIES)
    ]
    most_total: Annotated[
        int, "Most bytes of category {} in the last step, with its children.", Each("most_total_{}_bytes", CATEGORIES)
    ]
    peak_own_bytes: Annotated[int, "Bytes at the peak, the layer's own; the column adds up to the peak."]
    peak_total_bytes: Annotated[int, "Bytes at the peak, with its children."]
    most_own_bytes: Annotated[int, "Most bytes alive at once in the last step, the layer's own."]
    most_total_bytes: Annotated[int, "Most bytes alive at once in the last step, with its children."]


@dataclass(frozen=True)
class NamedPhasesTable(NamedPhase):
    """A phase that the script named (``fakedist.phase``), in the order in which they ended. What is in use is that of
    the virtual GPU: 0 without one.
    """

    first_change: Annotated[
        float, "Number of the first change in `device_use` during it; NaN if not known.", ColumnMark.NEWER
    ]
    end_change: Annotated[float, "Number of the first change after it.", ColumnMark.NEWER]


class DeviceUseTable:
    """Memory that a process held of the rank's virtual GPU after a change of what is in use, without contexts; in the
    order of changes. No rows without a virtual GPU.
    """

    change: Annotated[
        int,
        "Number of the change, from 1. In a long run it stands for all changes before the next number; the bytes are"
        " those after the one of them with the most in use.",
    ]
    process: Annotated[str, "Name of another process of the rank; empty for the rank's own."]
    part: Annotated[
        str,
        "KV cache (of vLLM's engine). The rest of the rank's own process: allocator (behind its segments), outside "
        "(of the allocator). The rest of another: all.",
        USE_PARTS,
    ]
    bytes: Annotated[int, "How much."]


class SpansTable:
    """A stretch of events in one phase, in order; together they are all of the events."""

    step: Annotated[Int32, "Step."]
    phase: Annotated[str, "Phase.", PHASES]
    first_event: Annotated[int, "Row of `events` that begins it; the next span's ends it.", RowOf("events")]


class StepsTable:
    """A training step that ended."""

    step: Annotated[Int32, "Number, from 1."]
    start_us: Annotated[int, "Unix time."]
    wall_us: Annotated[int, "How long it took here, recording included; not a real GPU's time."]
    peak_allocated_bytes: Annotated[int, "Most that was allocated during it."]
    peak_reserved_bytes: Annotated[int, "Most that was reserved during it."]
    samples: Annotated[
        int, "First dimension of the model's input, summed over its forwards with gradients; 0 if not known."
    ]
    sample_shape: Annotated[str, "The input's other dimensions: 3x224x224; empty if not known."]
    name: Annotated[
        str, "What the script calls it; evaluation if one ran before its training; else empty.", ColumnMark.NEWER
    ]
    elements: Annotated[
        float,
        "Elements of all inputs of the model, summed over its forwards with gradients; 0 or NaN if not known.",
        ColumnMark.NEWER,
    ]


@dataclass(frozen=True)
class CollectivesTable:
    """Calls of one operation on one group."""

    group: Annotated[Int32, "Row of `groups`."]
    operation: Annotated[str, "all_reduce, all_gather_into_tensor, ..."]
    num_calls: Annotated[int, "Calls."]
    bytes_in: Annotated[int, "Bytes of this rank's inputs."]
    bytes_out: Annotated[int, "Bytes of this rank's outputs."]


class CallsTable:
    """A collective call, in order."""

    sequence: Annotated[int, "Sequence number."]
    operation: Annotated[str, "all_reduce, all_gather_into_tensor, ..."]
    group: Annotated[Int32, "Row of `groups`."]
    bytes_in: Annotated[int, "Bytes of this rank's inputs."]
    bytes_out: Annotated[int, "Bytes of this rank's outputs."]
    dtype: Annotated[str, "dtype of the first tensor."]
    asynchronous: Annotated[bool, "Called with async_op=True."]
    stream: Annotated[UInt64, "CUDA stream it was called from."]
    op: Annotated[int, "Number of the next operation."]
    step: Annotated[Int32, "Step."]
    phase: Annotated[str, "Phase.", PHASES]
    layer: Annotated[Int32, "Row of `layers`.", RowOf("layers")]
    peer: Annotated[int, "The other rank of a send or receive; -1 for collectives."]
    largest_part_bytes: Annotated[
        int, "Bytes of the largest part of an all_to_all to or from another rank; 0 for other calls."
    ]
    exchanged_bytes: Annotated[
        int, "Bytes of an all_to_all to all other ranks or from them, whichever is more; 0 for other calls."
    ]


class CallTermsTable:
    """Terms on which the ranks of a call have to agree, and where the host waits. Row by row as `calls`."""

    reduction: Annotated[str, "SUM, AVG, ...; empty without one."]
    root: Annotated[Int32, "Group rank that is its root; -1 without one."]
    tag: Annotated[int, "Tag of a send or receive."]
    batch: Annotated[Int32, "Calls of a group that are coalesced into one, from 1; 0 for others."]
    sent_parts: Annotated[list[int], "Bytes for each rank of the group, where they are not equal."]
    received_parts: Annotated[list[int], "Bytes from each rank of the group, where they are not equal."]
    on_host: Annotated[bool, "The host makes it: its tensors are the host's, or its backend is gloo."]
    own_pair: Annotated[bool, "A send or receive on a communicator of these two ranks alone."]
    waits: Annotated[
        bool,
        "The host waits for the call in a barrier, and on the host if it is not asynchronous; where its communicator "
        "is made, for the hosts of its ranks.",
    ]
    lines: Annotated[str, "The script's lines, innermost first, one a line; empty in autograd's threads."]
    parts: Annotated[
        str,
        "Dtype and bytes of each part of a call of several tensors, one a line; empty for other calls.",
        ColumnMark.NEWER,
    ]
    join: Annotated[
        str,
        "In a `torch.distributed.algorithms.Join`: inside, a call that ranks without inputs left make, too; joined, "
        "the one in which they do so until no rank has any.",
        ("", "inside", "joined"),
        ColumnMark.NEWER,
    ]
    awaited: Annotated[
        float, "Sequence number of the first call after the wait for it; NaN where none was seen.", ColumnMark.NEWER
    ]
    awaited_on: Annotated[float, "The stream that waits; NaN where no wait was seen.", ColumnMark.NEWER]


class KernelsTable:
    """Work of a stream in the timed step: a kernel, a copy, a fill, or a collective; in the order of their start.
    Which step, and whether it was measured or estimated, says `kernels` of the `--json` object.
    """

    name: Annotated[str, "The kernel, or the library's function that would have launched it."]
    family: Annotated[str, "What it does: {words}.", FAMILIES]
    stream: Annotated[UInt64, "CUDA stream; 0 is the default one."]
    start_us: Annotated[float, "When it began, from the beginning of the step."]
    duration_us: Annotated[float, "How long it took; NaN if not known: an estimated step's collectives."]
    launch_us: Annotated[float, "When the host launched it, from the beginning of the step; NaN: unknown."]
    grid: Annotated[str, "Blocks as x,y,z; empty if unknown."]
    block: Annotated[str, "Threads of a block as x,y,z; empty if unknown."]
    operation: Annotated[str, "The operation that launched it, e.g. aten.mm.default; empty if none was."]
    op: Annotated[int, "Number of that operation, as in `blocks`; -1 if none was running."]
    step: Annotated[Int32, "Step."]
    phase: Annotated[str, "init, generation, forward, backward, optimizer or other.", PHASES]
    recompute: Annotated[bool, "Launched while backward ran a checkpointed forward again."]
    layer: Annotated[Int32, "Row of `layers`; 0 outside of modules.", RowOf("layers")]
    call: Annotated[int, "Sequence number in `calls` of the collective that it stands for; -1 otherwise."]
    flops: Annotated[float, "Its share of a product's, convolution's or attention's FLOPs; else 0; NaN if unknown."]
    moved_bytes: Annotated[float, "What it must read and write at least; NaN if not known."]
    bound: Annotated[str, "Estimated: compute, memory or launch limits it; empty where not known.", BOUNDS]
    low_us: Annotated[float, "Estimated: the least of its 90 % interval; NaN if measured or not known."]
    high_us: Annotated[float, "Estimated: the most of its 90 % interval; NaN if measured or not known."]
    shape: Annotated[str, "Estimated: sizes of its product or attention; empty for others."]
    basis: Annotated[str, "Estimated: the measurement its time is from, and what is assumed; else empty."]
    launch: Annotated[int, "Row of `launches`; -1 if a tool traced it.", RowOf("launches", least=-1)]
    path_us: Annotated[
        float,
        "How much of the critical path it is; 0 if it is not on it, NaN if the path is not known.",
        ColumnMark.NEWER,
    ]


class LaunchesTable:
    """A launch, event or wait that the host gave to the streams in the timed step, in order. On the virtual GPU it says
    nothing of times, and so holds for any GPU.
    """

    what: Annotated[str, "What it is: {words}.", LAUNCH_KINDS]
    work: Annotated[Int32, "Row of `work`; -1 for events and waits.", RowOf("work", least=-1)]
    stream: Annotated[UInt64, "CUDA stream; 0 is the default one."]
    event: Annotated[UInt64, "The event that is recorded or waited for; 0 without one."]
    num_operations: Annotated[int, "Operations of torch that the host ran since the last row with work."]
    graph: Annotated[Int32, "Number of the launch of the CUDA graph that it belongs to; 0 outside of graphs."]
    device: Annotated[Int32, "Index of the device."]
    grid: Annotated[str, "Blocks as x,y,z; empty if unknown."]
    block: Annotated[str, "Threads of a block as x,y,z; empty if unknown."]
    op: Annotated[int, "Number of the operation that launched it, as in `blocks`; -1 if none was running."]
    step: Annotated[Int32, "Step."]
    phase: Annotated[str, "init, generation, forward, backward, optimizer or other."]
    recompute: Annotated[bool, "Launched while backward ran a checkpointed forward again."]
    layer: Annotated[Int32, "Row of `layers`; 0 outside of modules.", RowOf("layers")]
    call: Annotated[int, "Sequence number in `calls` of the collective that it stands for; -1 otherwise."]
    measured_us: Annotated[float, "How long it took on a real GPU; NaN for collectives, and on the virtual GPU."]
    host_us: Annotated[float, "Time of the host before it, waits left out; NaN on the virtual GPU."]
    dispatch_us: Annotated[
        float,
        "Time of Python, torch's dispatcher and autograd before it, measured on the virtual GPU in steps without the"
        " recorder; without what a real CUDA library takes. NaN where it was not measured.",
    ]
    thread: Annotated[
        float,
        "The host's thread that launched it: 0 for the main one, others as they come; NaN where it is not known.",
        ColumnMark.NEWER,
    ]
    allocator: Annotated[str, _CALLED, ColumnMark.NEWER]
    host_work: Annotated[
        str,
        "Operations on large floats in the host's memory since the row before, which are not computed, one a line: "
        "name, elements of the largest tensor, bytes moved, FLOPs, torch's threads, the script's line; empty for none.",
        ColumnMark.NEWER,
    ]


class HostTable:
    """The host on the time line of the timed step: a row for each row of `launches`, in their order. No rows if it is
    not known what streams wait for.
    """

    begin_us: Annotated[float, "When the host begins what leads to this launch, event or wait."]
    reached_us: Annotated[float, "When it launches, or begins to wait."]
    passed_us: Annotated[float, "When it goes on: later only where it waits for the GPU."]
    late_us: Annotated[float, "How long the GPU was idle until this launch; 0 if that was not the host's doing."]
    idle_us: Annotated[float, "Of the idle time of the GPU behind late launches, what follows from this wait."]


class RangesTable(RangeRow):
    """A range that the script opened in the timed step: torch.cuda.nvtx, torch.profiler's record_function. In the order
    in which they began, outer ones first. None of an imported trace.
    """

    begin_us: Annotated[float, "When the host launched the first kernel in it; NaN without one."]
    end_us: Annotated[float, "When it launched the last one."]
    gpu_begin_us: Annotated[float, "When the first of those began on the GPU."]
    gpu_end_us: Annotated[float, "When the last of them ended, as far as durations are known."]
    num_kernels: Annotated[int, "How many, communication left out."]
    num_unknown: Annotated[int, "How many of them are of unknown duration."]
    kernel_us: Annotated[float, "How long the others took, ranges inside included."]
    num_calls: Annotated[int, "Collective calls in it."]


class RoutedTable:
    """Launches of the timed step whose work follows the tokens of experts, and the call of a router that each belongs
    to. They are priced as on the busiest rank of each call.
    """

    launch: Annotated[int, "Row of `launches`.", RowOf("launches")]
    sums: Annotated[bool, "A product that sums over the tokens."]
    layer: Annotated[int, "Number of the router's layer, among those with routers."]
    number: Annotated[int, "How often the layer's router was called before."]
    step: Annotated[int, "Training steps that had ended."]
    tokens: Annotated[int, "Tokens of each rank."]
    num_experts: Annotated[int, "Experts of the layer."]
    top_k: Annotated[int, "Experts that a token picks."]
    groups: Annotated[int, "Groups that experts are in; 1: none."]
    top_groups: Annotated[int, "Groups that a token picks first."]
    in_turn: Annotated[bool, "Whether two operations pick a token's two experts."]
    received: Annotated[int, "Tokens that this rank's experts get in the call, once for each expert."]
    busiest: Annotated[int, "The same of the rank that gets the most in the call."]


class LayerTimesTable:
    """The timed step by layer: a row for each row of `layers`, none without `kernels`. Communication is apart."""

    name: Annotated[str, "The layer's name."]
    num_kernels: Annotated[int, "Kernels of the layer's own, communication left out."]
    kinds: Annotated[float, "Time of those in {}, the layer's own.", Each("{}_us", KINDS)]
    own_us: Annotated[float, "Time of those; the column adds up to the time of all kernels."]
    total_us: Annotated[float, "The same with its children."]
    families: Annotated[float, "Time of those of family {}, the layer's own.", Each("family_{}_us", COMPUTE_FAMILIES)]
    bounds: Annotated[float, "Time of those that {} limits.", Each("bound_{}_us", BOUNDS[1:])]
    flops: Annotated[float, "Floating-point operations of those, where they are known."]
    moved_bytes: Annotated[float, "Bytes that those move, where they are known."]
    num_lacking_flops: Annotated[int, "Matrix products and attention whose operations are not known."]
    launch_gap_us: Annotated[float, "How long the GPU waited for the host to launch the layer's kernels."]
    num_calls: Annotated[int, "Collective calls of the layer's own."]
    num_unknown_calls: Annotated[int, "Those whose duration is not known."]
    communication_us: Annotated[
        float, "Duration of the others: of the copies that stand for them, where they are not priced."
    ]
    host_us: Annotated[float, "The host's own time for the layer's launches, waits left out.", ColumnMark.NEWER]


@dataclass(frozen=True)
class GroupsTable:
    """A process group that this rank is in."""

    name: Annotated[str, "Its name in torch.distributed."]
    description: Annotated[str, "Its description or mesh axes; else the line that made it."]
    backend: Annotated[str, "The backend that the script asked for."]
    size: Annotated[int, "Ranks in it."]
    group_rank: Annotated[int, "This rank's place in it."]
    ranks: Annotated[str, "Its ranks, regular ones as start-stop:step.", ColumnMark.RANKS]


class OtherGroupsTable:
    """A process group that this rank made with others and is not in, in order."""

    after: Annotated[int, "Rows of `groups` that were made before it."]
    description: Annotated[str, "As in `groups`."]
    ranks: Annotated[str, "As in `groups`.", ColumnMark.RANKS]


class HostBlocksTable:
    """A block of the host's memory that a tensor took, of 1 MiB and more, or pinned memory, as they were allocated."""

    kind: Annotated[str, "pageable or pinned.", HOST_KINDS[:2]]
    bytes: Annotated[int, "Its size."]
    step: Annotated[Int32, "Step that allocated it."]
    phase: Annotated[str, "Phase that allocated it.", HOST_PHASES]
    stack: Annotated[Int32, "Row of `stacks`; -1 without Python frames.", RowOf("stacks", least=-1)]
    alloc_us: Annotated[int, "Unix time."]
    free_us: Annotated[int, "Unix time; -1 if it was never freed."]
    at_peak: Annotated[bool, "Whether it was held at the peak of the host's memory."]


class HostFilesTable:
    """A file of 1 MiB or more, or a piece of /dev/shm, that was in the rank's memory when it was looked at."""

    path: Annotated[str, "Its path."]
    is_shared_memory: Annotated[bool, "Whether it is in /dev/shm, and so in memory alone."]
    bytes: Annotated[int, "The most of it at one time."]
    is_private: Annotated[bool, "Whether pages that the rank writes become its own."]
    step: Annotated[Int32, "Step in which it was first seen."]
    phase: Annotated[str, "Phase in which it was first seen.", HOST_PHASES]


class InventedTable:
    """Values that the virtual GPU had to make up because the script read what no kernel had computed."""

    operation: Annotated[str, "The reading operation."]
    line: Annotated[str, "file:line of the script."]
    num_calls: Annotated[int, "How often."]
    num_values: Annotated[int, "How many values."]


TABLES: dict[str, Table] = {
    "blocks": Table(BlocksTable),
    "shares": Table(SharesTable),
    "asleep": Table(AsleepTable, is_newer=True),
    "events": Table(EventsTable),
    "segments": Table(SegmentsTable),
    "stacks": Table(StacksTable),
    "operation_stacks": Table(OperationStacksTable),
    "frames": Table(FrameRow),
    "layers": Table(LayersTable),
    "phases": Table(PhasePeak),
    "named_phases": Table(NamedPhasesTable, is_newer=True),
    "device_use": Table(DeviceUseTable, is_newer=True),
    "spans": Table(SpansTable),
    "steps": Table(StepsTable),
    "largest": Table(LargeBlock),
    "collectives": Table(CollectivesTable),
    "calls": Table(CallsTable),
    "call_terms": Table(CallTermsTable, is_newer=True),
    "kernels": Table(KernelsTable),
    "launches": Table(LaunchesTable),
    "host": Table(HostTable, is_newer=True),
    "ranges": Table(RangesTable),
    "work": Table(WorkRow),
    "routed": Table(RoutedTable, is_newer=True),
    "layer_times": Table(LayerTimesTable),
    "kernel_names": Table(KernelTime),
    "groups": Table(GroupsTable),
    "other_groups": Table(OtherGroupsTable, is_newer=True),
    "host_blocks": Table(HostBlocksTable, is_newer=True),
    "host_phases": Table(HostPhase, is_newer=True),
    "host_files": Table(HostFilesTable, is_newer=True),
    "saves": Table(Save, is_newer=True),
    "invented": Table(InventedTable),
    "unanswered": Table(UnansweredRow),
}
