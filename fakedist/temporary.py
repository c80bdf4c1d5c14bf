"""Temporary directories and files. Those of a process that was killed go when fakedist starts next.

A process holds a lock (flock) on each of its temporary directories; the kernel releases it when the process ends. The
lock works across the containers and PID namespaces of a machine, but perhaps not across machines on a network file
system: so a directory's name has the kernel's boot ID, and only directories of this boot are removed.
"""

from __future__ import annotations

import fcntl
import functools
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fakedist.errors import SetupError

#: Prefix of the files that are being written next to those that they will replace.
FRESH_PREFIX = ".fakedist-"
_PREFIX = "fakedist"


@contextmanager
def scratch_directory(of: str, within: Path | None = None) -> Iterator[Path]:
    """A temporary directory that exists as long as the context. What killed processes left next to it goes first.

    Its name contains ``of``, one word. A missing ``within`` is the directory for temporary files.

    Raises:
        SetupError: It cannot be written.
    """
    remove_left_over(within)
    try:
        path, lock = _locked_directory(f"{_PREFIX}-{of}-{_boot()}-", within)
    except OSError as error:
        where = "the directory for temporary files" if within is None else str(within)
        raise SetupError(
            f"{where} cannot be written: {error.strerror}", "TMPDIR=DIR names another directory for temporary files"
        ) from error
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _locked_directory(prefix: str, within: Path | None) -> tuple[Path, int]:
    while True:
        path = tempfile.mkdtemp(prefix=prefix, dir=within)
        with suppress(FileNotFoundError):  # another process saw it before it was locked, and removed it
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with suppress(OSError):  # a file system without locks: no other process can lock it either
                fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.exists(path):
                return Path(path), lock
            os.close(lock)


def remove_left_over(within: Path | None = None) -> None:
    """Remove what this user's killed processes left in a directory, by default in that for temporary files."""
    ours = re.compile(rf"{_PREFIX}-\w+-{_boot()}-\w+")
    with suppress(OSError):
        folder = within or Path(tempfile.gettempdir())
        with os.scandir(folder) as entries:
            left = [Path(entry.path) for entry in entries if ours.fullmatch(entry.name)]
        # Where anyone may rename anything, a name says nothing.
        if left and _boot() and not is_open_to_all(os.stat(folder).st_mode):
            for path in left:
                _remove_if_left_over(path)


def _remove_if_left_over(path: Path) -> None:
    with suppress(OSError):
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(lock).st_uid == os.geteuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)


def kept_directory(of: str, seconds: float) -> Path:
    """A temporary directory that outlives this process. Earlier ones go once they are older than so many seconds.

    Its name contains ``of``, one word.
    """
    folder = Path(tempfile.gettempdir())
    for old in folder.glob(f"{_PREFIX}-{of}-*"):
        with suppress(OSError):
            if (status := old.lstat()).st_uid == os.geteuid() and status.st_mtime < time.time() - seconds:
                shutil.rmtree(old)
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}-{of}-"))


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The path of a new file that atomically replaces another when the context exits without an error.

    Its name cannot be guessed: in a directory that others can write to, a link could wait there.
    """
    fresh = path.with_name(f"{FRESH_PREFIX}{os.urandom(8).hex()}")
    try:
        yield fresh
        fresh.replace(path)
    finally:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)


def is_open_to_all(mode: int) -> bool:
    """Return whether everybody may rename what is in a directory of this mode."""
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX


@functools.cache
def _boot() -> str:
    """The kernel's boot, which all processes and containers of this machine share; empty if it is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")[:16]
    except OSError:
        return ""
