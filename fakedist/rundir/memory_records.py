"""The journal's records of memory: what the allocator did, what blocks are for, and what compiled graphs hold."""

from __future__ import annotations

from dataclasses import field

from fakedist.rundir.encoding import I32, I64, U8, U64, Record, record_kind
from fakedist.rundir.rows import (
    FrameRow,
    GraphRow,
    HeldRow,
    HolderRow,
    LineRow,
    MappingRow,
    PlacingRow,
    PoolRow,
    ScopeRow,
)


@record_kind("events")
class EventsRecord(Record):
    """Events of the caching allocator on a device, in order.

    Attributes:
        device: The device's index.
        frames: New frames. Their numbers follow those of the records before.
        stacks: New stacks: numbers of frames, innermost first.
        action: Index of the action in ``rundir.schema.ACTIONS``.
        address: Address of the block or segment.
        size: Requested bytes of a block, bytes of a segment.
        stream: CUDA stream.
        time_us: Unix time.
        op: Number of the operation that ran; -1 if none did.
        stack: Number of the stack; -1 without one.
        pools: The private pools among the segments.
    """

    device: int
    frames: list[FrameRow]
    stacks: list[tuple[int, ...]]
    action: U8
    address: U64
    size: I64
    stream: U64
    time_us: I64
    op: I64
    stack: I32
    pools: list[PoolRow] = field(default_factory=list)


@record_kind("nodes")
class NodesRecord(Record):
    """Nodes of autograd's graph, and what made them. The first row of a node holds.

    Attributes:
        frames: New frames, as in :class:`EventsRecord`.
        stacks: New stacks.
        op: Number of the operation whose allocations have the stack; -1 if ``stack`` has it.
        thread: Number of the thread that made the node.
        sequence: Number of the node among those of its thread.
        stack: Number of the stack; -1 with an operation.
    """

    frames: list[FrameRow]
    stacks: list[tuple[int, ...]]
    op: I64
    thread: U64
    sequence: I64
    stack: I32


@record_kind("node_runs")
class NodeRunsRecord(Record):
    """Operations that nodes of autograd's graph ran in a backward: of each, the node by its thread and number."""

    op: I64
    thread: U64
    sequence: I64


@record_kind("operation_stacks")
class OperationStacksRecord(Record):
    """Operations of timed steps, and the Python code that called them.

    Attributes:
        op: Number of the operation.
        stack: Number of its stack.
    """

    op: I64
    stack: I32


@record_kind("host_blocks")
class HostBlocksRecord(Record):
    """Changes of the host's memory, in order. Of the CPU allocator only blocks of 1 MiB and more are known.

    Attributes:
        frames: New frames, as in :class:`EventsRecord`.
        stacks: New stacks.
        change: Index in ``rundir.schema.HOST_CHANGES``.
        address: Address of the block; for ``moved`` the number of the place.
        size: Its bytes; 0 if it was freed.
        time_us: Unix time.
        stack: Number of the stack that allocated it; -1 if it was freed.
    """

    frames: list[FrameRow]
    stacks: list[tuple[int, ...]]
    change: U8
    address: U64
    size: I64
    time_us: I64
    stack: I32


@record_kind("host_places")
class HostPlacesRecord(Record):
    """Steps and phases of ``rundir.schema.HOST_PHASES``, by their numbers; layers are not known."""

    rows: list[ScopeRow]


@record_kind("allocator_settings")
class AllocatorSettingsRecord(Record):
    """The script set the caching allocator's settings, before an operation: all of them, as in PYTORCH_ALLOC_CONF."""

    op: int
    alloc_conf: str


@record_kind("host_look")
class HostLookRecord(Record):
    """The host's memory that no event tells of, at one time.

    Attributes:
        time_us: Unix time.
        place: Number of the place.
        malloc_bytes: What malloc had given to all of the process; -1 if that is not known.
        pinned_bytes: What torch's pinned allocator had taken; -1 if that is not known.
        pinned_used_bytes: The part of it that tensors held.
        prefetched_bytes: The most that workers of DataLoaders have in /dev/shm for this rank to take.
        mappings: Files and /dev/shm in this process's memory.
    """

    time_us: int
    place: int
    malloc_bytes: int
    pinned_bytes: int
    pinned_used_bytes: int
    prefetched_bytes: int
    mappings: list[MappingRow]


@record_kind("save")
class SaveRecord(Record):
    """A checkpoint that was written.

    Attributes:
        function: The function that wrote it.
        line: The script's line that called it.
        place: Number of the place.
        begin_us: Unix time when it was called.
        end_us: When it returned.
        written_bytes: Bytes that this process wrote until it was done; -1 if it was not done at the run's end, or
            another process writes.
        asynchronous: Whether it goes on after it returned.
    """

    function: str
    line: str
    place: int
    begin_us: int
    end_us: int
    written_bytes: int
    asynchronous: bool


@record_kind("marks")
class MarksRecord(Record):
    """The purposes of blocks. A mark means the block last allocated at its address by an operation up to its own.

    Attributes:
        op: Number of an operation.
        address: Address of the block.
        category: Index of the category in ``rundir.schema.CATEGORIES``, or one of the journal's own codes.
        layer: The layer that owns it; -1 keeps the layer that allocated it.
        start: First byte that the layer uses.
        size: Bytes that the layer uses.
    """

    op: I64
    address: U64
    category: U8
    layer: I32
    start: I64
    size: I64


@record_kind("stats")
class StatisticsRecord(Record):
    """The caching allocator's own statistics of a device: the most bytes, those at the end, and failed requests.

    ``peaks_were_reset``: by the script.
    """

    device: int
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    num_ooms: int = 0
    peaks_were_reset: bool = False


@record_kind("oom")
class FailedRequestRecord(Record):
    """A request that the caching allocator could not serve: by which operation and layer, at which ``file:line
    (function)``, and how much the device had left. ``stack`` is of the script's lines, innermost first.
    """

    device: int
    requested_bytes: int
    op: int
    layer: str
    line: str = ""
    message: str = ""
    stack: list[str] = field(default_factory=list)


@record_kind("beyond")
class BeyondCapacityRecord(Record):
    """The first request that did not fit and was granted all the same, so that the run could go on.

    Attributes:
        device: The device's index.
        requested_bytes: What the allocator asked the GPU for.
        limit_bytes: The GPU's memory, or the part of it that the script allows its process.
        op: The operation that asked.
        stack: The script's lines as ``file:line (function)``, innermost first; in a backward, those that called it.
    """

    device: int
    requested_bytes: int
    limit_bytes: int
    op: int
    stack: list[str]


@record_kind("generated")
class GeneratedRecord(Record):
    """The generated code of a compiled graph, with the module of each line, and where memory changes hands.

    ``recomputed`` are lines of a backward from which a buffer has a result of its forward, computed again.
    """

    number: int
    filename: str
    lines: list[LineRow]
    holders: list[HolderRow]
    recomputed: list[int] = field(default_factory=list)


@record_kind("placings")
class PlacingsRecord(Record):
    """New lists of layers for the modules of compiled graphs."""

    rows: list[PlacingRow]


@record_kind("graphs")
class GraphsRecord(Record):
    """Calls of compiled graphs."""

    rows: list[GraphRow]


@record_kind("held")
class HeldRecord(Record):
    """Inputs whose memory compiled graphs use again."""

    rows: list[HeldRow]
