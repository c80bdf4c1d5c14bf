"""A wheel for Linux runs a rank on a machine without a compiler, with the figures of a driver compiled there."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from fakedist.gpu.driver.build import ensure_driver, find_cuda
from tests.conftest import ROOT, clean_environment
from tests.support.runs import Finished, ProfileOnce
from tests.support.wheel import build_wheel
from tools.platform_wheel import with_drivers

pytestmark = pytest.mark.long

JOB = ROOT / "examples" / "ddp_gpt.py"
ARGUMENTS = ("--model", "debug", "--batch-size", "2", "--accumulate", "2")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``fakedist`` of an environment into which pip has installed such a wheel; its torch is the tests' own."""
    scratch = tmp_path_factory.mktemp("installed")
    everywhere, cuda = build_wheel(scratch), find_cuda().cuda_version
    wheel = with_drivers(everywhere, {cuda: ensure_driver()}, f"linux_{os.uname().machine}")
    venv.create(scratch / "venv", symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = scratch / "venv" / "lib" / version / "site-packages"
    pip = [sys.executable, "-m", "pip", "--python", scratch / "venv" / "bin" / "python", "install", "--no-deps"]
    environment = {name: value for name, value in clean_environment().items() if name != "PYTHONPATH"}
    install = [*pip, "--no-index", "--quiet", wheel]
    subprocess.run(install, check=True, capture_output=True, cwd=scratch, env=environment)
    (packages / "tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return scratch / "venv" / "bin" / "fakedist"


def ran(installed: Path, tmp_path: Path, *arguments: str | Path) -> Finished:
    """A command of the installed package, where no compiler is on the PATH and nothing is in the cache."""
    environment = clean_environment() | {"PATH": str(installed.parent), "FAKEDIST_CACHE": str(tmp_path / "cache")}
    environment = {name: value for name, value in environment.items() if name not in ("CC", "CXX", "PYTHONPATH")}
    done = subprocess.run([installed, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)
    return Finished(done.returncode, done.stdout, done.stderr)


def test_a_rank_runs_without_a_compiler(installed: Path, tmp_path: Path, profile_once: ProfileOnce) -> None:
    options = ("--world-size", "8", "--rank", "0", "--json", "--output", "run")
    done = ran(installed, tmp_path, "profile", *options, JOB, *ARGUMENTS)
    summary, compiled_here = done.json(), profile_once(JOB, *ARGUMENTS).summary
    for figure in ("peak_allocated_bytes", "peak_reserved_bytes", "by_category"):
        assert summary[figure] == compiled_here[figure]
    said = [line for line in done.stderr.splitlines() if "no C++ compiler was found" in line]
    assert len(said) == 1
    assert "recorded in Python" in said[0]


def test_doctor_needs_no_compiler_either(installed: Path, tmp_path: Path) -> None:
    done = ran(installed, tmp_path, "doctor")
    assert done.code == 0, done.stdout
    assert "--device virtual works here" in done.stdout
    assert "optional  C compiler" in done.stdout


def test_another_cuda_says_what_to_install(installed: Path, tmp_path: Path) -> None:
    """The driver of a later CUDA stands where that of the installed one was."""
    (held,) = installed.parents[1].glob("lib/*/site-packages/fakedist/gpu/driver/prebuilt/*")
    held.rename(held.with_name("99.1"))
    try:
        done = ran(
            installed, tmp_path, "profile", "--world-size", "8", "--rank", "0", "--output", "run", JOB, *ARGUMENTS
        )
    finally:
        held.with_name("99.1").rename(held)
    assert done.code == 1
    assert "no C compiler was found" in done.stderr
    assert "this package has drivers for CUDA 99.1, torch" in done.stderr
    assert "apt-get install gcc" in done.stderr
