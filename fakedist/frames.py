"""Which line of the script is running: the innermost frame of this thread outside of torch and this package.

What Inductor wrote for a compiled graph is torch's too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Container
from types import FrameType

import torch

from fakedist.run.sources import INDUCTORS

OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
TORCH = os.path.dirname(torch.__file__) + os.sep


def script_frame(passed_over: Container[str] = ()) -> FrameType | None:
    """The frame; None in autograd's own threads.

    Args:
        passed_over: Names of functions that only hand on what they are asked for.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_the_scripts(frame.f_code.co_filename) and frame.f_code.co_name not in passed_over:
            return frame
        frame = frame.f_back
    return None


def is_the_scripts(filename: str) -> bool:
    """Whether code of a file is neither torch's nor this package's."""
    return not filename.startswith((OURS, TORCH, "<")) and not INDUCTORS.search(filename)


def script_line() -> str:
    """The line as ``file:line (function)``; or nothing."""
    frame = script_frame()
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
