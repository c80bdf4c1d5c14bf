"""What the child tells the parent while it runs: JSON lines over a pipe."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any

#: Names the pipe's descriptor in the child's environment; the child takes it out before the script runs.
PIPE_VARIABLE = "FAKEDIST_PROGRESS_FD"
_MAX_LINE = 4000  # below PIPE_BUF, so that a line is written whole or not at all


class Teller:
    """The child's end. Nothing here may disturb the script: a full or closed pipe loses messages.

    Args:
        descriptor: The pipe's; -1 tells nobody.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pid = os.getpid()

    @classmethod
    def from_environment(cls) -> Teller:
        """The pipe that the parent named, hidden from the script and from the programs it starts."""
        descriptor = int(os.environ.pop(PIPE_VARIABLE, "-1"))
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)
            os.set_blocking(descriptor, False)
        return cls(descriptor)

    def tell(self, message: dict[str, Any]) -> None:
        """Send one message; texts in it are cut to fit."""
        if self._descriptor < 0 or os.getpid() != self._pid:
            return
        short = {key: value[:600] if isinstance(value, str) else value for key, value in message.items()}
        line = json.dumps(short).encode() + b"\n"
        if len(line) <= _MAX_LINE:
            with suppress(OSError):
                os.write(self._descriptor, line)
