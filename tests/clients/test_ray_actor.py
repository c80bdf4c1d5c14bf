"""A Ray actor that a script starts shares the memory of the rank's GPU."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

from tests.conftest import RunFakedist

pytestmark = pytest.mark.skipif(
    not any(importlib.metadata.distributions(name="ray")), reason="not installed: ray: make frameworks"
)
JOB = Path(__file__).parent / "jobs/ray_actor.py"
GIB, MIB = 1 << 30, 1 << 20


def test_an_actor_takes_memory_of_the_ranks_gpu_until_it_is_killed(run_fakedist: RunFakedist, tmp_path: Path) -> None:
    options = ["--device", "virtual", "--world-size", "8", "--rank", "0", "--gpu-memory", "10GiB", "--output", "run"]
    finished = run_fakedist("profile", *options, JOB, cwd=tmp_path)
    assert finished.code == 0, finished.stderr
    line = next(line for line in finished.stdout.splitlines() if line.startswith("FOUND "))
    found = json.loads(line.removeprefix("FOUND "))
    assert (found["before"], found["with"], found["after"]) == (9 * GIB, 8 * GIB, 9 * GIB)
    assert found["sum"] == 8.0
    assert "fakedist: a process that the script started joins a group of 2 ranks" in found["two"]
