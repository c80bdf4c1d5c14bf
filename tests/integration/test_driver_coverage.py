"""Every CUDA function that torch and Triton can reach is answered, or refused by name for a known reason."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from fakedist.gpu.driver import build
from fakedist.gpu.driver.elf import exported_names
from tests.unit.gpu.driver import on_driver

#: What is refused on purpose. A function of a newer torch that is in none of these fails the test: it wants an answer.
REFUSED = {
    r"cusparseSpGEMM\w+|cusparse[SDCZX]csrgeam2\w*": "sparse results: how many places they have depends on values",
    r"cusparseLt\w+": "half sparse matrices: the sizes of what it compresses are the library's own",
    r"nccl(?!Mem)\w+": "process groups are fakedist's; NCCL itself would talk to other processes",
    r"cupti\w+": "CUPTI's counters, samples and callbacks: no kernel runs that could be looked into",
    r"cuFile\w+": "GPUDirect Storage reads files into memory that holds no data",
    r"cu(da)?Ipc\w+|cu(da)?MemPool(Export|Import)\w+": "memory of another process",
    r"cudaLibraryGet(Global|Managed|UnifiedFunction|KernelCount)": "what is inside a compiled image, which is not read",
    r"cudnn(Find|Get)?Convolution\w+": "cuDNN's convolutions of version 7; torch takes those of version 8",
    r"cublasLtMatmulAlgo(Init|ConfigSetAttribute)": "algorithms by number; the heuristics' are answered",
}
_TORCH_LIBRARIES = (
    "libtorch_cpu",
    "libc10_cuda",
    "libtorch_cuda",
    "libtorch_cuda_linalg",
    "libtorch_python",
    "libcaffe2_nvrtc",
)


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@cache
def _answers() -> tuple[set[str], set[str]]:
    """Functions that the built driver answers, and those that it refuses."""
    cuda = build.find_cuda()
    source = build.generated_source(cuda, build.installed_names(cuda))
    refused = set(re.findall(r"API int (\w+)\(void\) \{ return refuse_call", source))
    return set(exported_names(build.ensure_driver())) - refused, refused


@cache
def _stood_in_for() -> set[str]:
    cuda = build.find_cuda()
    assert cuda.include is not None
    libraries = {name for path in cuda.libraries.values() for name in exported_names(path)}
    return {name for name in libraries if build.is_interface(name)} | set(build.driver_api_names(cuda.include))


def _linked(library: Path) -> set[str]:
    done = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
    return {line.split()[-1].partition("@")[0] for line in done.stdout.splitlines()}


def _driver_names_in(path: Path) -> set[str]:
    """Names of driver functions in a file: they are fetched by name, so no linker sees them."""
    return {name.decode() for name in re.findall(rb"\bcu[A-Z][A-Za-z0-9]+(?:_v\d)?\b", path.read_bytes())}


def _gaps(used: set[str]) -> list[str]:
    """Of these, what is neither answered, as it is or in a later form of its interface, nor known to be refused."""
    answered, _ = _answers()
    known = re.compile("|".join(f"(?:{pattern})" for pattern in REFUSED))
    left = {name for name in used if not answered & {name, f"{name}_v2", f"{name}_v3"}}
    return sorted(name for name in left if not build.is_harmless(name) and not known.fullmatch(name))


@pytest.mark.parametrize("name", _TORCH_LIBRARIES)
def test_what_torch_is_linked_with_is_answered(name: str) -> None:
    used = _linked(_package("torch") / "lib" / f"{name}.so") & _stood_in_for()
    assert used or name == "libcaffe2_nvrtc"
    assert _gaps(used) == []


def test_what_c10_fetches_from_the_driver_by_name_is_answered() -> None:
    cuda = build.find_cuda()
    assert cuda.include is not None
    names = _driver_names_in(_package("torch") / "lib" / "libc10_cuda.so") & set(build.driver_api_names(cuda.include))
    assert "cuMemAddressReserve" in names
    assert _gaps(names) == []


def test_what_c10_fetches_from_nvml_by_name_is_answered() -> None:
    found = re.findall(
        rb"\bnvml[A-Z][A-Za-z0-9]+(?:_v\d)?(?=\0)", (_package("torch") / "lib/libc10_cuda.so").read_bytes()
    )
    assert len(found) > 3
    assert sorted({name.decode() for name in found} - _answers()[0]) == []


def test_what_tritons_launcher_needs_is_answered() -> None:
    pytest.importorskip("triton")
    cuda = build.find_cuda()
    assert cuda.include is not None
    backend = _package("triton") / "backends" / "nvidia"
    names = _driver_names_in(backend / "driver.c") | _driver_names_in(backend / "driver.py")
    names &= set(build.driver_api_names(cuda.include))
    assert "cuLaunchKernelEx" in names
    assert _gaps(names) == []


def test_every_function_of_every_library_is_answered_or_refused_by_name() -> None:
    answered, refused = _answers()
    left = {name for name in _stood_in_for() - answered - refused if not build.is_harmless(name)}
    assert left == set()
    assert len(refused) > 1000


def test_no_reason_to_refuse_is_left_over() -> None:
    _, refused = _answers()
    assert [pattern for pattern in REFUSED if not any(re.fullmatch(pattern, name) for name in refused)] == []


def test_every_function_of_nvml_is_answered_or_not_supported() -> None:
    names = build.nvml_names()
    assert len(names) > 430
    assert sorted(set(names) - _answers()[0]) == []
    found = on_driver(
        """
nvml = ctypes.CDLL("libnvidia-ml.so.1")
found["links"] = nvml.nvmlDeviceGetNvLinkState(c_void_p(1), 0, byref(c_uint()))
found["events"] = nvml.nvmlEventSetCreate(byref(c_void_p()))
found["refused"] = gpu.refused()
"""
    )
    assert found == {"links": 3, "events": 3, "refused": []}, "NVML_ERROR_NOT_SUPPORTED"
