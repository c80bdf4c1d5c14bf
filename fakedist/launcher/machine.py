"""The resources of this machine: real GPUs, cores and memory. Does not import torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from glob import glob
from pathlib import Path
from typing import NamedTuple

#: Runs in its own process. A broken driver may crash or hang, and no CUDA context may stay in this process.
_COUNT_GPUS = os.fspath(Path(__file__).with_name("count_gpus.py"))
#: A process writes a few GiB in a second.
_LEAST_FREE = 2 << 30


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


class Memory(NamedTuple):
    """Bytes that this process can still use, of how many."""

    free: int
    total: int

    @property
    def is_nearly_gone(self) -> bool:
        """Whether so little is left that the kernel may end processes any moment."""
        return self.free < min(self.total // 16, _LEAST_FREE)


def memory(root: Path = Path("/")) -> Memory:
    """The machine's memory, or that of the control group that has the least left. ``root`` has ``proc`` and ``sys``."""
    least = Memory(host_memory_bytes(), host_memory_bytes())
    with suppress(OSError, ValueError, StopIteration):
        lines = (root / "proc/meminfo").read_text().splitlines()
        free, total = (next(line for line in lines if line.startswith(name)) for name in ("MemAvailable:", "MemTotal:"))
        least = Memory(1024 * int(free.split()[1]), 1024 * int(total.split()[1]))
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            version = 2 if not controllers else 1 if "memory" in controllers.split(",") else 0
            if version:
                least = min((least, *_of_groups(root, path.strip("/"), _GROUPS[version], least.total)))
    return least


class _Files(NamedTuple):
    """Names of a control group's files: its folder, its limit, what it uses, and what of that the kernel can drop."""

    folder: str
    limit: str
    used: str
    droppable: str


_GROUPS = {
    1: _Files("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: _Files("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
}


def _of_groups(root: Path, path: str, files: _Files, total: int) -> Iterator[Memory]:
    """Yield the memory left in a control group and in those above it. A container may see none above its own.

    Groups without a limit below ``total`` have none of their own.
    """
    names = path.split("/") if path else []
    for depth in range(len(names), -1, -1):
        group = os.path.join(root, files.folder, *names[:depth])
        with suppress(OSError, ValueError):  # "max" is not a number
            if (limit := int(_read(group, files.limit))) >= total:
                continue
            used = int(_read(group, files.used))
            known = dict(line.split() for line in _read(group, "memory.stat").splitlines())
            yield Memory(limit - used + int(known.get(files.droppable, 0)), limit)


def _read(folder: str, name: str) -> str:
    with open(f"{folder}/{name}") as file:
        return file.read()


def free_memory_bytes() -> int:
    """Bytes that this process can still use: what is left on the machine, or in its control group if that is less."""
    return memory().free
