"""How a supervisor tells a task's process of a template. Standard library alone."""

from __future__ import annotations

import os
import socket
from pathlib import Path

_VARIABLE = "FAKEDIST_TEMPLATE"


def told_of_template(learned: Path, channel: int | None) -> dict[str, str]:
    """The variable that names a channel, and the file with what the template imports or that takes it."""
    return {_VARIABLE: f"{'' if channel is None else channel}:{learned}"}


def hear_of_template() -> tuple[Path, socket.socket | None] | None:
    """What this process was told, if it was. Ranks and other programs are not told."""
    if (told := os.environ.pop(_VARIABLE, None)) is None:
        return None
    number, _, path = told.partition(":")
    if not number:
        return Path(path), None
    os.set_inheritable(int(number), False)
    return Path(path), socket.socket(fileno=int(number))
