"""The resources of this machine: real GPUs, cores and memory. Does not import torch."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from glob import glob
from pathlib import Path

#: Runs in its own process. A broken driver may crash or hang, and no CUDA context may stay in this process.
_COUNT_GPUS = os.fspath(Path(__file__).with_name("count_gpus.py"))


def count_real_gpus() -> int:
    """Number of real NVIDIA GPUs that a process started here would see, as CUDA_VISIBLE_DEVICES limits them."""
    if not (glob("/dev/nvidia[0-9]*") or Path("/dev/dxg").exists()):  # /dev/dxg: Windows Subsystem for Linux
        return 0
    try:
        counted = subprocess.run([sys.executable, "-I", _COUNT_GPUS], capture_output=True, text=True, timeout=60)
        return int(counted.stdout or 0)
    except (subprocess.TimeoutExpired, ValueError):
        return 0


def first_visible_gpu() -> str:
    """The value of CUDA_VISIBLE_DEVICES that selects the first GPU this process sees."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"


def host_memory_bytes() -> int:
    """Total memory of this machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def num_cores() -> int:
    """Number of cores that this process may use: its CPU affinity, or its control group's quota if that is less."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores


def free_memory_bytes() -> int:
    """Bytes that this process can still use: what is left on the machine, or in its control group if that is less."""
    free = host_memory_bytes()
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    with suppress(OSError, ValueError):  # "max" is not a number
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    return free
