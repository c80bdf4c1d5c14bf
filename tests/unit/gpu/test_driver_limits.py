"""The driver's limits: the memory that holds data, and the amount of everything."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.gpu.driver import on_driver

#: Segments of GPT-2's optimizer state on an H200 (driver 580), in MiB, and how far each address is from the one before.
ON_AN_H200 = (48, 48, 20, 24, 36, 12, 12, 24, 12, 48, 48, 12, 24, 12, 36, 12, 2, 12, 24, 48, 48, 20, 24, 36, 12, 12, 24)
STEPS_ON_AN_H200 = [
    -64, -32, -32, -64, 36, 12, -80, 148, -212, -64, 48, -80, 144, -208, 36, 12, 2, -82, -64, -64, -32, -32, -64, 36,
    12, -80,
]  # fmt: skip
_SCRIPT = (
    f"ON_AN_H200 = {ON_AN_H200}"
    """
from fakedist.gpu.driver.build import answered_names, find_cuda
from fakedist.gpu.driver.elf import exported_names

def malloc(size):
    return make("cudaMalloc", c_size_t(size))

host = (c_char * (4 * MIB))()

def copies(to, source, size):
    "Whether a copy of that size is done. The other end holds zeros before."
    ctypes.memset(host, 1, len(host))
    if source != ctypes.addressof(host):
        ctypes.memset(source, 1, size)
    before = gpu.counters()
    driver.cudaMemcpyAsync(c_void_p(to), c_void_p(source), c_size_t(size), 4, None)
    after = gpu.counters()
    done = ctypes.string_at(to, size) == bytes([1]) * size
    dropped = [after[name] - before[name] for name in ("copies_dropped", "bytes_dropped")]
    assert dropped == ([0, 0] if done else [1, size]), dropped
    return done

def fills(size, address):
    driver.cudaMemsetAsync(c_void_p(address), 1, c_size_t(size), None)
    return ctypes.string_at(address, size) == bytes([1]) * size

address = ctypes.addressof(host)
small, large = (lambda: malloc(2 * MIB)), (lambda: malloc(2 * MIB + 1))
found["to a small segment"] = [copies(small(), address, size) for size in (MIB, MIB + 1)]
found["to a large segment"] = [copies(large(), address, size) for size in (64 * KIB, 64 * KIB + 1)]
found["within small segments"] = [copies(small(), small(), size) for size in (MIB, MIB + 1)]
found["within large segments"] = copies(large(), large(), 1)
found["from a large segment to a small one"] = copies(small(), large(), 1)
found["from a small segment to a large one"] = copies(large(), small(), 1)
found["on the host"] = copies(address, address, 2 * MIB)
found["fills of a small segment"] = [fills(size, small()) for size in (MIB, MIB + 1)]
found["fills of a large segment"] = fills(1, large())

def pages_in_use():
    return int(open("/proc/self/statm").read().split()[1])

def zeros(offset, size, address):
    "Whether zeros replace exactly those bytes of memory that holds ones, and whether the pages are given back."
    whole = 2 * MIB
    ctypes.memset(address, 1, whole)
    before = pages_in_use()
    driver.cudaMemsetAsync(c_void_p(address + offset), 0, c_size_t(size), None)
    given_back = before - pages_in_use()
    expected = bytes([1]) * offset + bytes(size) + bytes([1]) * (whole - offset - size)
    noted = size // 8 // 4096  # the driver keeps a bit for each byte
    return ctypes.string_at(address, whole) == expected, given_back >= size // 4096 - noted - 16
found["zeros"] = [zeros(*where, small()) for where in ((0, MIB), (512, 300 * KIB + 9), (4096, 64 * KIB), (7, 1 * KIB))]

def pattern(count):
    address = small()
    driver.cuMemsetD32Async(c_void_p(address), c_uint(0x01020304), c_size_t(count), None)
    return ctypes.string_at(address, 4 * count) == bytes([4, 3, 2, 1]) * count
found["patterns"] = [pattern(MIB // 4), pattern(MIB // 4 + 1)]

class Properties(ctypes.Structure):
    _fields_ = [(name, c_int) for name in ("type", "handles", "location", "device")] + [
        ("win32", c_void_p), ("flags", c_uint64)]

def map_at(address):
    memory = make("cuMemCreate", c_size_t(2 * MIB), byref(Properties(1, 0, 1, 0, None, 0)), c_uint64(0))
    return driver.cuMemMap(c_void_p(address), c_size_t(2 * MIB), c_size_t(0), c_void_p(memory), c_uint64(0))

spread = make("cuMemAddressReserve", c_size_t(64 * MIB), c_size_t(0), None, c_uint64(0))
assert map_at(spread) == 0
found["up to the end of a segment"] = fills(8, spread + 2 * MIB - 8)
driver.cudaMemsetAsync(c_void_p(spread + 2 * MIB - 8), 2, c_size_t(9), None)
found["one byte past its end"] = ctypes.string_at(spread + 2 * MIB - 8, 1)[0] == 2
assert map_at(spread + 2 * MIB) == 0
found["across two small segments"] = fills(16, spread + 2 * MIB - 8)
found["mapped twice"] = map_at(spread)
found["mapped askew"] = map_at(spread + 4 * MIB + 512)

def left():
    free, total = c_size_t(), c_size_t()
    driver.cudaMemGetInfo(byref(free), byref(total))
    return free.value
before = left()
malloc(1)
found["one byte takes"] = before - left()
free = left()
found["one byte too many"] = malloc(free + 1)
all_of_it = malloc(free)
found["all that is left"] = [isinstance(all_of_it, int), left()]
driver.cudaFree(c_void_p(all_of_it))
found["given back"] = left() == free
found["addresses are used again"] = malloc(free) == all_of_it

driver.cudaFree(c_void_p(all_of_it))
three, two = malloc(6 * MIB), malloc(4 * MIB)
driver.cudaFree(c_void_p(three))
other = malloc(2 * MIB)
found["addresses of another size"] = [other == three, malloc(6 * MIB) == three]
driver.cudaFree(c_void_p(two))
over = [malloc(63 * GIB), malloc(3 * GIB)]
found["a device's addresses go on"] = over[1] - over[0]
driver.cudaSetDevice(1)
found["another device's chunk"] = malloc(1) // (64 * GIB) < over[1] // (64 * GIB)
malloc(24 * MIB)  # what else the context's reservations have left
given = [malloc(mib * MIB) for mib in ON_AN_H200]
found["as on an H200"] = [(after - before) // MIB for before, after in zip(given, given[1:])]
driver.cudaFree(c_void_p(given[0]))  # its reservation is the highest one, and free
found["a released reservation's upper end"] = malloc(20 * MIB) - given[0]
driver.cudaSetDevice(0)

unlimited = [make("cuMemAddressReserve", c_size_t(1 << 50), c_size_t(0), None, c_uint64(0)) for _ in range(2)]
found["a reservation without limit"] = unlimited[1] - unlimited[0]
found["reservations"] = sum(
    isinstance(make("cuMemAddressReserve", c_size_t(1 << 50), c_size_t(0), None, c_uint64(0)), int)
    for _ in range(20)
)

streams = [make("cudaStreamCreate") for _ in range((1 << 14) + 2)]
found["streams"] = [len(set(streams)), streams[: 1 << 14] == sorted(streams[: 1 << 14])]
for stream in streams:
    driver.cudaStreamDestroy(c_void_p(stream))

context = make("cuCtxGetCurrent")
found["contexts"] = [driver.cuCtxPushCurrent_v2(c_void_p(context)) for _ in range(17)]

kernel, value, named = c_int(), c_int(), {"threads": 0, "registers": 4}
for name, attribute in named.items():
    driver.cuFuncGetAttribute(byref(value), attribute, c_void_p(ctypes.addressof(kernel)))
    found[f"{name} of an unknown kernel"] = value.value

def size_of(function, *arguments):
    out = c_size_t()
    assert getattr(driver, function)(*(byref(out) if each is None else each for each in arguments)) == 0
    return out.value

plan, n, i64 = c_int(), (c_int64 * 2)(8, 4), c_int64
driver.cufftCreate(byref(plan))
layout = [NULL, i64(1), i64(32)]
found["bytes of a transform"] = {
    kind: size_of("cufftXtMakePlanMany", plan, 2, n, *layout, kind, *layout, kind, i64(3), None, kind)
    for kind in (4, 5, 6)
}
found["bytes of a QR"] = {
    columns: {
        kind: size_of("cusolverDnXgeqrf_bufferSize", *[NULL] * 2, i64(100), i64(columns), kind, NULL, i64(100), kind,
                      NULL, kind, None, byref(c_size_t()))
        for kind in (0, 1, 4, 5)
    }
    for columns in (10, 10000)
}

names = sorted(set(exported_names(find_cuda().libraries["cusparse"])) - answered_names(find_cuda().include))
refused = [name for name in names if hasattr(driver, name)][:300]
for name in refused:
    getattr(driver, name)()
found["refused"] = [len(refused), len(gpu.refused())]

import resource
before = gpu.lacked_bytes
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 256 * MIB, resource.RLIM_INFINITY))
statuses = malloc(512 * MIB), make("cudaHostAlloc", c_size_t(GIB), 0)
found["the machine lacks"] = [before, *statuses, gpu.lacked_bytes]
"""
)


INVALID_VALUE, OUT_OF_MEMORY, OPERATING_SYSTEM = 1, "status 2", "status 304"
EXPECTED = {
    # Small segments hold what is copied, large ones what the host writes; pairs are of one size and of a byte more.
    "to a small segment": [True, False],  # 1 MiB
    "to a large segment": [True, False],  # 64 KiB
    "within small segments": [True, False],  # 1 MiB
    "within large segments": False,
    "from a large segment to a small one": False,
    "from a small segment to a large one": False,
    "on the host": True,
    "fills of a small segment": [True, False],  # 1 MiB
    "fills of a large segment": False,
    "patterns": [True, False],
    "zeros": [[True, True]] * 4,  # they replace what memory held, and take no pages
    # A tensor may span two mapped segments.
    "up to the end of a segment": True,
    "one byte past its end": False,
    "across two small segments": True,
    "mapped twice": INVALID_VALUE,
    "mapped askew": INVALID_VALUE,
    "one byte takes": 2 << 20,
    "one byte too many": OUT_OF_MEMORY,
    "all that is left": [True, 0],
    "given back": True,
    "addresses are used again": True,
    "addresses of another size": [True, False],
    # A device takes addresses in chunks of 64 GiB, and goes on in the one below.
    "a device's addresses go on": -(3 << 30),
    "another device's chunk": True,
    "as on an H200": STEPS_ON_AN_H200,
    "a released reservation's upper end": 32 << 20,
    "bytes of a transform": {kind: size * 3 * 8 * 4 for kind, size in (("4", 8), ("5", 16), ("6", 4))},
    "bytes of a QR": {
        columns: {kind: size * elements for kind, size in (("0", 4), ("1", 8), ("4", 8), ("5", 16))}
        for columns, elements in (("10", 196608), ("10000", 10000 * 32))
    },
    "refused": [300, 256],  # the first 256 functions are counted
    "a reservation without limit": -(4 << 40),
    "reservations": 64 // 4 - 2 - 1,  # of 4 TiB in 64; less two, and what came before
    "streams": [(1 << 14) + 2, True],  # ascending handles, without limit
    "contexts": [0] * 16 + [2],
    "registers of an unknown kernel": 32,
    "threads of an unknown kernel": 1024,
    # What is refused below the GPU's limit is the machine's fault, and the first of it is kept.
    "the machine lacks": [0, OPERATING_SYSTEM, OPERATING_SYSTEM, 512 << 20],
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return on_driver(_SCRIPT)


@pytest.mark.parametrize("what", EXPECTED)
def test_the_driver_answers(found: dict[str, Any], what: str) -> None:
    assert found[what] == EXPECTED[what]
