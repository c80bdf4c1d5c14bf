"""Subjects that not everybody needs: each a package with its code and, in ``command.py``, its command.

The core imports no extra. :func:`commands` finds them.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import click


def commands() -> Iterator[click.Command]:
    """The command of each extra, which has the extra's ``command`` module as ``COMMAND``."""
    for extra in pkgutil.iter_modules(__path__):
        command: click.Command = importlib.import_module(f"{__name__}.{extra.name}.command").COMMAND
        yield command
