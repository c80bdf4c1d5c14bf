"""Bytes of device memory that hold a value, as the driver keeps it, and what the host reads of all others."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.gpu.driver import on_driver

_SCRIPT = """
import os, struct, subprocess, sys, tempfile, threading
from pathlib import Path
import triton

NOTHING, COMPUTED, MADE_UP = 0, 1, 2
driver.fakedist_losses.restype = ctypes.POINTER(c_uint64)
for name in ("fakedist_lost", "fakedist_unknown"):
    getattr(driver, name).restype = c_size_t
told = []
tell = ctypes.CFUNCTYPE(c_int, c_uint64)(lambda size: told.append(size) or 0)
state = ctypes.cast(ctypes.pythonapi.PyGILState_GetThisThreadState, c_void_p)
driver.fakedist_tell_reads(tell, state)

segment = make("cudaMalloc", c_size_t(2 * MIB))
ctypes.memset(segment, 7, 64 * KIB)  # what was there before
given = []

def block(size=512):
    "A block that the caching allocator hands out."
    address = segment + sum(given)
    given.append(size)
    driver.fakedist_handed_out(c_void_p(address), c_size_t(size))
    return address

def upload(address, data):
    driver.cudaMemcpy(c_void_p(address), data, c_size_t(len(data)), 1)
    return address

def read(address, size=8):
    "The bytes that the host gets, and how many of them count as made up."
    told.clear()
    out = (c_char * size)(*[b"x"] * size)
    status = driver.cudaMemcpy(out, c_void_p(address), c_size_t(size), 2)
    return [status, list(bytes(out)), sum(told)]

def launch(kernel, *arguments, **more):
    kept = [(c_char * len(each)).from_buffer_copy(each) for each in arguments]
    pointers = (c_void_p * len(kept))(*map(ctypes.addressof, kept))
    driver.cuLaunchKernel(c_void_p(kernel), *[c_uint(1)] * 6, c_uint(0), NULL, pointers, NULL)

def pointer(address):
    return struct.pack("Q", address)

found["a block handed out"] = read(block())
found["uploaded"] = read(upload(block(), bytes(range(8))))
found["uploaded in part"] = read(upload(block(), b"abc"))
filled = block()
driver.cudaMemset(c_void_p(filled), 5, c_size_t(8))
found["filled"] = read(filled)
copied, source = block(), upload(block(), b"abcd")
driver.cudaMemcpy(c_void_p(copied), c_void_p(source), c_size_t(8), 3)
found["copied within the device"] = read(copied)
freed = upload(block(), b"12345678")
driver.fakedist_handed_out(c_void_p(freed), c_size_t(512))
found["handed out again"] = read(freed)
engines = block()
ctypes.memset(engines, 7, 8)  # as the engine does
driver.fakedist_know(c_void_p(engines), c_size_t(8), COMPUTED)
found["the engine's"] = read(engines)
driver.fakedist_taint(c_void_p(engines), c_size_t(4))
found["the engine's, half of it made up"] = read(engines)
driver.fakedist_know_where(c_void_p(engines), bytes([0, 1] * 4), c_size_t(8))
found["the engine's, chosen bytes"] = read(engines)
large = make("cudaMalloc", c_size_t(4 * MIB))
found["more than memory holds"] = [read(large, 2 * MIB)[1] == [0] * (2 * MIB), list(told)]

def cubin(name, parameters):
    "Triton's assembler makes a kernel that does nothing."
    declared = ", ".join(f".param {kind} p{number}" for number, kind in enumerate(parameters))
    with tempfile.TemporaryDirectory() as scratch:
        text, made = Path(scratch) / "k.ptx", Path(scratch) / "k.cubin"
        head = ".version 8.0\\n.target sm_90\\n.address_size 64\\n"
        text.write_text(f"{head}.visible .entry {name}({declared}) {{ ret; }}\\n")
        ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
        subprocess.run([ptxas, "-arch=sm_90", text, "-o", made], check=True)
        image = made.read_bytes()
        module, kernel = c_void_p(), c_void_p()
        how = driver.cuModuleLoad(byref(module), os.fsencode(made)) if name == "from_a_file" else \\
            driver.cuModuleLoadData(byref(module), image)
        assert how == 0
        assert driver.cuModuleGetFunction(byref(kernel), module, name.encode()) == 0
    return kernel.value

losses = driver.fakedist_losses()[0]
scale = cubin("_Z5scalePfPKfi", [".u64", ".u64", ".u32"])
out, given_in, other = (upload(block(), b"12345678") for _ in range(3))
launch(scale, pointer(out), pointer(given_in), struct.pack("i", 1))
found["a kernel's output, input and neighbour"] = [read(each) for each in (out, given_in, other)]
found["losses"] = driver.fakedist_losses()[0] - losses

triton_kernel = cubin("from_a_file", [".u64", ".u32"])
maybe = upload(block(), b"12345678")
launch(triton_kernel, pointer(maybe), struct.pack("i", 1))
found["what an unknown kernel gets"] = [read(maybe), driver.fakedist_losses()[0] - losses]

read_once = cubin("reads_the_second", [".u64", ".u64"])
driver.fakedist_kernel_writes(c_void_p(read_once), bytes([1, 0]), 2)
to, from_ = (upload(block(), b"12345678") for _ in range(2))
launch(read_once, pointer(to), pointer(from_))
found["a kernel whose parameters were read"] = [read(each) for each in (to, from_)]
unlike = cubin("of_other_parameters", [".u64", ".u64"])
driver.fakedist_kernel_writes(c_void_p(unlike), bytes([1]), 1)
launch(unlike, pointer(upload(to, b"12345678")), pointer(from_))
found["a kernel with other parameters than were read"] = [read(each) for each in (to, from_)]
listed, one_of_them = block(), upload(block(), b"12345678")
upload(listed, pointer(one_of_them))
launch(triton_kernel, pointer(listed), struct.pack("i", 1))
found["what an unknown kernel finds in memory"] = read(one_of_them)
wide = cubin("with_many_parameters", [".u64"] * 70)
last = upload(block(), b"12345678")
launch(wide, *[pointer(0)] * 69, pointer(last))
found["the last of many parameters"] = read(last)
mapped, map_ = upload(block(), b"12345678"), (c_char * 128)()
driver.cuTensorMapEncodeTiled(map_, 0, c_uint(2), c_void_p(mapped))
launch(cubin("with_a_map", [".u64", ".u64"]), bytes(map_[:8]), bytes(map_[8:16]))
found["what a tensor map is of"] = read(mapped)
text = b".version 8.0\\n.target sm_90\\n.address_size 64\\n"
text += b".visible .entry as_text(.param .align 8 .b8 s[16], .param .u64 p){ret;}\\n"
module, kernel = c_void_p(), c_void_p()
driver.cuModuleLoadData(byref(module), text)
driver.cuModuleGetFunction(byref(kernel), module, b"as_text")
inside, behind, neighbour = (upload(block(), b"12345678") for _ in range(3))
launch(kernel.value, struct.pack("QQ", 1, inside), pointer(behind))
found["a kernel in PTX"] = [read(each) for each in (inside, behind, neighbour)]

def lost_blocks():
    driver.fakedist_next_loss.restype = c_uint64
    return list(iter(driver.fakedist_next_loss, 0))

lost_blocks()
launch(scale, pointer(out + 8), pointer(given_in), struct.pack("i", 1))
launch(scale, pointer(out), pointer(given_in), struct.pack("i", 1))
found["blocks that were lost"] = [lost_blocks() == [out], lost_blocks()]
kept_inside = upload(block(), b"12345678")
before = driver.fakedist_protect(c_void_p(kept_inside), c_size_t(512))
launch(scale, pointer(kept_inside), pointer(given_in), struct.pack("i", 1))
found["protected"] = read(kept_inside)
launch(read_once, pointer(kept_inside), pointer(from_))
driver.fakedist_unprotect(before)
found["protected from a kernel that was read and stores"] = read(kept_inside)
upload(kept_inside, b"12345678")
launch(scale, pointer(kept_inside), pointer(given_in), struct.pack("i", 1))
found["protected no more"] = read(kept_inside)

fill_name = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorI{}EESt5arrayIPcLm1EEEEviT0_T1_"
for type_, value in {"l": struct.pack("q", -3), "f": struct.pack("f", 2.5), "N3c108BFloat16E": b"\\x20\\x40"}.items():
    kernel = cubin(fill_name.format(type_), [".u32", ".u64", ".u64"])
    to = block()
    launch(kernel, struct.pack("i", 2), value.ljust(8, b"\\0"), pointer(to))
    got = read(to, 2 * len(value))
    found[f"fill of {type_}"] = [got[1] == list(value * 2), got[2]]
unlike = cubin(fill_name.format("x"), [".u32", ".u64", ".u64"])
to = upload(block(), b"12345678")
launch(unlike, struct.pack("i", 1), struct.pack("q", 9), pointer(to))
found["a fill of an unknown type"] = read(to)[1:]

kept = upload(block(), b"12345678")
driver.fakedist_cover(1)
launch(scale, pointer(kept), pointer(kept), struct.pack("i", 1))
driver.fakedist_cover(-1)
found["covered by an operation"] = read(kept)
handle = make("cublasCreate_v2")
driver.cublasSscal_v2(c_void_p(handle), 1, NULL, NULL, 1)
found["after a library call that is not read"] = read(kept)

# An expandable segment: a block begins in its first mapping and ends in its second, where the next block begins.
properties = struct.pack("iiiiQQ", 1, 0, 1, 0, 0, 0)
area = make("cuMemAddressReserve", c_size_t(4 * MIB), c_size_t(0), NULL, c_uint64(0))
for piece in (area, area + 2 * MIB):
    memory = make("cuMemCreate", c_size_t(2 * MIB), properties, c_uint64(0))
    assert driver.cuMemMap(c_void_p(piece), c_size_t(2 * MIB), c_size_t(0), c_void_p(memory), c_uint64(0)) == 0
over_both, after = area + MIB, area + 3 * MIB
driver.fakedist_handed_out(c_void_p(over_both), c_size_t(2 * MIB))
driver.fakedist_handed_out(c_void_p(after), c_size_t(512))
for address in (over_both - 512, over_both, after - 512, after):
    upload(address, b"12345678")
launch(scale, pointer(over_both), pointer(over_both), struct.pack("i", 1))
reads = [over_both - 512, over_both, after - 512, after]
found["over two mappings: before, beginning, tail, after"] = [read(each)[2] for each in reads]

driver.fakedist_words_looked_at.restype = c_uint64
def words(function, *arguments):
    "How many words of bits the driver looks at."
    before = driver.fakedist_words_looked_at()
    function(*arguments)
    return driver.fakedist_words_looked_at() - before

huge = make("cudaMalloc", c_size_t(64 * GIB))
def launch_there():
    launch(scale, pointer(huge), pointer(huge), struct.pack("i", 1))
def library():
    driver.cublasSscal_v2(c_void_p(handle), 1, NULL, NULL, 1)

library()
few = {}
few["nothing known"] = [words(launch_there), words(library)]
upload(huge + 64 * GIB - 8, b"12345678")
few["one at its end"] = [words(library), words(launch_there), words(launch_there)]
few["that one again"] = read(huge + 64 * GIB - 8)[2]
for number in range(1000):
    upload(huge + number * 60 * MIB, b"12345678")
few["a thousand"] = [words(library), words(launch_there), words(library), words(launch_there)]
found["words"] = few

refuse = ctypes.CFUNCTYPE(c_int, c_uint64)(lambda size: 1)
driver.fakedist_tell_reads(refuse, state)
found["refused"] = read(block())[0]
driver.fakedist_tell_reads(None, None)
before = gpu.counters()
read(block())
after = gpu.counters()
found["counted without Python"] = [after[name] - before[name] for name in ("reads_made_up", "bytes_made_up")]
"""


_WRITTEN = list(b"12345678")
_KEPT, _LOST = [0, _WRITTEN, 0], [0, [0] * 8, 8]
#: What the host reads, and how many of its bytes are made up.
READS = {
    "a block handed out": ([0] * 8, 8),
    "uploaded": (list(range(8)), 0),
    "uploaded in part": ([*b"abc", 0, 0, 0, 0, 0], 5),
    "filled": ([5] * 8, 0),
    "copied within the device": ([*b"abcd", 0, 0, 0, 0], 4),
    "handed out again": ([0] * 8, 8),
    "the engine's": ([7] * 8, 0),
    "the engine's, half of it made up": ([7] * 8, 4),
    "the engine's, chosen bytes": ([0, 7] * 4, 4),
    "covered by an operation": (_WRITTEN, 0),
    "after a library call that is not read": (_WRITTEN, 8),
}
EXPECTED = {what: [0, *read] for what, read in READS.items()} | {
    "more than memory holds": [True, [2 << 20]],
    # A kernel takes the values of what it writes, and leaves what it reads.
    "a kernel's output, input and neighbour": [[0, [0] * 8, 8], [0, _WRITTEN, 0], [0, _WRITTEN, 0]],
    "losses": 1,
    # Of a kernel that was not read, all that it gets counts as written.
    "what an unknown kernel gets": [_LOST, 2],
    "a kernel whose parameters were read": [_LOST, _KEPT],
    "a kernel with other parameters than were read": [_LOST, _LOST],
    "what an unknown kernel finds in memory": _LOST,
    "the last of many parameters": _LOST,
    "what a tensor map is of": _LOST,
    "a kernel in PTX": [_LOST, _LOST, _KEPT],
    "blocks that were lost": [True, []],
    "protected": _KEPT,
    "protected from a kernel that was read and stores": _LOST,
    "protected no more": _LOST,
    # torch's fills are done; one that is not recognised leaves nothing.
    **{f"fill of {kind}": [True, 0] for kind in ("l", "f", "N3c108BFloat16E")},
    "a fill of an unknown type": [[0] * 8, 8],
    "over two mappings: before, beginning, tail, after": [0, 8, 8, 0],
    "refused": 801,
    "counted without Python": [1, 8],
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return on_driver(_SCRIPT)


@pytest.mark.parametrize("what", EXPECTED)
def test_the_driver_answers(found: dict[str, Any], what: str) -> None:
    assert found[what] == EXPECTED[what]


def test_the_work_of_a_launch_does_not_grow_with_the_bytes_of_its_segment(found: dict[str, Any]) -> None:
    """A segment of 64 GiB has 2^30 words of bits. What values cost follows from how many there are, once."""
    few = 40  # searches in some levels
    words = found["words"]
    assert max(words["nothing known"]) < few
    assert max(words["one at its end"]) < 3 * few
    assert words["that one again"] == 8
    tainted, lost, *again = words["a thousand"]
    assert 1000 < tainted < 1000 * few
    assert 1000 < lost < 1000 * few
    assert max(again) < few
