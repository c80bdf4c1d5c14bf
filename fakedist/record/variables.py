"""What the script calls an object: the name of the variable or the attribute that holds it."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from types import CellType, FrameType, ModuleType

from fakedist.frames import OURS, TORCH

_WORD = ctypes.sizeof(ctypes.c_void_p)
_FRAME_FIELD = 3  # PyFrameObject: ob_refcnt, ob_type, f_back, f_frame
_FAR = 32  # more words than come before the locals of a _PyInterpreterFrame
#: Attributes in which wrappers keep what they hold: they say nothing of it.
_SAY_NOTHING = {"module", "model", "_modules", "params", "parameters", "shadow_params", "shadow", "state", "data"}
_LEVELS = 3


def variable_name(held: object) -> str:
    """The name of a variable, or of an attribute, that holds an object or a holder of it; empty where none is known."""
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
    """Names under which a namespace has an object: a module's, an instance's or a plain dict."""
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
    """A local variable of a running function outside of torch and this package that is one of these, or its cell."""
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

    Before Python 3.13, ``f_locals`` is a copy that stays with the frame and keeps all that is in it alive: the peak
    would be another. The frame itself is read instead.
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
    """Which word of a running function's inside is its first variable, seen at one whose variables are known."""
    marker = object()
    frame = sys._getframe()
    place = frame.f_code.co_varnames.index("marker")
    address = id(marker)
    found = (word for word in range(_FAR) if _word(_inside(frame), word) == address)
    return next(found, place - 1) - place
