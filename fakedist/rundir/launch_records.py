"""The launches of a timed step in the journal: the work of each and their order, not how long they take.

Launches that have the same to do share one row of work. ``fakedist.cost_model`` prices the rows of work for a GPU and
places the launches in time, so another GPU needs no other run.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, NamedTuple

from fakedist.rundir.encoding import F64, I32, I64, U8, U32, U64, Record, record_kind
from fakedist.rundir.schema import RowOf

#: What a row of the launch log is. The last five launch nothing on the GPU.
LAUNCH_KINDS = (
    "kernel",
    "product",
    "library",
    "copy",
    "fill",
    "collective",
    "stream_records",
    "stream_waits",
    "host_waits",
    "host_waits_for_device",
    "host_reads",
)

#: What the caching allocator asks CUDA for in the timed step: a request that is refused, so that it frees what it
#: caches and asks again; cudaMalloc; cudaFree; and a piece of an expandable segment that it maps, or unmaps.
ALLOCATOR_CALLS = ("refused", "malloc", "free", "map", "unmap")
#: Stands for a wait of the host with which the allocator makes sure that nothing uses what it gives back.
ALLOCATOR_WAITS = "wait"


class WorkRow(NamedTuple):
    """Work of launches in the timed step; launches with the same to do share a row. 0 where a size does not apply.

    Attributes:
        name: The kernel's name, as CUPTI reports it.
        kind: One of LAUNCH_KINDS: kernel, product, library, copy, fill, collective or host_reads.
        family: One of ``run.schema.FAMILIES``.
        operation: The operation that launched it, e.g. aten.mm.default; empty if none did.
        flops: Floating-point operations; NaN if unknown.
        moved_bytes: The fewest bytes it must read and write; NaN if unknown.
        dtype: The type it computes in: fp64, fp32, tf32, bf16 (and fp16), fp8, int8; tf32x3, bf16x3, bf16x6, bf16x9 for
            fp32 made of so many products; empty for copies and fills.
        over_host_link: Whether the bytes cross the link between host and GPU.
        pinned: Whether the host's side of such a copy is pinned memory.
        batch: Products: how many of one size. Attention: sequences.
        m: Products: rows of the result. Grouped products: rows of all groups together. Conversions to eight bits: rows.
            Embeddings: rows that are looked up.
        n: Products: columns of the result.
        k: Products: length of the sums. Conversions to eight bits: columns.
        groups: Grouped products: their number of groups; 0 for other products.
        layout: Products: which operands are transposed, as cuBLAS names it (TN is y = x w^T of a linear layer's
            forward, NN its input gradient, NT its weight gradient); empty if unknown.
        a_bytes: Products: bytes of an element of the first operand.
        b_bytes: Products: of the second.
        d_bytes: Products: of the result.
        accumulates: Products: whether the result is added to the tensor that receives it.
        scaling: fp8 products: "tensor", "row" or "block", by how many values share a scale; else empty.
        attention: "forward" or "backward"; empty for anything else.
        library: Attention: "cudnn" (Transformer Engine's, too), "flash2", "flash3", "efficient", "flex" or empty for
            unknown.
        heads: Attention: query heads of a sequence.
        kv_heads: Attention: key and value heads of a sequence.
        queries: Attention: queries of a sequence.
        keys: Attention: keys of a sequence.
        width: Attention: width of a query's head. Norms and reductions: length of a row.
        value_width: Attention: width of a value's head.
        causal: Attention: whether each query meets only the keys before it.
        window: Attention: the most keys that a query meets; 0 without a window. Of flex_attention: the mean of the
            keys in the blocks that it visits.
        dropout: Attention: whether it leaves out scores at random.
        deterministic: Attention: whether its backward adds up gradients in a fixed order.
        is_dense: Attention: whether it counts as if every query met every key, because the mask's values are unknown.
        threads: Kernels: threads of its grid.
        steps: Recurrent networks, factorisations: how many steps follow one another, each of which waits for the one
            before.
        is_bounded: Whether only the least is known that it takes: its arithmetic and bytes, but not how close its
            kernel comes to the GPU's limits.
    """

    name: str
    kind: str
    family: str
    operation: str = ""
    flops: float = 0.0
    moved_bytes: float = 0.0
    dtype: str = ""
    over_host_link: bool = False
    pinned: bool = True
    batch: int = 0
    m: int = 0
    n: int = 0
    k: int = 0
    groups: int = 0
    layout: str = ""
    a_bytes: float = 0.0
    b_bytes: float = 0.0
    d_bytes: float = 0.0
    accumulates: bool = False
    scaling: str = ""
    attention: str = ""
    library: str = ""
    heads: int = 0
    kv_heads: int = 0
    queries: int = 0
    keys: int = 0
    width: int = 0
    value_width: int = 0
    causal: bool = False
    window: int = 0
    dropout: bool = False
    deterministic: bool = False
    is_dense: bool = False
    threads: int = 0
    steps: int = 0
    is_bounded: bool = False


class RangeRow(NamedTuple):
    """A range that the script opened in the timed step (NVTX, ``record_function``).

    Attributes:
        name: Its name.
        thread: The thread that opened it, numbered as they come.
        depth: Ranges of that thread around it.
        first_launch: Row of the table ``launches``: the first that the host made after the range began.
        end_launch: The first that it made after the range ended.
    """

    name: str
    thread: int
    depth: int
    first_launch: Annotated[int, RowOf("launches", may_end=True)]
    end_launch: Annotated[int, RowOf("launches", may_end=True)]


class HostWork(NamedTuple):
    """An operation on large floats in the host's memory, which a run on the virtual GPU does not compute.

    ``str()`` is its line in ``LaunchesRecord.host_work``, which :meth:`read` reads.

    Attributes:
        operation: Its full name.
        elements: Of its largest tensor.
        moved_bytes: The fewest bytes that it reads and writes.
        flops: Floating-point operations of a product, convolution or attention; else 0. NaN if unknown.
        threads: Those of torch for one operation.
        line: The script's; empty in autograd's threads.
    """

    operation: str
    elements: int
    moved_bytes: float
    flops: float
    threads: int
    line: str

    def __str__(self) -> str:
        return " ".join(map(str, self))

    @classmethod
    def read(cls, text: str) -> HostWork:
        """The operation of a line."""
        operation, elements, moved_bytes, flops, threads, line = text.split(" ", 5)
        return cls(operation, int(elements), float(moved_bytes), float(flops), int(threads), line)


@record_kind("launches")
class LaunchesRecord(Record):
    """The launches of the timed step, in the order in which the host made them. They become the table ``launches``.

    Texts (grid, block) are indices in ``texts``. ``what`` and ``phase`` are indices in LAUNCH_KINDS and
    ``rundir.schema.PHASES``.

    Attributes:
        step: The timed step.
        work_rows: What the launches have to do.
        texts: The texts.
        ranges: The script's ranges.
        what: The kind of row, an index in LAUNCH_KINDS.
        work: Index in ``work_rows``; -1 for events and waits.
        stream: CUDA stream; 0 is the default one.
        event: The event that is recorded or waited for; 0 without one.
        num_operations: Operations of torch that the host ran since the last row with work; each takes host time.
        graph: Number of the launch of the CUDA graph that it belongs to; 0 outside of graphs.
        device: Index of the device.
        grid: Blocks as x,y,z.
        block: Threads of a block as x,y,z.
        op: Number of the operation that launched it; -1 if none was running.
        phase: Phase.
        recompute: Whether backward ran a forward again.
        layer: Row of ``layers``.
        call: Sequence number of the collective that it stands for; -1 otherwise.
        thread: The host's thread that launched it: 0 for the main one. Empty in journals of earlier versions.
        allocator: What the caching allocator called between the row before and this one, an index in ``texts``:
            "refused 1 1048576, free 2 4194304, malloc 1 1048576" has the number and the bytes of each of
            ALLOCATOR_CALLS, in order; ALLOCATOR_WAITS if the row is a wait of its own. Empty in earlier journals.
        host_work: What the host has to do on large tensors of its own between the row before and this one, an index
            in ``texts``: a line for each :class:`HostWork`. Empty in earlier journals.
    """

    step: int
    work_rows: list[WorkRow]
    texts: list[str]
    what: U8
    work: I32
    stream: U64
    event: U64
    num_operations: U32
    graph: I32
    device: I32
    grid: U32
    block: U32
    op: I64
    phase: U8
    recompute: U8
    layer: I32
    call: I64
    thread: U8 = b""
    allocator: U32 = b""
    host_work: U32 = b""
    ranges: list[RangeRow] = field(default_factory=list)


@record_kind("launch_keys")
class LaunchKeysRecord(Record):
    """Keys of a timed step's launches, for a second run of the script. Earlier versions wrote it for each run.

    Attributes:
        step: The timed step.
        key: For each row of that step's :class:`LaunchesRecord`: launches with the same key do the same, in another
            process too; 0 for work that no other step repeats.
        split: Rows of the step until its last optimizer's step ended.
    """

    step: int
    key: U64
    split: int = 0


@record_kind("host_clock")
class HostClockRecord(Record):
    """The host's time in steps after the recorded ones, in which neither the recorder nor the value engine runs.

    If there were none, it is that of the recorded step (``is_recorded``), without the time in the recorder.

    The clock stands still in fakedist's own code: the virtual GPU's library, faked collectives, answered reads. What a
    real CUDA library takes there is not in it. Of blocked DataLoaders it counts the main thread's CPU time alone.

    Attributes:
        step: The recorded step whose launches the rows are.
        dispatch_us: For each row of that step's :class:`LaunchesRecord`: the time from the row before it to this one;
            NaN where no step had such a launch. Rows of one CUDA graph's launch but for the first have 0. The first
            row's includes what follows the last launch of the step before. The mean of the repeats with warm caches, as
            if the core's pace had always been ``pace_us``.
        num_repeats: Steps that were measured and count.
        step_us: The time of a whole step at that pace, the median.
        wall_us: A step with our own code and all waits, at the pace that the core had.
        cpu_us: CPU time of the process in such a step, our own code included, the median.
        loading_us: The part of ``step_us`` in DataLoaders' iterators, in the main thread.
        bound_us: By how much our own code may have put ``step_us`` off: the error of the clock for each launch, from a
            job of tiny operations, for all of them.
        spread: The standard deviation of the steps, over their mean; 0 of one step.
        linear_us: The machine's score (``MachineScoreRecord.linear_us``) at ``pace_us``, which ``dispatch_us`` are for.
            0 if there was none: then that of :class:`MachineScoreRecord` counts, at its own pace.
        collector_us: Pauses of Python's garbage collector in such a step, the mean; no other time includes them.
        pace_us: How long the core took for a fixed piece of work in a calm moment. 0 in earlier versions, whose times
            are at the pace that the core had, and whose ``linear_us`` is the least of several or their mean.
        slowdown: The mean pace of the core in these steps, over ``pace_us``.
        is_recorded: It is the recorded step's. The time of the collector and of DataLoaders is not known.
        is_second_run: The steps are those of a second run of the script (``--clock-run``).
    """

    step: int
    dispatch_us: F64
    num_repeats: int
    step_us: float
    wall_us: float
    cpu_us: float
    loading_us: float
    bound_us: float
    spread: float
    linear_us: float = 0.0
    collector_us: float = 0.0
    pace_us: float = 0.0
    slowdown: float = 1.0
    is_recorded: bool = False
    is_second_run: bool = False


@record_kind("machine_score")
class MachineScoreRecord(Record):
    """How fast the machine that recorded the run is at what a host does. CPU time of one thread in a calm moment.

    Taken on the virtual GPU, where CUDA's own calls take nothing, once nothing more is recorded. It scales what no
    :class:`HostClockRecord` with a score of its own has.

    Attributes:
        linear_us: A forward of torch's Linear with a graph, in the main thread.
        operator_us: An addition of two tensors on the GPU.
        python_us: A call of a Python function with ten arguments through another.
        spread: Median of the repeats of ``linear_us`` over the least, less one.
        pace_us: As of :class:`HostClockRecord`, for these times; 0 in earlier versions, which have the least of the
            repeats.
    """

    linear_us: float
    operator_us: float
    python_us: float
    spread: float
    pace_us: float = 0.0
