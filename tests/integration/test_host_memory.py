"""A long run of a large job costs the host less than 2 GB, and no more the longer it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, clean_environment

JOB = ROOT / "bench" / "jobs" / "transformer_10b.py"
LIMIT_BYTES = 2_000_000_000


def profiled(tmp_path: Path, steps: int) -> tuple[int, int]:
    """Most bytes of host memory that a process of the run held, and the peak of reserved device memory."""
    run = tmp_path / f"run{steps}"
    options = ["--world-size", "1", "--rank", "0", "--device", "virtual", "--gpu-memory", "unlimited", "-o", str(run)]
    # One step more than the script takes: it ends by itself.
    script = ["--steps", str(steps + 1), str(JOB), "--steps", str(steps), "--layers", "30"]
    command = [sys.executable, "-m", "fakedist", "profile", *options, *script]
    with (tmp_path / "printed").open("w") as printed:
        process = subprocess.Popen(command, env=clean_environment(), stdout=printed, stderr=subprocess.STDOUT)
        # wait4 counts the rank's process too, which fakedist waited for, and keeps the largest.
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    text = (tmp_path / "printed").read_text()
    assert process.returncode == 0, text
    assert text.count("step_ms") == steps
    reserved = next(line for line in text.splitlines() if line.strip().startswith("reserved"))
    assert reserved.split()[2] == "GiB"
    return usage.ru_maxrss * 1024, int(float(reserved.split()[1]) * (1 << 30))


@pytest.mark.nightly
def test_fifty_steps_of_a_job_of_100_gib_stay_under_2_gb_of_host_memory(tmp_path: Path) -> None:
    short_bytes, reserved_bytes = profiled(tmp_path, 5)
    assert reserved_bytes > 100 << 30
    long_bytes, _ = profiled(tmp_path, 50)
    # With what the script itself takes: importing torch and a CUDA build's libraries.
    assert long_bytes < LIMIT_BYTES
    assert long_bytes - short_bytes < 300_000_000
