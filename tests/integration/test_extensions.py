"""CUDA extensions: one with the shared CUDA runtime works; one that brings a static runtime is refused by name."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pandas
import pytest

from tests.conftest import RunFakedist

JOBS = Path(__file__).parent / "jobs"


@dataclass(frozen=True)
class Called:
    """What a run that calls the extension left: its runtime, what the calls answered, stderr, what was refused."""

    runtime: str
    answers: list[str]
    stderr: str
    refused: list[str]


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
    command = [compiler, "-shared", "-Xcompiler", "-fPIC", "-cudart", request.param, "-arch", "sm_90"]
    done = subprocess.run([*command, JOBS / "extension.cu", "-o", built], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    options = ["--device", "virtual", "--gpu", "h100-80g", "--world-size", "4", "--rank", "0", "--output", "run"]
    finished = run_fakedist("profile", *options, JOBS / "extension.py", built, cwd=directory)
    assert finished.code == 0, finished.stderr
    line = next(line for line in finished.stdout.splitlines() if line.startswith("EXTENSION"))
    refused = pandas.read_parquet(directory / "run/tables/unanswered.parquet")
    return Called(request.param, line.split()[1:], finished.stderr, list(refused["function"]))


def test_an_extension_is_answered_or_refused_by_name(called: Called) -> None:
    if called.runtime == "shared":
        assert called.answers == ["cudaSuccess", "cudaSuccess", str(64 << 20)]
        assert called.refused == []
        assert "not answered" not in called.stderr
    else:
        assert called.answers == ["cudaErrorNotSupported", "cudaErrorNotSupported", "0"]
        name = "cuGetExportTable (the CUDA runtime linked statically into static.so; a shared one is answered)"
        assert called.refused == [name]
        assert f"fakedist: {name} is not answered by the virtual GPU" in called.stderr
