"""Where allocations go, against an H200 (driver 580.159.04, CUDA 13): the caching allocator breaks ties by address.

``addresses.csv`` has calls of cudaMalloc and, with negative sizes, cudaFree in one process: random sizes, mixed in
four ways, and forty at a time. Addresses are relative to the first.
"""

from __future__ import annotations

import csv

from tests.conftest import ROOT
from tests.unit.gpu.driver import on_driver

_REPLAY = """
first = None
for size, address in calls:
    if size < 0:
        assert driver.cuMemFree_v2(c_uint64(first + address * MIB)) == 0
    else:
        got = make("cuMemAlloc_v2", c_size_t(size * MIB))
        first = got if first is None else first
        found.setdefault("misplaced", []).extend([] if got == first + address * MIB else [(size, address)])
"""


def test_allocations_go_where_a_real_driver_puts_them() -> None:
    with (ROOT / "tests" / "data" / "addresses.csv").open() as file:
        calls = [(int(row["mib"]), int(row["address_mib"])) for row in csv.DictReader(file)]
    assert sum(size > 0 for size, _ in calls) == 1494
    assert on_driver(f"calls = {calls}\n{_REPLAY}")["misplaced"] == []
