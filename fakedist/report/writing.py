"""Text into a file that somebody named."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from fakedist.errors import JobError

_ELSEWHERE = "choose another place"


def see_that_it_can_be_written(path: Path, *, is_directory: bool = False) -> None:
    """Look before the work: the place is a directory that exists, or can be made, and may be written to.

    Args:
        path: The file, which is replaced where it is there.
        is_directory: Whether it is a directory instead, for files in it.

    Raises:
        JobError: It cannot be written.
    """
    folder = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    there = folder == path.absolute()
    if folder.is_dir() is not (is_directory or not there):
        raise JobError(
            f"{path} cannot be written: {folder} is {'a' if folder.is_dir() else 'no'} directory", _ELSEWHERE
        )
    # A file is replaced, so that its directory must let that be; a pipe or a terminal is written to.
    if not os.access(folder.resolve().parent if folder.is_file() else folder, os.W_OK):
        raise JobError(f"{path} cannot be written: {os.strerror(errno.EACCES)}", _ELSEWHERE)


def replace_text(path: Path, text: str) -> None:
    """Write a file; one that is there is replaced, whole or not at all. A pipe or a terminal is written to.

    Raises:
        JobError: It cannot be written.
        OSError: The disk is full.
    """
    try:
        if path.exists() and not path.is_file():  # /dev/stdout
            path.write_text(text, encoding="utf-8", errors="replace")
        else:
            _replace(path.resolve(), text)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise JobError(f"{path} cannot be written: {error.strerror}", _ELSEWHERE) from error


def _replace(path: Path, text: str) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(text, encoding="utf-8", errors="replace")  # names may hold half a surrogate pair
        scratch.replace(path)
    finally:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)
