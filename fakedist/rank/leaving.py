"""Ends the rank's process without Python's teardown, which frees a million objects of torch one by one.

What a script can notice of a teardown happens: destructors of what its own modules hold, and open files are written.
"""

from __future__ import annotations

import ctypes
import gc
import io
import os
import sys
import sysconfig
from contextlib import suppress
from types import ModuleType

from fakedist.record.alive import alive

_exit = os._exit  # not what watches the script's calls of it
_OURS = "fakedist"


def leave_at_once(code: int) -> None:
    """End this process. Call this last of all: after the script's threads and its ``atexit`` functions.

    Returns only if standard output or standard error cannot be written: the teardown reports that.

    Args:
        code: The exit code.
    """
    for module in _modules_of_script():
        _clear(module)
    gc.collect()  # what is part of a cycle is destroyed here
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # closed, replaced, or its reader went away
        return
    _write_files()
    ctypes.CDLL(None).fflush(None)  # what code in C has printed
    _exit(code)


def _modules_of_script() -> list[ModuleType]:
    """The main module, and others that are neither installed, nor Python's, nor ours; the last imported first."""
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    found = [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType)
        and name.partition(".")[0] != _OURS
        and (name == "__main__" or not (_file_of(module) or installed[0]).startswith(installed))
    ]
    return found[::-1]


def _file_of(module: ModuleType) -> str:
    """Where a module comes from; empty if it has no file. A module's ``__getattr__`` is not asked."""
    file = module.__dict__.get("__file__")
    return os.path.realpath(file) if isinstance(file, str) else ""


def _clear(module: ModuleType) -> None:
    """Drop a module's values in Python's order: private names first (``_PyModule_ClearDict``)."""
    names = [name for name in module.__dict__ if isinstance(name, str) and name != "__builtins__"]
    for name in sorted(names, key=lambda name: not name.startswith("_") or name.startswith("__")):
        module.__dict__[name] = None


def _write_files() -> None:
    """Write what files that are still open hold, text before the bytes that it becomes."""
    files = [each for each in alive(lambda of: issubclass(of, io.IOBase)) if isinstance(each, io.IOBase)]
    for file in sorted(files, key=lambda each: not isinstance(each, io.TextIOBase)):
        with suppress(Exception):  # a teardown does not report it either
            if not file.closed and file.writable():
                file.flush()
