"""Templates as their owners have them: started, asked for processes, and ended. It needs the standard library alone."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fakedist.rank.fork_server import PEAK, receive, send, socket_pair

#: Templates that are started for one script. If ranks start again on their own even so, no template fits them.
_MOST_TEMPLATES = 3
_PROGRAM = os.fspath(Path(__file__).parents[1] / "rank" / "__main__.py")
_VARIABLE = "FAKEDIST_TEMPLATE"
#: Arrow's allocator would start a thread, and none may be missing in a fork.
_NO_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}


class OwnChild:
    """A process that this one started. Its process ID stays taken until :meth:`wait` has returned."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid

    def has_ended(self) -> bool:
        """Return whether it has ended. It is not reaped, so its process group keeps its number."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def wait(self) -> int:
        """Wait for it, and reap it. Returns its exit code; -n if signal n killed it."""
        return self._process.wait()


class ForkedChild:
    """A process that a template forked, and whose end it reports. ``pid`` stays taken until :meth:`wait` returns."""

    #: The exit code of a process whose template was killed, and the process with it.
    LOST = -9

    def __init__(self, pid: int, answers: socket.socket) -> None:
        self.pid = pid
        self._answers = answers
        self._code: int | None = None

    @classmethod
    def ask(cls, door: int, request: Mapping[str, Any], files: Sequence[int]) -> ForkedChild | None:
        """Request a process from a template through its ``door``. None if it makes none.

        ``request`` has ``environment``, ``cwd`` and more for the template's program; ``files`` are stdin, stdout,
        stderr and further descriptors.
        """
        ours, theirs = socket_pair()
        with suppress(OSError):  # the template was killed
            with theirs, socket.socket(fileno=os.dup(door)) as end:
                send(end, request, (*files, theirs.fileno()))
            answer, _ = receive(ours)
            if answer is not None and answer["pid"] is not None:
                return cls(answer["pid"], ours)
        ours.close()
        return None

    def fileno(self) -> int:
        """A descriptor that is ready when it has ended."""
        return self._answers.fileno()

    def has_ended(self) -> bool:
        """Return whether it has ended."""
        if self._code is None and select.select([self._answers], [], [], 0.0)[0]:
            self._hear()
        return self._code is not None

    def wait(self) -> int:
        """Wait for it, and have the template reap it. Returns its exit code; -n if signal n killed it."""
        if self._code is None:
            self._hear()
        with suppress(OSError), self._answers as answers:
            answers.shutdown(socket.SHUT_WR)
            answers.recv(1)  # the template closes its end once it has reaped it
        assert self._code is not None
        return self._code

    def _hear(self) -> None:
        message, _ = receive(self._answers)
        self._code = self.LOST if message is None else message["code"]


Child = OwnChild | ForkedChild


class TemplateProcess:
    """A template that may not have been started yet, or may have ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._door: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """The template's process. None if there is none."""
        return None if self._process is None else self._process.pid

    def start(self, program: Sequence[str], environment: Mapping[str, str], cwd: str, output: int | None) -> None:
        """Start it. Its last argument is the descriptor of its end of the door."""
        self._door, theirs = socket_pair()
        with theirs:
            self._process = subprocess.Popen(
                [*program, str(theirs.fileno())],
                env=environment,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def most_bytes(self) -> int:
        """The most resident memory of a process that ended since this was asked last."""
        most = 0
        if self._door is not None:
            with suppress(BlockingIOError, ConnectionError):
                while data := self._door.recv(PEAK.size, socket.MSG_DONTWAIT):
                    most = max(most, PEAK.unpack(data)[0] * 1024)
        return most

    def reaped(self, pid: int) -> None:
        """A child of this process was reaped."""
        if self._process is not None and self._process.pid == pid:
            self._process.returncode = 0  # else subprocess would wait for it
            self._process = None
            self.close()

    def close(self) -> None:
        """End it."""
        if self._door is not None:
            self._door.close()
            self._door = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class TemplateKeeper(TemplateProcess):
    """Starts a template of ranks once it is known what to import, and a new one when that changes.

    ``learned`` takes a rank's imports (:mod:`fakedist.rank.preloading`); an ``output`` of None is this process's stdout
    and stderr.
    """

    def __init__(self, learned: Path, output: int | None = None) -> None:
        super().__init__()
        self.learned, self._output = learned, output
        self._learned: dict[str, Any] = {}
        self._num_started = 0

    def open_door(self, key: str) -> int | None:
        """The descriptor of the door to a template for a script; None before its imports are known, or if none fits."""
        try:
            learned = json.loads(self.learned.read_text())
        except (OSError, ValueError):
            return None
        if learned["key"] != key:
            return None
        if key != self._learned.get("key"):
            self._num_started = 0
        if not self._is_same(learned) or self._process is None:
            self.close()
            if self._num_started < _MOST_TEMPLATES:
                program = [sys.executable, _PROGRAM, os.fspath(self.learned)]
                self.start(program, learned["started"], learned["cwd"], self._output)
                self._num_started += 1
        self._learned = learned
        return None if self._door is None else self._door.fileno()

    def _is_same(self, learned: dict[str, Any]) -> bool:
        """Return whether nothing was learned since. A template may have left some modules out."""
        return {**learned, "modules": None} == {**self._learned, "modules": None}


class TaskTemplate(TemplateProcess):
    """A process that has imported what makes tables, and from which tasks fork, from the second on."""

    def __init__(self) -> None:
        super().__init__()
        self._num_tasks = 0
        self._environment: dict[str, str] = {}

    def fork(self, program: Sequence[str], task: dict[str, Any], files: Sequence[int]) -> ForkedChild | None:
        """Fork the process of a task. None if it has to start on its own.

        Args:
            program: The template's program and arguments, to which the descriptor of its door is added.
            task: The ``arguments`` of its program, its ``environment`` and ``cwd``, and ``learned``: the file of its
                ranks' template, empty if they start on their own.
            files: The descriptors for its streams, then of the door to a template of ranks, if there is one.
        """
        self._num_tasks += 1
        if self._num_tasks == 2:
            self._environment = task["environment"]
            with suppress(OSError):  # no memory, or no process more
                self.start(program, self._environment | _NO_THREADS, task["cwd"], sys.stderr.fileno())
        if self._door is None or task["environment"] != self._environment:
            return None
        if (forked := ForkedChild.ask(self._door.fileno(), task, files)) is None:
            self.close()  # something cannot be imported, or starts threads
        return forked


def template_variable(learned: Path, door: int | None) -> dict[str, str]:
    """The variable that names a door, and the file with what the template imports or that takes it."""
    return {_VARIABLE: f"{'' if door is None else door}:{learned}"}


def offered_template() -> tuple[Path, int | None] | None:
    """The file and the door of this process's variable, which ranks and other programs do not see."""
    if (offered := os.environ.pop(_VARIABLE, None)) is None:
        return None
    number, _, path = offered.partition(":")
    if not number:
        return Path(path), None
    os.set_inheritable(int(number), False)
    return Path(path), int(number)
