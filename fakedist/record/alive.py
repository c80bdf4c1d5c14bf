"""Searches all objects that Python's garbage collector knows."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import compress


def alive(is_wanted: Callable[[type], bool]) -> list[object]:
    """Every live object whose type is wanted. A large job has a million objects, and each type is asked for once.

    Types are compared by ``id``: comparing or hashing them may run the script's code.
    """
    objects = gc.get_objects()
    types = list(map(type, objects))
    ids = list(map(id, types))
    wanted = {number for number, each in dict(zip(ids, types, strict=True)).items() if is_wanted(each)}
    return list(compress(objects, map(wanted.__contains__, ids)))
