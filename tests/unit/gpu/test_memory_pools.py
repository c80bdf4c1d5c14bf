"""Memory pools (cudaMallocAsync) against what a real driver answered, and their part in the GPU's memory."""

from __future__ import annotations

import csv
import itertools
from functools import cache
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.unit.gpu.driver import on_driver

_RECORDED = ROOT / "tests" / "data" / "memory_pools.csv"
#: On the H100 these had every address, too. In the others a tie or a gap went to another block, with the same memory.
_SAME_ADDRESSES = ("kept", "mid")

_SCRIPT = """
THRESHOLD, RESERVED, RESERVED_HIGH, USED, USED_HIGH = 4, 5, 6, 7, 8

class Properties(ctypes.Structure):
    _fields_ = [(name, c_int) for name in ("type", "handles", "location", "device")]
    _fields_ += [("win32", c_void_p), ("most", c_size_t), ("rest", c_char * 56)]

def call(function, *arguments):
    return getattr(driver, function)(*arguments)

def new_pool(most=0):
    return c_void_p(make("cuMemPoolCreate", byref(Properties(1, 0, 1, 0, None, most))))

def get(pool, attribute):
    value = c_uint64()
    return call("cuMemPoolGetAttribute", pool, attribute, byref(value)) or value.value

def put(pool, attribute, value):
    return call("cuMemPoolSetAttribute", pool, attribute, byref(c_uint64(value)))

def allocate(pool, size, stream=NULL):
    return make("cuMemAllocFromPoolAsync", c_size_t(size), pool, stream)

def free(address, stream=NULL):
    return call("cuMemFreeAsync", c_void_p(address), stream)

def mib(pool):
    return get(pool, RESERVED) // MIB

def used():
    free, total = c_size_t(), c_size_t()
    call("cuMemGetInfo_v2", byref(free), byref(total))
    return (total.value - free.value) // MIB

def outside():
    return {name: count // MIB for name, count in gpu.outside(0).items()}

one, other = (c_void_p(make("cuStreamCreate", 0)) for _ in range(2))
"""

_REPLAY = """
for name, made in calls.items():
    pool, addresses, found[name] = new_pool(), [], []
    for what, value in made:
        address = None
        if what == "threshold":
            put(pool, THRESHOLD, value)
        elif what == "allocate":
            address = allocate(pool, value, one)
        elif what == "free":
            free(addresses[value], one)
        else:
            call("cuStreamSynchronize", one)
        addresses.append(address)
        found[name].append([mib(pool), address])
"""


def _traces() -> dict[str, list[dict[str, str]]]:
    lines = [line for line in _RECORDED.read_text().splitlines() if not line.startswith("#")]
    grouped = itertools.groupby(csv.DictReader(lines), key=lambda row: row["trace"])
    return {name: list(rows) for name, rows in grouped}


@cache
def _replayed() -> dict[str, Any]:
    calls = {name: [(row["call"], int(row["value"] or 0)) for row in rows] for name, rows in _traces().items()}
    return on_driver(f"{_SCRIPT}\ncalls = {calls!r}\n{_REPLAY}")


@pytest.mark.parametrize("trace", _traces())
def test_a_pool_reserves_what_a_real_one_did_after_every_call(trace: str) -> None:
    expected = [int(row["reserved_mib"]) for row in _traces()[trace]]
    assert [reserved for reserved, _ in _replayed()[trace]] == expected


@pytest.mark.parametrize("trace", _SAME_ADDRESSES)
def test_allocations_have_the_addresses_of_a_real_pool(trace: str) -> None:
    expected = [int(row["at"]) for row in _traces()[trace] if row["at"]]
    addresses = [address for _, address in _replayed()[trace] if address is not None]
    assert [(address - min(addresses)) // 512 for address in addresses] == expected


def test_pools_count_outside_the_allocator_and_waiting_releases_what_is_beyond_the_threshold() -> None:
    found = on_driver(
        _SCRIPT
        + """
default = c_void_p(make("cuDeviceGetDefaultMemPool", 0))
address = make("cudaMallocAsync", c_size_t(50 * MIB), one)
found["taken"] = [mib(default), get(default, USED), used(), outside()]
size = c_size_t()
base = make("cuMemGetAddressRange_v2", byref(size), c_void_p(address + 100))
found["range"] = [base == address, size.value]
pool = c_void_p()
call("cuPointerGetAttribute", byref(pool), 17, c_void_p(address))
found["pool"] = pool.value == default.value
found["freed"] = [call("cudaFreeAsync", c_void_p(address), one), mib(default), get(default, USED)]
call("cuStreamSynchronize", other)
found["waited_for_another"] = mib(default)
event = c_void_p(make("cuEventCreate", 0))
call("cuEventRecord", event, one)
call("cuEventSynchronize", event)
found["waited"] = [mib(default), used(), get(default, RESERVED_HIGH) // MIB, outside()]
put(default, THRESHOLD, 100 * MIB)
kept = [make("cuMemAllocAsync", c_size_t(n * MIB), one) for n in (10, 20, 30, 40, 50, 60)]
for address in kept:
    free(address, one)
call("cuCtxSynchronize")
found["threshold"] = mib(default)
found["trimmed"] = [call("cuMemPoolTrimTo", default, c_size_t(keep * MIB)) or mib(default) for keep in (33, 0)]
found["wrong"] = [free(kept[0], one), put(default, USED, 0), put(default, RESERVED_HIGH, 5)]
found["wrong"] += [call("cuMemPoolDestroy", default)]
put(default, THRESHOLD, 0)
address = make("cuMemAllocAsync", c_size_t(50 * MIB), one)
found["cudaFree"] = [call("cudaFree", c_void_p(address)), used()]
"""
    )
    assert found["taken"] == [64, 50 << 20, 64, {"memory pools": 64}]
    assert found["range"] == [True, 50 << 20]
    assert found["pool"] is True
    assert found["freed"] == [0, 64, 0]
    assert found["waited_for_another"] == 64
    assert found["waited"] == [0, 0, 64, {"memory pools": 64}]
    assert found["threshold"] == 96
    assert found["trimmed"] == [64, 0]
    assert found["wrong"] == [1, 1, 1, 1]
    assert found["cudaFree"] == [0, 0]


def test_streams_reuse_their_own_memory_and_that_of_streams_waited_for() -> None:
    found = on_driver(
        _SCRIPT
        + """
def reused(stream, wait):
    pool = new_pool()
    put(pool, THRESHOLD, 2**64 - 1)
    first = allocate(pool, 50 * MIB, one)
    free(first, one)
    if wait:
        call("cuStreamSynchronize", one)
    return [allocate(pool, 50 * MIB, stream) == first, mib(pool)]

found["own"], found["other"], found["waited"] = reused(one, False), reused(other, False), reused(other, True)
"""
    )
    assert found == {"own": [True, 64], "other": [False, 128], "waited": [True, 64]}


def test_a_limit_a_full_gpu_and_a_destroyed_pool() -> None:
    found = on_driver(
        _SCRIPT
        + """
limited = new_pool(70 * MIB)
sizes = [allocate(limited, n * MIB) for n in (10, 20, 30, 40)]
found["limited"] = [isinstance(address, int) for address in sizes] + [sizes[-1], mib(limited)]
held = allocate(limited, MIB)
found["destroyed"] = [call("cuMemPoolDestroy", limited), used()]
for address in (*sizes[:3], held):
    free(address)
found["gone"] = used()

large = new_pool()
put(large, THRESHOLD, 2**64 - 1)
address = allocate(large, 600 * MIB, one)
free(address, one)
found["kept"] = used()
found["malloc"] = [isinstance(make("cuMemAlloc_v2", c_size_t(700 * MIB)), int), mib(large), used()]
found["full"] = allocate(large, 600 * MIB, one)
""",
        memory_bytes=1 << 30,
    )
    assert found["limited"] == [True, True, True, False, "status 2", 64]
    assert found["destroyed"] == [0, 64]
    assert found["gone"] == 0
    assert found["kept"] == 608
    assert found["malloc"] == [True, 0, 700]
    assert found["full"] == "status 2"


def test_small_memory_of_a_pool_holds_what_is_copied_there() -> None:
    found = on_driver(
        _SCRIPT
        + """
addresses = [allocate(new, 1000, one) for new in [new_pool()] * 3]
call("cudaMemcpyAsync", c_void_p(addresses[1]), (c_char * 1000)(*(b"x" * 1000)), c_size_t(1000), 1, one)
back = (c_char * 1000)()
call("cudaMemcpyAsync", back, c_void_p(addresses[1]), c_size_t(1000), 2, one)
found["back"] = back.raw.decode()
found["unknown"] = [driver.fakedist_lost(c_void_p(address), c_size_t(1000)) for address in addresses]
"""
    )
    assert found == {"back": "x" * 1000, "unknown": [1000, 0, 1000]}
