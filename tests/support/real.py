"""Every rank of an example, run for real on CPUs."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.conftest import ROOT, clean_environment

Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class RealRun:
    """The results of the ranks.

    Attributes:
        codes: Exit code of each rank.
        gradients: Of each rank that trained, those of the last step, by name.
        losses: What was printed as "loss", in order.
    """

    codes: list[int]
    gradients: dict[int, Gradients]
    losses: list[float]


def run_for_real(example: str, world_size: int, folder: Path, function: str, *arguments: str) -> RealRun:
    """Run an example of ``examples/``; ``function`` is called with the module when its gradients are done."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    worker = ROOT / "tests" / "integration" / "jobs" / "real_ranks.py"
    command = [sys.executable, worker, ROOT / "examples" / example, world_size, folder, function, *arguments]
    finished = subprocess.run(
        [*map(str, command)],
        env=clean_environment() | {"CUDA_VISIBLE_DEVICES": "", "REAL_RANKS_PORT": str(port)},
        capture_output=True,
        text=True,
    )
    said = "\n".join(path.read_text() for path in sorted(folder.glob("rank*.txt")))
    assert finished.returncode == 0, finished.stderr + said
    codes = [int(line.split()[1]) for line in finished.stdout.splitlines()]
    assert set(codes) == {0}, said
    gradients = {
        rank: torch.load(folder / f"rank{rank}.pt")
        for rank in range(world_size)
        if (folder / f"rank{rank}.pt").exists()
    }
    return RealRun(codes, gradients, [float(found) for found in re.findall(r"loss ([\d.]+)", said)])
