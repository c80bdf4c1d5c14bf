"""Replaces an attribute of torch temporarily, and runs a callback when the script imports a module.

The callback runs right after the module's own code. A finder at the head of ``sys.meta_path`` returns what the finders
behind it find, with a loader that runs the module and then calls the callback. The module looks unwatched: its
``__loader__`` and spec are the real ones. Other threads that import the module wait for the callback, because the
importing thread holds the module's lock.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from fakedist.errors import RecordingError


@dataclass(frozen=True, slots=True, eq=False)
class Replaced:
    """An attribute that is replaced now."""

    owner: object
    name: str
    original: object


_replaced: list[Replaced] = []


def replacements() -> tuple[Replaced, ...]:
    """The present replacements, oldest first."""
    return tuple(_replaced)


def present(owner: object, name: str) -> Any:  # torch's own attribute, of any type
    """Return ``owner.name``. RecordingError if there is no such attribute, so this torch works in a different way."""
    missing = object()
    value = getattr(owner, name, missing)
    if value is missing:
        from importlib.metadata import version  # which imports the parsers of mail

        where = getattr(owner, "__name__", repr(owner))
        raise RecordingError(f"torch {version('torch')} has no {where}.{name}", "pip install torch==2.15.0")
    return value


@contextmanager
def patched(owner: object, name: str, replacement: object) -> Iterator[Any]:  # as present()
    """Replace ``owner.name``, restore the original on exit, and yield it. RecordingError as :func:`present`."""
    original = present(owner, name)
    setattr(owner, name, replacement)
    _replaced.append(replaced := Replaced(owner, name, original))
    try:
        yield original
    finally:
        _replaced.remove(replaced)
        setattr(owner, name, original)


Told = Callable[[ModuleType], None]
#: Returns the context in which a module's code runs.
Around = Callable[[ModuleType], AbstractContextManager[None]]


@contextmanager
def when_imported(wanted: Callable[[str], bool], imported: Told) -> Iterator[None]:
    """Call ``imported(module)`` after each ``wanted`` module's first import, which fails if the call raises."""

    @contextmanager
    def around(module: ModuleType) -> Iterator[None]:
        yield
        imported(module)

    with imported_within(wanted, around):
        yield


@contextmanager
def now_and_when_imported(names: Collection[str], imported: Told) -> Iterator[None]:
    """Call ``imported(module)`` for each of these modules: now if it is imported, else as :func:`when_imported`."""
    for name in names:
        if name in sys.modules:
            imported(sys.modules[name])
    with when_imported(names.__contains__, imported):
        yield


@contextmanager
def imported_within(wanted: Callable[[str], bool], around: Around) -> Iterator[None]:
    """Run the code of each module whose full name is ``wanted`` inside ``around(module)``."""
    finder = _Finder(wanted, around)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        finder.stop()
        if finder in sys.meta_path:  # the script may have replaced the list
            sys.meta_path.remove(finder)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, wanted: Callable[[str], bool], around: Around) -> None:
        self._wanted = wanted
        self._around = around

    def stop(self) -> None:
        self._wanted = _nothing

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a watched module; None for any other, which the next finder finds."""
        if not self._wanted(fullname):
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :] if self in sys.meta_path else sys.meta_path[:]
        return find_watched(behind, self._around, fullname, path, target)


def find_watched(
    finders: Iterable[object],
    around: Around,
    fullname: str,
    path: Sequence[str] | None,
    target: ModuleType | None = None,
) -> ModuleSpec | None:
    """The spec that the first of some finders has for a module, whose code then runs inside ``around(module)``."""
    for finder in finders:
        find = getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
        if spec is not None:
            if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                spec.loader = _Loader(spec.loader, around)
            return spec
    return None


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, around: Around) -> None:
        self._loader = loader
        self._around = around

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        with self._around(module):
            self._loader.exec_module(module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)


def _nothing(name: str) -> bool:
    return False
