"""Requests beyond a device's memory: refused, repeated, and granted or not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.gpu.driver import on_driver

_SCRIPT = """
import threading

def malloc(size, function="cudaMalloc"):
    return make(function, c_size_t(size))

def left():
    free, total = c_size_t(), c_size_t()
    driver.cudaMemGetInfo(byref(free), byref(total))
    return free.value

def statuses(*sizes):
    "Whether each request in a row is served."
    return [not isinstance(malloc(size), str) for size in sizes]

questions = []
def decide(answer):
    def deciding(device, bytes_, limit, thread):
        questions.append((device, bytes_ // MIB, limit // MIB, thread == threading.main_thread().ident))
        return answer
    return deciding

found["without a question"] = statuses(80 * MIB, 40 * MIB, 40 * MIB)
first, = [malloc(10 * MIB)]
gpu.go_beyond(decide(False))
found["refused by the answer"] = statuses(40 * MIB, 40 * MIB), questions.copy(), gpu.is_beyond
questions.clear()
gpu.go_beyond(decide(True))
found["free before"] = left() // MIB
found["fits the second time"] = statuses(20 * MIB), driver.cudaFree(c_void_p(first)), statuses(20 * MIB), len(questions)
found["granted the second time"] = statuses(40 * MIB, 40 * MIB), questions.copy(), gpu.is_beyond, left()
questions.clear()
found["each one is refused first"] = statuses(2 * MIB, 2 * MIB, 2 * MIB, 2 * MIB), len(questions)
questions.clear()
gpu.asked_once(1)
found["asked once"] = statuses(2 * MIB, 2 * MIB), len(questions)
gpu.asked_once(-1)
questions.clear()
out = c_void_p()
while_python_waits = ctypes.PyDLL("libcuda.so.1").cudaMalloc  # a call that keeps Python's lock
found["with Python's lock"] = [while_python_waits(byref(out), c_size_t(2 * MIB)) for _ in range(2)], len(questions)

class Properties(ctypes.Structure):
    _fields_ = [*((name, c_int) for name in ("type", "handles", "location", "device"))]
    _fields_ += [("win32", c_void_p), ("flags", c_uint64)]
pieces = Properties(1, 0, 1, 1)
def create():
    return not isinstance(make("cuMemCreate", c_size_t(20 * MIB), byref(pieces), c_uint64(0)), str)
found["pieces"] = [create() for _ in range(10)]
driver.cudaSetDevice(1)
area = make("cuMemAddressReserve", c_size_t(20 * MIB), c_size_t(0), NULL, c_uint64(0))
driver.cuMemSetAccess(c_void_p(area), c_size_t(20 * MIB), NULL, c_size_t(1))
found["after them"] = [create(), create(), create()]

driver.cudaSetDevice(2)
gpu.go_beyond(None)
gpu.limit(2, 30 * MIB)
found["limited"] = statuses(20 * MIB, 20 * MIB), left() // MIB
gpu.limit(2, 0)
found["no longer"] = statuses(20 * MIB)
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Results of a process with three devices of 100 MiB."""
    return on_driver(_SCRIPT, devices=3, memory_bytes=100 << 20)


def test_a_request_beyond_the_memory_is_granted_when_it_is_repeated_and_the_answer_is_yes(
    found: dict[str, Any],
) -> None:
    assert found["without a question"] == [True, False, False]
    assert found["refused by the answer"] == [[False, False], [[0, 40, 100, True]], False]
    assert found["free before"] == 10
    assert found["fits the second time"] == [[False], 0, [True], 0]
    assert found["granted the second time"] == [[False, True], [[0, 40, 100, True]], True, 0]
    assert found["each one is refused first"] == [[False, True, False, True], 2]
    assert found["asked once"] == [[True, True], 2]
    assert found["with Python's lock"] == [[2, 0], 1]


def test_an_expandable_segment_gets_all_its_pieces_once_it_is_granted_one(found: dict[str, Any]) -> None:
    assert found["pieces"] == [True] * 5 + [False] + [True] * 4
    assert found["after them"] == [False, True, True]


def test_a_limit_below_the_memory_holds_until_it_is_taken_away(found: dict[str, Any]) -> None:
    assert found["limited"] == [[True, False], 80]
    assert found["no longer"] == [True]


_CALLS = """
from fakedist.gpu.launch_log import LaunchLog
free, total = c_size_t(), c_size_t()
driver.cudaMemGetInfo(byref(free), byref(total))
found["others"] = free.value // MIB, total.value // MIB
found["next to them"] = [not isinstance(make("cudaMalloc", c_size_t(40 * MIB)), str) for _ in range(2)]

log = LaunchLog()
log.begin()
driver.cudaFree(c_void_p(make("cudaMalloc", c_size_t(2 * MIB))))
found["of an extension"] = len(log.end())
"""


def test_what_others_hold_is_taken_and_calls_of_an_extension_are_not_the_allocators() -> None:
    found = on_driver(_CALLS, devices=1, memory_bytes=100 << 20, others_bytes=40 << 20)
    assert found == {"others": [60, 100], "next to them": [True, False], "of an extension": 0}
