"""The driver under AddressSanitizer, with sixteen threads at once; and what it says when it crashes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fakedist.gpu.driver import build
from fakedist.gpu.native import find_c_compiler
from tests.conftest import ROOT

STRESS = Path(__file__).parent / "driver_stress.c"
SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1", "-std=gnu11", "-pthread")


@pytest.fixture(scope="module")
def stress(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver's sources and the stress program in one, with sanitizers."""
    cuda = build.find_cuda()
    made = tmp_path_factory.mktemp("stress")
    (made / "generated.c").write_text(build.generated_source(cuda, build.installed_names(cuda)))
    sources = [*build.sources(), made / "generated.c", STRESS]
    # AddressSanitizer keeps its own memory where the driver's addresses begin.
    flags = [*SANITIZED, "-DRANGE_BASE=0x200000000000ull", *build.include_flags(cuda)]
    command = [find_c_compiler(), *flags, *map(str, sources), "-ldl", "-o", str(made / "stress")]
    subprocess.run(command, check=True)
    return made / "stress"


@pytest.mark.nightly
def test_sixteen_threads_leave_nothing_behind_and_touch_nothing_that_is_not_theirs(stress: Path) -> None:
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}  # ended captures are kept (streams.c)
    done = subprocess.run([stress], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cuTexRefCreate is not answered") == 1
    assert "AddressSanitizer" not in done.stderr


def test_a_crash_inside_of_an_answer_names_the_call() -> None:
    code = """
from fakedist.gpu.models.catalogue import find_gpu
from fakedist.gpu.virtual import virtual_gpu
with virtual_gpu(find_gpu("h100-80g")):
    import ctypes
    ctypes.CDLL("libcuda.so.1").cudaGetDeviceCount(ctypes.c_void_p(8))
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == -11
    assert "fakedist: crash inside of cudaGetDeviceCount" in done.stderr


def test_a_process_that_does_not_ask_sees_no_gpu() -> None:
    """The library is loaded and not configured: it then is as on a machine without a GPU, and silent."""
    code = """
import ctypes, os
from fakedist.gpu.driver.build import ensure_driver
driver = ctypes.CDLL(os.fspath(ensure_driver()), mode=ctypes.RTLD_GLOBAL)
import torch
assert not torch.cuda.is_available()
assert driver.cuTexRefCreate(None) != 0
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "fakedist" not in done.stderr
