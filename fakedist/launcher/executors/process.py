"""Runs a task on this machine, under a supervisor, and sees how it ended."""

from __future__ import annotations

import json
import os
import platform
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Literal

from fakedist.errors import ExitCode, RunDirectoryError
from fakedist.launcher.executors.task import Task, TaskResult
from fakedist.launcher.fork_servers import ForkedChild, RankServer, TaskServer, priced_gpu
from fakedist.launcher.machine import ProcessTree, adopt_orphans
from fakedist.rank.fork_server import end_with_parent
from fakedist.rank.preloading import key_of
from fakedist.rundir.directory import is_in_use, load_manifest
from fakedist.rundir.outcome import Ending, Outcome
from fakedist.temporary import scratch_directory
from fakedist.units import format_bytes

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
        supervised = _Supervision(Order(**json.loads(line)), (sys.stdin.fileno(), shield), child_ends, servers).run()
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
        order = self._order
        now = time.monotonic()
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


_OUTPUT_BYTES = 8_000
_WAIT_S = 0.5
_POLL_S = 0.1
#: Seconds that an attempt whose worker was lost may hold the run directory. A rank has 10 to leave, then come its
#: tables. An NFS server frees the lock of a client that has gone after 90 (nfsd's lease).
_EARLIER_S = 120.0
_ERROR = "fakedist: error: "
_SUPERVISOR = os.fspath(Path(__file__).with_name("__main__.py"))
_PROGRAM = os.fspath(Path(__file__).parents[2] / "cli" / "task_program.py")
_TASK = (sys.executable, _PROGRAM, "run")


class TaskProcesses:
    """Runs tasks in processes of this machine. Threads may share one.

    With ``fork``, tasks fork from a server that has imported what they need, and their ranks from one that has the
    imports of the first one.
    """

    def __init__(
        self, environment: Mapping[str, str] | None = None, fork: bool = False, program: tuple[str, ...] = _TASK
    ) -> None:
        self._environment, self._fork, self._program = environment, fork, program
        self._lock = threading.Lock()
        self._supervisors: set[_Supervisor] = set()
        self._idle: list[_Supervisor] = []
        self._is_over = False

    def run(self, task: Task) -> TaskResult:
        """Run a task to its end. No process of it is left."""
        # Not next to the run directory: if that disk is full, the log holds the error.
        with scratch_directory("task") as scratch:
            log = scratch / "log"
            if not task.cwd.is_dir():
                ending = Ending(Outcome.ERROR, ExitCode.ERROR, f"{platform.node()} has no directory {task.cwd}")
                return _result(task, ending, Supervised("itself", 0, 0.0, 0), log)
            self._wait_for_earlier_attempt(task)
            with self._supervisor() as supervisor:
                answer = b"" if supervisor is None else supervisor.ask(self._order(task, scratch, log))
            if not answer:
                return _result(task, self._unsupervised(), Supervised("cancelled", 0, 0.0, 0), log)
            supervised = Supervised(**json.loads(answer))
            return _result(task, _ending(task, supervised, log), supervised, log)

    def close(self) -> None:
        """End the supervisors that wait for tasks."""
        with self._lock:
            while self._idle:
                supervisor = self._idle.pop()
                self._supervisors.discard(supervisor)
                supervisor.end()

    def cancel(self) -> None:
        """End every task that runs, and start no more."""
        with self._lock:
            self._is_over = True
            for supervisor in self._supervisors:
                supervisor.cancel()
        self.close()

    def _order(self, task: Task, scratch: Path, log: Path) -> Order:
        data = scratch / "job.json"
        forks = self._fork and task.job.device == "virtual"
        server = [sys.executable, _PROGRAM, "fork", "page" if task.job.page else "", priced_gpu(task.job)]
        data.write_text(json.dumps({"job": task.job.to_dict(), "directory": os.fspath(task.directory.absolute())}))
        return Order(
            command=[*self._program],
            arguments=[os.fspath(data)],
            server=server if forks else [],
            environment=dict(os.environ if self._environment is None else self._environment),
            cwd=os.fspath(task.cwd.absolute()),
            log=os.fspath(log),
            memory_limit_bytes=task.memory_limit_bytes,
            timeout_s=task.timeout_s,
            script=key_of(task.job) if forks else "",
        )

    @contextmanager
    def _supervisor(self) -> Iterator[_Supervisor | None]:
        with self._lock:
            if self._is_over:
                supervisor = None
            else:
                supervisor = self._idle.pop() if self._idle else _Supervisor()
                self._supervisors.add(supervisor)
        try:
            yield supervisor
        finally:
            if supervisor is not None:
                with self._lock:
                    if stays := self._fork and not self._is_over and supervisor.can_go_on:
                        self._idle.append(supervisor)
                    else:
                        self._supervisors.discard(supervisor)
                if not stays:
                    supervisor.end()

    def _wait_for_earlier_attempt(self, task: Task) -> None:
        """Wait until nothing writes to the directory: a cluster may restart a task while its first attempt ends."""
        until = time.monotonic() + _EARLIER_S
        runs = [task.directory, *task.directory.glob("rank*")]
        while any(map(is_in_use, runs)) and not self._is_over and time.monotonic() < until:
            time.sleep(_POLL_S)

    def _unsupervised(self) -> Ending:
        if self._is_over:
            return Ending(Outcome.INTERRUPTED, ExitCode.INTERRUPTED, "it was cancelled")
        return Ending(Outcome.ERROR, ExitCode.ERROR, "the process that supervises it was killed")


class _Supervisor:
    def __init__(self) -> None:
        self._scratch = ExitStack()
        self._process = start_supervisor(self._scratch.enter_context(scratch_directory("supervisor")))
        self.can_go_on = True

    def ask(self, order: Order) -> bytes:
        answer = _ask(self._process, order)
        self.can_go_on = bool(answer)
        return answer

    def cancel(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            self._process.stdin.close()

    def end(self) -> None:
        assert self._process.stdout is not None
        self.cancel()
        self._process.wait()
        self._process.stdout.close()
        self._scratch.close()


def start_supervisor(scratch: Path) -> subprocess.Popen[bytes]:
    """Start the process that starts and watches tasks' processes, in its own session. It logs to ``scratch``."""
    with (scratch / "log").open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-S", _SUPERVISOR, os.fspath(scratch / "imports.json")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )


def _ask(supervisor: subprocess.Popen[bytes], order: Order) -> bytes:
    assert supervisor.stdin is not None
    assert supervisor.stdout is not None
    with suppress(OSError, ValueError):  # it was cancelled, or killed, before it had the order
        supervisor.stdin.write(json.dumps(asdict(order)).encode() + b"\n")
        supervisor.stdin.flush()
    answer = b""
    while not answer.endswith(b"\n"):  # in short waits: Python sees an interrupt (Ray cancels a task) only between
        if select.select([supervisor.stdout], [], [], _WAIT_S)[0]:
            if not (read := os.read(supervisor.stdout.fileno(), 65536)):
                return b""
            answer += read
    return answer


def _ending(task: Task, supervised: Supervised, log: Path) -> Ending:
    if supervised.ended == "memory":
        limit, most = (format_bytes(size or 0) for size in (task.memory_limit_bytes, supervised.peak_rss_bytes))
        message = f"its processes held {most} of host memory, and {limit} is the limit"
        return Ending(Outcome.HOST_MEMORY, 128 + signal.SIGKILL, message)
    if supervised.ended == "timeout":
        return Ending(Outcome.TIMEOUT, ExitCode.TIMEOUT, f"it did not end within {task.timeout_s:g} s")
    if supervised.ended == "cancelled":
        return Ending(Outcome.INTERRUPTED, ExitCode.INTERRUPTED, "it was cancelled")
    if supervised.code < 0:
        name = signal.Signals(-supervised.code).name
        return Ending(Outcome.KILLED, 128 - supervised.code, f"by {name}")  # what the rank's own process would say
    try:
        ending = load_manifest(task.run_directory).exit
    except RunDirectoryError:
        ending = None
    if ending is None or ending.code != supervised.code:  # else the files are those of an earlier run
        return Ending(Outcome.ERROR, supervised.code or ExitCode.ERROR, _error(log) or "the run could not start")
    return ending


def _result(task: Task, ending: Ending, supervised: Supervised, log: Path) -> TaskResult:
    return TaskResult(
        key=task.key,
        outcome=ending.outcome,
        code=ending.code or 0,
        failure=_failure(ending),
        output=_tail(log),
        directory=task.directory,
        host=platform.node(),
        worker=str(os.getpid()),
        wall_s=supervised.wall_s,
        peak_rss_bytes=supervised.peak_rss_bytes,
        is_accident=ending.is_accident,
    )


def _failure(ending: Ending) -> str:
    if ending.ended_well:
        return ""
    if ending.outcome is Outcome.KILLED:
        return f"killed {ending.message}"
    return ending.message or f"it ended with exit code {ending.code}"


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _OUTPUT_BYTES))
            return file.read().decode(errors="replace").rstrip()
    except OSError:
        return ""


def _error(log: Path) -> str:
    """Return fakedist's own error among what a task printed, or else the last line."""
    lines = _tail(log).splitlines()
    ours = [line.removeprefix(_ERROR) for line in lines if line.startswith(_ERROR)]
    return (ours or lines or [""])[-1].strip()
