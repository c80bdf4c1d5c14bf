"""The socket between a template and the process that wants forks of it: messages, and open files along with them."""

from __future__ import annotations

import json
import os
import select
import socket
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass

#: How the keeper of a template is told the most resident memory of a rank that has ended, in KiB.
PEAK = struct.Struct("<Q")
_HEADER = struct.Struct("<Q")
_MOST_FILES = 8


@dataclass(frozen=True, slots=True)
class Fork:
    """Asks for a rank. Its stdin, stdout, stderr and the pipe for its messages come along.

    Attributes:
        run_directory: Its run directory.
        environment: Its environment.
        cwd: The directory in which it starts.
        parent: The process that asks.
    """

    run_directory: str
    environment: dict[str, str]
    cwd: str
    parent: int


@dataclass(frozen=True, slots=True)
class ForkTask:
    """Asks for the process of a task, which runs ranks. The file for its output comes along.

    Attributes:
        arguments: The arguments of its program.
        environment: Its environment.
        cwd: The directory in which it starts.
        learned: The file of the template that its ranks fork from. Empty if they start on their own. A channel to that
            template comes along if there is one.
    """

    arguments: list[str]
    environment: dict[str, str]
    cwd: str
    learned: str


@dataclass(frozen=True, slots=True)
class Forked:
    """The process runs.

    Attributes:
        pid: Its process.
    """

    pid: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The template makes no ranks.

    Attributes:
        why: Why not.
    """

    why: str


@dataclass(frozen=True, slots=True)
class Over:
    """The rank has ended. Its process ID stays taken until :class:`Released`.

    Attributes:
        code: Its exit code; -n if signal n killed it.
    """

    code: int


@dataclass(frozen=True, slots=True)
class Release:
    """Nothing is left to be done about the rank that has ended."""


@dataclass(frozen=True, slots=True)
class Released:
    """The rank's process ID is free."""


Message = Fork | ForkTask | Forked | Refused | Over | Release | Released
_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind for kind in (Fork, ForkTask, Forked, Refused, Over, Release, Released)
}


class Channel:
    """One end of a stream socket. Both ends are on this machine."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fileno(self) -> int:
        """Its descriptor."""
        return self._end.fileno()

    def close(self) -> None:
        """Close this end."""
        self._end.close()

    def send(self, message: Message, files: Sequence[int] = ()) -> None:
        """Send a message, and duplicates of descriptors.

        Raises:
            OSError: The other end is closed.
        """
        data = json.dumps([type(message).__name__, asdict(message)]).encode(errors="surrogateescape")
        socket.send_fds(self._end, [_HEADER.pack(len(data))], files)
        self._end.sendall(data)

    def receive(self) -> tuple[Message | None, list[int]]:
        """Wait for a message, and take the descriptors that came along. None: the other end is closed."""
        try:
            head, files, *_ = socket.recv_fds(self._end, _HEADER.size, _MOST_FILES)
            data = self._all(_HEADER.unpack(head)[0]) if len(head) == _HEADER.size else b""
        except ConnectionError:
            return None, []
        if not data:
            for each in files:
                os.close(each)
            return None, []
        kind, value = json.loads(data)
        return _KINDS[kind](**value), list(files)

    def has_message(self, seconds: float = 0.0) -> bool:
        """Whether there is a message, or the other end is closed, after this many seconds at most."""
        return bool(select.select([self._end], [], [], seconds)[0])

    def _all(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            if not (more := self._end.recv(min(size - len(data), 1 << 20))):
                return b""
            data += more
        return data
