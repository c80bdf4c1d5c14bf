"""Compiled code reads the allocator's history as Python reads it from torch's snapshot."""

from __future__ import annotations

from fakedist.run.encoding import columns_of
from fakedist.run.memory_records import EventsRecord
from fakedist.run.schema import ACTIONS
from tests.integration.virtual_worker import on_virtual_gpu


def _events(record: EventsRecord) -> list[tuple[object, ...]]:
    """Each event of a history, with its stack spelled out, but for its time."""
    stacks = [[record.frames[frame] for frame in stack] for stack in record.stacks]
    codes = {name: code for name, code in columns_of(type(record)).items() if name != "time_us"}
    columns = [memoryview(getattr(record, name)).cast(code) for name, code in codes.items()]
    return [(*row, None if number < 0 else stacks[number]) for *row, number in zip(*columns, strict=True)]


@on_virtual_gpu
def test_compiled_code_reads_the_history_as_python_does() -> None:
    import torch

    from fakedist.gpu.fast_path.compiled import CompiledFastPath
    from fakedist.record.allocator_history import AllocatorHistory

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
    compiled, python = CompiledFastPath(None).read_history(), AllocatorHistory(lambda record: None, dict).read()
    torch.cuda.memory._record_memory_history(enabled=None)
    assert compiled is not None
    assert [record.device for record in compiled] == [record.device for record in python] == [0, 1]
    for mine, its in zip(compiled, python, strict=True):
        assert len(mine.action) > 50
        # The first reading is an event too.
        assert _events(mine) == _events(its)[: len(mine.action)]
        assert mine.pools == its.pools
        # torch converts its clock's ticks each time, a little differently.
        times = zip(memoryview(mine.time_us).cast("q"), memoryview(its.time_us).cast("q"), strict=False)
        assert all(abs(one - other) < 100_000 for one, other in times)
    assert compiled[0].pools
    assert not compiled[1].pools
    assert {7, 800000000000, int("9" * 18), -1} <= set(memoryview(compiled[0].op).cast("q"))
    assert ACTIONS.index("oom") in compiled[1].action
