"""Scripts find what the real launchers set: the same variables, with the same values, and the same arguments."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fakedist.options import Job
from fakedist.world.environ import rank_environment

_DUMP = """
import json, os, sys
with open(f"told.{os.environ['RANK']}", "w") as file:
    json.dump([dict(os.environ), sys.argv[1:]], file)
"""
#: Of one run: the port, a file for a traceback, and the launcher's own signal handling.
_OF_THE_RUN = {"MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "LC_CTYPE"}


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


_WORLD = base64.urlsafe_b64encode(json.dumps({"one": [0, 1], "two": [0, 1]}).encode()).decode()
LAUNCHERS: dict[str, tuple[list[str], Job]] = {
    "torchrun": (
        ["torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={_free_port()}"],
        Job(world_size=2, rank=1, target="dump.py", gpus_per_node=2),
    ),
    "accelerate": (
        ["accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1", "--main_process_port=0"],
        Job(world_size=2, rank=1, target="dump.py", gpus_per_node=2, launcher="accelerate"),
    ),
    "deepspeed": (
        ["deepspeed.launcher.launch", f"--world_info={_WORLD}", "--node_rank=1", "--master_port=29500"],
        Job(world_size=4, rank=3, target="dump.py", gpus_per_node=2, launcher="deepspeed"),
    ),
}


def told(directory: Path, name: str) -> tuple[dict[str, Any], list[str]]:
    """The variables that the real launcher sets for the rank, and the script's arguments."""
    command, job = LAUNCHERS[name]
    if importlib.util.find_spec(command[0].partition(".")[0]) is None:
        pytest.skip(f"{name} is not installed")
    before = {"PATH": os.environ["PATH"], "HOME": str(directory)}
    (directory / "dump.py").write_text(_DUMP)
    finished = subprocess.run(
        [sys.executable, "-m", *command, "dump.py", "--flag", "its own"],
        cwd=directory,
        env=before,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    environment, arguments = json.loads((directory / f"told.{job.rank}").read_text())
    changed = {key: value for key, value in environment.items() if before.get(key) != value}
    return {key: value for key, value in changed.items() if key not in _OF_THE_RUN}, arguments


@pytest.mark.parametrize("name", list(LAUNCHERS))
def test_the_script_finds_what_the_real_launcher_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    environment, arguments = told(tmp_path, name)
    job = LAUNCHERS[name][1]
    assert {key: value for key, value in rank_environment(job).items() if key not in _OF_THE_RUN} == environment
    assert (*job.script_arguments, "--flag", "its own") == tuple(arguments)
