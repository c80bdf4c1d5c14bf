"""Compiled code reads the allocator's history as Python reads it from torch's snapshot."""

from __future__ import annotations

from fakedist.run.encoding import columns_of
from fakedist.run.memory_records import EventsRecord
from fakedist.run.schema import ACTIONS
from tests.integration.virtual_worker import on_virtual_gpu


def _rows(record: EventsRecord, number: int) -> list[tuple[object, ...]]:
    """The first events of a history, but for their time."""
    columns = {name: code for name, code in columns_of(type(record)).items() if name != "time_us"}
    return list(
        zip(*(memoryview(getattr(record, name)).cast(code)[:number] for name, code in columns.items()), strict=True)
    )


@on_virtual_gpu
def test_compiled_code_reads_the_history_as_python_does() -> None:
    import torch

    from fakedist.gpu.fast_path.compiled import CompiledFastPath
    from fakedist.record.allocator_history import AllocatorHistory
    from fakedist.record.numbering import Cells, Whereabouts

    torch.cuda.memory._record_memory_history(enabled="all", context="alloc", stacks="python", clear_history=True)
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
    python, path, cells = AllocatorHistory(lambda record: None, lambda: {7: (0,)}), CompiledFastPath(None), Cells()
    path.begin(cells, lambda: Whereabouts(0, -1))
    compiled, again = path.read_history([7], 3), path.read_history([7], 3)
    expected = [python._numbered(record) for record in python.read()]
    python._gemms, python._highest, products = {7: (0,)}, 3, []
    for record in expected:
        products.append(python._may_be_workspaces(record))
        python._highest = max(python._highest, *memoryview(record.op).cast("q"))
    torch.cuda.memory._record_memory_history(enabled=None)
    assert compiled is not None
    assert again is not None
    assert [read[0].device for read in compiled] == [record.device for record in expected] == [0, 1]
    for (mine, its_products, highest), its, wanted in zip(compiled, expected, products, strict=True):
        assert len(mine.action) > 50
        # The first reading is an event too.
        assert _rows(mine, len(mine.action)) == _rows(its, len(mine.action))
        assert (mine.frames, mine.stacks, mine.pools) == (its.frames, its.stacks, its.pools)
        assert its_products == wanted != []
        assert highest == int("9" * 18)
        # torch converts its clock's ticks each time, a little differently.
        times = zip(memoryview(mine.time_us).cast("q"), memoryview(its.time_us).cast("q"), strict=False)
        assert all(abs(one - other) < 100_000 for one, other in times)
    records = [read[0] for read in compiled]
    assert records[0].frames
    assert records[0].pools
    assert not records[1].pools
    assert {7, 800000000000, int("9" * 18), -1} <= set(memoryview(records[0].op).cast("q"))
    assert ACTIONS.index("oom") in records[1].action
    for known, (record, _, _) in zip(records, again, strict=True):
        assert not record.frames
        assert not record.stacks
        assert record.stack[: len(known.stack)] == known.stack
