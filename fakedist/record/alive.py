"""Searches all objects that Python's garbage collector knows."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import compress
from typing import Protocol


class TypeFinder(Protocol):
    """Finds objects by their types. Compiled code does it sooner (gpu/fast_path/objects.py).

    Types are compared by ``id``: comparing or hashing them may run the script's code.
    """

    def types(self, objects: list[object]) -> list[type]:
        """The distinct types of objects."""

    def of_types(self, objects: list[object], types: list[type]) -> list[object]:
        """Those objects whose type is one of these, in the same order."""


class _InPython:
    """Finds them in Python."""

    def types(self, objects: list[object]) -> list[type]:
        types = list(map(type, objects))
        return list(dict(zip(map(id, types), types, strict=True)).values())

    def of_types(self, objects: list[object], types: list[type]) -> list[object]:
        wanted = set(map(id, types))
        return list(compress(objects, map(wanted.__contains__, map(id, map(type, objects)))))


_finder: TypeFinder = _InPython()


def find_types_with(finder: TypeFinder | None) -> None:
    """Search with ``finder`` from now on. None goes on as before."""
    global _finder
    _finder = finder or _finder


def alive(is_wanted: Callable[[type], bool]) -> list[object]:
    """Every live object whose type is wanted. A large job has a million objects, and each type is asked for once."""
    objects = gc.get_objects()
    return _finder.of_types(objects, [each for each in _finder.types(objects) if is_wanted(each)])
