"""Searches all objects that Python's garbage collector knows."""

from __future__ import annotations

import gc
from collections.abc import Callable, Set
from itertools import compress
from typing import Protocol, cast


class TypeFinder(Protocol):
    """Finds objects by their types' ``id``: comparing or hashing types may run the script's code."""

    def types(self, objects: list[object]) -> list[type]:
        """The distinct types of objects."""

    def of_types(self, objects: list[object], types: list[type]) -> list[object]:
        """Objects whose type is one of these, in the same order."""

    def holding(self, objects: list[object], types: list[type], lengths: Set[int]) -> list[object]:
        """Objects of these types, all lists or dicts, that hold one of these numbers of items."""


class _InPython:
    def types(self, objects: list[object]) -> list[type]:
        types = list(map(type, objects))
        return list(dict(zip(map(id, types), types, strict=True)).values())

    def of_types(self, objects: list[object], types: list[type]) -> list[object]:
        wanted = set(map(id, types))
        return list(compress(objects, map(wanted.__contains__, map(id, map(type, objects)))))

    def holding(self, objects: list[object], types: list[type], lengths: Set[int]) -> list[object]:
        return [holder for holder in self.of_types(objects, types) if _length(holder) in lengths]


def _length(holder: object) -> int:
    return list.__len__(holder) if isinstance(holder, list) else dict.__len__(cast("dict[object, object]", holder))


_finder: TypeFinder = _InPython()


def find_types_with(finder: TypeFinder | None) -> None:
    """Search with ``finder`` from now on. None goes on as before."""
    global _finder
    _finder = finder or _finder


class Alive:
    """The objects that were alive at a time, a million in a large job, with each type requested once.

    ``objects`` must not contain this object: a cycle would keep them all alive.
    """

    def __init__(self, objects: list[object]) -> None:
        self._objects = objects
        self._types = _finder.types(objects)

    def of(self, is_wanted: Callable[[type], bool]) -> list[object]:
        """Every object whose type is wanted."""
        return _finder.of_types(self._objects, list(filter(is_wanted, self._types)))

    def holding(self, lengths: Set[int]) -> list[object]:
        """Every list, of that class itself, and every dict that holds one of these numbers of items."""
        types = [kind for kind in self._types if kind is list or issubclass(kind, dict)]
        return _finder.holding(self._objects, types, lengths)


def all_alive() -> Alive:
    """The objects that are alive now."""
    return Alive(gc.get_objects())


def alive(is_wanted: Callable[[type], bool]) -> list[object]:
    """Every live object whose type is wanted."""
    return all_alive().of(is_wanted)
