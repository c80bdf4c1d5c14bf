"""The user's script: found and checked in the parent, run as ``__main__`` in the child, as ``python`` would do it."""

from __future__ import annotations

import builtins
import os
import runpy
import sys
import traceback
import types
import zipfile
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path

from fakedist.errors import JobError
from fakedist.job import Job

_PACKAGE = str(Path(__file__).parent) + os.sep


class ScriptSyntaxError(Exception):
    """The script does not compile; its text is what ``python`` prints for it."""


def check_script(job: Job) -> None:
    """See that the script or module exists and compiles, without running any of it.

    Raises:
        JobError: There is no such script or module.
        ScriptSyntaxError: It does not compile.
    """
    path = _module_source(job.target) if job.is_module else _script_source(job.target)
    if path is None:
        return
    try:
        source = path.read_bytes()
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}") from error
    try:
        compile(source, os.path.join(os.getcwd(), path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes
        raise ScriptSyntaxError("".join(traceback.format_exception_only(error)).rstrip()) from None


def run_as_main(job: Job) -> None:
    """Run the script here, as ``__main__``; whatever it raises goes through.

    ``sys.argv``, ``sys.path[0]`` and the module's attributes become what they are under ``python script.py`` or
    ``python -m module`` (CPython's ``pymain_run_python`` and ``pymain_run_module``).
    """
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if sys.version_info < (3, 14):  # annotations are made when asked for from then on
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


def without_our_frames(error: BaseException) -> types.TracebackType | None:
    """The error's traceback from the script's own first frame on."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.tb_next
    return frame if frame is not None else error.__traceback__


def _put_first(directory: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, directory)


def _script_source(target: str) -> Path | None:
    path = Path(target)
    if not path.exists():
        hint = "fakedist profile -m MODULE runs a module" if "." in target and not target.endswith(".py") else ""
        raise JobError(f"no such script: {target}", hint or "give the path of a Python script")
    if path.is_dir():
        if not (path / "__main__.py").exists():
            raise JobError(f"{target} is a directory without a __main__.py", "give the path of a Python script")
        return path / "__main__.py"
    return None if zipfile.is_zipfile(path) else path


def _module_source(name: str) -> Path | None:
    """Source of the module that ``python -m name`` would run, found without importing its packages."""
    spec: ModuleSpec | None = None
    search: list[str] | None = [os.getcwd(), *sys.path]
    parts = name.split(".")
    for number, part in enumerate(parts, start=1):
        spec = PathFinder.find_spec(part, search) if part else None
        if spec is None:
            raise JobError(f"no module named {'.'.join(parts[:number])}", f"python -m {name} must work from here")
        search = list(spec.submodule_search_locations) if spec.submodule_search_locations is not None else []
    if spec is not None and spec.submodule_search_locations is not None:
        spec = PathFinder.find_spec("__main__", search)
        if spec is None:
            raise JobError(f"{name} is a package without a __main__ module", f"fakedist profile -m {name}.MODULE")
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None
