"""Reads the allocator's history from compiled code, as columns."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from itertools import accumulate

from fakedist.gpu.fast_path.views import View
from fakedist.run.memory_records import EventsRecord
from fakedist.run.rows import FrameRow, PoolRow

#: Columns of a device's events, in the order of history.cpp.
_NUM_COLUMNS = 10


def read_history(library: ctypes.CDLL) -> list[EventsRecord] | None:
    """The history of each device that has one, with frames and stacks of its own. None if torch cannot tell it.

    CUDA must be initialised.
    """
    num_devices = library.fakedist_history_read()
    if num_devices < 0:
        return None
    named = View()
    library.fakedist_history_frames(ctypes.byref(named))
    texts = named.copied().decode().split("\0")[:-1]
    frames = list(map(FrameRow, texts[::3], map(int, texts[1::3]), texts[2::3]))
    found = (_events(library, device, frames) for device in range(num_devices))
    return [record for record in found if record.action]


def _events(library: ctypes.CDLL, device: int, frames: list[FrameRow]) -> EventsRecord:
    views = (View * _NUM_COLUMNS)()
    library.fakedist_history_events(device, views)
    action, address, size, stream, time_us, op, stack, lengths, numbers, pools = (view.copied() for view in views)
    flat = memoryview(pools).cast("q").tolist()
    return EventsRecord(
        device,
        frames,
        list(_stacks(memoryview(lengths).cast("I"), memoryview(numbers).cast("I").tolist())),
        action,
        address,
        size,
        stream,
        time_us,
        op,
        stack,
        pools=list(map(PoolRow, flat[::3], flat[1::3], flat[2::3])),
    )


def _stacks(lengths: memoryview, numbers: list[int]) -> Iterator[tuple[int, ...]]:
    for length, end in zip(lengths, accumulate(lengths), strict=True):
        yield tuple(numbers[end - length : end])
