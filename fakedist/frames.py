"""Finds the script's running line: the innermost frame of this thread outside torch and this package.

Inductor's generated code counts as torch's, as do a tensor subclass's methods that pass an operation on, and the code
that warns of a deprecated function of torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Container
from types import FrameType

import torch

from fakedist.rundir.sources import INDUCTOR_FILE, PASSES_ON, WRAPPERS

OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
TORCH = os.path.dirname(torch.__file__) + os.sep
_MOST_LINES = 20


def script_frame(passed_over: Container[str] = ()) -> FrameType | None:
    """The script's innermost frame; None in autograd's own threads. Functions named in ``passed_over`` are skipped."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        if is_the_scripts(frame.f_code.co_filename) and name not in PASSES_ON and name not in passed_over:
            return frame
        frame = frame.f_back
    return None


def is_the_scripts(filename: str) -> bool:
    """Return whether a file's code is neither torch's nor this package's."""
    if filename.startswith((OURS, TORCH, "<")) or filename.endswith(WRAPPERS):
        return False
    return not INDUCTOR_FILE.search(filename)


def script_line() -> str:
    """The script's running line as ``file:line (function)``; empty if there is none."""
    frame = script_frame()
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def script_lines(frame: FrameType | None) -> list[str]:
    """The script's lines from a frame outwards, as of :func:`script_line`, at most 20."""
    lines: list[str] = []
    while frame is not None and len(lines) < _MOST_LINES:
        code = frame.f_code
        if is_the_scripts(code.co_filename) and code.co_name not in PASSES_ON:
            lines.append(f"{code.co_filename}:{frame.f_lineno} ({code.co_name})")
        frame = frame.f_back
    return lines


def calling_file() -> str:
    """The file of this thread's innermost frame outside this package; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
    return "" if frame is None else frame.f_code.co_filename
