"""Compiled code reads the allocator's history as Python reads it from torch's snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fakedist.run.encoding import columns_of
from fakedist.run.memory_records import EventsRecord
from fakedist.run.schema import ACTIONS
from tests.integration.virtual_worker import on_virtual_gpu

if TYPE_CHECKING:
    from fakedist.gpu.fast_path.compiled import CompiledFastPath
    from fakedist.record.numbering import Read


def _rows(record: EventsRecord, number: int) -> list[tuple[object, ...]]:
    """The first events of a history, but for their time."""
    columns = {name: code for name, code in columns_of(type(record)).items() if name != "time_us"}
    return list(
        zip(*(memoryview(getattr(record, name)).cast(code)[:number] for name, code in columns.items()), strict=True)
    )


def _work() -> object:
    """Allocate and free on two devices and in a private pool, run out of memory, and return what is still alive."""
    import torch

    pool = torch.cuda.MemPool()
    for device in range(2):
        for metadata in ("", "7", "800000000000", "seven", "9" * 18, "-3"):
            torch._C._cuda_setMemoryMetadata(metadata)
            x = torch.ones(2 << 20, device=f"cuda:{device}", requires_grad=True)
            (x * 2).sum().backward()  # frees in another thread, whose stacks are empty
    with torch.cuda.use_mem_pool(pool), torch.cuda.stream(torch.cuda.Stream()):
        kept = [torch.empty(3 << 20, device="cuda:0") for _ in range(9)]
    try:
        torch.empty(1 << 50, device="cuda:1")
    except torch.OutOfMemoryError:
        kept.pop()
    return pool, kept


@contextmanager
def _history() -> Iterator[CompiledFastPath]:
    """Begin a run and a history."""
    import torch

    from fakedist.gpu.fast_path.compiled import CompiledFastPath
    from fakedist.record.numbering import Cells, Whereabouts

    path, cells = CompiledFastPath(None), Cells()
    path.begin(cells, lambda: Whereabouts(0, -1))
    torch.cuda.memory._record_memory_history(enabled="all", context="alloc", stacks="python", clear_history=True)
    try:
        yield path
    finally:
        path.stop_history()
        torch.cuda.memory._record_memory_history(enabled=None)


def _compare(read: list[Read] | None) -> list[EventsRecord]:
    """Compare with what Python reads and numbers, and return the records."""
    from fakedist.record.allocator_history import AllocatorHistory

    python, highest_before = AllocatorHistory(lambda record: None, dict), 3
    expected = [python._numbered(record) for record in python.read()]
    assert read is not None
    assert [each[0].device for each in read] == [record.device for record in expected] == [0, 1]
    python._gemms = {7: (0,)}
    for (mine, products, highest), its in zip(read, expected, strict=True):
        python._highest = highest_before
        highest_before = highest
        assert len(mine.action) > 50
        # Each reading from torch's snapshot is an event too.
        assert set(its.action[len(mine.action) :]) <= {ACTIONS.index("snapshot")}
        assert _rows(mine, len(mine.action)) == _rows(its, len(mine.action))
        assert (mine.frames, mine.stacks, mine.pools) == (its.frames, its.stacks, its.pools)
        assert products == python._may_be_workspaces(its) != []
        assert highest == int("9" * 18)
        # torch converts its clock's ticks each time, a little differently.
        times = zip(memoryview(mine.time_us).cast("q"), memoryview(its.time_us).cast("q"), strict=False)
        assert all(abs(one - other) < 100_000 for one, other in times)
    return [each[0] for each in read]


@on_virtual_gpu
def test_compiled_code_reads_the_history_as_python_does() -> None:
    with _history() as path:
        kept = _work()
        read = path.read_history([7], 3)
        again = path.read_history([7], 3)
        records = _compare(read)
    assert kept
    assert again is not None
    assert records[0].frames
    assert records[0].pools
    assert not records[1].pools
    assert {7, 800000000000, int("9" * 18), -1} <= set(memoryview(records[0].op).cast("q"))
    assert ACTIONS.index("oom") in records[1].action
    for known, (record, _, _) in zip(records, again, strict=True):
        assert not record.frames
        assert not record.stacks
        assert record.stack[: len(known.stack)] == known.stack


@on_virtual_gpu
def test_events_that_are_watched_are_those_of_the_history() -> None:
    with _history() as path:
        path.watch_history()
        kept = _work()
        read, again = path.read_history([7], 3), path.read_history([7], 3)
        _compare(read)
        path.watch_history()
        del kept
        (freed,) = path.read_history([7], 3) or ()
    assert again == []
    assert freed[0].action.startswith(bytes(map(ACTIONS.index, ("free_requested", "free_completed"))) * 8)


@on_virtual_gpu
def test_a_snapshot_that_the_script_takes_is_in_its_devices_history() -> None:
    import torch

    with _history() as path:
        path.watch_history()
        kept = _work()
        torch.cuda.memory._snapshot()
        records = _compare(path.read_history([7], 3))
    assert kept
    assert [ACTIONS.index("snapshot") in record.action for record in records] == [True, True]
