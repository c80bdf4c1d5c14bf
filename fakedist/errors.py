"""Every error fakedist raises on purpose.

::

    FakedistError            exit 1   says what happened; `hint` says what to type next
    ├── JobError             exit 2   the request makes no sense (rank >= world size, unknown GPU, no such script)
    ├── SetupError           exit 1   this machine lacks something (a CUDA build of torch, a C compiler)
    ├── CheckError           exit 2   the configuration of `check` or a baseline makes no sense
    ├── ScriptError          exit 1   the script itself failed, so there is nothing to judge
    ├── RunDirectoryError    exit 1   a run directory is missing, in use, truncated, foreign or too new
    ├── RecordingError       exit 1   recording would be wrong (a patch target is gone, no allocator history)
    ├── ReportError          exit 1   a report of Nsight Systems is missing, cut off, foreign or empty
    ├── InventedValueError   exit 1   --values strict: the script read a value that no kernel computed
    └── WorldError           exit 1   the faked world cannot answer (an object from a rank that never ran)
"""

from __future__ import annotations


class FakedistError(Exception):
    """An error with one line that says what happened and one that says what to type.

    Args:
        message: What happened and what was expected, one line.
        hint: What to type next; empty where there is nothing to type.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint:  # a traceback that the script's own error handling prints has it too
            self.add_note(hint)


class JobError(FakedistError):
    """The job as asked for makes no sense. Exit code 2."""

    exit_code = 2


class CheckError(FakedistError):
    """What ``check`` was configured to do makes no sense, or a baseline does not. Exit code 2."""

    exit_code = 2


class ScriptError(FakedistError):
    """A script that was to be judged failed by itself.

    Args:
        message: How it ended.
        hint: What to type next.
        output: The end of what it printed.
    """

    def __init__(self, message: str, hint: str = "", output: str = "") -> None:
        super().__init__(message, hint)
        self.output = output


class SetupError(FakedistError):
    """This machine lacks something that the run needs."""


class RunDirectoryError(FakedistError):
    """A run directory cannot be written or read."""


class RecordingError(FakedistError):
    """What would be recorded could be wrong, so nothing is."""


class ReportError(FakedistError):
    """A report of Nsight Systems cannot be made or read."""


class InventedValueError(FakedistError):
    """With ``--values strict`` the script read a value that no kernel computed."""


class WorldError(FakedistError):
    """The faked world has no answer to what the script asked of another rank."""
