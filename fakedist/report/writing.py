"""Writes text into a file that the user named."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from fakedist.errors import JobError
from fakedist.temporary import replacing
from fakedist.visible import visible

_ELSEWHERE = "choose another place"
_FRONT_BYTES = 4_096


def see_that_it_can_be_written(path: Path, *, is_directory: bool = False) -> None:
    """Check before the work that a file can be written: its directory exists or can be created, and is writable.

    Raises:
        JobError: It cannot be written.
    """
    try:
        folder = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    except OSError as error:  # a name of 300 letters
        raise JobError(f"{visible(str(path))} cannot be written: {error.strerror}", _ELSEWHERE) from None
    if path.is_symlink() and not path.exists():
        raise JobError(f"{path} cannot be written: it is a link to nothing", _ELSEWHERE)
    there = folder == path.absolute()
    if folder.is_dir() is not (is_directory or not there):
        raise JobError(
            f"{path} cannot be written: {folder} is {'a' if folder.is_dir() else 'not a'} directory", _ELSEWHERE
        )
    # Replacing a file needs a writable directory. A pipe or a terminal is written to directly.
    if not os.access(folder.resolve().parent if folder.is_file() else folder, os.W_OK):
        raise JobError(f"{path} cannot be written: {os.strerror(errno.EACCES)}", _ELSEWHERE)


_MARK = b'<meta name="generator" content="fakedist">'


def may_hold_page(path: Path) -> bool:
    """True if a page of ours may be written to a path: it is free, or holds an earlier page of fakedist."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        return False
    try:
        with path.open("rb") as file:
            return _MARK in file.read(_FRONT_BYTES)
    except FileNotFoundError:
        return True
    except OSError:
        return False


def replace_text(path: Path, text: str) -> None:
    """Write a file. An existing file is replaced atomically; a pipe or a terminal is written to directly.

    Raises:
        JobError: It cannot be written.
        OSError: The disk is full.
    """
    try:
        if path.exists() and not path.is_file():  # /dev/stdout
            path.write_text(text, encoding="utf-8", errors="replace")
        else:
            with replacing(path.resolve()) as fresh:
                fresh.write_text(text, encoding="utf-8", errors="replace")  # names may contain lone surrogates
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise JobError(f"{path} cannot be written: {error.strerror}", _ELSEWHERE) from error
