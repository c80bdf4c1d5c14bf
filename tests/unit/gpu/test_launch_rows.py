"""The record of launches, as the reading half takes it."""

from __future__ import annotations

from fakedist.gpu.demand.launch_demand import Tagged
from fakedist.gpu.demand.operation_demand import Demand
from fakedist.gpu.demand.work_shapes import ProductShape
from fakedist.gpu.launch_log import Launch, LaunchKind
from fakedist.gpu.launch_rows import LaunchRows, StepRanges
from fakedist.rundir.encoding import decode, encode
from fakedist.rundir.launch_records import LaunchesRecord
from fakedist.rundir.records import RECORDS
from fakedist.rundir.rows import Place


def test_whole_numbers_of_flops_and_bytes_are_read_back() -> None:
    """torch's formulas count in whole numbers, and so do sizes of elements."""
    launch = Launch(kind=LaunchKind.KERNEL, tag=0, call=-1)
    launch.grid[:], launch.block[:] = (1, 1, 1), (1, 1, 1)
    shape = ProductShape(8, 8, 8, 1, a_bytes=2, b_bytes=2, d_bytes=2)
    demand = Demand(1024, 400, product=shape)
    tags = {0: Tagged(0, "aten._grouped_mm.default", Place(1, "forward", 0, False), demand)}
    record = LaunchRows(2, [launch], tags, lambda each: "kernel", ranges=StepRanges(int)).record()
    found = decode(encode(record), RECORDS)
    assert isinstance(found, LaunchesRecord)
    (row,) = found.work_rows
    assert (row.flops, row.moved_bytes, row.a_bytes) == (1024, 400, 2)
