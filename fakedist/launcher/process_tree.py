"""A process and its descendants, as /proc shows them: which they are, and how much memory they hold."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress

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
