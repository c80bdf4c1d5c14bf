"""CUDA extensions, with the shared CUDA runtime and with one that is linked statically."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pandas
import pytest

from fakedist.gpu.driver.build import driver_api_names, find_cuda, interface_versions
from tests.conftest import RunFakedist
from tests.support.virtual import on_virtual_gpu

JOBS = Path(__file__).parent / "jobs"


@dataclass(frozen=True)
class Called:
    """A run that calls the extension: what the calls answered, stderr, what was refused.

    ``compiled`` is what ptxas said of the kernels, ``taken`` what the extension got of them, ``categories`` the
    bytes of each at the peak.
    """

    answers: list[str]
    stderr: str
    refused: list[str]
    compiled: str
    taken: list[str]
    categories: dict[str, int]


def nvcc() -> str | None:
    """The CUDA compiler: of $CUDA_HOME, of the wheel nvidia-cuda-nvcc, of an installed toolkit, or on PATH."""
    import nvidia

    homes = [os.environ.get("CUDA_HOME"), *(f"{path}/cu13" for path in nvidia.__path__), "/usr/local/cuda"]
    found = (shutil.which("nvcc", path=f"{home}/bin") for home in homes if home)
    return next((path for path in found if path), shutil.which("nvcc"))


@pytest.fixture(scope="module", params=["shared", "static"])
def called(
    request: pytest.FixtureRequest, run_fakedist: RunFakedist, tmp_path_factory: pytest.TempPathFactory
) -> Called:
    """A run that calls the extension, linked with one of the two CUDA runtimes and named after it."""
    compiler = nvcc()
    if compiler is None:
        pytest.skip("nvcc is not installed: pip install nvidia-cuda-nvcc, or set CUDA_HOME")
    directory = tmp_path_factory.mktemp("extension")
    built = directory / f"{request.param}.so"
    command = [compiler, "-shared", "-Xcompiler", "-fPIC", "-cudart", request.param, "-arch", "sm_90", "-Xptxas=-v"]
    done = subprocess.run([*command, JOBS / "extension.cu", "-o", built], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    options = ["--device", "virtual", "--gpu", "h100-80g", "--world-size", "4", "--rank", "0", "--output", "run"]
    finished = run_fakedist("profile", *options, JOBS / "extension.py", built, cwd=directory)
    assert finished.code == 0, finished.stderr
    said = {line.split()[0]: line.split()[1:] for line in finished.stdout.splitlines() if line}
    refused = list(pandas.read_parquet(directory / "run/tables/unanswered.parquet")["function"])
    categories = run_fakedist("report", "run", "--json", cwd=directory).json()["by_category"]
    return Called(said["EXTENSION"], finished.stderr, refused, done.stderr, said["TAKEN"], categories)


@pytest.mark.long
def test_an_extension_is_answered_with_either_runtime(called: Called) -> None:
    assert called.answers == ["cudaSuccess", "cudaSuccess", str(64 << 20)]
    assert called.refused == []
    assert "not answered" not in called.stderr


@pytest.mark.long
def test_what_a_librarys_own_products_work_in_is_workspace(called: Called) -> None:
    assert called.categories["workspace"] == 48 << 20


@pytest.mark.long
def test_a_kernel_takes_the_registers_and_the_shared_memory_that_the_compiler_gave_it(called: Called) -> None:
    expected = []
    for name, limit in (("scale", 1024), ("demanding", 256)):
        used = re.search(rf"{name}P.*?Used (\d+) registers(?:.*?(\d+) bytes smem)?", called.compiled, re.DOTALL)
        assert used, called.compiled
        registers, shared = int(used[1]), int(used[2] or 0) if name == "demanding" else 0
        of_block = -(-registers * 32 // 256) * 256 * 8  # 8 warps of 256 threads, registers in lots of 256 a warp
        expected += [registers, shared, limit, min(65536 // of_block, 2048 // 256)]
    assert called.taken == ["cudaSuccess", *map(str, expected)]
    assert expected[-1] < expected[3]  # registers limit the second kernel, threads the first


def test_a_name_means_the_interface_that_its_cuda_version_knew() -> None:
    found = on_virtual_gpu(
        """
        import ctypes
        driver = ctypes.CDLL("libcuda.so.1")
        def address(name, version):
            function = ctypes.c_void_p()
            driver.cuGetProcAddress_v2(name.encode(), ctypes.byref(function), version, ctypes.c_uint64(0), None)
            return [n for n in (name, f"{name}_v2") if function.value == ctypes.cast(driver[n], ctypes.c_void_p).value]
        for name, version in (("cuStreamGetCtx", 12010), ("cuStreamGetCtx", 12050), ("cuMemAlloc", 12000)):
            found[f"{name} {version}"] = address(name, version)
        """
    )
    assert found == {
        "cuStreamGetCtx 12010": ["cuStreamGetCtx"],
        "cuStreamGetCtx 12050": ["cuStreamGetCtx_v2"],
        "cuMemAlloc 12000": ["cuMemAlloc_v2"],
    }


def test_the_runtime_by_its_name_is_the_virtual_gpus() -> None:
    found = on_virtual_gpu(
        """
        import ctypes
        count = ctypes.c_int()
        runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
        found["status"] = runtime.cudaGetDeviceCount(ctypes.byref(count))
        found["devices"] = count.value
        found["refused"] = gpu.refused()
        """,
        devices=3,
    )
    assert found == {"status": 0, "devices": 3, "refused": []}


def test_memory_that_another_rank_shares_is_no_memory_of_this_gpu() -> None:
    found = on_virtual_gpu(
        """
        import ctypes
        class Handle(ctypes.Structure):
            _fields_ = [("reserved", ctypes.c_char * 64)]
        runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
        memory = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        free = torch.cuda.mem_get_info()[0]
        handle, theirs = Handle(), ctypes.c_void_p()
        runtime.cudaIpcOpenMemHandle.argtypes = [ctypes.POINTER(ctypes.c_void_p), Handle, ctypes.c_uint]
        found["shared"] = runtime.cudaIpcGetMemHandle(ctypes.byref(handle), ctypes.c_void_p(memory.data_ptr() + 512))
        found["opened"] = runtime.cudaIpcOpenMemHandle(ctypes.byref(theirs), handle, 1)
        found["taken"] = free - torch.cuda.mem_get_info()[0]
        found["closed"] = runtime.cudaIpcCloseMemHandle(theirs)
        found["on_host"] = runtime.cudaIpcGetMemHandle(ctypes.byref(handle), None)
        found["no handle"] = runtime.cudaIpcOpenMemHandle(ctypes.byref(theirs), Handle(), 1)
        """
    )
    assert found == {"shared": 0, "opened": 0, "taken": 0, "closed": 0, "on_host": 1, "no handle": 1}


def test_every_later_interface_is_a_function_of_the_driver() -> None:
    include = find_cuda().include
    assert include is not None
    later = {f"{name}_v{suffix}" for name, suffix, _ in interface_versions(include)}
    assert later
    assert later <= set(driver_api_names(include))
