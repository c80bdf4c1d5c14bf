"""A library that brings its own CUDA runtime, linked statically, sees the same GPU as one with the shared runtime."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nvidia
import pytest

from fakedist.gpu.driver.build import find_cuda, include_flags
from fakedist.gpu.native import find_c_compiler
from tests.conftest import ROOT
from tests.support.virtual import on_virtual_gpu

JOBS = Path(__file__).parent / "jobs"
#: Where the wheels of the CUDA runtime put it: nvidia-cuda-runtime, and for CUDA 12 nvidia-cuda-runtime-cu12.
STATIC = {"cuda13": "cu13/lib/libcudart_static.a", "cuda12": "cuda_runtime/lib/libcudart_static.a"}
#: Calls everything, prints what was answered, and what the driver counted and logged.
_SCRIPT = """
import ctypes, json, sys
from fakedist.gpu.launch_log import LaunchKind, LaunchLog
from fakedist.gpu.models.catalogue import find_gpu
from fakedist.gpu.virtual import virtual_gpu
with virtual_gpu(find_gpu("h100-80g"), 2) as gpu:
    log = LaunchLog()
    library = ctypes.CDLL(sys.argv[1])
    log.begin()
    assert library.call_all(sys.argv[2].encode()) == 0
    order = {0: 0}
    launches = [
        [LaunchKind(each.kind).name, order.setdefault(each.stream, len(order)), log.name(each), each.bytes]
        + [each.direction, each.pinned, each.graph, list(each.grid), list(each.block)]
        for each in log.end()
    ]
    print(json.dumps({"launches": launches, "counters": gpu.counters(), "refused": gpu.refused()}))
"""


@dataclass(frozen=True)
class Seen:
    """Answers that a library got, line by line; the log of launches; the driver's counters and what it refused."""

    answers: list[str]
    launches: list[Any]
    counters: dict[str, int]
    refused: list[Any]


def static_runtime(name: str) -> Path:
    """A static runtime by its key in STATIC, or skip."""
    found = [path for root in nvidia.__path__ if (path := Path(root) / STATIC[name]).exists()]
    if not found:
        wheel = "nvidia-cuda-runtime" + ("-cu12" if name == "cuda12" else "")
        pytest.skip(f"libcudart_static.a of {name} is not installed: pip install {wheel}")
    return found[0]


def fat_binary(path: Path) -> Path:
    """The machine code of scale.ptx for an H100, packed as nvcc packs it."""
    triton = pytest.importorskip("triton")
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    subprocess.run([ptxas, "-arch", "sm_90", JOBS / "scale.ptx", "-o", path], check=True)
    code = path.read_bytes()
    code += bytes(-len(code) % 8)
    entry = struct.pack("<HHIQIIHHIIIQQQ", 2, 0x101, 64, len(code), 0, 0, 8, 1, 90, 0, 0, 0x11, 0, 0)
    path.write_bytes(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entry) + len(code)) + entry + code)
    return path


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Build runtime_calls.c with the shared runtime or one of STATIC, by its name."""
    directory = tmp_path_factory.mktemp("runtimes")
    image = fat_binary(directory / "scale.fatbin")

    def built(name: str) -> Path:
        path = directory / f"{name}.so"
        # The shared runtime is the driver's own, which is loaded before.
        libraries = [] if name == "shared" else [static_runtime(name), "-ldl", "-lrt", "-lpthread", "-lstdc++"]
        flags = include_flags(find_cuda())
        if name == "cuda12":
            flags = [f"-isystem{static_runtime(name).parents[1] / 'include'}", *flags]
        command = [find_c_compiler(), "-shared", "-fPIC", f'-DIMAGE="{image}"', *flags, JOBS / "runtime_calls.c"]
        done = subprocess.run([*command, "-o", path, *libraries], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return path

    return built


@pytest.fixture(scope="module")
def seen(build: Callable[[str], Path]) -> Callable[[str], Seen]:
    """Look at the GPU through the library with a runtime, each time in a process of its own."""

    def look(name: str) -> Seen:
        library = build(name)
        answers = library.with_suffix(".txt")
        command = [sys.executable, "-c", _SCRIPT, str(library), str(answers)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        # Each runtime says its own version; everything else is the GPU's.
        lines = [line for line in answers.read_text().splitlines() if not line.startswith("runtime ")]
        return Seen(lines, **json.loads(done.stdout))

    return look


@pytest.mark.parametrize("name", STATIC)
def test_a_static_runtime_is_answered_as_the_shared_one(name: str, seen: Callable[[str], Seen]) -> None:
    static, shared = seen(name), seen("shared")
    assert shared.refused == []
    assert static.refused == []
    assert len(shared.answers) > 300
    assert static.answers == shared.answers
    assert static.launches == shared.launches
    assert static.counters == shared.counters
    assert shared.counters["launches"] == 7  # four kernels, and a graph of a kernel and its replays
    # What the figures must be, whatever the runtime: two allocations, rounded up to 2 MiB, and one that is refused. The
    # first lies in a reservation of the context, 24 MiB below its end, the second 552 MiB below the first.
    assert f"taken {68 << 20}, apart {-552 << 20}" in shared.answers
    assert "left over 0" in shared.answers
    assert "cudaMalloc(&first, 1ull << 40): cudaErrorMemoryAllocation" in shared.answers
    assert "shift 4 5" in shared.answers
    assert "calls 2, bytes 7 7 1" in shared.answers


def test_a_static_runtime_shares_torchs_gpu(build: Callable[[str], Path]) -> None:
    """One ledger, one context, one current device; an error of the one is not an error of the other."""
    library = build("cuda13")
    found = on_virtual_gpu(
        f"""
        import ctypes
        library = ctypes.CDLL({str(library)!r})
        free = ctypes.c_size_t.in_dll(library, "free_now")
        tensor = torch.full((1024,), 3.0, device="cuda")
        before = torch.cuda.mem_get_info()[0]
        found["taken"] = library.take(ctypes.c_size_t(64 << 20))
        found["seen_by_torch"] = before - torch.cuda.mem_get_info()[0]
        found["seen_by_library"] = before - free.value
        found["allocated"] = torch.cuda.memory_allocated()
        found["refused"] = library.take(ctypes.c_size_t(1 << 40))
        torch.zeros(8, device="cuda")  # raises the runtime's last error, if there is one
        number = ctypes.c_float()
        found["read"] = library.read_number(ctypes.c_void_p(tensor.data_ptr()), ctypes.byref(number))
        found["number"] = number.value
        torch.cuda.set_device(1)
        found["device"] = library.current()
        """,
        devices=2,
    )
    assert found["taken"] == found["read"] == 0
    assert found["seen_by_torch"] == found["seen_by_library"] == 64 << 20
    assert found["allocated"] == 4096
    assert found["refused"] == 2  # cudaErrorMemoryAllocation
    assert found["number"] == 3.0
    assert found["device"] == 1
