"""The record of launches, as the reading half takes it, with the script's ranges."""

from __future__ import annotations

import threading

from fakedist.gpu.demand.launch_demand import Tagged
from fakedist.gpu.demand.operation_demand import Demand
from fakedist.gpu.demand.work_shapes import ProductShape
from fakedist.gpu.launch_log import Launch, LaunchKind
from fakedist.gpu.launch_rows import LaunchRows, StepRanges, range_rows
from fakedist.rundir.encoding import decode, encode
from fakedist.rundir.launch_records import LaunchesRecord, RangeRow
from fakedist.rundir.records import RECORDS
from fakedist.rundir.rows import Location


def test_whole_numbers_of_flops_and_bytes_are_read_back() -> None:
    """torch's formulas count in whole numbers, and so do sizes of elements."""
    launch = Launch(kind=LaunchKind.KERNEL, tag=0, call=-1)
    launch.grid[:], launch.block[:] = (1, 1, 1), (1, 1, 1)
    shape = ProductShape(8, 8, 8, 1, a_bytes=2, b_bytes=2, d_bytes=2)
    demand = Demand(1024, 400, product=shape)
    tags = {0: Tagged(0, "aten._grouped_mm.default", Location(1, "forward", 0, False), demand)}
    record = LaunchRows(2, [launch], tags, lambda each: "kernel").record()
    found = decode(encode(record), RECORDS)
    assert isinstance(found, LaunchesRecord)
    (row,) = found.work_rows
    assert (row.flops, row.moved_bytes, row.a_bytes) == (1024, 400, 2)


class Log:
    def __init__(self) -> None:
        self.count = 0
        self.ranges = StepRanges(lambda: self.count)

    def rows(self) -> list[RangeRow]:
        self.ranges.step_ended(self.count)
        return range_rows(self.ranges.of_step, range(self.count + 1))


def test_a_range_has_the_launches_between_its_begin_and_its_end() -> None:
    log = Log()
    log.ranges.step_begins()
    outer = log.ranges.begins("outer")
    log.count = 2
    inner = log.ranges.begins("inner")
    log.count = 5
    log.ranges.ended(inner)
    log.ranges.ended(outer)
    log.count = 9
    assert log.rows() == [RangeRow("outer", 0, 0, 0, 5), RangeRow("inner", 0, 1, 2, 5)]


def test_a_range_that_is_open_when_the_step_begins_or_ends_has_what_the_step_launched() -> None:
    log = Log()
    before = log.ranges.begins("before")
    log.count = 100  # of a step that was not timed
    log.ranges.step_begins()
    log.count = 3
    log.ranges.ended(before)
    log.ranges.begins("after")
    log.count = 4
    log.ranges.begins("of the next step")
    assert log.rows() == [RangeRow("before", 0, 0, 0, 3), RangeRow("after", 0, 0, 3, 4)]


def test_threads_have_depths_of_their_own() -> None:
    log = Log()
    log.ranges.step_begins()
    outer = log.ranges.begins("outer")
    thread = threading.Thread(target=lambda: log.ranges.ended(log.ranges.begins("in a thread")))
    thread.start()
    thread.join()
    log.count = 1
    log.ranges.ended(outer)
    assert [(row.name, row.thread, row.depth) for row in log.rows()] == [("outer", 0, 0), ("in a thread", 1, 0)]


def test_ranges_of_other_steps_and_rows_that_are_no_launches_of_the_table_are_not_counted() -> None:
    log = Log()
    log.ranges.ended(log.ranges.begins("warm-up"))
    log.ranges.step_begins()
    log.ranges.ended(log.ranges.begins("first"))
    log.ranges.step_ended(0)
    log.ranges.ended(log.ranges.begins("between"))
    log.ranges.step_begins()
    log.count = 1
    number = log.ranges.begins("range")
    log.count = 3
    log.ranges.ended(number)
    log.ranges.step_ended(3)
    assert range_rows(log.ranges.of_step, [0, 1, 1, 2]) == [RangeRow("range", 0, 0, 1, 2)]


def test_a_step_that_is_cut_short_keeps_what_its_ranges_have_of_it() -> None:
    log = Log()
    log.ranges.step_begins()
    log.ranges.begins("all")
    log.count = 4
    saving = log.ranges.begins("saving")
    log.count = 9
    log.ranges.ended(saving)
    log.ranges.step_ended(log.count)
    log.ranges.cut_short(3)
    assert range_rows(log.ranges.of_step, range(4)) == [RangeRow("all", 0, 0, 0, 3)]


def allocator_texts(*launches: Launch) -> list[str]:
    record = LaunchRows(2, launches, {}, lambda each: "kernel").record()
    return [record.texts[number] for number in memoryview(record.allocator).cast("I")]


def called(kind: LaunchKind, number: int, num_bytes: int) -> Launch:
    return Launch(kind=kind, tag=-1, call=-1, m=number, bytes=num_bytes)


def launched(kind: LaunchKind = LaunchKind.KERNEL, call: int = -1) -> Launch:
    return Launch(kind=kind, tag=-1, call=call)


def test_the_allocators_calls_are_with_the_row_that_comes_next() -> None:
    retry = [
        called(LaunchKind.ALLOCATOR_IS_REFUSED, 1, 8),
        launched(LaunchKind.HOST_WAITS),
        launched(LaunchKind.HOST_WAITS_FOR_DEVICE),
        called(LaunchKind.ALLOCATOR_FREES, 2, 16),
        called(LaunchKind.ALLOCATOR_MALLOCS, 1, 8),
    ]
    texts = allocator_texts(launched(), *retry, launched(), launched())
    assert texts == ["", "refused 1 8", "wait", "free 2 16, malloc 1 8", ""]


def test_a_wait_of_the_scripts_is_not_the_allocators_unless_memory_is_given_back_right_after_it() -> None:
    wait, unmapped = launched(LaunchKind.HOST_WAITS), called(LaunchKind.ALLOCATOR_UNMAPS, 3, 60)
    assert allocator_texts(wait, launched(), unmapped, launched()) == ["", "", "unmap 3 60"]
    assert allocator_texts(launched(), wait, unmapped, launched()) == ["", "wait", "unmap 3 60"]


def test_what_a_step_ends_with_is_with_its_last_row() -> None:
    freed = called(LaunchKind.ALLOCATOR_FREES, 1, 4)
    assert allocator_texts(launched(), launched(LaunchKind.HOST_WAITS_FOR_DEVICE), freed) == ["", "wait, free 1 4"]
    assert allocator_texts(launched(call=3), called(LaunchKind.ALLOCATOR_MAPS, 1, 4)) == []
