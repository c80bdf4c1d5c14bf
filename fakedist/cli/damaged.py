"""Turns what a damaged file does to its reader into one line that names the file."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from fakedist.errors import FakedistError, RunDirectoryError
from fakedist.visible import visible

#: The variable that shows the traceback instead.
TRACEBACK = "FAKEDIST_TRACEBACK"
#: What is said of a machine, or a limit, that a long recording does not fit.
TOO_LITTLE_MEMORY = "there is too little memory"
MORE_MEMORY = "a recording takes up to six times the size of its journal.bin: report it on a machine with more memory"
_PACKAGE = Path(__file__).parents[1]


@contextmanager
def reading(*paths: Path) -> Iterator[None]:
    """Name these files in the error if what they hold cannot be shown.

    Their values are checked where they are read. What contradicts itself only later ends here: figures that do not
    belong together, for example.

    Raises:
        RunDirectoryError: Anything failed but for what has its own message, and a full disk.
    """
    try:
        yield
    except RunDirectoryError as error:
        if any(path.name in error.message for path in paths):
            raise
        raise RunDirectoryError(f"{' or '.join(map(str, paths))}: {error.message}", error.hint) from error
    except (FakedistError, OSError, click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except MemoryError as error:
        names = " or ".join(map(str, paths))
        raise RunDirectoryError(f"{names} cannot be shown: {TOO_LITTLE_MEMORY}", MORE_MEMORY) from error
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        names = " or ".join(map(str, paths))
        said = visible(str(error).strip().partition("\n")[0], 120)
        cause = type(error).__name__ + (f": {said}" if said else "")
        raise RunDirectoryError(
            f"{names} cannot be shown: {cause} in {_place(error)}",
            f"it is damaged, or this is a bug in fakedist: {TRACEBACK}=1 shows more",
        ) from error


def _place(error: Exception) -> str:
    """The innermost line of fakedist, as a bug report needs it."""
    found = "fakedist"
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_PACKAGE):
            found = f"{path.relative_to(_PACKAGE.parent)}:{line}"
    return found
