"""The messages that the child sends the parent while it runs: JSON lines over a pipe."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass

from fakedist.rundir.outcome import Outcome
from fakedist.rundir.plain import to_plain

#: Environment variable with the pipe's descriptor. The child removes it before the script runs.
PIPE_VARIABLE = "FAKEDIST_PROGRESS_FD"
_MAX_LINE = 4000  # below PIPE_BUF, so a line is written whole or not at all


@dataclass(frozen=True, slots=True)
class Started:
    """The rank is set up, and the script begins. Under nsys, the process ``pid`` is not the parent's child."""

    pid: int


@dataclass(frozen=True, slots=True)
class Progress:
    """The script's progress; ``steps`` is the requested number or "auto", ``allocated_bytes`` the peak until now."""

    phase: str
    step: int
    steps: int | str
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of the script, with a message of one line and the ``file:line (function)``; both may be empty."""

    outcome: Outcome
    code: int
    message: str = ""
    line: str = ""


@dataclass(frozen=True, slots=True)
class Restarted:
    """The rank must start anew: an environment variable, or "sys.path", is not as in its fork server's first rank."""

    what: str


@dataclass(frozen=True, slots=True)
class Signals:
    """The script sends a signal to its own process."""

    number: int


@dataclass(frozen=True, slots=True)
class Failed:
    """An error of fakedist's own ended the run; with ``before_start`` the rank was not set up, and leaves no run."""

    error: str
    hint: str
    before_start: bool


Message = Started | Progress | Ended | Restarted | Signals | Failed


class Reporter:
    """The child's end of the pipe; -1 sends nothing. It drops messages to a full or closed pipe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pid = os.getpid()

    @classmethod
    def from_environment(cls) -> Reporter:
        """Open the pipe that the parent named, and hide it from the script and the programs it starts."""
        descriptor = int(os.environ.pop(PIPE_VARIABLE, "-1"))
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)
            os.set_blocking(descriptor, False)
        return cls(descriptor)

    def send(self, message: Message) -> None:
        """Send one message. Long texts in it are truncated."""
        if self._descriptor < 0 or os.getpid() != self._pid:
            return
        short = {key: value[:600] if isinstance(value, str) else value for key, value in to_plain(message).items()}
        line = json.dumps({type(message).__name__: short}).encode() + b"\n"
        if len(line) <= _MAX_LINE:
            with suppress(OSError):
                os.write(self._descriptor, line)
