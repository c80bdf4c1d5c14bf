"""Fork servers as their owners have them: started, asked for processes, and ended.

The supervisor of tasks imports this, so it needs the standard library alone until a rank starts.

Does ahead, on another core while the rank runs, what its tables and its page need.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fakedist.errors import FakedistError
from fakedist.gpu.models.catalogue import find_gpu
from fakedist.options import Job
from fakedist.rank.fork_server import PEAK, receive, send, socket_pair

if TYPE_CHECKING:
    from fakedist.results.building import Computed


def import_ahead(page: bool, gpu: str) -> None:
    """Import what makes the tables and, if wanted, the page, and load what they need at first use.

    ``gpu`` is the model for which the tables price a step, as they do for faster ones; empty if they price none.
    """
    with suppress(ImportError, FakedistError):  # raised again where it is needed
        import fakedist.report.content.run
        import fakedist.results.building
        import fakedist.results.opening  # noqa: F401
        from fakedist.rundir.tables import import_parquet

        import_parquet()
        if page:
            from fakedist.report.render.html import load_page

            load_page()
        if gpu:
            from fakedist.cost_model.estimated import faster_gpus
            from fakedist.cost_model.kernels.kernel_times import KernelTimes

            own = find_gpu(gpu)
            for spec in (own, *faster_gpus(own)):
                KernelTimes(spec).load()


def priced_gpu(job: Job) -> str:
    """The GPU model for which a job's tables price a step. Empty if they price none."""
    return job.gpu if job.device == "virtual" and job.kernels else ""


class Ahead:
    """A thread that imports and loads while the rank runs, and computes the tables once all of it is recorded.

    A rank that has written its last record needs a while to end: a large job has a gigabyte to free. ``computed`` is
    known at the end of the ``with`` block: None if the rank's process ended before all was recorded.
    """

    def __init__(self, job: Job, run_directory: Path) -> None:
        self._job, self._run_directory = job, run_directory
        self._may_go_on = threading.Event()
        self._is_recorded = False
        self._thread = threading.Thread(target=self._work, name="ahead")
        self.computed: Computed | None = None

    def __enter__(self) -> Ahead:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_recorded &= kind is None
        self._may_go_on.set()
        self._thread.join()  # two threads must not import modules that import each other

    def recorded(self) -> None:
        """The rank has written its last record."""
        self._is_recorded = True
        self._may_go_on.set()

    def _work(self) -> None:
        import_ahead(self._job.page, priced_gpu(self._job))
        with suppress(Exception):  # raised again where it is needed
            self._may_go_on.wait()
            if self._is_recorded and not self._job.nsys:  # what nsys saw is joined to the recording later
                from fakedist.results.building import compute_tables

                self.computed = compute_tables(self._run_directory)


_PROGRAM = os.fspath(Path(__file__).parents[1] / "rank" / "__main__.py")
_VARIABLE = "FAKEDIST_FORK_SERVER"
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
    """A process that a fork server forked, and whose end it reports. ``pid`` stays taken until :meth:`wait` returns."""

    #: The exit code of a process whose server was killed, and the process with it.
    LOST = -9

    def __init__(self, pid: int, answers: socket.socket) -> None:
        self.pid = pid
        self._answers = answers
        self._code: int | None = None

    @classmethod
    def ask(cls, door: int, request: Mapping[str, Any], files: Sequence[int]) -> ForkedChild | None:
        """Request a process from a server through its ``door``. None if it makes none.

        ``request`` has ``environment``, ``cwd`` and more for the server's program; ``files`` are stdin, stdout,
        stderr and further descriptors.
        """
        ours, theirs = socket_pair()
        with suppress(OSError):  # the server was killed
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
        """Wait for it, and have the server reap it. Returns its exit code; -n if signal n killed it."""
        if self._code is None:
            self._hear()
        with suppress(OSError), self._answers as answers:
            answers.shutdown(socket.SHUT_WR)
            answers.recv(1)  # the server closes its end once it has reaped it
        assert self._code is not None
        return self._code

    def _hear(self) -> None:
        message, _ = receive(self._answers)
        self._code = self.LOST if message is None else message["code"]


Child = OwnChild | ForkedChild


class ForkServer:
    """A fork server that may not have been started yet, or may have ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._door: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """The server's process. None if there is none."""
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

    def ask(self, request: Mapping[str, Any], files: Sequence[int]) -> ForkedChild | None:
        """Fork a process (:meth:`ForkedChild.ask`). None if it makes none."""
        return None if self._door is None else ForkedChild.ask(self._door.fileno(), request, files)

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


class RankServer(ForkServer):
    """Forks the ranks of one script, once its first rank has written its imports to the file ``path``.

    It is started once for a script and its environment: if it fails, the other ranks start on their own. An ``output``
    of None is this process's stdout and stderr.
    """

    def __init__(self, path: Path, output: int | None = None) -> None:
        super().__init__()
        self._path, self._output = path, output
        self._serves: tuple[Any, ...] = ()

    def door(self, key: str) -> RankDoor:
        """The door for the next rank of a script; closed before its imports are known, or if its server has ended."""
        try:
            imports = json.loads(self._path.read_text())
        except (OSError, ValueError):
            imports = {"key": None}
        if imports["key"] != key:
            return RankDoor(self._path, None)
        serves = (key, imports["started"], imports["cwd"])
        if serves != self._serves:
            self.close()
            self._serves = serves
            self.start([sys.executable, _PROGRAM, str(self._path)], imports["started"], imports["cwd"], self._output)
        return RankDoor(self._path, None if self._door is None else self._door.fileno())


@dataclass(frozen=True)
class RankDoor:
    """A fork server of ranks, for a process that runs them: its file of imports, and its descriptor if it is open."""

    path: Path
    descriptor: int | None

    @classmethod
    def from_environment(cls) -> RankDoor | None:
        """The door in this process's variable, which is removed: ranks and other programs do not see it."""
        if (offered := os.environ.pop(_VARIABLE, None)) is None:
            return None
        number, _, path = offered.partition(":")
        if number:
            os.set_inheritable(int(number), False)
        return cls(Path(path), int(number) if number else None)

    def variable(self) -> dict[str, str]:
        """The variable of :meth:`from_environment`."""
        return {_VARIABLE: f"{'' if self.descriptor is None else self.descriptor}:{self.path}"}

    def fork(
        self, job: Job, run_directory: Path, environment: Mapping[str, str], *, stdout: int | None, pipe: int
    ) -> ForkedChild | None:
        """Fork a rank. None if the server does not fit it, or makes none. A ``stdout`` of None is this process's."""
        from fakedist.rank.preloading import Imports, key_of

        if self.descriptor is None or job.device != "virtual" or job.nsys:
            return None
        if (imports := Imports.read(self.path)) is None or not imports.fits(key_of(job), environment):
            return None
        return self._ask(run_directory, environment, (0, 1 if stdout is None else stdout, 2, pipe))

    def _ask(self, run_directory: Path, environment: Mapping[str, str], files: Sequence[int]) -> ForkedChild | None:
        assert self.descriptor is not None
        request = {
            "run_directory": os.fspath(run_directory.absolute()),
            "environment": dict(environment),
            "cwd": os.getcwd(),
            "parent": os.getpid(),
        }
        return ForkedChild.ask(self.descriptor, request, files)

    def own_start(self, job: Job) -> dict[str, str]:
        """The variable of a rank that starts on its own: with a closed door, it is the first of its script."""
        from fakedist.rank.preloading import first_rank, key_of

        return first_rank(self.path, key_of(job)) if self.descriptor is None else {}


class TaskServer(ForkServer):
    """Forks tasks, from the second on, with what makes tables imported."""

    def __init__(self) -> None:
        super().__init__()
        self._num_tasks = 0
        self._environment: dict[str, str] = {}

    def fork(self, program: Sequence[str], task: dict[str, Any], files: Sequence[int]) -> ForkedChild | None:
        """Fork the process of a task. None if it has to start on its own.

        Args:
            program: The server's program and arguments, to which the descriptor of its door is added.
            task: The ``arguments`` of its program, its ``environment`` and ``cwd``, and ``ranks``: the file of imports
                of its ranks' server, empty if they start on their own.
            files: The descriptors for its streams, then of the door to a server of ranks, if that is open.
        """
        self._num_tasks += 1
        if self._num_tasks == 2:
            self._environment = task["environment"]
            with suppress(OSError):  # no memory, or no process more
                self.start(program, self._environment | _NO_THREADS, task["cwd"], sys.stderr.fileno())
        if self._door is None or task["environment"] != self._environment:
            return None
        if (forked := self.ask(task, files)) is None:
            self.close()  # something cannot be imported, or starts threads
        return forked
