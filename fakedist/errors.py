"""Every error fakedist raises on purpose.

::

    FakedistError            exit 1   says what happened; `hint` says what to type next
    ├── JobError             exit 2   the request is invalid (rank >= world size, unknown GPU, no such script)
    ├── SetupError           exit 1   this machine lacks something (a CUDA build of torch, a C compiler)
    ├── CheckError           exit 2   the configuration of `check` or a baseline is invalid
    ├── SweepError           exit 2   the space of a sweep or its directory is invalid
    ├── ScriptError          exit 1   the script itself failed, so there is nothing to judge
    ├── RunDirectoryError    exit 1   a run directory is missing, in use, truncated, foreign or too new
    ├── RecordingError       exit 1   recording would be wrong (a patch target is gone, no allocator history)
    ├── ReportError          exit 1   a report of Nsight Systems is missing, cut off, foreign or empty
    ├── InventedValueError   exit 1   --values strict: the script read a value that no kernel computed
    └── WorldError           exit 1   the faked world cannot answer (an object from a rank that never ran)
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable, Iterator
from enum import IntEnum
from pathlib import Path

from fakedist.visible import visible


class ExitCode(IntEnum):
    """Exit codes of fakedist. A script that ends by itself passes its own code through, which may be any of these."""

    DONE = 0
    #: An error of fakedist, or an exception of the script.
    ERROR = 1
    #: The command line, the job or the configuration is invalid.
    USAGE = 2
    #: A figure exceeds a budget or a baseline of ``fakedist check``.
    EXCEEDED = 3
    #: The rank does not fit the GPU.
    OUT_OF_MEMORY = 4
    #: Calls of the job's ranks do not match.
    MISMATCH = 5
    #: The time given with ``--timeout`` was over, as for timeout(1).
    TIMEOUT = 124
    #: 128 + SIGINT.
    INTERRUPTED = 130
    #: 128 + SIGPIPE: the reader of stdout has gone.
    BROKEN_PIPE = 141
    #: 128 + SIGTERM.
    TERMINATED = 143


class FakedistError(Exception):
    """An error: one line states what happened and what was expected; ``hint``, if not empty, what to type next."""

    exit_code = ExitCode.ERROR

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint:  # so a traceback printed by the script's own error handling has the hint too
            self.add_note(hint)


class JobError(FakedistError):
    """The requested job is invalid. Exit code 2."""

    exit_code = ExitCode.USAGE


class CheckError(FakedistError):
    """The configuration of ``check`` or a baseline is invalid. Exit code 2."""

    exit_code = ExitCode.USAGE


class SweepError(FakedistError):
    """The space of a sweep or its directory is invalid. Exit code 2."""

    exit_code = ExitCode.USAGE


class ScriptError(FakedistError):
    """The script itself failed, so there is nothing to judge."""

    def __init__(self, message: str, hint: str = "", output: str = "") -> None:
        super().__init__(message, hint)
        self.output = output


class SetupError(FakedistError):
    """This machine lacks something that the run needs."""


class RunDirectoryError(FakedistError):
    """A run directory cannot be written or read."""


class RecordingError(FakedistError):
    """The recording could be wrong, so there is none."""


class ReportError(FakedistError):
    """A report of Nsight Systems cannot be created or read."""


class InventedValueError(FakedistError):
    """With ``--values strict``, the script read a value that no kernel computed."""


class WorldError(FakedistError):
    """The faked world cannot answer what the script asked of another rank."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint with the word that was probably meant, or with all known words if none is close."""
    choices = list(known)
    if close := difflib.get_close_matches(word, choices, n=1, cutoff=0.5):
        return f"did you mean {close[0]!r}?"
    return f"known are: {', '.join(choices)}" if choices else ""


#: The variable that shows the traceback of an error that is fakedist's own.
TRACEBACK = "FAKEDIST_TRACEBACK"
_PACKAGE = Path(__file__).parent


def described(error: Exception) -> str:
    """An unexpected error's type, first line and innermost line in fakedist: "ZeroDivisionError: ... in FILE:LINE"."""
    position = "fakedist"
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_PACKAGE):
            position = f"{path.relative_to(_PACKAGE.parent)}:{line}"
    message = visible(str(error).strip().partition("\n")[0], 120)
    return f"{type(error).__name__}{': ' if message else ''}{message} in {position}"


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then what it came from: its causes or contexts, at most 100."""
    link: BaseException | None = error
    for _ in range(100):
        if link is None:
            return
        yield link
        link = link.__cause__ or link.__context__


class StopRun(BaseException):
    """Raised inside the script after the last wanted step.

    ``except Exception`` around a training step does not catch it; ``finally`` and ``atexit`` still run.
    """

    def __str__(self) -> str:
        # The script's context managers may log it, as Megatron-LM's straggler detector does.
        return "the recorded steps are done: fakedist ends the run here"
