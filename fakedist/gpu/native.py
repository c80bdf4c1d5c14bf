"""Compiles what fakedist builds on the user's machine, into a cache. Standard library only."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from fakedist.errors import SetupError

#: How many of the compiler's or linker's last lines an error shows.
_LINES_SHOWN = 10


def find_c_compiler() -> str:
    """The C compiler: $CC, else gcc, cc or clang.

    Raises:
        SetupError: No C compiler is installed.
    """
    return _find(
        (os.environ.get("CC"), "gcc", "cc", "clang"),
        "no C compiler was found; the virtual GPU is built from source at first use",
        "apt-get install gcc libc6-dev   (or: dnf install gcc glibc-devel)",
    )


def find_cpp_compiler(use: str) -> str:
    """The C++ compiler: $CXX, else g++, c++ or clang++.

    Args:
        use: What needs it, as the error says.

    Raises:
        SetupError: No C++ compiler is installed.
    """
    return _find(
        (os.environ.get("CXX"), "g++", "c++", "clang++"),
        f"no C++ compiler was found; {use}",
        "apt-get install g++   (or: dnf install gcc-c++)",
    )


def _find(names: tuple[str | None, ...], missing: str, remedy: str) -> str:
    for name in names:
        if name and (found := shutil.which(name)):
            return found
    raise SetupError(missing, remedy)


def cache_directory() -> Path:
    """Where built libraries are kept: $FAKEDIST_CACHE, else the user's cache directory, else a temporary one."""
    chosen = os.environ.get("FAKEDIST_CACHE")
    base = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fakedist"
    try:
        base.mkdir(parents=True, exist_ok=True)
        if os.access(base, os.W_OK):
            return base
    except OSError:
        pass
    if chosen:
        raise SetupError(f"FAKEDIST_CACHE={chosen} cannot be written", "choose a directory that you may write to")
    fallback = Path(tempfile.gettempdir()) / f"fakedist-{os.getuid()}"
    fallback.mkdir(mode=0o700, exist_ok=True)
    return fallback


def compile_native(command: list[str], what: str) -> None:
    """Run a compiler or linker.

    Args:
        command: Its command line.
        what: What it builds, as the error calls it.

    Raises:
        SetupError: It failed. The message ends with its last lines.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        shown = "".join(f"\n    {line}" for line in done.stderr.strip().splitlines()[-_LINES_SHOWN:])
        raise SetupError(
            f"{command[0]} could not build {what} (exit status {done.returncode}):{shown}",
            "install gcc with the C library's headers (apt-get install gcc libc6-dev), or set CC to another compiler",
        )
