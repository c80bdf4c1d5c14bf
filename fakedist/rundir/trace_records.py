"""The timed step in the journal: what a tool saw of it, and its kernels. Also the names of ranges in a trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fakedist.rundir.encoding import F64, I32, I64, U8, U32, U64, Record, record_kind
from fakedist.rundir.step_time import KernelSource

#: The names of the ranges and marks that the rank emits, and that fakedist looks for in a tool's trace, begin so.
OWN_RANGE = "fakedist."
STEP_RANGE = f"{OWN_RANGE}step:"
PHASE_RANGE = f"{OWN_RANGE}phase:"
LAYER_RANGE = f"{OWN_RANGE}layer:"
CALL_RANGE = f"{OWN_RANGE}call:"
#: Marks where a range of the script begins and ends: "fakedist.range:7:its name", "fakedist.range_end:7".
SCRIPT_RANGE = f"{OWN_RANGE}range:"
SCRIPT_RANGE_END = f"{OWN_RANGE}range_end:"
#: The range that nsys captures.
CAPTURE_RANGE = f"{OWN_RANGE}timed"


@record_kind("timed")
class TimedStepRecord(Record):
    """A step that was timed after the recorded ones."""

    step: int


@record_kind("kernels")
class KernelsRecord(Record):
    """The kernels of the timed step. They become the table ``kernels``, whose columns these are.

    Texts (name, grid, block, operation) are indices in ``texts``. Family, phase and bound are indices in the tuples of
    ``rundir.schema``.

    Attributes:
        source: Where the kernels come from.
        texts: The texts.
        path_us: How much of the critical path each is; empty if that is not known.
    """

    source: KernelSource
    texts: list[str]
    name: U32
    family: U8
    stream: U64
    start_us: F64
    duration_us: F64
    launch_us: F64
    grid: U32
    block: U32
    operation: U32
    op: I64
    step: I32
    phase: U8
    recompute: U8
    layer: I32
    call: I64
    flops: F64
    moved_bytes: F64
    bound: U8
    path_us: F64 = b""


@dataclass(frozen=True, slots=True)
class TracedOperations:
    """Torch operations and ranges on the host. Times are in nanoseconds.

    Attributes:
        id: What calls and activity refer to.
        start: When it began.
        end: When it ended.
        thread: Torch's number of its thread.
        sequence: Autograd's sequence number; -1 without one.
        flops: Torch's own count for a matrix product, from its shapes; 0 where torch counts none.
        text: Index of its name in the texts.
    """

    id: I64
    start: I64
    end: I64
    thread: I64
    sequence: I64
    flops: I64
    text: U32


@dataclass(frozen=True, slots=True)
class TracedCalls:
    """CUDA calls on the host. Times are in nanoseconds.

    Attributes:
        correlation: What activity refers to.
        start: When it began.
        operation: Id of the operation that was running, or 0.
        thread: CUPTI's number of its thread.
    """

    correlation: I64
    start: I64
    operation: I64
    thread: I64


@dataclass(frozen=True, slots=True)
class TracedActivity:
    """Activity on the GPU. Times are in nanoseconds.

    Attributes:
        start: When it began.
        end: When it ended.
        stream: Its stream.
        correlation: The CUDA call that launched it.
        operation: Id of the operation that was running, or 0.
        size: Bytes of a copy or fill; -1 without any.
        node: Number of its node in a CUDA graph; 0 outside of one.
        text: Index of its name in the texts.
        grid: Index of its grid in the texts.
        block: Index of its block in the texts.
    """

    start: I64
    end: I64
    stream: I64
    correlation: I64
    operation: I64
    size: I64
    node: I64
    text: U32
    grid: U32
    block: U32


@dataclass(frozen=True, slots=True)
class TracedWaits:
    """Waits for an event, a stream or the device, as CUPTI saw them. Times are in nanoseconds.

    Attributes:
        what: An index in ``rundir.launch_records.LAUNCH_KINDS``: stream_waits, host_waits or host_waits_for_device.
        stream: The stream that waits, or that the host waits for; -1 if the host waits for an event or the device.
        recorded_on: The stream that the event was recorded on; -1 without an event, or if that was not traced.
        record: Correlation of the call that recorded the event; -1 without one.
        correlation: Correlation of the call that waits.
        start: When the wait began on the host.
        end: When it ended there.
    """

    what: U8
    stream: I64
    recorded_on: I64
    record: I64
    correlation: I64
    start: I64
    end: I64


@record_kind("profiler")
class ProfilerRecord(Record):
    """The timed step as torch.profiler saw it.

    Attributes:
        gpu: The GPU's name.
        source: Where its times come from: measured or simulated.
        texts: Texts that the columns refer to.
        operations: Operations and ranges.
        calls: CUDA calls.
        activity: Activity on the GPU.
        waits: What waits for events, streams and the device.
        has_events: Whether it also traced where events were recorded.
    """

    gpu: str
    source: Literal["measured", "simulated"]
    texts: list[str]
    operations: TracedOperations
    calls: TracedCalls
    activity: TracedActivity
    waits: TracedWaits
    has_events: bool


@dataclass(frozen=True, slots=True)
class HostWaits:
    """Events that the host gave to the streams in the timed step, and waits for them.

    Attributes:
        what: An index in ``rundir.launch_records.LAUNCH_KINDS``, one of those that launch nothing.
        stream: The stream that records or waits, or that the host waits for.
        event: Which event; 0 without one. Each record of an event has a number of its own.
        at_us: When the host called it, from the beginning of the step.
        until_us: When the call returned.
    """

    what: U8
    stream: U64
    event: U64
    at_us: F64
    until_us: F64


@dataclass(frozen=True, slots=True)
class HostCalls:
    """The rank's collective calls in the timed step: sequence numbers, and when, from the beginning of the step."""

    call: I64
    at_us: F64


@dataclass(frozen=True, slots=True)
class HostRanges:
    """The script's own ranges in the timed step.

    Attributes:
        name: Index of its name in the texts.
        thread: The thread that opened it, numbered as they come.
        begin_us: When it began, from the beginning of the step.
        end_us: When it ended.
    """

    name: U32
    thread: I64
    begin_us: F64
    end_us: F64


@record_kind("host")
class HostRecord(Record):
    """The host in a timed step that a tool traced, besides its launches of kernels.

    With the kernels of ``KernelsRecord`` it is what ``LaunchesRecord`` has of a step on the virtual GPU.

    Attributes:
        step: The timed step.
        has_events: Whether the tool traced where events were recorded. If not, it is not known what streams wait for.
        texts: The texts.
        waits: Events and waits.
        calls: Collective calls.
        ranges: The script's ranges.
    """

    step: int
    has_events: bool
    texts: list[str]
    waits: HostWaits
    calls: HostCalls
    ranges: HostRanges
