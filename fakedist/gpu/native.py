"""Compiles what fakedist builds on the user's machine, into a cache. Standard library only."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fakedist.errors import SetupError
from fakedist.temporary import is_open_to_all, scratch_directory

#: How many of the compiler's or linker's last lines an error shows.
_LINES_SHOWN = 10


def find_c_compiler(why: str = "") -> str:
    """The C compiler: $CC, else gcc, cc or clang. SetupError without any, which says ``why`` one is needed."""
    return _find(
        (os.environ.get("CC"), "gcc", "cc", "clang"),
        f"no C compiler was found; the virtual GPU is built from source at first use{why and f' ({why})'}",
        "apt-get install gcc libc6-dev, or dnf install gcc glibc-devel",
    )


def find_cpp_compiler(use: str) -> str:
    """The C++ compiler: $CXX, else g++, c++ or clang++. SetupError, which names its use, without any."""
    return _find(
        (os.environ.get("CXX"), "g++", "c++", "clang++"),
        f"no C++ compiler was found; {use}",
        "apt-get install g++, or dnf install gcc-c++",
    )


def _find(names: tuple[str | None, ...], missing: str, remedy: str) -> str:
    for name in names:
        if name and (path := shutil.which(name)):
            return path
    raise SetupError(missing, remedy)


def cache_directory() -> Path:
    """Directory of built libraries: $FAKEDIST_CACHE, the user's cache or a temporary one. SetupError if all are
    unusable.

    Libraries are loaded from it, so the directory must be this user's, and closed to others.
    """
    chosen = os.environ.get("FAKEDIST_CACHE")
    if chosen:
        candidates = [Path(chosen)]
    else:
        own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fakedist"
        candidates = [own, Path(tempfile.gettempdir()) / f"fakedist-{os.geteuid()}"]
    refused = []
    for path in candidates:
        if not (why := _why_not_ours(path)):
            return path
        refused.append(f"{path} {why}")
    raise SetupError(
        f"no directory for built libraries: {'; '.join(refused)}",
        "FAKEDIST_CACHE=DIR names one that only you may use",
    )


def _why_not_ours(path: Path) -> str:
    """Make a directory that only this user may enter, or say why this is none. Rights to read it are taken away."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        if os.lstat(path).st_uid != os.geteuid() or (status := os.stat(path)).st_uid != os.geteuid():
            return "belongs to another user"
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return "may be written by other users"
        above = next((parent for parent in path.resolve().parents if is_open_to_all(parent.stat().st_mode)), None)
        if above is not None:
            return f"may be moved by other users, who may write to {above}"
        if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            path.chmod(0o700)
    except OSError as error:
        return f"cannot be used: {error.strerror}"
    return "" if os.access(path, os.W_OK) else "cannot be written"


@contextmanager
def build_directory(cache: Path) -> Iterator[Path]:
    """A temporary directory to build in, for one process at a time: a C++ compiler takes a gigabyte of memory.

    A process that waited first checks whether another has built the same.
    """
    with (cache / "build.lock").open("a") as lock:
        with suppress(OSError):  # a file system without locks: each process builds its own
            fcntl.flock(lock, fcntl.LOCK_EX)
        with scratch_directory("build", cache) as scratch:
            yield scratch


def compile_native(command: list[str], product: str) -> None:
    """Run a compiler or linker for ``what``. SetupError, which ends with its last lines, if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        shown = "".join(f"\n    {line}" for line in done.stderr.strip().splitlines()[-_LINES_SHOWN:])
        raise SetupError(
            f"{command[0]} could not build {product} (exit status {done.returncode}):{shown}",
            "install gcc with the C library's headers (apt-get install gcc libc6-dev), or set CC to another compiler",
        )
