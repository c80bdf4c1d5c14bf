"""The records of the journal. The recording half writes them, the reading half gets the same objects back.

A record is a frozen dataclass. Its ``kind`` names it in the file. Rows are NamedTuples (:mod:`fakedist.rundir.rows`).
What comes by the million is in columns. This module has the records of the rank, its steps, operations and calls;
:mod:`fakedist.rundir.memory_records` those of memory, :mod:`fakedist.rundir.trace_records` those of the timed step as
a tool saw it, :mod:`fakedist.rundir.launch_records` those of its launches.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fakedist.gpu.models.spec import GpuSpec
from fakedist.rundir import launch_records, memory_records, trace_records  # noqa: F401 (they declare records, too)
from fakedist.rundir.encoding import RECORDS, U32, U64, Record, record_kind
from fakedist.rundir.notes import Note
from fakedist.rundir.outcome import Outcome
from fakedist.rundir.rows import (
    CallRow,
    CallTerms,
    CallWait,
    DeviceUseRow,
    GroupRow,
    InventedRow,
    LayerRow,
    OperationRow,
    OtherGroupRow,
    RegionRow,
    RouterPassRow,
    ScopeRow,
    UnansweredRow,
)
from fakedist.rundir.step_time import Peaks
from fakedist.rundir.summary import EngineSettings, RouterLoadFacts

__all__ = ["RECORDS"]

# ---- the rank and its GPU


@record_kind("gpu")
class GpuRecord(Record):
    """The rank's GPU and software. The last record counts.

    Attributes:
        gpu_name: The GPU's name; empty if it is not known yet.
        capacity_bytes: Its memory.
        compute_capability: As "9.0".
        spec_memory_bytes: The memory of the GPU model that the virtual GPU stands for; 0 on a real GPU.
        peaks: Its peak rates; None for an unknown model.
        model: The whole GPU model that the virtual GPU stands for, with its power limit; None on a real GPU.
        torch: Version of torch.
        cuda: Version of CUDA that torch was built for.
        python: Version of Python.
        device_index: Index of the rank's device.
        alloc_conf: The allocator's settings, as in PYTORCH_ALLOC_CONF.
        launch_queues: CUDA_SCALE_LAUNCH_QUEUES when CUDA began; empty without it.
    """

    gpu_name: str = ""
    capacity_bytes: int = 0
    compute_capability: str = ""
    spec_memory_bytes: int = 0
    peaks: Peaks | None = None
    model: GpuSpec | None = None
    torch: str = ""
    cuda: str = ""
    python: str = ""
    device_index: int = 0
    alloc_conf: str = ""
    launch_queues: str = ""


@record_kind("nccl")
class NcclRecord(Record):
    """NCCL as the job would have loaded it, with its variables that matter for memory or time.

    The last record counts.
    """

    version: str
    environment: dict[str, str]


@record_kind("outside")
class OutsideRecord(Record):
    """Memory of the real GPU at the end of the run: bytes in use, other processes included, and bytes that the caching
    allocator had reserved.
    """

    device: int
    used_bytes: int
    reserved_bytes: int


@record_kind("taken")
class TakenRecord(Record):
    """The most memory of a virtual GPU that was taken outside the caching allocator at one time, and the most that each
    owner took: user buffers, managed memory, extensions. ``backed_bytes`` is the most that was behind the segments of
    the caching allocator; less than it reserved if some of them slept.
    """

    device: int
    peak_bytes: int
    by_owner: dict[str, int]
    backed_bytes: int = 0


@record_kind("device_use")
class DeviceUseRecord(Record):
    """Memory of the rank's virtual GPU in use over the run, without contexts: names of other processes that held
    memory of it, and rows in the order of changes.
    """

    processes: list[str]
    rows: list[DeviceUseRow]

    def __post_init__(self) -> None:
        if any(len(row.others_bytes) != len(self.processes) for row in self.rows):
            raise ValueError("rows does not have the bytes of each process")


@dataclass(frozen=True, slots=True)
class TrainingFacts:
    """Facts about the script's training: whether an evaluation ran, how often any optimizer stepped, and whether the
    script marked where its steps end.
    """

    evaluated: bool
    optimizer_steps: int
    counts_itself: bool


@record_kind("outcome")
class OutcomeRecord(Record):
    """How the rank ended.

    Attributes:
        outcome: How the script ended.
        code: The exit code.
        message: More about it, one line; may be empty.
        line: Where it ended, as ``file:line (function)``; empty at the script's end.
        last_phase: The phase that it was in.
        last_step: The last recorded step that had begun; 0 before the first.
        training: None if the script never imported torch, or ran in another tool.
    """

    outcome: Outcome
    code: int | None
    message: str = ""
    line: str = ""
    last_phase: str = "init"
    last_step: int = 0
    training: TrainingFacts | None = None


@record_kind("note")
class NoteRecord(Record):
    """A note for the report."""

    note: Note


@record_kind("invented")
class InventedRecord(Record):
    """Values that were made up since the last such record.

    Attributes:
        rows: By operation and line.
        idle: Indices of the rows whose values change nothing: the script logs, keeps or asserts them.
    """

    rows: list[InventedRow]
    idle: list[int] = field(default_factory=list)


@record_kind("not_sent")
class NotSentRecord(Record):
    """A line that read integers or flags that another rank should have sent. They were this rank's own, or zeros.

    Attributes:
        line: The line, as ``file:line (function)``.
        call: The call that should have received them.
        source: The rank that sends them; -1 for any.
        command: The command that supplies them; may be empty.
        is_read: Whether the script read them. On the host that is not seen.
    """

    line: str
    call: str
    source: int
    command: str
    is_read: bool

    @property
    def text(self) -> str:
        """The call, the rank that sends and the line: "broadcast from rank 0 at train.py:3 (main)"."""
        whom = "any rank" if self.source < 0 else f"rank {self.source}"
        return f"{self.call} from {whom}" + (f" at {self.line}" if self.line else "")


@record_kind("router_load")
class RouterLoadRecord(Record):
    """The routers that picked experts by made-up values, and what their load sent to whom."""

    facts: RouterLoadFacts


@record_kind("router_passes")
class RouterPassesRecord(Record):
    """The calls of these routers, in order."""

    rows: list[RouterPassRow]


@record_kind("unanswered")
class UnansweredRecord(Record):
    """Calls of CUDA functions that were refused so far. A later record replaces the numbers of an earlier one."""

    rows: list[UnansweredRow]


# ---- steps, layers and operations


@record_kind("named_phase")
class NamedPhaseRecord(Record):
    """A phase that the script named (``fakedist.phase``), and the virtual GPU then; 0 bytes without one.

    Attributes:
        name: The script's name.
        step: Step in which it began.
        first_op: Number of its first operation.
        end_op: Number of the first operation after it.
        peak_used_bytes: Most that was in use of the device during it, by all processes, without their contexts.
        backed_bytes: At its end, memory behind the caching allocator's segments. Segments that sleep have none.
        outside_bytes: At its end, this process's memory outside the caching allocator.
        others_bytes: At its end, memory of other processes.
        end_step: Step in which it ended.
        first_change: Number of the first change of what is in use of the device during it; -1 if it is not known.
        end_change: Number of the first change after it.
        peak_asleep_bytes: Most that was in use during it without vLLM's KV cache: it slept, or there was none yet.
        peak_awake_bytes: Most that was in use during it with vLLM's KV cache.
    """

    name: str
    step: int
    first_op: int
    end_op: int
    peak_used_bytes: int = 0
    backed_bytes: int = 0
    outside_bytes: int = 0
    others_bytes: int = 0
    end_step: int = 0
    first_change: int = -1
    end_change: int = -1
    peak_asleep_bytes: int = 0
    peak_awake_bytes: int = 0


@record_kind("engine")
class EngineRecord(EngineSettings, Record):
    """Settings of vLLM's engine, and its measurements before it took its KV cache.

    Attributes:
        total_bytes: Memory of the GPU.
        free_bytes: Memory that was free when the engine looked first, before its weights.
        requested_bytes: What it may use of the GPU, its share, without weights that other processes hold for it.
        consumed_bytes: What its weights and its profiling run took and kept.
        graphs_estimate_bytes: What it set aside for CUDA graphs.
        block_bytes: Size of a block, of all layers of this rank.
        request_bytes: Blocks that one request of ``max_model_len`` tokens needs.
    """

    total_bytes: int
    free_bytes: int
    requested_bytes: int
    consumed_bytes: int
    graphs_estimate_bytes: int
    block_bytes: int
    request_bytes: int


@record_kind("engine_sleep")
class EngineSleepRecord(Record):
    """An engine slept.

    Attributes:
        how: "level 2" of vLLM's ``sleep``, or "kv_cache paused" of torch_memory_saver.
        freed_bytes: Of the virtual GPU, no longer in use.
        kept: Bytes of it that the process still has in use, by kind.
        process: As of :class:`EngineRecord`.
    """

    how: str
    freed_bytes: int
    kept: dict[str, int]
    process: str = ""


@record_kind("asleep")
class AsleepRecord(Record):
    """Segments of the caching allocator, by address, that have no memory behind them from an operation on until the
    next of these records: an engine sleeps.
    """

    op: int
    address: U64
    size: U64


@record_kind("engine_cache")
class EngineCacheRecord(Record):
    """vLLM's KV cache had memory from a change of what is in use of the virtual GPU, by its number, until another: the
    first after which it sleeps; -1 if it is not known yet. ``process`` is as of :class:`EngineRecord`.
    """

    first_change: int
    end_change: int
    process: str = ""


@record_kind("engine_use")
class EngineUseRecord(Record):
    """Most that was in use of the virtual GPU from when vLLM's engine took its KV cache until the end of the recording,
    without the KV cache and with it.
    """

    peak_asleep_bytes: int
    peak_awake_bytes: int


@record_kind("step")
class StepRecord(Record):
    """A step that ended.

    Attributes:
        step: Its number, from 1.
        start_us: When it began, as Unix time.
        end_us: When it ended.
        samples: First dimension of the model's input, summed over its forwards with gradients; 0 if not known.
        sample_shape: The other dimensions of that input, such as "3x224x224"; empty if not known.
        name: What the script calls it; "evaluation" if one ran before its training; else empty.
        elements: Elements of all inputs of the model, summed over its forwards with gradients; 0 if not known.
    """

    step: int
    start_us: int
    end_us: int
    samples: int = 0
    sample_shape: str = ""
    name: str = ""
    elements: int = 0

    @property
    def wall_us(self) -> int:
        """How long it took."""
        return self.end_us - self.start_us


@record_kind("step_went_on")
class StepWentOnRecord(Record):
    """A step that was reported as ended and went on. What came after its end belongs to it.

    Attributes:
        step: Its number; 0 if what was recorded as step 1 is ``init``.
    """

    step: int


@record_kind("layers")
class LayersRecord(Record):
    """New layers, parents before children, and layers that have another name or parent since they were written."""

    rows: list[LayerRow]


@record_kind("scopes")
class ScopesRecord(Record):
    """New scopes."""

    rows: list[ScopeRow]


@record_kind("operations")
class OperationNamesRecord(Record):
    """Operations that ran for the first time."""

    rows: list[OperationRow]


@record_kind("ops")
class OperationsRecord(Record):
    """Operations that ran, in order.

    Attributes:
        first: Number of the first one.
        operation: Number of each one's name.
        scope: Number of each one's scope.
    """

    first: int
    operation: U32
    scope: U32


@record_kind("regions")
class RegionsRecord(Record):
    """Ranges of operations that saved activations and that ended."""

    rows: list[RegionRow]


# ---- process groups


@record_kind("groups")
class GroupsRecord(Record):
    """New process groups."""

    rows: list[GroupRow]


@record_kind("other_groups")
class OtherGroupsRecord(Record):
    """New process groups that this rank is not in, in order."""

    rows: list[OtherGroupRow]


@record_kind("bound")
class BoundRecord(Record):
    """A group that is bound to its device: NCCL creates the communicator with it, not at the first call."""

    group: int


@record_kind("calls")
class CallsRecord(Record):
    """Calls on process groups."""

    rows: list[CallRow]


@record_kind("call_terms")
class CallTermsRecord(Record):
    """Terms of calls: a row for each of a :class:`CallsRecord`, in order."""

    rows: list[CallTerms]


@record_kind("call_waits")
class CallWaitsRecord(Record):
    """Waits for calls."""

    rows: list[CallWait]


@record_kind("call_lines")
class CallLinesRecord(Record):
    """Lines of the script that make calls, as ``file:line (function)``, innermost first; numbered from 0 in order."""

    lines: list[str]
