"""Finds Python's objects by their types in compiled code."""

from __future__ import annotations

import ctypes
from collections.abc import Set

#: Where CPython keeps an object's type (PyObject), a list's or dict's length, and a list's items (PyListObject).
_TYPE_AT, _SIZE_AT, _ITEMS_AT = 8, 16, 24
_WORD = 8
_MOST_TYPES = 1 << 15
_word = ctypes.c_size_t.from_address


class ObjectTypes:
    """Implements protocol ``record.alive.TypeFinder``.

    Args:
        library: The fast path's library.
    """

    def __init__(self, library: ctypes.PyDLL) -> None:
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        self._types, self._of = library.fakedist_objects_types, library.fakedist_objects_of
        self._types.argtypes, self._types.restype = [pointer, size, pointer, size], size
        self._of.argtypes, self._of.restype = [pointer, size, pointer, size, pointer], size
        self._holding = library.fakedist_objects_holding
        self._holding.argtypes, self._holding.restype = [pointer, size, pointer, size, pointer, size, pointer], size

    def types(self, objects: list[object]) -> list[type]:
        """The distinct types of objects."""
        room = min(len(objects), _MOST_TYPES)
        found = (ctypes.c_void_p * room)()
        count = self._types(_items(objects), len(objects), found, room)
        if count > room:
            return list({id(each): each for each in map(type, objects)}.values())
        return [ctypes.cast(address, ctypes.py_object).value for address in found[:count] if address is not None]

    def of_types(self, objects: list[object], types: list[type]) -> list[object]:
        """Those objects whose type is one of these, in the same order."""
        wanted = (ctypes.c_void_p * len(types))(*map(id, types))
        found = (ctypes.c_uint32 * len(objects))()
        count = self._of(_items(objects), len(objects), wanted, len(types), found)
        return [objects[place] for place in found[:count]]

    def holding(self, objects: list[object], types: list[type], lengths: Set[int]) -> list[object]:
        """Those whose type is one of these, all lists or dicts, and that hold one of these numbers of items."""
        wanted = (ctypes.c_void_p * len(types))(*map(id, types))
        numbers = (ctypes.c_int64 * len(lengths))(*lengths)
        found = (ctypes.c_uint32 * len(objects))()
        given = _items(objects), len(objects), wanted, len(types), numbers, len(lengths)
        return [objects[place] for place in found[: self._holding(*given, found)]]


def find_objects_by_type(library: ctypes.PyDLL) -> ObjectTypes | None:
    """What finds them; None in a Python whose objects have another layout."""
    probe: list[object] = [ctypes, [], "text"]
    if list.__basicsize__ < _ITEMS_AT + _WORD or _word(id(probe) + _SIZE_AT).value != 3:
        return None
    if _word(id({"one": 1, "two": 2}) + _SIZE_AT).value != 2:
        return None
    for place, each in enumerate(probe):
        if _word(id(each) + _TYPE_AT).value != id(type(each)) or _word(_items(probe) + place * _WORD).value != id(each):
            return None
    return ObjectTypes(library)


def _items(objects: list[object]) -> int:
    return _word(id(objects) + _ITEMS_AT).value
