"""A template's process as its owner has it. This needs the standard library alone."""

from __future__ import annotations

import subprocess
from typing import Generic, Protocol, TypeVar


class _Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=_Closable)


class TemplateProcess(Generic[C]):
    """A template that may not have been started yet, or may have ended, and the connection to it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: C | None = None

    @property
    def pid(self) -> int | None:
        """The template's process. None if there is none."""
        return None if self._process is None else self._process.pid

    def reaped(self, pid: int) -> None:
        """A child of this process was reaped."""
        if self._process is not None and self._process.pid == pid:
            self._process.returncode = 0  # else subprocess would wait for it
            self._process = None
            self.close()

    def close(self) -> None:
        """End the template."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
