"""Finds the user's script and checks that it compiles before anything starts."""

from __future__ import annotations

import os
import shlex
import sys
import traceback
import zipfile
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import cast

from fakedist.errors import JobError
from fakedist.options import Job
from fakedist.visible import visible


class ScriptSyntaxError(Exception):
    """The script does not compile. The message is what ``python`` would print."""


def check_script(job: Job) -> None:
    """Check that the script or module exists and compiles, without running any of it.

    Raises:
        JobError: The script or module does not exist, or cannot be read.
        ScriptSyntaxError: It does not compile.
    """
    path = find_source(job.target, job.is_module)
    where = os.path.join(os.getcwd(), job.target)
    try:
        where.encode()
    except UnicodeEncodeError:
        raise JobError(
            f"the path {visible(where)} is not UTF-8, and torch's memory history cannot name it", "rename or link it"
        ) from None
    if path is None:
        return
    try:
        source = path.read_bytes()
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}", f"chmod u+r {shlex.quote(str(path))}") from error
    if b"\0" in source:
        raise JobError(f"{path} is a binary file, not a Python script", "give the path of a Python script")
    try:
        compile(source, os.path.join(os.getcwd(), path), "exec", dont_inherit=True)
    except SyntaxError as error:
        raise ScriptSyntaxError("".join(traceback.format_exception_only(error)).rstrip()) from None


def find_source(target: str, is_module: bool) -> Path | None:
    """The source of a script or module; None if it has none that can be read. JobError if it does not exist."""
    return _module_source(target) if is_module else _script_source(target)


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
    """Find the source of ``python -m name`` without importing its packages."""
    spec: ModuleSpec | None = None
    search: list[str] | None = [os.getcwd(), *sys.path]
    parts = name.split(".")
    for number, part in enumerate(parts, start=1):
        spec = PathFinder.find_spec(part, search) if part else None
        if spec is None and number == 1 and part:
            spec = find_editable(part)
        if spec is None:
            raise JobError(f"no module named {'.'.join(parts[:number])}", f"python -m {name} must work from here")
        search = list(spec.submodule_search_locations) if spec.submodule_search_locations is not None else []
    if spec is not None and spec.submodule_search_locations is not None:
        spec = PathFinder.find_spec("__main__", search)
        if spec is None:
            raise JobError(f"{name} is a package without a __main__ module", f"fakedist profile -m {name}.MODULE")
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


def find_editable(name: str) -> ModuleSpec | None:
    """A top-level module that only a finder of its own finds, as ``pip install -e`` leaves one; None without it."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        if finder is not PathFinder and find is not None and (spec := find(name, None, None)) is not None:
            return cast(ModuleSpec, spec)
    return None
