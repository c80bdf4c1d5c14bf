"""Finds what the script calls an object: the name of the variable or attribute that holds it."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from types import CellType, FrameType, ModuleType

from fakedist.frames import OURS, TORCH
from fakedist.own_memory import read_words

_WORD = ctypes.sizeof(ctypes.c_void_p)
_FRAME_FIELD = 3  # PyFrameObject: ob_refcnt, ob_type, f_back, f_frame
_FAR = 32  # more words than precede the locals of a _PyInterpreterFrame, which may end before
#: Attributes in which wrappers keep what they hold. The names say nothing about it.
_SAY_NOTHING = {"module", "model", "_modules", "params", "parameters", "shadow_params", "shadow", "state", "data"}
_LEVELS = 3


def variable_name(held: object) -> str:
    """The name of a variable or attribute that holds an object or a holder of it. Empty if none is known."""
    for _ in range(_LEVELS):
        holders = [each for each in gc.get_referrers(held) if not isinstance(each, (FrameType, list, tuple))]
        if name := _local_name({id(held), *(id(each) for each in holders if isinstance(each, CellType))}):
            return name
        keys = [(key, holder) for holder in holders for key in _keys(holder, held)]
        for key, holder in sorted(keys, key=lambda found: found[0] in _SAY_NOTHING):
            if key not in _SAY_NOTHING:
                return key
            held = _owner(holder)
            break
        else:
            return ""
        if isinstance(held, dict):
            return ""
    return ""


def _keys(holder: object, held: object) -> Iterator[str]:
    """The names under which a namespace (a module's, an instance's or a plain dict) holds an object."""
    space = holder if isinstance(holder, dict) else getattr(holder, "__dict__", None)
    if isinstance(space, dict):
        for key, value in list(space.items()):
            if value is held and isinstance(key, str) and key.isidentifier() and not key.startswith("__"):
                yield key


def _owner(holder: object) -> object:
    """The instance whose ``__dict__`` a holder is, or the holder itself."""
    if isinstance(holder, dict):
        for each in gc.get_referrers(holder):
            if not isinstance(each, (dict, ModuleType)) and getattr(each, "__dict__", None) is holder:
                return each
    return holder


def _local_name(addresses: set[int]) -> str:
    """The name of a local variable that holds one of these, in a running function outside torch and fakedist."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith((OURS, TORCH, "<")):
            for name, address in _locals(frame):
                if address in addresses and name.isidentifier():
                    return name
        frame = frame.f_back
    return ""


def _locals(frame: FrameType) -> Iterator[tuple[str, int]]:
    """Names and addresses of a running function's variables.

    Before Python 3.13, ``f_locals`` is a copy that stays with the frame and keeps everything in it alive, which would
    change the peak. So this reads the frame itself.
    """
    if sys.version_info >= (3, 13):
        yield from ((name, id(value)) for name, value in frame.f_locals.items())
    elif frame.f_code.co_name == "<module>":
        yield from ((name, id(value)) for name, value in frame.f_globals.items())
    elif (first := _first_local()) >= 0:
        code = frame.f_code
        cells = [name for name in code.co_cellvars if name not in code.co_varnames]
        for place, name in enumerate((*code.co_varnames, *cells, *code.co_freevars)):
            yield name, _word(_inside(frame), first + place)


def _inside(frame: FrameType) -> int:
    return _word(id(frame), _FRAME_FIELD)


def _word(address: int, place: int) -> int:
    return ctypes.c_size_t.from_address(address + place * _WORD).value


def _first_local() -> int:
    """Index of the word in an interpreter frame that holds the first local, found in a frame with a known local."""
    marker = object()
    frame = sys._getframe()
    place = frame.f_code.co_varnames.index("marker")
    address = id(marker)
    words = read_words(_inside(frame), _FAR)
    return words.index(address) - place if address in words else -1
