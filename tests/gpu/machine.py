"""The GPU of this machine, looked at from a process of its own: a CUDA context here would be measured with the jobs."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from fakedist.gpu.driver.build import torch_build
from fakedist.gpu.models.catalogue import find_gpu

_LOOK = """
import json, torch
found = torch.cuda.get_device_properties(0)
print(json.dumps({"gpu": found.name, "capacity_bytes": found.total_memory}))
"""


class NoGpuError(Exception):
    """The machine's GPU cannot be used; the last words of the process that tried."""


def driver_version() -> str:
    """The NVIDIA driver's version, from the kernel module; empty where it cannot be read."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else ""


def real_machine() -> dict[str, Any]:
    """``gpu``, ``capacity_bytes``, ``driver``, ``torch``, ``python`` of the real GPU.

    Raises:
        NoGpuError: torch cannot use it.
    """
    done = subprocess.run([sys.executable, "-c", _LOOK], capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise NoGpuError((done.stderr.strip().splitlines() or ["it said nothing"])[-1])
    return {**json.loads(done.stdout), "driver": driver_version(), **_versions()}


def rehearsed_machine(gpu: str) -> dict[str, Any]:
    """The same of the virtual GPU that stands in for a real one."""
    spec = find_gpu(gpu)
    return {"gpu": spec.product, "capacity_bytes": spec.memory_bytes, "driver": "", **_versions()}


def _versions() -> dict[str, str]:
    return {"torch": torch_build()[0], "python": sys.version.split()[0]}
