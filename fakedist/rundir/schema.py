"""The contents of a run directory: names, types, units and meanings.

docs/run-directory is made from it (:mod:`fakedist.rundir.schema_page`).
"""

from __future__ import annotations

import re
import typing
from dataclasses import KW_ONLY, dataclass

from fakedist.docstrings import docstring_of
from fakedist.rundir.host_memory import HostPhase, Save
from fakedist.rundir.launch_records import ALLOCATOR_CALLS, ALLOCATOR_WAITS, LAUNCH_KINDS, WorkRow
from fakedist.rundir.step_time import KernelTime


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        name: Its name; ``_bytes`` and ``_us`` are its unit.
        type: Its Parquet type.
        meaning: One sentence.
        words: The only texts that it may hold; empty if it may hold any.
        row_of: The table of which its numbers are rows; empty if they are none. What is read is checked.
        least: The least of those numbers: -1 where it stands for none.
        may_end: Whether it may also be the number of rows there, for what never ended.
        is_earlier: Whether it is a row before its own.
        has_ranks: Whether its texts are lists of ranks, or empty.
        is_newer: Whether tables of earlier versions lack it; it then reads as NaN, or as empty texts.
    """

    name: str
    type: str
    meaning: str
    _: KW_ONLY
    words: tuple[str, ...] = ()
    row_of: str = ""
    least: int = 0
    may_end: bool = False
    is_earlier: bool = False
    has_ranks: bool = False
    is_newer: bool = False


@dataclass(frozen=True)
class Table:
    """One file ``tables/<name>.parquet``.

    Attributes:
        row: What a row is, and in which order they are.
        columns: Its columns, in order.
        is_newer: Whether runs of earlier versions lack it; it then has no rows.
    """

    row: str
    columns: tuple[Column, ...]
    is_newer: bool = False


def attributes(kind: type) -> dict[str, str]:
    """The meaning of each attribute of a class, on one line, from its docstring."""
    text = docstring_of(kind).partition("Attributes:\n")[2]
    meanings: dict[str, str] = {}
    for line in text.splitlines():
        if line and not line.startswith(" "):  # the next section, such as "Raises:"
            break
        if start := re.match(r"    (\w+): (.*)", line):
            last, meaning = start[1], start[2]
            meanings[last] = meaning
        elif meanings and line.strip():
            meanings[last] += " " + line.strip()
    return meanings


_TYPES = {str: "string", int: "int64", float: "double", float | None: "double", bool: "bool"}


def _columns_of(row: type, **meanings: str) -> tuple[Column, ...]:
    known = attributes(row) | meanings
    hints = typing.get_type_hints(row)
    return tuple(Column(name, _TYPES[hint], known[name].replace("``", "`")) for name, hint in hints.items())


LAUNCHES = Table(
    "What the host gave to the streams in the timed step, in order: launches, and the events and waits between them. "
    "On the virtual GPU it says nothing of times, and so holds for any GPU.",
    (
        Column("what", "string", "What it is: " + ", ".join(LAUNCH_KINDS) + ".", words=LAUNCH_KINDS),
        Column("work", "int32", "Row of `work`; -1 for events and waits.", row_of="work", least=-1),
        Column("stream", "uint64", "CUDA stream; 0 is the default one."),
        Column("event", "uint64", "The event that is recorded or waited for; 0 without one."),
        Column("num_operations", "int64", "Operations of torch that the host ran since the last row with work."),
        Column("graph", "int32", "Number of the launch of the CUDA graph that it belongs to; 0 outside of graphs."),
        Column("device", "int32", "Index of the device."),
        Column("grid", "string", "Blocks as x,y,z; empty if unknown."),
        Column("block", "string", "Threads of a block as x,y,z; empty if unknown."),
        Column("op", "int64", "Number of the operation that launched it, as in `blocks`; -1 if none was running."),
        Column("step", "int32", "Step."),
        Column("phase", "string", "init, generation, forward, backward, optimizer or other."),
        Column("recompute", "bool", "Launched while backward ran a checkpointed forward again."),
        Column("layer", "int32", "Row of `layers`; 0 outside of modules.", row_of="layers"),
        Column("call", "int64", "Sequence number in `calls` of the collective that it stands for; -1 otherwise."),
        Column("measured_us", "double", "How long it took on a real GPU; NaN for collectives, and on the virtual GPU."),
        Column("host_us", "double", "Time of the host before it, waits left out; NaN on the virtual GPU."),
        Column(
            "dispatch_us",
            "double",
            "Time of Python, torch's dispatcher and autograd before it, measured on the virtual GPU in steps without "
            "the recorder; without what a real CUDA library takes. NaN where it was not measured.",
        ),
        Column(
            "thread",
            "double",
            "The host's thread that launched it: 0 for the main one, others as they come; NaN where it is not known.",
            is_newer=True,
        ),
        Column(
            "allocator",
            "string",
            "What the caching allocator called since the row before, with the number of calls and their bytes: "
            f"{', '.join(ALLOCATOR_CALLS)}; {ALLOCATOR_WAITS} where the row is a wait of its own; empty for nothing.",
            is_newer=True,
        ),
    ),
)

HOST = Table(
    "The host on the time line of the timed step: a row for each row of `launches`, in their order. No rows if it is "
    "not known what streams wait for.",
    (
        Column("begin_us", "double", "When the host begins what leads to this launch, event or wait."),
        Column("reached_us", "double", "When it launches, or begins to wait."),
        Column("passed_us", "double", "When it goes on: later only where it waits for the GPU."),
        Column("late_us", "double", "How long the GPU was idle until this launch; 0 if that was not the host's doing."),
        Column("idle_us", "double", "Of the idle time of the GPU behind late launches, what follows from this wait."),
    ),
    is_newer=True,
)

RANGES = Table(
    "A range that the script opened in the timed step: torch.cuda.nvtx, torch.profiler's record_function. In the order "
    "in which they began, outer ones first. None of an imported trace.",
    (
        Column("name", "string", "Its name."),
        Column("thread", "int64", "The thread that opened it, numbered as they come."),
        Column("depth", "int64", "Ranges of that thread around it."),
        Column(
            "first_launch",
            "int64",
            "Row of `launches`: the first after the range began, whatever its thread.",
            row_of="launches",
            may_end=True,
        ),
        Column(
            "end_launch",
            "int64",
            "Row of `launches`: the first after the range ended.",
            row_of="launches",
            may_end=True,
        ),
        Column("begin_us", "double", "When the host launched the first kernel in it; NaN without one."),
        Column("end_us", "double", "When it launched the last one."),
        Column("gpu_begin_us", "double", "When the first of those began on the GPU."),
        Column("gpu_end_us", "double", "When the last of them ended, as far as durations are known."),
        Column("num_kernels", "int64", "How many, communication left out."),
        Column("num_unknown", "int64", "How many of them are of unknown duration."),
        Column("kernel_us", "double", "How long the others took, ranges inside included."),
        Column("num_calls", "int64", "Collective calls in it."),
    ),
)

WORK = Table(
    "What launches of the timed step have to do; launches with the same to do share a row. 0 where a size does not "
    "apply.",
    _columns_of(WorkRow),
)


SCHEMA_VERSION = 1

#: What a block of memory is for; where several hold, the first does.
CATEGORIES = (
    "parameter",
    "optimizer_state",
    "gradient",
    "workspace",
    "activation",
    "communication",
    "temporary",
    "other",
)
#: In the journal alone: this rank's part of parameters that were gathered; a parameter unless made for the gather.
SHARD, SHARD_CODE = "shard", 255
#: In the journal alone: what has the shapes of a model's parameters; a copy of them unless it was made as zeros.
ALIKE, ALIKE_CODE = "alike", 254
#: Records have their places, so a new one goes to the end.
PHASES = ("init", "forward", "backward", "optimizer", "other", "generation")
#: Phases of the host's memory: an evaluation, or a checkpoint that is written or read, comes before the others.
HOST_PHASES = (*PHASES, "evaluation", "save", "load")
#: In the journal: what happened to the host's memory. See ``gpu/fast_path/host.cpp``.
HOST_CHANGES = ("pageable", "pinned", "registered", "moved")
#: Kinds of the host's memory: tensors, pinned memory, and shared memory in /dev/shm.
HOST_KINDS = ("pageable", "pinned", "shared")
#: What a kernel does.
FAMILIES = ("gemm", "attention", "norm", "elementwise", "copy", "optimizer", "communication", "other")
#: What a kernel's time is spent for: its phase, but what backward computes again stands alone.
KINDS = ("generation", "forward", "recompute", "backward", "optimizer", "other")
#: What limits an estimated kernel; empty where that is not known.
BOUNDS = ("", "compute", "memory", "launch")
#: The moments of the table `segments`: the reserved peak when it was reached, and the allocated peak.
MOMENTS = ("peak_reserved", "peak_allocated")
#: Parts of what is in use of a device: two of the rank's own process, and another process as a whole.
USE_PARTS = ("allocator", "KV cache", "outside", "all")
#: What the free memory of a segment is; where several hold, the first does.
SEGMENT_STATES = {
    "unknown": "before the history, at an unknown address",
    "private": "in a private pool (of a CUDA graph or a torch.cuda.MemPool)",
    "empty": "nothing in it is allocated",
    "expandable": "expandable, and something in it is allocated",
    "small": "of the small pool (blocks up to 1 MiB), and something in it is allocated",
    "pinned": "less than half of it is allocated",
    "used": "half of it or more is allocated",
}
#: The allocator's own names, c10/cuda/CUDACachingAllocator.h TraceEntry::Action.
ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "snapshot",
    "oom",
    "annotate",
)


def _per_category(text: str, prefix: str = "") -> tuple[Column, ...]:
    return tuple(Column(f"{prefix}{name}_bytes", "int64", text.format(name)) for name in CATEGORIES)


TABLES: dict[str, Table] = {
    "blocks": Table(
        "A block of device memory that the caching allocator gave away, in the order of allocation.",
        (
            Column("address", "uint64", "Device address."),
            Column("requested_bytes", "int64", "What was asked for."),
            Column("bytes", "int64", "What the allocator gave: the request rounded up, or a free block's whole rest."),
            Column("alloc_event", "int64", "Row of `events` that made it.", row_of="events"),
            Column(
                "free_event",
                "int64",
                "Row of `events` that asked to free it; the number of events if none did.",
                row_of="events",
                may_end=True,
            ),
            Column(
                "reuse_event",
                "int64",
                "Row of `events` from which its memory could be given again; the number of events if none.",
                row_of="events",
                may_end=True,
            ),
            Column("op", "int64", "Number of the operation that allocated it; -1 if none was running."),
            Column("operation", "string", "That operation, e.g. aten.mm.default."),
            Column("step", "int32", "Training step; 0 is before the first one."),
            Column("phase", "string", "init, generation, forward, backward, optimizer or other.", words=PHASES),
            Column("recompute", "bool", "Allocated while backward ran a checkpointed forward again."),
            Column("layer", "int32", "Row of `layers`; for marked blocks the layer that owns it.", row_of="layers"),
            Column("category", "string", "What it is for: " + ", ".join(CATEGORIES) + ".", words=CATEGORIES),
            Column("stream", "uint64", "CUDA stream; 0 is the default one."),
            Column("stack", "int32", "Row of `stacks`; -1 without Python frames.", row_of="stacks", least=-1),
            Column("at_peak", "bool", "Whether it was alive at the peak."),
        ),
    ),
    "shares": Table(
        "A layer's share of a block that several layers own (a flat buffer); other blocks have no row.",
        (
            Column("block", "int64", "Row of `blocks`.", row_of="blocks"),
            Column("layer", "int32", "Row of `layers`.", row_of="layers"),
            Column("bytes", "int64", "Its share; the shares of a block add up to the block."),
        ),
    ),
    "asleep": Table(
        "A stretch of events in which a block had no memory behind it, because an inference engine slept, between two "
        "changes of what sleeps. It is allocated and reserved nevertheless. No rows without a virtual GPU.",
        (
            Column("block", "int64", "Row of `blocks`.", row_of="blocks"),
            Column("first_event", "int64", "Row of `events` that is the first in it.", row_of="events", may_end=True),
            Column("end_event", "int64", "Row of `events` that is the first after it.", row_of="events", may_end=True),
        ),
        is_newer=True,
    ),
    "events": Table(
        "What the allocator did, in order.",
        (
            Column("action", "string", "The allocator's own word: " + ", ".join(ACTIONS) + ".", words=ACTIONS),
            Column("address", "uint64", "Of the block or segment."),
            Column("size_bytes", "int64", "Requested bytes of a block; bytes of a segment."),
            Column("stream", "uint64", "CUDA stream."),
            Column("time_us", "int64", "Unix time."),
            Column("op", "int64", "Number of the operation that ran; -1 if none did."),
            Column("stack", "int32", "Row of `stacks` (allocations only); -1 if none.", row_of="stacks", least=-1),
            Column("allocated_bytes", "int64", "In blocks that tensors hold, after the event."),
            Column("reserved_bytes", "int64", "In segments, after the event."),
        ),
    ),
    "segments": Table(
        "A segment that the caching allocator held at one of two moments, those with the most free memory first. Those "
        "of a moment add up to what is reserved. Adjacent pages of an expandable segment are one row.",
        (
            Column(
                "moment",
                "string",
                "peak_reserved: the first time that the most was reserved, with the block that it was reserved for; "
                "peak_allocated: the first time that the most was allocated.",
                words=MOMENTS,
            ),
            Column("event", "int64", "Row of `events` after which it is.", row_of="events"),
            Column("address", "uint64", "Device address; 0 if unknown."),
            Column("bytes", "int64", "Its size."),
            Column(
                "state",
                "string",
                "; ".join(f"{name}: {text}" for name, text in SEGMENT_STATES.items()) + ".",
                words=tuple(SEGMENT_STATES),
            ),
            Column("pool", "string", "small, large or unknown."),
            Column("private_pool", "string", "Id of its private pool; empty outside of private pools."),
            Column("is_expandable", "bool", "Whether it consists of mapped pages (expandable_segments)."),
            Column("stream", "uint64", "The CUDA stream whose blocks it serves."),
            Column("allocated_bytes", "int64", "In blocks that tensors hold."),
            Column("requested_bytes", "int64", "What was asked for with those; the rest is rounding."),
            Column("waiting_bytes", "int64", "In blocks that were freed while another stream still used them."),
            Column("free_bytes", "int64", "The rest."),
            Column("num_blocks", "int64", "Blocks in it, allocated or waiting."),
            Column("num_holes", "int64", "Pieces that the free memory is in."),
            Column("largest_hole_bytes", "int64", "The largest of them."),
            Column(
                "block",
                "int64",
                "Row of `blocks`: the largest one in it; -1 if it is empty.",
                row_of="blocks",
                least=-1,
            ),
        ),
    ),
    "stacks": Table(
        "A Python stack.",
        (
            Column("frames", "list<int32>", "Rows of `frames`, innermost first.", row_of="frames"),
            Column(
                "line",
                "string",
                "The innermost line outside of torch: file:line (function); file:line (function, backward) for what "
                "the backward of that line's operation allocates.",
            ),
        ),
    ),
    "operation_stacks": Table(
        "An operation of the timed step that launched something, and the Python stack that called it; of an operation "
        "that a node of autograd's graph runs in a backward, the stack of the forward's that made the node. Only on "
        "the virtual GPU.",
        (
            Column("op", "int64", "Number of the operation, as in `kernels`."),
            Column("stack", "int32", "Row of `stacks`.", row_of="stacks"),
        ),
    ),
    "frames": Table(
        "A Python frame.",
        (
            Column("filename", "string", "Source file."),
            Column("line", "int32", "Line."),
            Column("function", "string", "Function."),
        ),
    ),
    "layers": Table(
        "A module, by its fully qualified name; parents before children, models that an optimizer trains before "
        "others. Row 0 is outside of any module.",
        (
            Column("name", "string", "Name without wrappers; a root module is called by its class in parentheses."),
            Column("class_name", "string", "Class."),
            Column("parent", "int32", "Row of the parent; -1 for row 0.", row_of="layers", least=-1, is_earlier=True),
            *_per_category("Bytes of category {} at the peak, the layer's own.", "peak_"),
            *_per_category("Most bytes of category {} in the last step, the layer's own.", "most_"),
            *_per_category("Most bytes of category {} in the last step, with its children.", "most_total_"),
            Column("peak_own_bytes", "int64", "Bytes at the peak, the layer's own; the column adds up to the peak."),
            Column("peak_total_bytes", "int64", "Bytes at the peak, with its children."),
            Column("most_own_bytes", "int64", "Most bytes alive at once in the last step, the layer's own."),
            Column("most_total_bytes", "int64", "Most bytes alive at once in the last step, with its children."),
        ),
    ),
    "phases": Table(
        "A phase of a step, in the order in which they began.",
        (
            Column("step", "int32", "Step."),
            Column("phase", "string", "Phase.", words=PHASES),
            Column("peak_allocated_bytes", "int64", "Most that was allocated during it."),
            Column("peak_reserved_bytes", "int64", "Most that was reserved during it."),
            Column("end_allocated_bytes", "int64", "Allocated when it ended."),
        ),
    ),
    "named_phases": Table(
        "A phase that the script named (`fakedist.phase`), in the order in which they ended. What is in use is that of "
        "the virtual GPU: 0 without one.",
        (
            Column("phase", "string", "The script's name."),
            Column("step", "int32", "Step in which it began."),
            Column("end_step", "int32", "Step in which it ended."),
            Column("first_event", "int64", "Row of `events`: the first in it.", row_of="events", may_end=True),
            Column("end_event", "int64", "Row of `events`: the first after it.", row_of="events", may_end=True),
            Column(
                "handover_allocated_bytes",
                "int64",
                "Most that was allocated from where the last phase before it began or ended, or the run began, to its "
                "begin.",
            ),
            Column("handover_reserved_bytes", "int64", "Most that was reserved then."),
            Column("peak_allocated_bytes", "int64", "Most that was allocated during it."),
            Column("peak_reserved_bytes", "int64", "Most that was reserved during it."),
            Column("peak_used_bytes", "int64", "Most that was in use, by all processes, without their contexts."),
            Column("end_backed_bytes", "int64", "In use at its end behind the allocator's segments."),
            Column("end_outside_bytes", "int64", "In use at its end outside of the allocator."),
            Column("end_others_bytes", "int64", "In use at its end by other processes."),
            Column(
                "first_change",
                "double",
                "Number of the first change in `device_use` during it; NaN if not known.",
                is_newer=True,
            ),
            Column("end_change", "double", "Number of the first change after it.", is_newer=True),
        ),
        is_newer=True,
    ),
    "device_use": Table(
        "What a process held of the rank's virtual GPU after a change of what is in use, without contexts; in the "
        "order of changes. No rows without a virtual GPU.",
        (
            Column(
                "change",
                "int64",
                "Number of the change, from 1. In a long run it stands for all changes before the next number; the "
                "bytes are those after the one of them with the most in use.",
            ),
            Column("process", "string", "Name of another process of the rank; empty for the rank's own."),
            Column(
                "part",
                "string",
                "KV cache (of vLLM's engine). The rest of the rank's own process: allocator (behind its segments), "
                "outside (of the allocator). The rest of another: all.",
                words=USE_PARTS,
            ),
            Column("bytes", "int64", "How much."),
        ),
        is_newer=True,
    ),
    "spans": Table(
        "A stretch of events in one phase, in order; together they are all of the events.",
        (
            Column("step", "int32", "Step."),
            Column("phase", "string", "Phase.", words=PHASES),
            Column("first_event", "int64", "Row of `events` that begins it; the next span's ends it.", row_of="events"),
        ),
    ),
    "steps": Table(
        "A training step that ended.",
        (
            Column("step", "int32", "Number, from 1."),
            Column("start_us", "int64", "Unix time."),
            Column("wall_us", "int64", "How long it took here, recording included; not a real GPU's time."),
            Column("peak_allocated_bytes", "int64", "Most that was allocated during it."),
            Column("peak_reserved_bytes", "int64", "Most that was reserved during it."),
            Column(
                "samples",
                "int64",
                "First dimension of the model's input, summed over its forwards with gradients; 0 if not known.",
            ),
            Column("sample_shape", "string", "The input's other dimensions: 3x224x224; empty if not known."),
            Column(
                "name",
                "string",
                "What the script calls it; evaluation if one ran before its training; else empty.",
                is_newer=True,
            ),
        ),
    ),
    "largest": Table(
        "The largest blocks at the peak, largest first.",
        (
            Column("bytes", "int64", "Bytes."),
            Column("category", "string", "What it is for.", words=CATEGORIES),
            Column("layer", "string", "Name of the layer that owns it; of several how many: 12 layers of layers.3."),
            Column("phase", "string", "Phase it was allocated in.", words=PHASES),
            Column("step", "int32", "Step it was allocated in."),
            Column("operation", "string", "Operation that allocated it."),
            Column("line", "string", "The innermost line outside of torch: file:line (function)."),
        ),
    ),
    "collectives": Table(
        "Calls of one operation on one group.",
        (
            Column("group", "int32", "Row of `groups`."),
            Column("operation", "string", "all_reduce, all_gather_into_tensor, ..."),
            Column("num_calls", "int64", "Calls."),
            Column("bytes_in", "int64", "Bytes of this rank's inputs."),
            Column("bytes_out", "int64", "Bytes of this rank's outputs."),
        ),
    ),
    "calls": Table(
        "A collective call, in order.",
        (
            Column("sequence", "int64", "Sequence number."),
            Column("operation", "string", "all_reduce, all_gather_into_tensor, ..."),
            Column("group", "int32", "Row of `groups`."),
            Column("bytes_in", "int64", "Bytes of this rank's inputs."),
            Column("bytes_out", "int64", "Bytes of this rank's outputs."),
            Column("dtype", "string", "dtype of the first tensor."),
            Column("asynchronous", "bool", "Called with async_op=True."),
            Column("stream", "uint64", "CUDA stream it was called from."),
            Column("op", "int64", "Number of the next operation."),
            Column("step", "int32", "Step."),
            Column("phase", "string", "Phase.", words=PHASES),
            Column("layer", "int32", "Row of `layers`.", row_of="layers"),
            Column("peer", "int64", "The other rank of a send or receive; -1 for collectives."),
            Column(
                "largest_part_bytes",
                "int64",
                "Bytes of the largest part of an all_to_all to or from another rank; 0 for other calls.",
            ),
            Column(
                "exchanged_bytes",
                "int64",
                "Bytes of an all_to_all to all other ranks or from them, whichever is more; 0 for other calls.",
            ),
        ),
    ),
    "call_terms": Table(
        "What the ranks of a call have to agree on, and where the host waits. Row by row as `calls`.",
        (
            Column("reduction", "string", "SUM, AVG, ...; empty without one."),
            Column("root", "int32", "Group rank that is its root; -1 without one."),
            Column("tag", "int64", "Tag of a send or receive."),
            Column("batch", "int32", "Calls of a group that are coalesced into one, from 1; 0 for others."),
            Column("sent_parts", "list<int64>", "Bytes for each rank of the group, where they are not equal."),
            Column("received_parts", "list<int64>", "Bytes from each rank of the group, where they are not equal."),
            Column("on_host", "bool", "The host makes it: its tensors are the host's, or its backend is gloo."),
            Column("own_pair", "bool", "A send or receive on a communicator of these two ranks alone."),
            Column(
                "waits",
                "bool",
                "The host waits until all its ranks make it: in a barrier, in a call on the host "
                "that is not asynchronous, and where its communicator is made.",
            ),
            Column("lines", "string", "The script's lines, innermost first, one a line; empty in autograd's threads."),
            Column(
                "parts",
                "string",
                "Dtype and bytes of each part of a call of several tensors, one a line; empty for other calls.",
                is_newer=True,
            ),
            Column(
                "join",
                "string",
                "In a `torch.distributed.algorithms.Join`: inside, a call that ranks without inputs left make, too; "
                "joined, the one in which they do so until no rank has any.",
                words=("", "inside", "joined"),
                is_newer=True,
            ),
            Column(
                "awaited",
                "double",
                "Sequence number of the first call after the wait for it; NaN where none was seen.",
                is_newer=True,
            ),
            Column("awaited_on", "double", "The stream that waits; NaN where no wait was seen.", is_newer=True),
        ),
        is_newer=True,
    ),
    "kernels": Table(
        "What a stream did in the timed step: a kernel, a copy, a fill, or a collective; in the order of their start. "
        "Which step, and whether it was measured or estimated, says `kernels` of the `--json` object.",
        (
            Column("name", "string", "The kernel, or the library's function that would have launched it."),
            Column("family", "string", "What it does: " + ", ".join(FAMILIES) + ".", words=FAMILIES),
            Column("stream", "uint64", "CUDA stream; 0 is the default one."),
            Column("start_us", "double", "When it began, from the beginning of the step."),
            Column("duration_us", "double", "How long it took; NaN if not known: an estimated step's collectives."),
            Column("launch_us", "double", "When the host launched it, from the beginning of the step; NaN: unknown."),
            Column("grid", "string", "Blocks as x,y,z; empty if unknown."),
            Column("block", "string", "Threads of a block as x,y,z; empty if unknown."),
            Column("operation", "string", "The operation that launched it, e.g. aten.mm.default; empty if none was."),
            Column("op", "int64", "Number of that operation, as in `blocks`; -1 if none was running."),
            Column("step", "int32", "Step."),
            Column("phase", "string", "init, generation, forward, backward, optimizer or other.", words=PHASES),
            Column("recompute", "bool", "Launched while backward ran a checkpointed forward again."),
            Column("layer", "int32", "Row of `layers`; 0 outside of modules.", row_of="layers"),
            Column("call", "int64", "Sequence number in `calls` of the collective that it stands for; -1 otherwise."),
            Column(
                "flops",
                "double",
                "Its share of a product's, convolution's or attention's FLOPs; else 0; NaN if unknown.",
            ),
            Column("moved_bytes", "double", "What it must read and write at least; NaN if not known."),
            Column(
                "bound",
                "string",
                "Estimated: compute, memory or launch limits it; empty where not known.",
                words=BOUNDS,
            ),
            Column("low_us", "double", "Estimated: the least of its 90 % interval; NaN if measured or not known."),
            Column("high_us", "double", "Estimated: the most of its 90 % interval; NaN if measured or not known."),
            Column("shape", "string", "Estimated: sizes of its product or attention; empty for others."),
            Column("basis", "string", "Estimated: the measurement its time is from, and what is assumed; else empty."),
            Column("launch", "int64", "Row of `launches`; -1 if a tool traced it.", row_of="launches", least=-1),
            Column(
                "path_us",
                "double",
                "How much of the critical path it is; 0 if it is not on it, NaN if the path is not known.",
                is_newer=True,
            ),
        ),
    ),
    "launches": LAUNCHES,
    "host": HOST,
    "ranges": RANGES,
    "work": WORK,
    "routed": Table(
        "Launches of the timed step whose work follows the tokens of experts, and the call of a router that each "
        "belongs to. They are priced as on the busiest rank of each call.",
        (
            Column("launch", "int64", "Row of `launches`.", row_of="launches"),
            Column("sums", "bool", "A product that sums over the tokens."),
            Column("layer", "int64", "Number of the router's layer, among those with routers."),
            Column("number", "int64", "How often the layer's router was called before."),
            Column("step", "int64", "Training steps that had ended."),
            Column("tokens", "int64", "Tokens of each rank."),
            Column("num_experts", "int64", "Experts of the layer."),
            Column("top_k", "int64", "Experts that a token picks."),
            Column("groups", "int64", "Groups that experts are in; 1: none."),
            Column("top_groups", "int64", "Groups that a token picks first."),
            Column("in_turn", "bool", "Whether two operations pick a token's two experts."),
            Column("received", "int64", "Tokens that this rank's experts get in the call, once for each expert."),
            Column("busiest", "int64", "The same of the rank that gets the most in the call."),
        ),
        is_newer=True,
    ),
    "layer_times": Table(
        "The timed step by layer: a row for each row of `layers`, none without `kernels`. Communication is apart.",
        (
            Column("name", "string", "The layer's name."),
            Column("num_kernels", "int64", "Kernels of the layer's own, communication left out."),
            *(Column(f"{name}_us", "double", f"Time of those in {name}, the layer's own.") for name in KINDS),
            Column("own_us", "double", "Time of those; the column adds up to the time of all kernels."),
            Column("total_us", "double", "The same with its children."),
            *(
                Column(f"family_{name}_us", "double", f"Time of those of family {name}, the layer's own.")
                for name in FAMILIES
                if name != "communication"
            ),
            *(Column(f"bound_{name}_us", "double", f"Time of those that {name} limits.") for name in BOUNDS if name),
            Column("flops", "double", "Floating-point operations of those, where they are known."),
            Column("moved_bytes", "double", "Bytes that those move, where they are known."),
            Column("num_lacking_flops", "int64", "Matrix products and attention whose operations are not known."),
            Column("launch_gap_us", "double", "How long the GPU waited for the host to launch the layer's kernels."),
            Column("num_calls", "int64", "Collective calls of the layer's own."),
            Column("num_unknown_calls", "int64", "Those whose duration is not known."),
            Column(
                "communication_us",
                "double",
                "Duration of the others: of the copies that stand for them, where they are not priced.",
            ),
            Column("host_us", "double", "The host's own time for the layer's launches, waits left out.", is_newer=True),
        ),
    ),
    "kernel_names": Table(
        "Kernels of one name, shape and layer in the timed step, most time first.",
        _columns_of(
            KernelTime,
            shape="Sizes of its work, as in `kernels`; where they are not known, its grid.",
            layer="Their layer; one name for repeated layers: layers.0-79.attention.",
            low_us="The least of the 90 % interval of that; NaN if measured, or not known.",
            least_us="The shortest.",
            bound="What limits most of its time; empty where not known.",
        ),
    ),
    "groups": Table(
        "A process group that this rank is in.",
        (
            Column("name", "string", "Its name in torch.distributed."),
            Column(
                "description",
                "string",
                "Its description or mesh axes; else the line that made it.",
            ),
            Column("backend", "string", "The backend that the script asked for."),
            Column("size", "int64", "Ranks in it."),
            Column("group_rank", "int64", "This rank's place in it."),
            Column("ranks", "string", "Its ranks, regular ones as start-stop:step.", has_ranks=True),
        ),
    ),
    "other_groups": Table(
        "A process group that this rank made with others and is not in, in order.",
        (
            Column("after", "int64", "Rows of `groups` that were made before it."),
            Column("description", "string", "As in `groups`."),
            Column("ranks", "string", "As in `groups`.", has_ranks=True),
        ),
        is_newer=True,
    ),
    "host_blocks": Table(
        "A block of the host's memory that a tensor took, of 1 MiB and more, or pinned memory, as they were allocated.",
        (
            Column("kind", "string", "pageable or pinned.", words=HOST_KINDS[:2]),
            Column("bytes", "int64", "Its size."),
            Column("step", "int32", "Step that allocated it."),
            Column("phase", "string", "Phase that allocated it.", words=HOST_PHASES),
            Column("stack", "int32", "Row of `stacks`; -1 without Python frames.", row_of="stacks", least=-1),
            Column("alloc_us", "int64", "Unix time."),
            Column("free_us", "int64", "Unix time; -1 if it was never freed."),
            Column("at_peak", "bool", "Whether it was held at the peak of the host's memory."),
        ),
        is_newer=True,
    ),
    "host_phases": Table(
        "A phase of a step, and the most of the host's memory that the rank held in it, in order.",
        _columns_of(HostPhase),
        is_newer=True,
    ),
    "host_files": Table(
        "A file of 1 MiB or more, or a piece of /dev/shm, that was in the rank's memory when it was looked at.",
        (
            Column("path", "string", "Its path."),
            Column("is_shared_memory", "bool", "Whether it is in /dev/shm, and so in memory alone."),
            Column("bytes", "int64", "The most of it at one time."),
            Column("is_private", "bool", "Whether pages that the rank writes become its own."),
            Column("step", "int32", "Step in which it was first seen."),
            Column("phase", "string", "Phase in which it was first seen.", words=HOST_PHASES),
        ),
        is_newer=True,
    ),
    "saves": Table("A checkpoint that was written, in order.", _columns_of(Save), is_newer=True),
    "invented": Table(
        "Values that the virtual GPU had to make up because the script read what no kernel had computed.",
        (
            Column("operation", "string", "The reading operation."),
            Column("line", "string", "file:line of the script."),
            Column("num_calls", "int64", "How often."),
            Column("num_values", "int64", "How many values."),
        ),
    ),
    "unanswered": Table(
        "CUDA functions that the virtual GPU refused.",
        (Column("function", "string", "Name."), Column("num_calls", "int64", "Calls.")),
    ),
}
