"""The messages that the child sends the parent while it runs: JSON lines over a pipe."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any

#: Environment variable with the pipe's descriptor. The child removes it before the script runs.
PIPE_VARIABLE = "FAKEDIST_PROGRESS_FD"
_MAX_LINE = 4000  # below PIPE_BUF, so a line is written whole or not at all


class Teller:
    """The child's end of the pipe. It never disturbs the script: a full or closed pipe drops messages.

    Args:
        descriptor: The pipe's descriptor. -1 sends nothing.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pid = os.getpid()

    @classmethod
    def from_environment(cls) -> Teller:
        """Open the pipe that the parent named, and hide it from the script and the programs it starts."""
        descriptor = int(os.environ.pop(PIPE_VARIABLE, "-1"))
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)
            os.set_blocking(descriptor, False)
        return cls(descriptor)

    def tell(self, message: dict[str, Any]) -> None:
        """Send one message. Long texts in it are truncated."""
        if self._descriptor < 0 or os.getpid() != self._pid:
            return
        short = {key: value[:600] if isinstance(value, str) else value for key, value in message.items()}
        line = json.dumps(short).encode() + b"\n"
        if len(line) <= _MAX_LINE:
            with suppress(OSError):
                os.write(self._descriptor, line)
