"""The caching allocator's own history, drained in pieces before it can overflow."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypedDict

import torch

from fakedist.errors import RecordingError
from fakedist.frames import OURS, TORCH
from fakedist.frameworks.transformer_engine import WORKSPACE_FUNCTIONS
from fakedist.patch import patched, present
from fakedist.run.allocator import SETTINGS, refusal
from fakedist.run.encoding import Record
from fakedist.run.memory_records import EventsRecord, StatisticsRecord
from fakedist.run.rows import FrameRow, PoolRow
from fakedist.run.schema import ACTIONS

_ACTION_CODES = {name: code for code, name in enumerate(ACTIONS)}
_GAINS = frozenset(("segment_alloc", "segment_map"))
_COMMON_POOL = (0, 0)
_RECORD = "_record_memory_history"
_RESET_PEAK = "_cuda_resetPeakMemoryStats"


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
    """What is read of a segment in torch's snapshot."""

    device: int
    address: int
    segment_pool_id: tuple[int, int]


class AllocatorHistory:
    """Reads the allocator's history into journal records.

    Attributes:
        is_on: Whether allocations are recorded.
        peaks_were_reset: Whether the script reset the allocator's peak statistics, so that they miss the run's peak.
        requests_ignored: How often the script tried to record the history itself.
        on_workspace: Called with (address, op, bytes) for a block that a GEMM allocated in addition to its output, or
            that a library allocated for its own GEMMs. It is cuBLAS's workspace, kept or for that one call.
    """

    def __init__(self, append: Callable[[Record], None], gemms: dict[int, tuple[int, ...]]) -> None:
        self.is_on = False
        self.peaks_were_reset = False
        self.requests_ignored = 0
        self.on_workspace: Callable[[int, int, int], None] = lambda address, op, bytes_: None
        self._append = append
        self._gemms = gemms
        self._frames: dict[FrameRow, int] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        self._workspace_stacks: set[int] = set()
        self._highest = -1
        self._record: Callable[..., None] = present(torch.cuda.memory, _RECORD)

    def start(self) -> None:
        """Start or restart an empty history. Only allocations carry a Python stack. CUDA must be initialised."""
        self.is_on = True
        self._record(enabled="all", context="alloc", stacks="python", clear_history=True)

    def stop(self) -> None:
        """Stop recording."""
        if self.is_on:
            self.is_on = False
            self._record(enabled=None)

    def drain(self) -> None:
        """Move everything recorded since the last call to the journal."""
        if not self.is_on:
            return
        snapshot = torch._C._cuda_memorySnapshot(None)
        self.start()
        for device, trace in enumerate(snapshot["device_traces"]):
            if trace:
                self._append(self._events(device, trace, _private_pools(snapshot["segments"], device)))
        self._gemms.clear()

    def _events(self, device: int, trace: list[_Entry], private: dict[int, tuple[int, int]]) -> EventsRecord:
        first_frame, first_stack = len(self._frames), len(self._stacks)
        frame_ids: dict[int, int] = {}
        stack_ids: dict[int, int] = {}
        action, address, size = array("B"), array("Q"), array("q")
        stream, time_us, op, stack = array("Q"), array("q"), array("q"), array("i")
        pools: list[PoolRow] = []
        for entry in trace:
            name = entry["action"]
            at = entry["addr"] if "addr" in entry else entry.get("device_free", 0)
            metadata = entry.get("user_metadata")
            number = int(metadata) if metadata and metadata.isdecimal() else -1
            self._highest = max(self._highest, number)
            action.append(_ACTION_CODES[name])
            address.append(at)
            size.append(entry["size"])
            stream.append(entry["stream"])
            time_us.append(entry.get("time_us", 0))
            op.append(number)
            if name in _GAINS and (pool := entry.get("pool_id") or private.get(at, _COMMON_POOL)) != _COMMON_POOL:
                pools.append(PoolRow(len(action) - 1, *pool))
            frames = entry.get("frames")
            if frames:
                found = stack_ids.get(id(frames))
                if found is None:
                    found = stack_ids[id(frames)] = self._stack(frames, frame_ids)
                stack.append(found)
            else:
                stack.append(-1)
            gemm = self._gemms.get(number)
            # A block of an operand's size would be a contiguous copy of that operand.
            is_product_workspace = gemm is not None and at != gemm[0] and entry["size"] not in gemm[1:]
            if name == "alloc" and (is_product_workspace or stack[-1] in self._workspace_stacks):
                self.on_workspace(at, self._highest, entry["size"])
        return EventsRecord(
            device,
            frames=list(self._frames)[first_frame:],
            stacks=list(self._stacks)[first_stack:],
            action=action.tobytes(),
            address=address.tobytes(),
            size=size.tobytes(),
            stream=stream.tobytes(),
            time_us=time_us.tobytes(),
            op=op.tobytes(),
            stack=stack.tobytes(),
            pools=pools,
        )

    def _stack(self, frames: list[_Frame], frame_ids: dict[int, int]) -> int:
        """The number of a stack, innermost frame first, without this package's frames."""
        numbers = []
        for frame in frames:
            number = frame_ids.get(id(frame))
            if number is None:
                key = FrameRow(frame["filename"], frame["line"], frame["name"])
                ours = key.filename.startswith((OURS, "<frozen "))
                number = frame_ids[id(frame)] = -1 if ours else self._frames.setdefault(key, len(self._frames))
            if number >= 0:
                numbers.append(number)
        stack = self._stacks.setdefault(tuple(numbers), len(self._stacks))
        caller = next((frame for frame in frames if not frame["filename"].startswith((OURS, TORCH, "<"))), None)
        if caller is not None and caller["name"] in WORKSPACE_FUNCTIONS:
            self._workspace_stacks.add(stack)
        return stack

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


def _private_pools(segments: list[_Segment], device: int) -> dict[int, tuple[int, int]]:
    """Private pools of the segments that are held now, by address: older versions of torch name no pool in events."""
    return {
        segment["address"]: segment["segment_pool_id"]
        for segment in segments
        if segment["device"] == device and segment["segment_pool_id"] != _COMMON_POOL
    }


def check_allocator() -> None:
    """Check that the allocator keeps a history. CUDA need not be initialised.

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
    found = torch._C._cuda_memorySnapshot(None).get("allocator_settings", {})
    told = [found[name] for name in SETTINGS if name in found]
    return next(map(str, filter(None, told or [os.environ.get(name) for name in SETTINGS])), "")


@contextmanager
def allocator_history(history: AllocatorHistory) -> Iterator[None]:
    """Keep the script from switching the history off or clearing it. Leaving the context stops the history.

    Raises:
        RecordingError: This version of torch lacks a function that is needed.
    """
    reset_peaks = present(torch._C, _RESET_PEAK)
    for name in ("_cuda_memorySnapshot", "_cuda_setMemoryMetadata"):
        present(torch._C, name)

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
