"""Device memory: the caching allocator's settings and history, drained before it overflows, and what is outside it.

fakedist must not initialise CUDA itself, because scripts and torch check for it (``init_device_mesh`` chooses the
rank's device only if CUDA is uninitialised). Until then the allocator's history cannot be switched on.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple, TypedDict

import torch

from fakedist.errors import RecordingError
from fakedist.frames import OURS, TORCH
from fakedist.patch import patched, present
from fakedist.rank.frameworks.transformer_engine import WORKSPACE_FUNCTIONS
from fakedist.record.nodes import Nodes
from fakedist.record.numbering import FastPath, Gemms, Read
from fakedist.rundir.collector import no_collector
from fakedist.rundir.encoding import Record
from fakedist.rundir.environment import SETTINGS, nccl_variables, refusal
from fakedist.rundir.memory_records import EventsRecord, HostBlocksRecord, NodesRecord, StatisticsRecord
from fakedist.rundir.records import NcclRecord, OutsideRecord
from fakedist.rundir.rows import FrameRow, PoolRow
from fakedist.rundir.schema import ACTIONS

_INDUCTOR = "torch._inductor"


def take_snapshot() -> dict[str, Any]:  # torch's own dict; its readers say what they read of it
    """Take torch's snapshot. CUDA must be initialised."""
    with without_inductor():
        snapshot: dict[str, Any] = torch._C._cuda_memorySnapshot(None)
    return snapshot


@contextmanager
def without_inductor() -> Iterator[None]:
    """While torch names the frames of stacks, keep it from importing Inductor."""
    package, _, attribute = _INDUCTOR.rpartition(".")
    known = sys.modules[package].__dict__
    if attribute in known or _INDUCTOR in sys.modules:
        yield
        return
    placeholder = known[attribute] = _NotImported()
    try:
        yield
    finally:
        if known.get(attribute) is placeholder:  # else another thread has imported it
            del known[attribute]


class _NotImported:
    """Stands for ``torch._inductor``, and imports it for all but the snapshot.

    To name the frames of a stack, torch looks for ``torch._inductor.codecache`` (``py_symbolize`` in
    torch/csrc/profiler/python/combined_traceback.cpp). Looking alone imports Inductor, which takes 2 s.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> object:
        if name == "codecache" and threading.get_ident() == self._thread:
            raise AttributeError(name)
        return getattr(importlib.import_module(_INDUCTOR), name)


def check_allocator() -> None:
    """Check that the allocator keeps a history, without initialising CUDA.

    Raises:
        RecordingError: It keeps none.
    """
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        raise RecordingError(
            f"the allocator backend {backend} keeps no history; fakedist reads the native caching allocator's",
            "take backend:cudaMallocAsync out of PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF",
        )
    if refused := refusal({name: text for name, text in os.environ.items() if name not in SETTINGS}):
        raise RecordingError(*refused)


def allocator_settings() -> str:
    """The allocator's settings, as in PYTORCH_ALLOC_CONF. CUDA must be initialised."""
    settings = take_snapshot().get("allocator_settings", {})
    values = [settings[name] for name in SETTINGS if name in settings] or map(os.environ.get, SETTINGS)
    return next(map(str, filter(None, values)), "")


@contextmanager
def changed_settings(changed: Callable[[str], None]) -> Iterator[None]:
    """Call ``changed`` with the allocator's settings when the script sets them. What it leaves out is default."""
    with ExitStack() as stack:
        for name in ("_accelerator_setAllocatorSettings", "_cuda_cudaCachingAllocator_set_allocator_settings"):
            if (original := getattr(torch._C, name, None)) is not None:  # releases differ
                stack.enter_context(patched(torch._C, name, _then(original, changed)))
        yield


def _then(original: Callable[[str], None], changed: Callable[[str], None]) -> Callable[[str], None]:
    def set_settings(alloc_conf: str) -> None:
        original(alloc_conf)
        changed(alloc_conf)

    return set_settings


_QUEUE = "_queued_calls"


class Beginning:
    """Reports CUDA's initialisation, once; ``is_past`` from then on."""

    def __init__(self) -> None:
        self.is_past = False
        self._waiting: list[Callable[[], None]] = []
        self._pid = os.getpid()

    def then(self, call: Callable[[], None]) -> None:
        """Call a function when CUDA is initialised, before anything is allocated, or now if it already is.

        Torch turns an ``Exception`` that it raises into one of its own.
        """
        if self.is_past:
            call()
        else:
            self._waiting.append(call)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch for the initialisation: all Python reaches CUDA by ``torch.cuda._lazy_init``, which runs queued calls.

        Raises:
            RecordingError: This version of torch has no such queue.
        """
        present(torch.cuda, _QUEUE)
        present(torch.cuda, "_lazy_call")(self._begin)  # immediately, if CUDA is initialised
        try:
            yield
        finally:
            self._waiting.clear()
            queue = present(torch.cuda, _QUEUE)
            queue[:] = [call for call in queue if call[0] != self._begin]

    def before(self, kwargs: dict[str, object]) -> None:
        """Initialise CUDA if the operation that is about to run, with these keywords, needs it.

        As in C++ and ``torch.ops``, this bypasses ``torch.cuda``, whose ``is_initialized()`` stays False.
        """
        device = kwargs.get("device")
        if self.is_past or not isinstance(device, (torch.device, str, int)):
            return
        if torch.device(device).type == "cuda":
            torch.ops.aten.empty.memory_format([0], device=device)
            self._begin()

    def _begin(self) -> None:
        if self.is_past or os.getpid() != self._pid:  # a forked process must not touch CUDA
            return
        self.is_past = True
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()


def nccl_record() -> NcclRecord:
    """The version of NCCL that the job would have loaded, and its environment now."""
    return NcclRecord(".".join(map(str, torch.cuda.nccl.version())), nccl_variables(os.environ))


def outside_record(device: int) -> OutsideRecord | None:
    """Bytes in use on the real GPU, by all processes, and the allocator's reserved bytes; None without an answer."""
    try:
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
    except RuntimeError:  # a sticky CUDA error: every later call fails
        return None
    return OutsideRecord(device, used_bytes=total - free, reserved_bytes=reserved)


def kept_by_kind(
    device: int, is_backed: Callable[[int], bool], is_engines: Callable[[str], bool]
) -> tuple[dict[str, int], list[tuple[int, int]]]:
    """Bytes of this process behind the allocator's segments, by kind: tensors, private pools, and what is free; and the
    addresses and sizes of segments without memory.

    Args:
        is_backed: Whether there is memory behind an address. Segments that sleep have none.
        is_engines: Whether a source file is an engine's, whose tensors are kept apart where there is a history.
    """
    kinds: dict[str, int] = {}
    asleep: list[tuple[int, int]] = []
    for segment in take_snapshot()["segments"]:
        if segment["device"] != device:
            continue
        if not is_backed(segment["address"]):
            asleep.append((segment["address"], segment["total_size"]))
            continue
        is_private = tuple(segment["segment_pool_id"]) != _COMMON_POOL
        for block in segment["blocks"]:
            files = [frame["filename"] for frame in block.get("frames", ())]
            if is_private:
                kind = "private pools"
            elif block["state"] == "inactive":
                kind = "free in segments"
            else:
                kind = "engine's tensors" if any(map(is_engines, files)) else "other tensors" if files else "tensors"
            kinds[kind] = kinds.get(kind, 0) + block["size"]
    return kinds, asleep


class StreamUses:
    """Counts, by line, the blocks that ``Tensor.record_stream`` has the allocator keep until a stream has used them.

    ``step`` is called for the running step. What C++ records is not seen.
    """

    #: What calls it for others: FSDP1, and isend and irecv.
    _PASS_ON = ("fsdp/_common_utils.py", "distributed/distributed_c10d.py")

    def __init__(self, step: Callable[[], int]) -> None:
        self._step = step
        self._steps: dict[int, dict[str, tuple[int, int]]] = {}  # blocks and bytes

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count them. RecordingError if this version of torch has no such method."""

        def record_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
            if tensor.is_cuda:
                lines = self._steps.setdefault(self._step(), {})
                blocks, bytes_ = lines.get(line := self._line(), (0, 0))
                lines[line] = blocks + 1, bytes_ + tensor.nbytes
            original(tensor, stream)

        with patched(torch.Tensor, "record_stream", record_stream) as original:
            yield

    def most(self) -> list[tuple[str, int, int]]:
        """Lines, with their blocks and bytes in the step that has the most bytes, most bytes first."""
        of_step = max(self._steps.values(), key=lambda lines: sum(bytes_ for _, bytes_ in lines.values()), default={})
        return sorted(((line, *counts) for line, counts in of_step.items()), key=lambda row: -row[2])

    def _line(self) -> str:
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(OURS):
            frame = frame.f_back
        while frame.f_back is not None and frame.f_code.co_filename.endswith(self._PASS_ON):
            frame = frame.f_back
        return f"{frame.f_code.co_filename}:{frame.f_lineno}"


_ACTION_CODES = {name: code for code, name in enumerate(ACTIONS)}
_GAINS = frozenset(("segment_alloc", "segment_map"))
_ALLOC = _ACTION_CODES["alloc"]
_COMMON_POOL = (0, 0)
#: Has ``OpOverload.__call__``.
_OPS = str(torch._ops.__file__)
_RECORD = "_record_memory_history"
_RESET_PEAK = "_cuda_resetPeakMemoryStats"
_SET_METADATA = "_cuda_setMemoryMetadata"


class _Frame(TypedDict):
    filename: str
    line: int
    name: str


class _Entry(TypedDict, total=False):
    """An entry of the allocator's history, as torch gives it. Not every action has every key."""

    action: str
    addr: int
    device_free: int
    size: int
    stream: int
    time_us: int
    user_metadata: str
    pool_id: tuple[int, int]
    frames: list[_Frame]


class _Segment(TypedDict):
    device: int
    address: int
    total_size: int
    segment_pool_id: tuple[int, int]


class _PoolRange(NamedTuple):
    """Addresses of a private pool: from ``start`` up to ``end``."""

    start: int
    end: int
    pool: tuple[int, int]


class AllocatorHistory:
    """Reads the allocator's history into journal records.

    Args:
        take_gemms: Returns the matrix products since the last call.
        reader: Reads the history instead of :meth:`AllocatorHistory.read`.
        on_workspace: Called with (address, op, bytes) for a block that a GEMM allocated in addition to its output, or
            that a library allocated for its own GEMMs: cuBLAS's workspace, kept or for that one call.
        nodes: The nodes of autograd's graph, if the reader does not know them.

    Attributes:
        peaks_were_reset: Whether the script reset the allocator's peak statistics, so that they miss the run's peak.
    """

    def __init__(
        self,
        append: Callable[[Record], None],
        take_gemms: Callable[[], Gemms],
        reader: FastPath | None = None,
        on_workspace: Callable[[int, int, int], None] = lambda address, op, bytes_: None,
        *,
        nodes: Nodes | None = None,
    ) -> None:
        self.is_on = False
        self.peaks_were_reset = False
        self.requests_ignored = 0
        self._on_workspace = on_workspace
        self._nodes = nodes
        self._reader = reader
        self._append = append
        self._take_gemms = take_gemms
        self._gemms: Gemms = {}
        self._frames: dict[FrameRow, int] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        self._workspace_stacks: set[int] = set()
        self._highest = -1
        self._record: Callable[..., None] = present(torch.cuda.memory, _RECORD)

    def start(self) -> None:
        """Start an empty history. Only allocations carry a Python stack. CUDA must be initialised."""
        self.is_on = True
        self._record(enabled="all", context="alloc", stacks="python", clear_history=True)
        if self._reader is not None:
            self._reader.watch_history()

    def stop(self) -> None:
        """Stop recording."""
        if self.is_on:
            self.is_on = False
            self._record(enabled=None)
            if self._reader is not None:
                self._reader.stop_history()

    def drain(self) -> None:
        """Move everything recorded since the last call to the journal."""
        if not self.is_on:
            return
        with no_collector():
            self._gemms = self._take_gemms()
            self._drain()

    def _drain(self) -> None:
        read = self._read_compiled()
        records = self.read() if read is None else []
        self.start()
        for record in records:
            numbered = self._numbered(record)
            self._report_workspaces(numbered, self._may_be_workspaces(numbered))
            self._highest = max(self._highest, *memoryview(record.op).cast("q"))
            self._append(numbered)
        for record, products, highest in read or ():
            self.keep_numbers(record)
            self._report_workspaces(record, self._may_be_workspaces(record) if self._workspace_stacks else products)
            self._highest = highest
            self._append(record)
        self._drain_nodes()

    def _drain_nodes(self) -> None:
        if self._reader is not None:
            with without_inductor():
                read = self._reader.read_nodes()
            if read is not None:
                self.keep_numbers(read[0])
        else:
            first_frame, first_stack = len(self._frames), len(self._stacks)
            read = None if self._nodes is None else self._nodes.take(self._stack)
            if read is not None:
                frames, stacks = list(self._frames)[first_frame:], list(self._stacks)[first_stack:]
                read = replace(read[0], frames=frames, stacks=stacks), *read[1:]
        for record in read or ():
            if record.op or (isinstance(record, NodesRecord) and record.stacks):
                self._append(record)

    def _read_compiled(self) -> list[Read] | None:
        if self._reader is None:
            return None
        with without_inductor():
            read = self._reader.read_history(self._gemms, self._highest)
        if read is None:
            self._reader.stop_history()
            self._reader = None  # from now on the numbers here count
        return read

    def read(self) -> list[EventsRecord]:
        """The history of each device that has one, with frames and stacks of its own. It is still there afterwards."""
        snapshot = take_snapshot()
        traces = [(device, trace) for device, trace in enumerate(snapshot["device_traces"]) if trace]
        return [
            _events(device, trace, self._operations(device, trace), _private_pools(snapshot["segments"], device))
            for device, trace in traces
        ]

    @property
    def number(self) -> Callable[[str], None]:
        """``number(op)``: events from now on belong to this operation. Recording must have started."""
        set_metadata: Callable[[str], None] = present(torch._C, _SET_METADATA)
        return set_metadata

    def _operations(self, device: int, trace: list[_Entry]) -> Sequence[int]:
        """The number of the operation that ran at each event; -1 if none did."""
        numbers = _OperationNumbers()
        return [numbers[entry.get("user_metadata")] for entry in trace]

    def _numbered(self, record: EventsRecord) -> EventsRecord:
        first_frame, first_stack = len(self._frames), len(self._stacks)
        rows = record.frames
        numbers = [self._stack([rows[frame] for frame in frames]) for frames in record.stacks]
        numbers.append(-1)  # for an event without a stack, which has number -1
        stack = array("i", [numbers[number] for number in memoryview(record.stack).cast("i")])
        return replace(
            record,
            frames=list(self._frames)[first_frame:],
            stacks=list(self._stacks)[first_stack:],
            stack=stack.tobytes(),
        )

    def _stack(self, rows: list[FrameRow]) -> int:
        """The number of a stack, innermost frame first, without our frames. It is empty in autograd's threads."""
        others = _without_ours(rows)
        numbers = tuple(self._frames.setdefault(row, len(self._frames)) for row in others)
        return self._number(numbers, others)

    def keep_numbers(self, record: EventsRecord | NodesRecord | HostBlocksRecord) -> None:
        """Number the frames and stacks of a record of compiled code as it did."""
        for row in record.frames:
            self._frames[row] = len(self._frames)
        if record.stacks:
            rows = list(self._frames)
            for numbers in record.stacks:
                self._number(numbers, [rows[number] for number in numbers])

    def _number(self, numbers: tuple[int, ...], rows: list[FrameRow]) -> int:
        stack = self._stacks.setdefault(numbers, len(self._stacks))
        caller = next((row for row in rows if not row.filename.startswith((OURS, TORCH, "<"))), None)
        if caller is not None and caller.function in WORKSPACE_FUNCTIONS:
            self._workspace_stacks.add(stack)
        return stack

    def _may_be_workspaces(self, record: EventsRecord) -> list[tuple[int, int]]:
        """(row, highest operation so far) of blocks that a matrix product or a library's own function allocated."""
        stack, op = memoryview(record.stack).cast("i"), memoryview(record.op).cast("q")
        highest = array("q", accumulate(op, max, initial=self._highest))
        rows = [row for row, code in enumerate(record.action) if code == _ALLOC]
        return [(r, highest[r + 1]) for r in rows if op[r] in self._gemms or stack[r] in self._workspace_stacks]

    def _report_workspaces(self, record: EventsRecord, rows: Iterable[tuple[int, int]]) -> None:
        stack = memoryview(record.stack).cast("i")
        address, size, op = (memoryview(column).cast("q") for column in (record.address, record.size, record.op))
        for row, highest in rows:
            gemm = self._gemms.get(op[row])
            # A block of an operand's size would be a contiguous copy of that operand.
            is_product_workspace = gemm is not None and address[row] != gemm[0] and size[row] not in gemm[1:]
            if is_product_workspace or stack[row] in self._workspace_stacks:
                self._on_workspace(address[row], highest, size[row])

    def statistics(self) -> list[StatisticsRecord]:
        """The allocator's own statistics for every device in use. The replay of the journal is checked against them."""
        records = []
        for device in range(torch.cuda.device_count() if self.is_on else 0):
            stats = torch.cuda.memory_stats(device)
            if not stats.get("reserved_bytes.all.peak"):
                continue
            records.append(
                StatisticsRecord(
                    device,
                    allocated_peak_bytes=stats["allocated_bytes.all.peak"],
                    reserved_peak_bytes=stats["reserved_bytes.all.peak"],
                    allocated_bytes=stats["allocated_bytes.all.current"],
                    reserved_bytes=stats["reserved_bytes.all.current"],
                    num_ooms=stats["num_ooms"],
                    peaks_were_reset=self.peaks_were_reset,
                )
            )
        return records


class _OperationNumbers(dict[str | None, int]):
    def __missing__(self, metadata: str | None) -> int:
        number = self[metadata] = int(metadata) if metadata and metadata.isdecimal() else -1
        return number


def _events(device: int, trace: list[_Entry], operations: Sequence[int], private: list[_PoolRange]) -> EventsRecord:
    # One pass for each column is twice as fast as one pass for all, and there may be 100,000 entries a second.
    address = array("Q", [entry["addr"] if "addr" in entry else entry.get("device_free", 0) for entry in trace])
    stack, stacks, frames = _stacks_of(trace)
    return EventsRecord(
        device,
        frames,
        stacks,
        action=bytes([_ACTION_CODES[entry["action"]] for entry in trace]),
        address=address.tobytes(),
        size=array("q", [entry["size"] for entry in trace]).tobytes(),
        stream=array("Q", [entry["stream"] for entry in trace]).tobytes(),
        time_us=array("q", [entry.get("time_us", 0) for entry in trace]).tobytes(),
        op=array("q", operations).tobytes(),
        stack=stack.tobytes(),
        pools=[
            PoolRow(row, *pool)
            for row, entry in enumerate(trace)
            if entry["action"] in _GAINS
            and (pool := entry.get("pool_id") or _pool_at(address[row], private)) != _COMMON_POOL
        ],
    )


def _stacks_of(trace: list[_Entry]) -> tuple[array[int], list[tuple[int, ...]], list[FrameRow]]:
    """The number of each entry's stack, -1 for one without; the stacks, innermost frame first; and the frames."""
    # Each allocation has a list of its own. Equal frames of a snapshot are one object.
    known: dict[tuple[int, ...], int] = {}
    frames: dict[int, _Frame] = {}
    stack = array("i")
    for entry in trace:
        if (own := entry.get("frames")) is None:
            stack.append(-1)
            continue
        key = tuple(map(id, own))
        number = known.get(key)
        if number is None:
            number = known[key] = len(known)
            frames.update(zip(key, own, strict=True))
        stack.append(number)
    index = {key: position for position, key in enumerate(frames)}
    rows = [FrameRow(frame["filename"], frame["line"], frame["name"]) for frame in frames.values()]
    return stack, [tuple(map(index.__getitem__, key)) for key in known], rows


def _without_ours(rows: list[FrameRow]) -> list[FrameRow]:
    """A stack's frames without this package's, and without torch's by which we call an operator."""
    return [
        row
        for row, caller in zip(rows, [*(row.filename for row in rows), ""][1:], strict=True)
        if not row.filename.startswith((OURS, "<frozen ")) and not (row.filename == _OPS and caller.startswith(OURS))
    ]


def _private_pools(segments: list[_Segment], device: int) -> list[_PoolRange]:
    """The segments of private pools held now, by address: older versions of torch name no pool in events."""
    return sorted(
        _PoolRange(segment["address"], segment["address"] + segment["total_size"], segment["segment_pool_id"])
        for segment in segments
        if segment["device"] == device and segment["segment_pool_id"] != _COMMON_POOL
    )


def _pool_at(address: int, private: list[_PoolRange]) -> tuple[int, int]:
    """The pool of an address. Pages that are mapped later begin in the middle of an expandable segment."""
    index = bisect_right(private, address, key=lambda held: held.start) - 1
    return private[index].pool if index >= 0 and address < private[index].end else _COMMON_POOL


@contextmanager
def allocator_history(history: AllocatorHistory) -> Iterator[None]:
    """Keep the script from switching the history off or clearing it. Leaving the context stops the history.

    Raises:
        RecordingError: This version of torch lacks a function that is needed.
    """
    reset_peaks = present(torch._C, _RESET_PEAK)
    present(torch._C, "_cuda_memorySnapshot")

    def ignore_request(*args: object, **kwargs: object) -> None:
        history.requests_ignored += 1

    def note_reset(*args: object) -> None:
        history.peaks_were_reset = True
        reset_peaks(*args)

    process = os.getpid()
    try:
        with patched(torch.cuda.memory, _RECORD, ignore_request), patched(torch._C, _RESET_PEAK, note_reset):
            yield
    finally:
        if os.getpid() == process:  # a forked process must not touch CUDA
            history.stop()
