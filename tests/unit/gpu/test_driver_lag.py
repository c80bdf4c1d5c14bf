"""A virtual GPU that lags behind its host: when an event is over, and which blocks the allocator keeps."""

from __future__ import annotations

import pytest

from fakedist.rundir import notes
from tests.support.virtual import on_virtual_gpu

_LAG = """
gpu.lag("")
MIB = 1 << 20
filled = torch.empty(MIB, dtype=torch.uint8, device="cuda")
side = torch.cuda.Stream()

def launch(times=1):
    for _ in range(times):
        filled.zero_()

def recorded():
    event = torch.cuda.Event()
    event.record()
    return event
"""


def test_a_launch_is_over_once_the_launch_queue_is_full_behind_it() -> None:
    found = on_virtual_gpu(
        _LAG
        + """
launch()
first = recorded()
launch()
second = recorded()
launch(1020)
found["before"] = first.query(), second.query()
with torch.cuda.stream(side):
    launch(2)  # it has a queue of its own
found["elsewhere"] = first.query()
launch()
found["after"] = first.query(), second.query()
gpu.as_one(1)
launch(5)
gpu.as_one(-1)
found["as_one"] = second.query()
launch()
third = recorded()
gpu.as_one(1)
launch(2000)
gpu.as_one(-1)
found["a_call"] = third.query()
"""
    )
    assert found["before"] == [False, False]
    assert found["elsewhere"] is False
    assert found["after"] == [True, False]
    assert found["as_one"] is True  # it took one place, that of the second launch
    assert found["a_call"] is False


def test_what_a_stream_waited_for_is_over_with_what_came_after() -> None:
    found = on_virtual_gpu(
        _LAG
        + """
with torch.cuda.stream(side):
    launch()
    there = recorded()
torch.cuda.current_stream().wait_event(there)
here = recorded()  # nothing but the wait comes before it
found["waits"] = there.query(), here.query()
with torch.cuda.stream(side):
    launch()
    later = recorded()
here.synchronize()
found["waited"] = there.query(), here.query(), later.query()
"""
    )
    assert found == {"waits": [False, False], "waited": [True, True, False]}


@pytest.mark.parametrize(
    ("wait", "is_over"),
    [
        ("torch.cuda.synchronize()", True),
        ("torch.cuda.current_stream().synchronize()", True),
        ("side.synchronize()", False),
        ("filled.cpu()", True),
        ("torch.empty(MIB, dtype=torch.uint8, pin_memory=True).copy_(filled, non_blocking=True)", False),
        ("filled.copy_(torch.empty(MIB, dtype=torch.uint8), non_blocking=True)", False),
        ("[event.query() for _ in range(98)]", False),
        ("[event.query() for _ in range(100)]", True),  # it does nothing else than wait
        ("torch.cuda.empty_cache()", False),  # the allocator waits for its own events alone, and gives nothing back
    ],
)
def test_the_host_waits(wait: str, is_over: bool) -> None:
    found = on_virtual_gpu(f"{_LAG}launch()\nevent = recorded()\n{wait}\nfound['is_over'] = event.query()")
    assert found["is_over"] is is_over


@pytest.mark.parametrize(
    ("read", "is_over"),
    [
        ("ones.sum().item()", True),
        ("ones.nonzero()", True),
        ("ones[ones > 0]", True),
        ("ones.cpu()", True),
        ("ones.to('cpu', non_blocking=True)", False),
        ("ones + 1", False),
    ],
)
def test_the_host_waits_where_the_value_engine_answers_it(read: str, is_over: bool) -> None:
    found = on_virtual_gpu(
        f"""{_LAG}
from fakedist.gpu.values.engine import ValueEngine
from fakedist.record.operations import Operations
from fakedist.record.position import Position
ones = torch.ones(4, device="cuda")
with Operations(Position(), ValueEngine(0).execute, lambda: None, lambda text: None):
    launch()
    event = recorded()
    {read}
    found["is_over"] = event.query()
"""
    )
    assert found["is_over"] is is_over


def test_the_allocator_keeps_blocks_until_their_stream_has_come_there() -> None:
    script = """
def reserved(waits):
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    for _ in range(5):
        block = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
        with torch.cuda.stream(side):
            launch()
        block.record_stream(side)
        del block
        if waits:
            side.synchronize()
    return (torch.cuda.max_memory_reserved() - before) // MIB

found["reserved"] = reserved(False), reserved(True)
"""
    assert on_virtual_gpu(_LAG + script)["reserved"] == [500, 100]
    assert on_virtual_gpu(_LAG.replace('gpu.lag("")', "") + script)["reserved"] == [100, 100]


def test_lines_that_keep_blocks_are_counted_by_step() -> None:
    found = on_virtual_gpu(
        """
from fakedist.record.device_memory import StreamUses
step, side = 1, torch.cuda.Stream()
uses = StreamUses(lambda: step)
with uses.watching():
    torch.empty(1 << 20, device="cuda").record_stream(side)
    step = 2
    for size in (1 << 20, 2 << 20):
        torch.empty(size, device="cuda").record_stream(side)
    torch.empty(1, device="cuda").record_stream(side)
torch.empty(1 << 28, device="cuda").record_stream(side)
found["most"] = [(line.rpartition(":")[2], *counts) for line, *counts in uses.most()]
"""
    )
    (first, blocks, num_bytes), (second, *least) = found["most"]
    assert (blocks, num_bytes, least, int(second) - int(first)) == (2, 3 << 22, [1, 4], 1)


def test_the_notes_name_the_line_and_the_usual_cure() -> None:
    lines = [("/job/offload.py:88", 6, 6 << 30), ("/job/offload.py:90", 1, 512)]
    assert notes.streams_keep_least(lines).text == (
        "record_stream keeps 6 blocks of 6.00 GiB a step at /job/offload.py:88 (at other lines 1 of 512 B) until "
        "another stream is done with what they hold. Here streams are done at once, so what is reserved is a lower "
        "bound for a real GPU (--gpu-lag full gives an upper one)"
    )
    assert "can wait for the other one before the tensor is freed" in notes.streams_keep_most(lines[:1]).text
    of_fsdp = [("/x/torch/distributed/fsdp/_flat_param.py:1829", 1, 512)]
    assert "limit_all_gathers" in notes.streams_keep_most(of_fsdp).text
