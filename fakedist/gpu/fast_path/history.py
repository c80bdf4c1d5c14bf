"""Reads the allocator's history from compiled code, as columns."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Iterator
from itertools import accumulate

import torch

from fakedist.frames import OURS
from fakedist.gpu.fast_path.views import View
from fakedist.run.memory_records import EventsRecord
from fakedist.run.rows import FrameRow, PoolRow

#: ``record.numbering.Read``
Read = tuple[EventsRecord, list[tuple[int, int]], int]
#: Columns of a device's events, in the order of history.cpp.
_NUM_COLUMNS = 12


def begin_history(library: ctypes.CDLL) -> None:
    """Begin a run: no frame and no stack has a number."""
    library.fakedist_history_begin(OURS.encode(), str(torch._ops.__file__).encode())


def read_history(library: ctypes.CDLL, gemms: Iterable[int], highest: int) -> list[Read] | None:
    """What ``record.numbering.HistoryReader`` says. CUDA must be initialised."""
    operations = array("q", gemms)
    library.fakedist_history_read.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64]
    num_devices = library.fakedist_history_read(operations.buffer_info()[0], len(operations), highest)
    if num_devices < 0:
        return None
    found = (_events(library, device) for device in range(num_devices))
    return [read for read in found if read[0].action]


def _events(library: ctypes.CDLL, device: int) -> Read:
    views = (View * _NUM_COLUMNS)()
    library.fakedist_history_events.restype = ctypes.c_int64
    highest = library.fakedist_history_events(device, views)
    action, address, size, stream, time_us, op, stack, *others = (view.copied() for view in views)
    lengths, numbers, named, pools, products = others
    texts = named.decode().split("\0")[:-1]
    flat, pairs = memoryview(pools).cast("q").tolist(), memoryview(products).cast("q").tolist()
    record = EventsRecord(
        device,
        list(map(FrameRow, texts[::3], map(int, texts[1::3]), texts[2::3])),
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
    return record, list(zip(pairs[::2], pairs[1::2], strict=True)), highest


def _stacks(lengths: memoryview, numbers: list[int]) -> Iterator[tuple[int, ...]]:
    for length, end in zip(lengths, accumulate(lengths), strict=True):
        yield tuple(numbers[end - length : end])
