"""The supervisor: a small process between an executor and the processes of tasks, one task after the other.

It adopts every process that a task leaves behind, samples their resident memory, and ends all of them at a limit, at
the task's end, and when the executor closes the pipe or dies. It keeps the fork servers of tasks and ranks, and needs
the standard library alone.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Literal

from fakedist.launcher.fork_servers import ForkedChild, RankServer, TaskServer
from fakedist.launcher.process_tree import ProcessTree, adopt_orphans
from fakedist.rank.fork_server import end_with_parent

Ended = Literal["itself", "memory", "timeout", "cancelled"]

#: Seconds that a task may take to leave after SIGTERM: its rank has 10, then the tables are built.
LEAVE_S = 20.0
_SAMPLE_S = 0.2


@dataclass(frozen=True)
class Order:
    """A program to run in a complete environment, with its output in ``log``.

    Attributes:
        memory_limit_bytes, timeout_s: As for :class:`fakedist.launcher.executors.task.Task`.
        script: The script of its ranks, which chooses their fork server. Empty if they do not fork.
        arguments: Further arguments, which a fork of the server gets.
        server: The command of a server that forks processes like it. Empty if each starts on its own.
    """

    command: list[str]
    environment: dict[str, str]
    cwd: str
    log: str
    memory_limit_bytes: int | None
    timeout_s: float | None
    script: str = ""
    arguments: list[str] = field(default_factory=list)
    server: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Supervised:
    """The end of an ordered program.

    ``ended`` is "itself" or the supervisor's reason; ``code`` is -n if signal n killed it; ``peak_rss_bytes`` is the
    peak of all its processes together.
    """

    ended: Ended
    code: int
    wall_s: float
    peak_rss_bytes: int


def main(imports: str) -> int:
    """Run the orders on stdin, one a line, in a child of this process. Print how each ended, one a line."""
    shield = _shield()
    adopt_orphans()
    child_ends, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _hear)
    servers = ForkServers(RankServer(Path(imports), output=sys.stderr.fileno()), TaskServer())
    while line := sys.stdin.buffer.readline():
        owners = (sys.stdin.fileno(), shield)
        supervised = _Supervision(Order(**json.loads(line)), owners, child_ends, servers).run()
        if select.select([shield], [], [], 0)[0]:
            break
        sys.stdout.write(json.dumps(asdict(supervised)) + "\n")
        sys.stdout.flush()
    servers.close()
    return 0


def _shield() -> int:
    """Go on in a child, as Ray kills the children of a worker that leaves, and nothing would end the tasks then.

    Returns:
        A descriptor at its end once the original process is gone.
    """
    reader, writer = os.pipe()
    if child := os.fork():
        os.close(reader)
        os._exit(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
    os.close(writer)
    return reader


def _hear(number: int, frame: FrameType | None) -> None:
    """Only a handled signal reaches the wakeup descriptor."""


@dataclass(frozen=True)
class ForkServers:
    """The servers from which a supervisor's tasks, and their ranks, fork."""

    ranks: RankServer
    tasks: TaskServer

    def pids(self) -> set[int | None]:
        """Their processes, of which none belongs to a task."""
        return {self.ranks.pid, self.tasks.pid}

    def most_bytes(self) -> int:
        """The most resident memory of a process of theirs that ended since this was asked last."""
        return max(self.ranks.most_bytes(), self.tasks.most_bytes())

    def reaped(self, pid: int) -> None:
        """A child of this process was reaped."""
        self.ranks.reaped(pid)
        self.tasks.reaped(pid)

    def close(self) -> None:
        """End them."""
        self.ranks.close()
        self.tasks.close()


def start(order: Order, servers: ForkServers) -> subprocess.Popen[bytes] | ForkedChild:
    """Start the program in a session of its own, or fork it from its server."""
    with open(order.log, "wb") as log, open(os.devnull, "rb") as null:
        door = servers.ranks.door(order.script) if order.script else None
        doors = () if door is None or door.descriptor is None else (door.descriptor,)
        if order.server:
            task = {"arguments": order.arguments, "environment": order.environment, "cwd": order.cwd}
            ranks = "" if door is None else os.fspath(door.path)
            files = (null.fileno(), log.fileno(), log.fileno(), *doors)
            if (forked := servers.tasks.fork(order.server, task | {"ranks": ranks}, files)) is not None:
                return forked
        own = os.getpid()
        return subprocess.Popen(
            [*order.command, *order.arguments],
            cwd=order.cwd,
            env=order.environment | ({} if door is None else door.variable()),
            pass_fds=doors,
            stdin=null,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=lambda: end_with_parent(signal.SIGTERM, own),
        )


class _Supervision:
    def __init__(self, order: Order, owners: tuple[int, ...], child_ends: int, servers: ForkServers) -> None:
        self._order = order
        self._servers = servers
        self._child_ends, self._owners = child_ends, list(owners)
        self._tree = ProcessTree(os.getpid(), besides=servers.pids)
        self._peak_bytes = 0
        servers.most_bytes()  # of ranks of the task before, which it may have reaped late
        self._ended: Ended = "itself"
        self._begun = time.monotonic()
        self._kill_at: float | None = None
        self._program = start(order, servers)  # kept: without the object, subprocess would reap the process
        self._pid = self._program.pid

    def run(self) -> Supervised:
        while (code := self._code()) is None:
            self._wait()
            self._check_limits()
        wall_s = time.monotonic() - self._begun
        self._tree.kill()
        self._reap()
        return Supervised(self._ended, code, wall_s, max(self._peak_bytes, self._servers.most_bytes()))

    def _wait(self) -> None:
        forked = [self._program.fileno()] if isinstance(self._program, ForkedChild) else []
        for reader in select.select([self._child_ends, *self._owners, *forked], [], [], _SAMPLE_S)[0]:
            if reader not in forked and not os.read(reader, 4096):  # an owner is gone
                self._owners.remove(reader)
                self._leave("cancelled")

    def _check_limits(self) -> None:
        order, now = self._order, time.monotonic()
        rss_bytes = self._tree.rss_bytes()
        self._peak_bytes = max(self._peak_bytes, rss_bytes)
        if order.memory_limit_bytes is not None and rss_bytes > order.memory_limit_bytes:
            self._ended = "memory" if self._ended == "itself" else self._ended
            self._tree.kill()
        elif order.timeout_s is not None and self._ended == "itself" and now > self._begun + order.timeout_s:
            self._leave("timeout")
        if self._kill_at is not None and now > self._kill_at:
            self._kill_at = None
            os.kill(self._pid, signal.SIGKILL)

    def _leave(self, why: Ended) -> None:
        if self._ended == "itself":
            self._ended = why
            self._kill_at = time.monotonic() + LEAVE_S
            os.kill(self._pid, signal.SIGTERM)

    def _code(self) -> int | None:
        status = self._reap()
        if isinstance(self._program, ForkedChild):
            return self._program.wait() if self._program.has_ended() else None
        return None if status is None else os.waitstatus_to_exitcode(status)

    def _reap(self) -> int | None:
        status_of_program = None
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return status_of_program
            if not pid:
                return status_of_program
            if pid in self._servers.pids():
                self._servers.reaped(pid)
                continue
            self._peak_bytes = max(self._peak_bytes, usage.ru_maxrss * 1024)  # it may lie between two samples
            if pid == self._pid:
                status_of_program = status
