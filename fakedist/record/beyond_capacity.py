"""Lets a run go on beyond the virtual GPU's memory, so that it shows how much the rank needs.

The driver asks here about each request that does not fit after the caching allocator has freed its caches, which is
where a real run gets its error. The script gets one only if it handles it (:mod:`fakedist.record.handlers`). Torch
calls its observers only before it raises, so they do not hear of a request that is granted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, Protocol

import torch

from fakedist.frames import script_lines
from fakedist.patch import patched, present
from fakedist.record.device_memory import take_snapshot
from fakedist.record.handlers import is_handled
from fakedist.record.position import Position
from fakedist.rundir.collector import no_collector
from fakedist.rundir.encoding import Record
from fakedist.rundir.memory_records import BeyondCapacityRecord

_SET, _GET = "_cuda_setMemoryFraction", "_cuda_getMemoryFraction"
_BEGIN = (
    "_cuda_beginAllocateToPool",
    "_cuda_beginAllocateCurrentStreamToPool",
    "_cuda_beginAllocateCurrentThreadToPool",
)
_END = "_cuda_endAllocateToPool"


class Capacity(Protocol):
    """The memory of virtual GPUs; gpu/virtual.py implements it."""

    def go_beyond(self, decide: Callable[[int, int, int, int], bool] | None) -> None:
        """Ask ``decide(device, bytes, limit_bytes, thread)`` whether to grant a request that does not fit."""

    def limit(self, device: int, bytes_: int) -> None:
        """Let a device's memory end at so many bytes."""

    def asked_once(self, more: int) -> None:
        """From now on (1), or no longer (-1), a refused request is not repeated."""


@contextmanager
def beyond_capacity(capacity: Capacity, append: Callable[[Record], None], position: Position) -> Iterator[None]:
    """Grant what does not fit unless the script handles the error, and record the first such request.

    ``torch.cuda.set_per_process_memory_fraction`` is enforced by the driver meanwhile, because the allocator would
    raise by itself.

    Raises:
        RecordingError: This version of torch lacks a function that is needed.
    """
    is_recorded = False

    def decide(device: int, bytes_: int, limit_bytes: int, thread: int) -> bool:
        nonlocal is_recorded
        with no_collector():  # a tensor that is freed here would wait for the allocator, which waits for the answer
            frames = _frames_of([thread, position.calls_backward])
            try:
                if any(map(is_handled, frames)):
                    return False
                if not is_recorded:
                    is_recorded = True
                    stack = next(filter(None, map(script_lines, frames)), [])
                    append(BeyondCapacityRecord(device, bytes_, limit_bytes, position.op - 1, stack))
                return True
            finally:
                frames.clear()

    capacity.go_beyond(decide)
    try:
        with _fractions(capacity), _pools(capacity):
            yield
    finally:
        capacity.go_beyond(None)


def _frames_of(threads: Sequence[int | None]) -> list[FrameType]:
    """The innermost frames of threads that run Python code. Whoever keeps a frame keeps its tensors."""
    frames = sys._current_frames()
    try:
        return [frames[thread] for thread in dict.fromkeys(threads) if thread in frames]
    finally:
        frames.clear()  # this function's own frame, too: a cycle


@contextmanager
def _fractions(capacity: Capacity) -> Iterator[None]:
    fractions: dict[int, float] = {}

    def set_fraction(fraction: float, device: int) -> None:
        # With a threshold, the allocator collects garbage by the fraction that it knows.
        settings = take_snapshot().get("allocator_settings", {})
        if settings.get("garbage_collection_threshold"):
            originals[_SET](fraction, device)
            return
        fractions[device] = fraction
        capacity.limit(device, int(fraction * torch.cuda.get_device_properties(device).total_memory))

    def get_fraction(device: int) -> float:
        known: float = fractions[device] if device in fractions else originals[_GET](device)
        return known

    originals: dict[str, Any] = {name: present(torch._C, name) for name in (_SET, _GET)}
    try:
        with patched(torch._C, _SET, set_fraction), patched(torch._C, _GET, get_fraction):
            yield
    finally:
        for device in fractions:
            capacity.limit(device, 0)


@contextmanager
def _pools(capacity: Capacity) -> Iterator[None]:
    """Tell the driver while allocations go to a private pool: the allocator frees nothing then, and asks once."""

    def counted(original: Callable[..., object], more: int) -> Callable[..., object]:
        def call(*args: object) -> object:
            result = original(*args)
            capacity.asked_once(more)
            return result

        return call

    with ExitStack() as stack:
        for name, more in (*((name, 1) for name in _BEGIN), (_END, -1)):
            call = counted(present(torch._C, name), more)
            for owner in (torch._C, torch.cuda.memory):
                if hasattr(owner, name):
                    stack.enter_context(patched(owner, name, call))
        yield
