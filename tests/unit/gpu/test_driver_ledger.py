"""Processes share the memory of one virtual GPU, and what sleeps takes none of it."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.virtual import on_virtual_gpu
from tests.unit.gpu.driver import on_driver

_SCRIPT = '''
import os, signal, subprocess, sys, textwrap, time
gpu.share(500 * MIB)

def malloc(size):
    return make("cudaMalloc", c_size_t(size))

def left(device=0):
    driver.cudaSetDevice(device)
    free, total = c_size_t(), c_size_t()
    driver.cudaMemGetInfo(byref(free), byref(total))
    return free.value // MIB

class Process(ctypes.Structure):
    _fields_ = [("pid", c_uint), ("used", c_uint64), ("instances", c_uint64)]

def processes(room=8):
    "Of the first GPU: the status of NVML's call, their number, and the memory of each in GiB."
    found, count = (Process * 8)(), c_uint(room)
    status = driver.nvmlDeviceGetComputeRunningProcesses_v3(c_void_p(1), byref(count), found)
    return status, count.value, {found[i].pid: found[i].used >> 30 for i in range(count.value) if not status}

CODE = """
import ctypes, os, sys
from ctypes import byref, c_size_t, c_void_p
from fakedist.gpu.models.catalogue import find_gpu
from fakedist.gpu.virtual import virtual_gpu
with virtual_gpu(find_gpu("h100-80g"), 2, 100 << 30) as gpu:
    gpu.share()
    gpu.called(sys.argv[1])
    driver = ctypes.CDLL("libcuda.so.1")
    for line in sys.stdin:
        if line.strip().isalpha():
            print(gpu.engine(0, is_awake=line.strip() == "awake") or 0, flush=True)
            continue
        print(driver.cudaMalloc(byref(c_void_p()), c_size_t(int(line) << 30)), flush=True)
    os._exit(0)
"""

def start(name):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(CODE), name], **pipes)

def takes(process, gib):
    "Or, by a word, whether it has the KV cache of an engine."
    process.stdin.write(f"{gib}\\n")
    process.stdin.flush()
    return int(process.stdout.readline())

found["alone"] = left(0), processes()[1]
other, killed = start("other.py"), start("killed.py")
found["others take"] = takes(other, 20), takes(killed, 40), takes(other, 50)
found["with them"] = left(0), left(1)
driver.cudaSetDevice(0)
found["too much"] = malloc(50 * GIB)
first = malloc(10 * GIB)
status, count, held = processes()
found["processes"] = status, count, [held[pid] for pid in (os.getpid(), other.pid, killed.pid)]
found["no room for them"] = processes(1)[:2]
found["most"] = [size >> 30 for size in gpu.in_use(0)]
killed.send_signal(signal.SIGKILL)
killed.wait()
found["after a death"] = left(0), processes()[1]
found["now it fits"] = isinstance(malloc(50 * GIB), int)
driver.cudaFree(c_void_p(first))
found["most later"] = [size >> 30 for size in gpu.in_use(0)]
ends, told = os.pipe()
if not (forked := os.fork()):
    malloc(5 * GIB)
    os.write(told, b"x")
    time.sleep(60)
os.read(ends, 1)
found["with a fork"] = gpu.in_use(0).others >> 30, processes()[1]
os.kill(forked, signal.SIGKILL)
os.waitpid(forked, 0)
other.stdin.close()
other.wait()
found["alone again"] = left(0)

def course(device):
    names, rows = gpu.timeline(device)
    return names, [[change, *(size >> 30 for size in (*held, *others))] for change, *held, others in rows]

found["course"], found["course of another GPU"] = course(0), course(1)

def gib(*rows):
    return [[size >> 30 for size in row] for row in rows]

engine, before = start("engine.py"), gpu.most_of_engine(0)
takes(engine, 3), gpu.in_use(0), takes(engine, "awake"), takes(engine, 7), takes(engine, "asleep")
first = malloc(2 * GIB)
found["engine"] = gib(before, gpu.in_use(0), gpu.most_of_engine(0))
takes(engine, "awake"), left(0), gpu.in_use(0)
engine.stdin.close()
engine.wait()
left(0), malloc(4 * GIB)
found["engine died"] = gib(gpu.in_use(0), gpu.most_of_engine(0))
'''


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return on_driver(_SCRIPT, memory_bytes=100 << 30)


def test_each_sees_what_the_others_took(found: dict[str, Any]) -> None:
    gib = 1024
    assert found["alone"] == [100 * gib, 1]
    assert found["others take"] == [0, 0, 2], "60 of 100 GiB, and 50 more do not fit"
    assert found["with them"] == [40 * gib - 2 * 500, 100 * gib], "each other process has a context, on that GPU alone"
    assert found["too much"] == "status 2"
    assert found["processes"] == [0, 3, [10, 20, 40]]
    assert found["no room for them"] == [7, 3]


def test_a_process_that_dies_holds_nothing(found: dict[str, Any]) -> None:
    gib = 1024
    assert found["after a death"] == [70 * gib - 500, 2]
    assert found["now it fits"] is True
    assert found["alone again"] == 50 * gib


def test_the_most_in_use_counts_all_processes(found: dict[str, Any]) -> None:
    assert found["most"] == [70, 0, 0, 10, 60], "the most; this process outside of the allocator; the others"
    assert found["most later"] == [80, 0, 0, 50, 20], "since it was asked before"


def test_the_most_in_use_with_an_engines_kv_cache_is_kept_apart_whichever_process_has_it(found: dict[str, Any]) -> None:
    before, used, of_engine = found["engine"]
    assert before == [0, 0], "no engine"
    assert (used, of_engine) == ([62, 60, 0, 52, 10], [62, 60]), "53 GiB and 7 more awake; then 2 more"
    assert found["engine died"] == [[56, 62, 0, 56, 0], [62, 62]], "awake until it ended; then 4 more"


def test_a_fork_of_a_process_with_memory_holds_none(found: dict[str, Any]) -> None:
    """CUDA does not survive a fork: what the child believes it holds is its parent's."""
    assert found["with a fork"] == [20, 2]


def test_the_course_has_the_part_of_each_process_also_of_those_that_died(found: dict[str, Any]) -> None:
    names, rows = found["course"]
    assert names == ["other.py", "killed.py"]
    taken = [[1, 0, 0, 20, 0], [2, 0, 0, 20, 40], [3, 0, 10, 20, 40]]
    later = [[4, 0, 10, 20, 0], [5, 0, 60, 20, 0], [6, 0, 50, 20, 0], [7, 0, 50, 0, 0]]
    assert rows == [*taken, *later], "what one held is in use until another looks"
    assert found["course of another GPU"] == [[], []]


_IPC = """
import subprocess, sys, textwrap

CODE = '''
import ctypes, os, sys
from ctypes import byref, c_char, c_size_t, c_void_p
from fakedist.gpu.models.catalogue import find_gpu
from fakedist.gpu.virtual import virtual_gpu
with virtual_gpu(find_gpu("h100-80g"), 1, 100 << 30) as gpu:
    gpu.share()
    driver = ctypes.CDLL("libcuda.so.1")
    address, handle = c_void_p(), (c_char * 64)()
    driver.cudaMalloc(byref(address), c_size_t(6 << 20))
    driver.cudaMemset(address, 7, c_size_t(64))
    driver.cudaIpcGetMemHandle(handle, address)
    print(handle.raw.hex(), flush=True)
    sys.stdin.read()
    os._exit(0)
'''

class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_uint8 * 64)]

driver.cudaIpcOpenMemHandle.argtypes = [c_void_p, Handle, c_uint]

def opened():
    theirs = c_void_p()
    status = driver.cudaIpcOpenMemHandle(byref(theirs), handle, 1)
    return status, theirs

gpu.share()
own = c_void_p(make("cudaMalloc", c_size_t(2 * MIB)))
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(CODE)], **pipes)
handle = Handle.from_buffer_copy(bytes.fromhex(process.stdout.readline()))
found["held"] = gpu.in_use(0)
status, theirs = opened()
found["opened"] = status
found["held with it"] = gpu.in_use(0)
driver.fakedist_lost.argtypes = [c_void_p, c_size_t]
found["without values"] = driver.fakedist_lost(theirs, 64)
found["closed"] = [driver.cudaIpcCloseMemHandle(theirs) for _ in range(2)]
event = (ctypes.c_uint8 * 64)()
waited = c_void_p()
driver.cudaIpcOpenEventHandle.argtypes = [c_void_p, Handle]
found["waited"] = [
    driver.cudaIpcGetEventHandle(event, c_void_p(make("cudaEventCreateWithFlags", 6))),
    driver.cudaIpcOpenEventHandle(byref(waited), Handle.from_buffer_copy(event)),
    driver.cudaStreamWaitEvent(None, waited, 0),
]
process.stdin.close()
process.wait()
"""


def test_memory_of_another_process_opens_once_counted_and_without_values() -> None:
    found = on_driver(_IPC, memory_bytes=100 << 30)
    mib = 1 << 20
    assert found["held"] == found["held with it"] == [8 * mib, 0, 0, 2 * mib, 6 * mib]
    assert found["opened"] == 0
    assert found["without values"] == 64
    assert found["closed"] == [0, 1]
    assert found["waited"] == [0, 0, 0]


_MANY_CHANGES = """
def many(device):
    driver.cudaSetDevice(device)
    make("cudaMalloc", c_size_t(GIB))
    for turn in range(1500):
        driver.cudaFree(c_void_p(make("cudaMalloc", c_size_t(30 * GIB if turn == 702 else 2 * MIB))))
    last = make("cudaMalloc", c_size_t(3 * GIB))
    return gpu.num_changes(device), gpu.timeline(device)[1]

found["alone"] = many(0)
gpu.share()
found["shared"] = many(1)
"""


def test_a_long_course_keeps_its_peak_in_few_moments() -> None:
    found = on_driver(_MANY_CHANGES)
    for changes, rows in found.values():
        assert changes == 3002
        assert len(rows) <= 513
        assert {after[0] - before[0] for before, after in itertools.pairwise(rows[:-1])} == {8}
        peak = [change for change, backed, outside, _ in rows if backed + outside == 31 << 30]
        assert peak == [1 + 8 * ((2 + 2 * 702 - 1) // 8)], "the moment of the change that took it"
        assert rows[-1] == [3002, 0, 4 << 30, []], "what is in use at the end"


#: As vLLM's and torch_memory_saver's pools allocate.
_POOL = """
#include <stddef.h>
#include <stdint.h>
struct properties { int type, handle_types, location_type, device; void *win32; uint64_t flags; };
struct access { int location_type, device, flags; };
int cuMemAddressReserve(void **, size_t, size_t, void *, unsigned long long);
int cuMemAddressFree(void *, size_t);
int cuMemCreate(void **, size_t, const struct properties *, unsigned long long);
int cuMemMap(void *, size_t, size_t, void *, unsigned long long);
int cuMemSetAccess(void *, size_t, const struct access *, size_t);
int cuMemUnmap(void *, size_t);
int cuMemRelease(void *);
static void *memory, *address;
static size_t bytes;
int wake(void) {
    struct properties properties = {1, 0, 1, 0, NULL, 0};
    struct access access = {1, 0, 3};
    int status = cuMemCreate(&memory, bytes, &properties, 0);
    return status ? status : cuMemMap(address, bytes, 0, memory, 0) | cuMemSetAccess(address, bytes, &access, 1);
}
int sleeps(void) { return cuMemUnmap(address, bytes) | cuMemRelease(memory); }
void *pool_malloc(size_t size, int device, void *stream) {
    (void)device, (void)stream;
    bytes = size;
    return cuMemAddressReserve(&address, size, 0, NULL, 0) || wake() ? NULL : address;
}
void pool_free(void *at, size_t size, int device, void *stream) {
    (void)device, (void)stream, sleeps(), cuMemAddressFree(at, size);
}
"""
_SLEEPS = """
import ctypes
gpu.share()
pool_library = ctypes.CDLL({path!r})
allocator = torch.cuda.memory.CUDAPluggableAllocator({path!r}, "pool_malloc", "pool_free")
pool = torch.cuda.MemPool(allocator.allocator())
MIB = 1 << 20

def held():
    free, total = torch.cuda.mem_get_info()
    used = gpu.in_use(0)
    return [size // MIB for size in (total - free, torch.cuda.memory_reserved(), used.backed, used.outside)]

with torch.cuda.use_mem_pool(pool):
    cache = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
found["awake"] = held()
found["slept"] = pool_library.sleeps()
found["asleep"] = held()
training = torch.empty(80 * MIB, dtype=torch.uint8, device="cuda")
found["trains"] = held()
found["cannot wake"] = pool_library.wake()
del training
torch.cuda.empty_cache()
found["woken"] = pool_library.wake()
found["awake again"] = held()
found["course"] = [[size // MIB for size in row[1:3]] for row in gpu.timeline(0)[1]]
found["peaks"] = gpu.backed_peak(0) // MIB, torch.cuda.max_memory_reserved() // MIB, gpu.outside_peak(0)
"""


def test_memory_that_sleeps_is_reserved_but_not_in_use(tmp_path: Path) -> None:
    source, library = tmp_path / "pool.c", tmp_path / "pool.so"
    source.write_text(_POOL)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    found = on_virtual_gpu(_SLEEPS.format(path=str(library)), devices=1, memory_bytes=100 << 20)
    assert found["awake"] == [40, 40, 40, 0]
    assert (found["slept"], found["asleep"]) == (0, [0, 40, 0, 0])
    assert (found["trains"], found["cannot wake"]) == ([80, 120, 80, 0], 2)
    assert (found["woken"], found["awake again"]) == (0, [40, 40, 40, 0]), "woken memory is the allocator's again"
    assert found["peaks"] == [80, 120, 0]
    awake, asleep = [40, 0], [0, 0]
    assert found["course"] == [awake, asleep, [80, 0], asleep, awake], "mapped memory is the allocator's at once"
