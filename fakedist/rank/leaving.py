"""Ends the rank's process without Python's teardown, which frees a million objects of torch one by one.

What a script can notice of a teardown happens: destructors of what its own modules hold, and open files are written.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import io
import os
import sys
import sysconfig
import threading
import weakref
from contextlib import suppress
from types import (
    AsyncGeneratorType,
    BuiltinFunctionType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    ModuleType,
)

from fakedist.rank.template.learned import TORCH, is_installed
from fakedist.record.alive import alive

_exit = os._exit  # not what watches the script's calls of it
_OURS = "fakedist"
#: What destructors use, so it goes last.
_CODE = (ModuleType, FunctionType, BuiltinFunctionType, type)
_SUSPENDED = (GeneratorType, CoroutineType, AsyncGeneratorType)
_FRAMES = ("gi_frame", "cr_frame", "ag_frame")
#: Packages whose destructors only release what the process has.
_RELEASING = TORCH | {"filelock"}
_File = io.IOBase.__base__  # an abstract class would note each type that it is asked about


def leave_at_once(code: int) -> None:
    """End this process. Call this last of all: after the script's threads and its ``atexit`` functions.

    Returns if a teardown is needed: a daemon thread runs the script's code, which only a teardown stops, or standard
    output or standard error cannot be written, which it reports.

    Args:
        code: The exit code.
    """
    modules = _modules_of_script()
    theirs = {id(module.__dict__) for module in modules}
    if _run_in_a_thread(theirs):
        return
    for is_code in (False, True):
        for module in modules:
            _clear(module, is_code)
        if not is_code and _any_end_is_noticed(theirs):
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
    """The main module, and those from its directory and below that are not installed there; the last imported first."""
    main, real = sys.modules["__main__"], functools.cache(os.path.realpath)
    library = f"{real(sysconfig.get_path('stdlib'))}{os.sep}"
    file = _file_of(main)
    directory = os.path.dirname(real(file))

    def is_scripts(name: str, module: ModuleType) -> bool:
        at, own = os.path.split(_file_of(module))
        place = os.path.join(real(at), own)
        if not (file and own and place.startswith(os.path.join(directory, ""))) or place.startswith(library):
            return False
        return name.partition(".")[0] != _OURS and not is_installed(place)

    found = [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and (module is main or is_scripts(name, module))
    ]
    return found[::-1]


def _file_of(module: ModuleType) -> str:
    """Where a module comes from; empty if it has no file. A module's ``__getattr__`` is not asked."""
    file = module.__dict__.get("__file__")
    return file if isinstance(file, str) else ""


def _run_in_a_thread(theirs: set[int]) -> bool:
    """Whether another thread runs code of modules whose dicts have one of these ``id``."""
    for thread, frame in sys._current_frames().items():
        at: FrameType | None = frame if thread != threading.get_ident() else None
        while at is not None:
            if id(at.f_globals) in theirs:
                return True
            at = at.f_back
    return False


def _any_end_is_noticed(theirs: set[int]) -> bool:
    """Whether the end of an object would run code: a ``__del__``, or the script's that waits for it.

    The script's code waits in a suspended generator, or as the callback of a weak reference. Collecting walks a million
    objects for a third of a second, and most jobs have no such object.
    """
    for each in alive(_may_be_noticed):
        waiting: list[object] = []
        if isinstance(each, _SUSPENDED):
            waiting = [getattr(each, name, None) for name in _FRAMES]
        elif type(each) is weakref.ref:
            waiting = [each.__callback__]
        else:
            return True
        if any(_namespace(code) in theirs for code in waiting):
            return True
    return False


def _namespace(code: object) -> int:
    """The ``id`` of the dict of the module to which a frame or a function belongs; 0 for none."""
    found = getattr(code, "f_globals", None) or getattr(code, "__globals__", None)
    return 0 if found is None else id(found)


def _may_be_noticed(of: type) -> bool:
    if of is weakref.ref or any(of is each for each in _SUSPENDED):
        return True
    if _is_file(of):  # those of Python itself are written apart; gzip's write their end when they are destroyed
        return of.__module__ != "_io"
    owners = [str(each.__module__).partition(".")[0] for each in of.__mro__ if "__del__" in vars(each)]
    return any(owner not in _RELEASING for owner in owners)


def _clear(module: ModuleType, is_code: bool) -> None:
    """Drop a module's code, or its other values; private names first, as Python does (``_PyModule_ClearDict``)."""
    values = module.__dict__
    names = [
        name
        for name, value in values.items()
        if isinstance(name, str) and not name.startswith("__") and is_code == isinstance(value, _CODE)
    ]
    for name in sorted(names, key=lambda name: not name.startswith("_")):
        if is_code or gc.is_tracked(values[name]) or hasattr(type(values[name]), "__del__"):
            values[name] = None


def _write_files() -> None:
    """Write what files that are still open hold, text before the bytes that it becomes."""
    files = [each for each in alive(_is_file) if isinstance(each, io.IOBase)]
    for file in sorted(files, key=lambda each: not isinstance(each, io.TextIOBase)):
        with suppress(Exception):  # a teardown does not report it either
            if not file.closed and file.writable():
                file.flush()


def _is_file(of: type) -> bool:
    return any(each is _File for each in of.__mro__)
