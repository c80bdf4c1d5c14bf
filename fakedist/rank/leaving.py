"""Ends the rank's process without Python's teardown, which frees a million objects, if nothing depends on it."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from typing import Any

from fakedist.rank.ending import LIBRARY
from fakedist.rank.preloading import TORCH
from fakedist.record.alive import alive

_BUFFERS = ("TextIOWrapper", "BufferedWriter", "BufferedRandom", "BufferedRWPair")
#: Types whose objects hold code that runs at an end, and their attributes that lead to it.
_HOLDERS = {
    "generator": "gi_frame", "coroutine": "cr_frame", "async_generator": "ag_frame", "ReferenceType": "__callback__",
}  # fmt: skip


def leave_at_once(code: int) -> None:
    """End this process, last of all. Returns if a teardown would run code, stop a thread of the script's or write."""
    frames = [frame for thread, frame in sys._current_frames().items() if thread != threading.get_ident()]
    for frame in frames:
        if _is_scripts(frame.f_globals):
            return
        frames += [frame.f_back] if frame.f_back is not None else []
    if any(map(_is_noticed, alive(_may_be_noticed))):
        return
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # closed, replaced, or its reader went away
        return
    ctypes.CDLL(None).fflush(None)  # for code in C
    os._exit(code)


def _may_be_noticed(of: type) -> bool:
    if of.__module__ in ("builtins", "weakref", "_io"):
        return of.__name__ in _HOLDERS or of.__name__ in _BUFFERS
    owners = [str(one.__module__).partition(".")[0] for one in of.__mro__ if "__del__" in vars(one)]
    return any(owner not in TORCH and owner != "filelock" for owner in owners)  # these release what the process has


def _is_noticed(one: Any) -> bool:
    if (attribute := _HOLDERS.get(type(one).__name__)) is not None:
        held = getattr(one, attribute, None)
        return _is_scripts(getattr(held, "f_globals", None) or getattr(held, "__globals__", None))
    try:
        return type(one).__module__ != "_io" or (not one.closed and one.writable() and one.fileno() > 2)
    except (OSError, ValueError):  # of no file, or detached
        return False


def _is_scripts(names: Any) -> bool:
    name, file = (str((names or {}).get(one) or "") for one in ("__name__", "__file__"))
    is_library = "-packages/" in file or file.startswith(LIBRARY) or name.startswith("fakedist.")
    return name == "__main__" or bool(file and not is_library)
