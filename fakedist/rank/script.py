"""Runs the user's script as ``__main__``, the way ``python`` does."""

from __future__ import annotations

import builtins
import os
import runpy
import sys
import types
import zipfile
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path

from fakedist.options import Job

_PACKAGE = str(Path(__file__).parents[1]) + os.sep


def run_as_main(job: Job) -> None:
    """Run the script in this process as ``__main__``. Whatever it raises propagates.

    ``sys.argv``, ``sys.path[0]`` and the module's attributes become what they are under ``python script.py`` or
    ``python -m module`` (CPython's ``pymain_run_python`` and ``pymain_run_module``).
    """
    main = main_module()
    main.__dict__["__builtins__"] = builtins
    if sys.version_info < (3, 14):  # 3.14 evaluates annotations lazily
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    if job.is_module:
        sys.argv = ["-m", *job.script_arguments]
        _put_first(os.getcwd())
        runpy._run_module_as_main(job.target)  # type: ignore[attr-defined]
        return
    sys.argv = [job.target, *job.script_arguments]
    if os.path.isdir(job.target) or zipfile.is_zipfile(job.target):
        sys.path.insert(0, os.path.realpath(job.target))
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        return
    _put_first(os.path.dirname(os.path.realpath(job.target)))
    path = os.path.join(os.getcwd(), job.target)
    main.__file__ = path
    main.__loader__ = SourceFileLoader("__main__", path)
    main.__dict__["__cached__"] = None
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), main.__dict__)


@cache
def main_module() -> types.ModuleType:
    """The script's module. In a fork server it exists before the script's imports, some of which keep it (dill)."""
    return types.ModuleType("__main__")


def without_our_frames(error: BaseException) -> types.TracebackType | None:
    """The error's traceback, starting at the script's first frame."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.tb_next
    return frame if frame is not None else error.__traceback__


def _put_first(directory: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, directory)
