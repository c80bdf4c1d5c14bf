"""Compiled code reads the allocator's history and locates tensors as Python does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fakedist.rundir.encoding import columns_of
from fakedist.rundir.memory_records import EventsRecord
from fakedist.rundir.schema import ACTIONS
from tests.support.virtual_worker import on_virtual_gpu

if TYPE_CHECKING:
    import torch

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
    from fakedist.record.marker import Cells
    from fakedist.record.numbering import Whereabouts

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
    from fakedist.record.device_memory import AllocatorHistory

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


def _tensors() -> list[torch.Tensor]:
    """Parameters with and without gradients, views, what has no memory here, and a tensor subclass."""
    import torch
    from torch import nn
    from torch.testing._internal.two_tensor import TwoTensor

    plain, of_views = nn.Parameter(torch.ones(64, 64, device="cuda")), torch.ones(5, 1000, device="cuda:1")
    trained, freed = nn.Parameter(torch.ones(300, device="cuda")), torch.ones(4096, device="cuda")
    (trained * 2).sum().backward()
    freed.untyped_storage().resize_(0)
    both = TwoTensor(torch.ones(8, device="cuda"), torch.ones(8, device="cuda"))
    views = [of_views, of_views[2:4, 10:], of_views[3].to(torch.bfloat16)[7:], of_views.t()]
    nothing = [freed, torch.ones(3), torch.empty(0, device="cuda"), of_views[:0]]
    return [plain, trained, *views, *nothing, both, plain]


@on_virtual_gpu
def test_compiled_code_marks_the_pieces_that_python_marks() -> None:
    from fakedist.gpu.fast_path.compiled import CompiledFastPath
    from fakedist.record.marker import WHAT_BITS, Marker, What
    from fakedist.record.marks import Marks
    from fakedist.record.module_names import KEEP_LAYER, LayerTable
    from fakedist.record.position import Position
    from fakedist.rundir.memory_records import MarksRecord

    tensors = _tensors()

    def marked(marker: Marker | None, position: Position) -> MarksRecord:
        marks = Marks(position, LayerTable(), marker)
        for what in What:
            for layer in (7, KEEP_LAYER, KEEP_LAYER):
                wanted = [layer << WHAT_BITS | what] * len(tensors)
                marks._marker.mark_tensors(tensors, wanted, marks._locate)
                for tensor, each in zip(tensors, wanted, strict=True):
                    marks._marker.mark_tensor(tensor, each, marks._locate)
        return marks.take()

    position = Position()
    position.cells.op = 12
    path = CompiledFastPath(None)
    path.begin(position.cells, position.whereabouts)
    python, compiled = marked(None, position), marked(path.marker, position)
    assert len(python.category) > 100
    assert compiled == python
    assert not path.marker.take_marks().op


@on_virtual_gpu
def test_compiled_code_counts_each_piece_once() -> None:
    import ctypes

    import torch

    from fakedist.gpu.fast_path.build import FAST_PATH
    from fakedist.gpu.fast_path.compiled import CompiledMarker
    from fakedist.record.marker import What

    *tensors, both, last = _tensors()
    marker = CompiledMarker(ctypes.PyDLL(str(FAST_PATH.ensure())))
    own = sum({t.data_ptr(): t.nbytes for t in tensors if t.is_cuda and t.untyped_storage().nbytes()}.values())
    with_gradient = [What.PARAMETER_AND_ITS_GRADIENT] * (len(tensors) + 1)
    assert marker.bytes_of([*tensors, last], [What.PARAMETER] * (len(tensors) + 1)) == own
    assert marker.bytes_of([*tensors, last], with_gradient) == own + 300 * torch.float32.itemsize
    assert marker.bytes_of([both], [What.PARAMETER]) is None
