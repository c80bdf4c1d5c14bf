"""How a call of ``nvidia-smi`` ends that is not answered."""

from __future__ import annotations

INVALID_QUERY, NOT_FOUND, NO_DRIVER = 2, 6, 9  # exit codes: RETURN VALUE in nvidia-smi(1)


class NoAnswerError(Exception):
    """The call ends with this exit code, and has said this."""

    def __init__(self, code: int, stdout: str = "", stderr: str = "") -> None:
        super().__init__(stdout or stderr)
        self.code, self.stdout, self.stderr = code, stdout, stderr


def refused(what: str) -> NoAnswerError:
    """What the real tool knows and this one does not answer."""
    return NoAnswerError(INVALID_QUERY, stderr=f"nvidia-smi: {what} is not answered on fakedist's virtual GPU\n")
