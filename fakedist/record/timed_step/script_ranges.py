"""Follows the ranges that the script opens: ``torch.cuda.nvtx`` and ``torch.profiler.record_function``.

torch opens ranges of its own, such as FSDP's and the optimizers'. Those are not the script's.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Protocol

import torch
import torch.cuda.nvtx
from torch.autograd import profiler

from fakedist.frames import is_the_scripts
from fakedist.patch import patched, present
from fakedist.run.trace_records import OWN_RANGE

#: Files whose functions only forward the script's call.
_FIRST_HANDLE = 1 << 62  # of ranges that NVTX gives none; no tool counts that far
_FORWARDING = (contextlib.__file__, torch.cuda.nvtx.__file__)


class RangeTracer(Protocol):
    """Is told of ranges."""

    def range_begins(self, name: str) -> int:
        """A range begins in this thread. Returns its number."""

    def range_ended(self, number: int) -> None:
        """The range with that number ended."""


class _Open(threading.local):
    """The ranges that a thread pushed; None for one that is not the script's."""

    def __init__(self) -> None:
        self.pushed: list[int | None] = []


@contextlib.contextmanager
def script_ranges(tracer: RangeTracer) -> Iterator[None]:
    """Tell a tracer of the script's ranges.

    Raises:
        RecordingError: This version of torch opens ranges in another way.
    """
    thread, started, entered = _Open(), dict[int, int | None](), dict[int, int]()
    handles = itertools.count(_FIRST_HANDLE)
    nvtx, function = present(torch._C, "_nvtx"), profiler.record_function

    def push(text: str) -> object:
        thread.pushed.append(_begin(tracer, text, sys._getframe(1)))
        return original_push(text)

    def pop() -> object:
        if thread.pushed and (number := thread.pushed.pop()) is not None:
            tracer.range_ended(number)
        return original_pop()

    def start(text: str) -> int:
        handle: int = original_start(text)
        if not handle:  # without a tool, all ranges have handle 0
            handle = next(handles)
        started[handle] = _begin(tracer, text, sys._getframe(1))
        return handle

    def end(handle: int) -> object:
        if (number := started.pop(handle, None)) is not None:
            tracer.range_ended(number)
        return original_end(0 if handle >= _FIRST_HANDLE else handle)

    def mark(text: str) -> object:
        if (number := _begin(tracer, text, sys._getframe(1))) is not None:
            tracer.range_ended(number)
        return original_mark(text)

    def enter(own: profiler.record_function) -> object:
        if (number := _begin(tracer, own.name, sys._getframe(1))) is not None:
            entered[id(own)] = number
        return original_enter(own)

    def leave(own: profiler.record_function, *error: object) -> object:
        if (number := entered.pop(id(own), None)) is not None:
            tracer.range_ended(number)
        return original_leave(own, *error)

    with (
        patched(nvtx, "rangePushA", push) as original_push,
        patched(nvtx, "rangePop", pop) as original_pop,
        patched(nvtx, "rangeStartA", start) as original_start,
        patched(nvtx, "rangeEnd", end) as original_end,
        patched(nvtx, "markA", mark) as original_mark,
        patched(function, "__enter__", enter) as original_enter,
        patched(function, "__exit__", leave) as original_leave,
    ):
        yield


def _begin(tracer: RangeTracer, name: str, frame: FrameType | None) -> int | None:
    """The number of a range that begins now; None if it is torch's or ours.

    Args:
        tracer: What to tell.
        name: Its name.
        frame: The frame that opens it.
    """
    while frame is not None and frame.f_code.co_filename in _FORWARDING:
        frame = frame.f_back
    if frame is None or not is_the_scripts(frame.f_code.co_filename) or name.startswith(OWN_RANGE):
        return None
    return tracer.range_begins(name)
