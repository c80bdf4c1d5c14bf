"""A rank's process, as its parent sees it: started on its own, or forked from a template."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from typing import Protocol

from fakedist.rank.template.channel import Channel, Over, Release


class Child(Protocol):
    """A process that runs, or has ended.

    Attributes:
        pid: Its process ID, which stays taken until :meth:`wait` has returned.
    """

    @property
    def pid(self) -> int:
        """Its process ID."""
        ...

    def has_ended(self) -> bool:
        """Whether it has ended."""
        ...

    def wait(self) -> int:
        """Wait until it has ended, and free its process ID. Returns its exit code; -n if signal n killed it."""
        ...


class OwnChild:
    """A process that this one started."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Its process ID."""
        return self._process.pid

    def has_ended(self) -> bool:
        """Whether it has ended. It is not reaped, so its process group keeps its number."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def wait(self) -> int:
        """Wait for it, and reap it."""
        return self._process.wait()


class ForkedChild:
    """A process that a template forked, and whose end the template tells.

    Args:
        pid: Its process ID.
        channel: The channel to the template.
    """

    #: What a rank's exit code is taken to be if its template was killed, and the rank with it.
    LOST = -9

    def __init__(self, pid: int, channel: Channel) -> None:
        self.pid = pid
        self._channel = channel
        self._code: int | None = None

    def has_ended(self) -> bool:
        """Whether it has ended."""
        if self._code is None and self._channel.has_message():
            self._hear()
        return self._code is not None

    def wait(self) -> int:
        """Wait for it, and have the template reap it."""
        if self._code is None:
            self._hear()
        with suppress(OSError):
            self._channel.send(Release())
            self._channel.receive()
        assert self._code is not None
        return self._code

    def _hear(self) -> None:
        message, _ = self._channel.receive()
        self._code = message.code if isinstance(message, Over) else self.LOST
