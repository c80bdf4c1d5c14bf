"""Finds the script's running line, and the variables of running functions.

The script's frame is the innermost one of this thread outside torch and this package. Inductor's generated code counts
as torch's, as do a tensor subclass's methods that pass an operation on, and the code that warns of a deprecated
function of torch.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import os
import sys
from collections.abc import Container, Iterator
from types import CellType, FrameType

import torch

from fakedist.own_memory import read_words
from fakedist.rundir.sources import INDUCTOR_FILE, PASSES_ON, WRAPPERS

OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
TORCH = os.path.dirname(torch.__file__) + os.sep
_MOST_LINES = 20
_WORD = ctypes.sizeof(ctypes.c_void_p)
_FRAME_FIELD = 3  # PyFrameObject: ob_refcnt, ob_type, f_back, f_frame
_FAR = 32  # more words than precede the locals of a _PyInterpreterFrame, which may end before


def script_frame(passed_over: Container[str] = ()) -> FrameType | None:
    """The script's innermost frame; None in autograd's own threads. Functions named in ``passed_over`` are skipped."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        if is_the_scripts(frame.f_code.co_filename) and name not in PASSES_ON and name not in passed_over:
            return frame
        frame = frame.f_back
    return None


@functools.lru_cache(maxsize=4096)
def is_the_scripts(filename: str) -> bool:
    """Return whether a file's code is neither torch's nor this package's."""
    if filename.startswith((OURS, TORCH, "<")) or filename.endswith(WRAPPERS):
        return False
    return not INDUCTOR_FILE.search(filename)


def script_line() -> str:
    """The script's running line as ``file:line (function)``; empty if there is none."""
    frame = script_frame()
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def running_script(frame: FrameType | None) -> list[tuple[str, int, str]]:
    """File, line and name of the script's running functions, from a frame outwards, at most 20.

    Python keeps the hashes of these texts, while that of a code object is computed anew each time.
    """
    running: list[tuple[str, int, str]] = []
    while frame is not None and len(running) < _MOST_LINES:
        filename, name = frame.f_code.co_filename, frame.f_code.co_name
        if is_the_scripts(filename) and name not in PASSES_ON:
            running.append((filename, frame.f_lineno, name))
        frame = frame.f_back
    return running


def script_lines(frame: FrameType | None) -> list[str]:
    """The script's lines from a frame outwards, as of :func:`script_line`, at most 20."""
    return [f"{filename}:{line} ({name})" for filename, line, name in running_script(frame)]


def calling_frame() -> FrameType | None:
    """This thread's innermost frame outside this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
    return frame


def torch_files() -> Iterator[str]:
    """The files of torch through which the script's running line came here, the innermost first."""
    frame = calling_frame()
    while frame is not None and not is_the_scripts(frame.f_code.co_filename):
        yield frame.f_code.co_filename
        frame = frame.f_back


def local_addresses(frame: FrameType) -> Iterator[tuple[str, int]]:
    """Names and addresses of a running function's variables, read from the frame itself; 0 where one has no value.

    Before Python 3.13, ``f_locals`` is a copy that stays with the frame and keeps everything in it alive. That would
    change the peak, and renewing the copy frees tensors, which waits for the allocator where this thread must not.
    """
    if _has_dict(frame):
        yield from ((name, id(value)) for name, value in frame.f_locals.items())
    elif (first := _first_local()) >= 0:
        code = frame.f_code
        cells = [name for name in code.co_cellvars if name not in code.co_varnames]
        for index, name in enumerate((*code.co_varnames, *cells, *code.co_freevars)):
            yield name, _word(_inside(frame), first + index)


def local_value(frame: FrameType, name: str, default: object = None) -> object:
    """The value of a running function's variable, also of one that it shares with functions inside or around it."""
    if _has_dict(frame):
        return frame.f_locals.get(name, default)
    address = next((address for known, address in local_addresses(frame) if known == name), 0)
    if not address:
        return default
    value: object = ctypes.cast(address, ctypes.py_object).value
    if not isinstance(value, CellType) or name not in (*frame.f_code.co_cellvars, *frame.f_code.co_freevars):
        return value
    try:
        return value.cell_contents
    except ValueError:  # it has no value yet
        return default


def _has_dict(frame: FrameType) -> bool:
    """Whether ``f_locals`` is the namespace itself: of modules, classes, and everything from Python 3.13 on."""
    return sys.version_info >= (3, 13) or not frame.f_code.co_flags & inspect.CO_OPTIMIZED


def _inside(frame: FrameType) -> int:
    return _word(id(frame), _FRAME_FIELD)


def _word(address: int, index: int) -> int:
    return ctypes.c_size_t.from_address(address + index * _WORD).value


@functools.cache
def _first_local() -> int:
    """Index of the word in an interpreter frame that holds the first local, found in a frame with a known local."""
    marker = object()
    frame = sys._getframe()
    index = frame.f_code.co_varnames.index("marker")
    address = id(marker)
    words = read_words(_inside(frame), _FAR)
    del frame  # it would keep itself and, through its callers, their tensors
    return words.index(address) - index if address in words else -1
