"""A library that uses the driver API alone: the same memory, errors, pointers and graphs as the runtime's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.gpu.driver import on_driver

_SCRIPT = """
def number(function, *arguments, kind=c_int):
    "A number that the function writes, and its status."
    out = kind(-7)
    status = getattr(driver, function)(byref(out), *arguments)
    return [status, out.value]

def free():
    return number("cuMemGetInfo_v2", byref(c_size_t()), kind=c_size_t)[1]

def attribute(pointer, which, kind=c_int):
    out = kind(0)
    return [driver.cuPointerGetAttribute(byref(out), which, c_void_p(pointer)), out.value]

# One last error, which is the runtime's alone.
driver.cuMemAlloc_v2.argtypes = [c_void_p, c_size_t]
found["refused"] = make("cuMemAlloc_v2", 1 << 42)
found["last_error"] = driver.cudaGetLastError()
driver.cudaMalloc.argtypes = [c_void_p, c_size_t]
make("cudaMalloc", 1 << 42)
driver.cuMemFree_v2(c_void_p(12345))
found["runtimes_error"] = driver.cudaGetLastError()

# One ledger.
before = free()
memory = make("cuMemAlloc_v2", 5 * MIB)
found["taken"] = before - free()
managed = make("cuMemAllocManaged", c_size_t(2 * MIB), 1)
found["managed"] = before - free()
pitch = c_size_t()
pitched = make("cuMemAllocPitch_v2", byref(pitch), c_size_t(1000), c_size_t(4096), 16)
found["pitch"] = [pitch.value, before - free()]
for address in (memory, managed, pitched):
    driver.cudaFree(c_void_p(address))
found["left"] = before - free()

# Pointers, which know their range; what is not one is zero in a list.
memory = make("cuMemAlloc_v2", 3 * MIB)
found["start"] = attribute(memory + 4096, 11, c_uint64) == [0, memory]
found["size"] = attribute(memory + 4096, 12, c_uint64)
found["type"], found["host_type"] = attribute(memory, 2), attribute(make("cuMemHostAlloc", c_size_t(64), 0), 2)
found["newer"] = attribute(memory, 99)
ordinal = c_int(5)
plain = (c_char * 8)()
status = driver.cuPointerGetAttributes(1, byref(c_int(9)), byref(ctypes.pointer(ordinal)), plain)
found["plain"] = [status, ordinal.value]

# Contexts and devices.
first, second = make("cuDevicePrimaryCtxRetain", 0), make("cuDevicePrimaryCtxRetain", 1)
driver.cuCtxSetCurrent(c_void_p(second))
found["runtimes_device"] = number("cudaGetDevice")
found["device"] = number("cuCtxGetDevice_v2", c_void_p(first))
found["not_a_context"] = number("cuCtxGetDevice_v2", c_void_p(64))[0]
driver.cuCtxSetCurrent(c_void_p(first))
found["peer"] = [driver.cuCtxEnablePeerAccess(c_void_p(second), 0) for _ in range(2)]
bus = ctypes.create_string_buffer(32)
driver.cuDeviceGetPCIBusId(bus, 32, 1)
found["bus"] = [bus.value.decode(), number("cuDeviceGetByPCIBusId", bus)[1], number("cuDeviceGetAttribute", 33, 1)[1]]
found["unknown_bus"] = number("cuDeviceGetByPCIBusId", b"0000:77:00.0")[0]

# Copies of rectangles. CUDA_MEMCPY2D: x, y, type, host, device, array, pitch of both sides; width, height.
class Copy(ctypes.Structure):
    _fields_ = [(f"word_{i}", c_uint64) for i in range(16)]
source, target = (c_char * 64)(*range(64)), (c_char * 64)()
device = make("cuMemAlloc_v2", 4096)
to_device = Copy(4, 1, 1, ctypes.addressof(source), 0, 0, 16, 0, 0, 2, 0, device, 0, 128, 8, 2)
to_host = Copy(0, 0, 2, 0, device, 0, 128, 0, 0, 1, ctypes.addressof(target), 0, 0, 8, 8, 2)
found["rows"] = [driver.cuMemcpy2D_v2(byref(to_device)), driver.cuMemcpy2D_v2(byref(to_host))]
found["copied"] = list(target.raw[:17])
driver.cuMemsetD16_v2(c_void_p(device), 0x0102, c_size_t(4))
driver.cuMemcpyDtoH_v2(target, c_void_p(device), c_size_t(8))
found["words"] = list(target.raw[:8])

# A graph, captured and launched by the driver alone.
stream = make("cuStreamCreate", 1)
driver.cuStreamBeginCapture_v2(c_void_p(stream), 0)
driver.cuMemsetD8Async(c_void_p(device), 9, c_size_t(16), c_void_p(stream))
captured = c_void_p()
found["capture"] = driver.cuStreamEndCapture(c_void_p(stream), byref(captured))
driver.cuMemsetD8_v2(c_void_p(device), 1, c_size_t(16))
graph = make("cuGraphInstantiateWithFlags", captured, c_uint64(0))
found["launched"] = driver.cuGraphLaunch(c_void_p(graph), c_void_p(stream))
driver.cuMemcpyDtoH_v2(target, c_void_p(device), c_size_t(16))
found["filled"] = list(target.raw[:16])
found["unanswered"] = gpu.refused()

# Multiprocessors: words 24 to 27 of a resource are their number, the smallest part, its multiple, and flags.
whole, parts, rest = (c_int * 36)(), (c_int * 72)(), (c_int * 36)()
found["resource"] = [driver.cuDeviceGetDevResource(0, whole, 1), *whole[24:28]]
count = c_int(2)
found["split"] = [driver.cuDevSmResourceSplitByCount(parts, byref(count), whole, rest, 0, 60), count.value]
found["parts"] = [parts[24], parts[60], rest[24]]
count = c_int(5)
found["groups"] = [driver.cuDevSmResourceSplitByCount(None, byref(count), whole, None, 0, 10), count.value]
found["too_many"] = driver.cuDevSmResourceSplitByCount(parts, byref(count), whole, None, 0, 133)
found["other_kind"] = driver.cuDeviceGetDevResource(0, rest, 1000)
green = make("cuGreenCtxCreate", c_void_p(make("cuDevResourceGenerateDesc", whole, 1)), 0, 1)
found["green_whole"] = gpu.refused()
green = make("cuGreenCtxCreate", c_void_p(make("cuDevResourceGenerateDesc", parts, 1)), 0, 1)
found["green_part"] = gpu.refused()
found["green_context"] = make("cuCtxFromGreenCtx", c_void_p(green)) == first
driver.cuGreenCtxGetDevResource(c_void_p(green), rest, 1)
found["green_sms"] = rest[24]
found["green_stream"] = number("cuStreamGetDevice", c_void_p(make("cuGreenCtxStreamCreate", c_void_p(green), 1, 0)))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return on_driver(_SCRIPT)


def test_the_driver_api_has_no_last_error(found: dict[str, Any]) -> None:
    assert found["refused"] == "status 2"
    assert found["last_error"] == 0
    assert found["runtimes_error"] == 2  # of cudaMalloc; cuMemFree's did not replace it


def test_memory_of_both_apis_is_in_one_ledger(found: dict[str, Any]) -> None:
    assert found["taken"] == 6 << 20
    assert found["managed"] == 8 << 20
    assert found["pitch"] == [1024, 12 << 20]
    assert found["left"] == 0


def test_a_pointer_knows_its_range(found: dict[str, Any]) -> None:
    assert found["start"]
    assert found["size"] == [0, 3 << 20]
    assert found["type"] == [0, 2]
    assert found["host_type"] == [0, 1]
    assert found["newer"][0] == 1
    assert found["plain"] == [0, -2]


def test_contexts_are_the_runtimes_devices(found: dict[str, Any]) -> None:
    assert found["runtimes_device"] == [0, 1]
    assert found["device"] == [0, 0]
    assert found["not_a_context"] == 201
    assert found["peer"] == [0, 704]
    assert found["bus"] == ["0000:02:00.0", 1, 2]
    assert found["unknown_bus"] == 101


def test_rectangles_are_copied_row_by_row(found: dict[str, Any]) -> None:
    assert found["rows"] == [0, 0]
    assert found["copied"] == [*range(20, 28), *range(36, 44), 0]
    assert found["words"] == [2, 1] * 4


def test_a_graph_replays_what_the_driver_captured(found: dict[str, Any]) -> None:
    assert found["capture"] == found["launched"] == 0
    assert found["filled"] == [9] * 16
    assert found["unanswered"] == []


def test_multiprocessors_are_split_as_a_gpu_splits_them(found: dict[str, Any]) -> None:
    assert found["resource"] == [0, 132, 8, 8, 0]
    assert found["split"] == [0, 2]
    assert found["parts"] == [64, 64, 4]
    assert found["groups"] == [0, 8]
    assert found["too_many"] == 915


def test_a_green_context_of_some_multiprocessors_is_named_since_its_kernels_are_priced_with_all(
    found: dict[str, Any],
) -> None:
    of_others = ["a device resource that is not its SMs", 1]
    assert found["other_kind"] == 914
    assert found["green_whole"] == [of_others]
    assert found["green_part"] == [of_others, ["the price of kernels on some of the SMs (cuGreenCtxCreate)", 1]]
    assert found["green_context"]
    assert found["green_sms"] == 64


def test_a_runtime_of_cuda_13_2_is_let_begin_and_what_it_may_ask_more_is_refused_by_name() -> None:
    found = on_driver(
        """
id = bytes.fromhex("6bd5fb6c5bf4e74a8987d93912fd9df9")
words = ctypes.cast(make("cuGetExportTable", id), ctypes.POINTER(c_void_p))
count = words[0] // ctypes.sizeof(c_void_p)
found["answers"] = {number: ctypes.CFUNCTYPE(c_int)(words[number])() for number in range(10, count)}
found["refused"] = gpu.refused()
"""
    )
    assert found["answers"] == {"10": 801, "11": 801, "12": 0}
    names = [f"cuGetExportTable: function {number} of CUDART_INTERFACE" for number in (10, 11)]
    assert found["refused"] == [[name, 1] for name in names]
