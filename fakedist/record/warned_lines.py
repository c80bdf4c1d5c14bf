"""Lets warnings that an operation gives name the script's line, as without fakedist, and not one of the recorder."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fakedist.frames import OURS, script_frame
from fakedist.patch import patched


@contextmanager
def warnings_at_the_script() -> Iterator[None]:
    """Replace a place in this package by the script's running line, where a warning is shown.

    torch's C++ gives a warning to the innermost Python frame, and that is the recorder's dispatch mode.
    """
    original: Callable[..., None] = warnings.showwarning

    def showwarning(message: Any, category: Any, filename: str, lineno: int, *more: Any, **named: Any) -> None:
        if filename.startswith(OURS) and (frame := script_frame()) is not None:
            filename, lineno = frame.f_code.co_filename, frame.f_lineno
        original(message, category, filename, lineno, *more, **named)

    with patched(warnings, "showwarning", showwarning):
        yield
