"""The resources of this machine: real GPUs, cores and memory. Does not import torch.

A process and its descendants, as /proc shows them: which they are, and how much memory they hold.

How a command that runs many jobs is ended from outside.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from glob import glob
from pathlib import Path
from typing import NamedTuple


@contextmanager
def ended_like_interrupted() -> Iterator[None]:
    """Treat SIGTERM, by which CI services and batch systems end a job, like Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_PAGE_BYTES = resource.getpagesize()
_RESCAN_S = 1.0
_END_S = 10.0


class ProcessTree:
    """The descendants of ``root``, which as a subreaper adopts orphans, without those that ``besides`` returns."""

    def __init__(self, root: int, besides: Callable[[], Collection[int | None]] = tuple) -> None:
        self._root = root
        self._besides = besides
        self._known: set[int] = set()
        self._rescan_at = 0.0

    def rss_bytes(self) -> int:
        """Resident memory of all of them. A page that several share counts for each. New ones are seen in a second."""
        if (now := time.monotonic()) >= self._rescan_at:  # reading all of /proc takes 5 ms
            self._known, self._rescan_at = self._descendants(), now + _RESCAN_S
        return sum(map(rss_bytes, self._known))

    def kill(self) -> None:
        """Kill all of them, also those that are started meanwhile. Whoever started them still has to reap them."""
        until = time.monotonic() + _END_S  # a process that hangs in the kernel does not end
        while (left := self._descendants()) and time.monotonic() < until:
            for pid in left:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _descendants(self) -> set[int]:
        return descendants(self._root).difference(self._besides())


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parents end. Their children do not inherit this."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextmanager
def nothing_left() -> Iterator[None]:
    """At the end, kill all descendants of this process, also those that have left its session."""
    adopt_orphans()
    try:
        yield
    finally:
        ProcessTree(os.getpid()).kill()


def descendants(root: int) -> set[int]:
    """The living descendants of a process."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        with suppress(OSError):
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b") ")[2].split(None, 2)[:2]  # proc(5)
            children.setdefault(int(parent), []).append(int(name) if state != b"Z" else -int(name))
    living: set[int] = set()
    unseen = [root]
    while unseen:
        below = children.get(unseen.pop(), [])
        living.update(below)
        unseen += map(abs, below)
    return {pid for pid in living if pid > 0}


def rss_bytes(pid: int) -> int:
    """Resident memory of one process; 0 if it has ended."""
    with suppress(OSError, IndexError), open(f"/proc/{pid}/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES
    return 0


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
