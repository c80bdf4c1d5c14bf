"""Runs tasks on a Ray cluster. Ray places them, moves their results and runs those of lost workers again."""

from __future__ import annotations

import dataclasses
import io
import os
import platform
import re
import secrets
import shutil
import signal
import socket
import threading
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fakedist._version import __version__
from fakedist.errors import ExitCode, RunDirectoryError, SetupError
from fakedist.launcher.executors.process import LEAVE_S, TaskProcesses
from fakedist.launcher.executors.task import Coming, Task, TaskResult
from fakedist.rundir.outcome import Outcome
from fakedist.temporary import scratch_directory
from fakedist.units import format_bytes

if TYPE_CHECKING:
    from ray import ObjectRef


_MARK_PREFIX = ".fakedist-shared-"


@dataclass(frozen=True, slots=True)
class Handed:
    """A task on its way to a worker.

    ``mark`` names a file next to the task's directory: a worker that finds it, with the same ``inode``, shares the
    path. A copy, as rsync makes one, has another inode.
    """

    task: Task
    mark: str
    inode: int
    version: str = __version__


def run_there(handed: Handed, environment: Mapping[str, str]) -> tuple[TaskResult, bytes]:
    """Run a task for a driver elsewhere. Return the result and, unless the path is shared, its packed directory."""
    task = handed.task
    if handed.version != __version__:
        error = f"{platform.node()} has fakedist {__version__}, and the tasks come from {handed.version}"
        return failed(task, error), b""
    processes = TaskProcesses(environment)
    if _shares(task.directory.parent / handed.mark, handed.inode):
        return processes.run(task), b""
    with scratch_directory("run") as scratch:
        here = dataclasses.replace(task, directory=scratch / "run")
        result = dataclasses.replace(processes.run(here), directory=task.directory)
        return result, pack(here.directory)


def failed(task: Task, why: str) -> TaskResult:
    """The result of a task that could not run, or that was lost."""
    return TaskResult(
        key=task.key,
        outcome=Outcome.ERROR,
        code=ExitCode.ERROR,
        failure=why,
        output="",
        directory=task.directory,
        host="",
        worker="",
        wall_s=0.0,
        peak_rss_bytes=0,
    )


class SharedMarks:
    """Marks the directories of tasks, so that workers can see whether they share them. Removes the marks at the end."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._name = _MARK_PREFIX + secrets.token_hex(8)
        self._inodes: dict[Path, int] = {}

    def hand(self, task: Task) -> Handed:
        """Mark the location of a task's directory.

        Raises:
            RunDirectoryError: It cannot be written.
        """
        place = task.directory.parent.absolute()
        if place not in self._inodes:
            self._inodes[place] = self._stack.enter_context(_marked(place / self._name))
        absolute = dataclasses.replace(task, directory=task.directory.absolute())
        return Handed(absolute, self._name, self._inodes[place])


@contextmanager
def _marked(mark: Path) -> Iterator[int]:
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
        inode = mark.stat().st_ino
    except OSError as error:
        raise RunDirectoryError(f"{mark.parent} cannot be written: {error.strerror}", "choose another place") from None
    try:
        yield inode
    finally:
        mark.unlink(missing_ok=True)


def _shares(mark: Path, inode: int) -> bool:
    try:
        return mark.stat().st_ino == inode
    except OSError:
        return False


def pack(directory: Path) -> bytes:
    """The files below a directory as one archive. Empty if the directory does not exist."""
    if not directory.is_dir():
        return b""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED, compresslevel=1, strict_timestamps=False) as archive:
        for path in sorted(directory.rglob("*")):
            if path.is_file() and not path.is_symlink():
                archive.write(path, path.relative_to(directory))
    return data.getvalue()


def unpack(packed: bytes, directory: Path) -> None:
    """Replace a directory by what :func:`pack` made of one.

    Raises:
        RunDirectoryError: It cannot be written.
    """
    fresh = directory.with_name(f".{directory.name}-{secrets.token_hex(4)}")
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            archive.extractall(fresh)
        if directory.exists():
            shutil.rmtree(directory)
        os.rename(fresh, directory)
    except OSError as error:
        with suppress(OSError):
            shutil.rmtree(fresh)
        raise RunDirectoryError(
            f"{directory} cannot be written: {error.strerror}", "make room, or choose another place"
        ) from None


#: Seconds in which an address has to answer.
ANSWER_S = 10.0
#: How often Ray runs a task again whose worker or node was lost.
MAX_RETRIES = 5
_ADDRESS = re.compile(r"(?:ray://)?(?P<host>[^/:]+|\[[^]]+\]):(?P<port>\d+)")
_WAIT_S = 1.0
_HINT = "start one (docs/clusters.md), or give its address: RAY_ADDRESS=HOST:6379, or --on ray://HOST:10001"


def _say_nothing(text: str) -> None:
    pass


class RayExecutor:
    """Runs tasks on a Ray cluster that is already up.

    ``address`` is HOST:PORT, ray://HOST:PORT, or "auto" for a cluster that this machine is part of; None takes
    RAY_ADDRESS, or else "auto". ``say`` is called with remarks, such as that no node is large enough.

    Raises:
        SetupError: Ray is not installed, or no cluster answers at the address.
    """

    def __init__(self, address: str | None = None, say: Callable[[str], None] = _say_nothing) -> None:
        self._say = say
        self._pending: dict[ObjectRef[TaskResult], tuple[Task, ObjectRef[bytes]]] = {}
        self._most_bytes: int | None = None
        self._is_over = self._told_of_room = False
        self._stack = ExitStack()
        self._ray = _connected(address or os.environ.get("RAY_ADDRESS") or "auto", self._stack)
        self._stack.enter_context(_remarks_of_ray(say))
        self._remote = self._ray.remote(num_returns=2, max_retries=MAX_RETRIES)(_run_on_worker)

    def run(self, tasks: Iterable[Task | None]) -> Iterator[TaskResult]:
        """Run tasks and yield the result of each as it ends, see :class:`fakedist.launcher.executors.task.Executor`.

        Raises:
            SetupError: The workers cannot import fakedist.
            RunDirectoryError: A run directory cannot be written here.
        """
        coming = Coming(tasks)
        with ExitStack() as stack:
            marks = SharedMarks(stack)
            stack.callback(self._cancel)
            while True:
                while not self._is_over and (task := coming.next()) is not None and self._has_room(task):
                    self._submit(coming.take(), marks)
                if not self._pending:
                    return
                for ended in self._ray.wait(list(self._pending), num_returns=1, timeout=_WAIT_S)[0]:
                    task, packed = self._pending.pop(ended)
                    result = self._result(task, ended, packed)
                    self._most_bytes = max(self._most_bytes or 0, result.peak_rss_bytes) or None
                    yield result

    def close(self) -> None:
        """End what still runs, and leave the cluster."""
        self._is_over = True
        self._cancel()
        self._stack.close()

    def _submit(self, task: Task, marks: SharedMarks) -> None:
        memory_bytes = task.need.booked_bytes(self._most_bytes)
        remote = self._remote.options(name=task.key, num_cpus=task.need.cpus, memory=memory_bytes)
        result, packed = remote.remote(marks.hand(task))
        self._pending[result] = (task, packed)
        if not self._told_of_room and not self._fits_a_node(task.need.cpus, memory_bytes):
            self._told_of_room = True
            cores = "1 core" if task.need.cpus == 1 else f"{task.need.cpus} cores"
            self._say(f"no node of the cluster has {cores} and {format_bytes(memory_bytes)}: waiting for one that has")

    def _has_room(self, task: Task) -> bool:
        return len(self._pending) < 2 * max(1, int(self._ray.cluster_resources().get("CPU", 0.0) / task.need.cpus))

    def _fits_a_node(self, cpus: int, memory_bytes: int) -> bool:
        totals = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return any(total.get("CPU", 0) >= cpus and total.get("memory", 0) >= memory_bytes for total in totals)

    def _result(self, task: Task, ended: ObjectRef[TaskResult], packed: ObjectRef[bytes]) -> TaskResult:
        from ray.exceptions import RayError, RayTaskError

        try:
            result: TaskResult = self._ray.get(ended)
            files: bytes = self._ray.get(packed)
        except RayTaskError as error:  # nothing in a task raises: it could not be unpickled there
            raise SetupError(
                f"the cluster's workers cannot run tasks: {_one_line(error.cause)}",
                "install this version of fakedist and of Python on every node (docs/clusters.md)",
            ) from None
        except RayError as error:
            return failed(task, f"lost with its worker, after {MAX_RETRIES} retries: {_one_line(error)}")
        if files:
            unpack(files, task.directory)
        return result

    def _cancel(self) -> None:
        from ray.exceptions import RayError

        for ref in self._pending:
            with suppress(RayError, ValueError):
                self._ray.cancel(ref)
        if self._pending:
            self._ray.wait(list(self._pending), num_returns=len(self._pending), timeout=LEAVE_S + ANSWER_S)
        self._pending.clear()


def _run_on_worker(handed: Handed) -> tuple[TaskResult, bytes]:
    return run_there(handed, _environment_of_node())


def _environment_of_node() -> dict[str, str]:
    """The environment of the cluster's node plus the user's ``runtime_env``.

    A worker's own has more: Ray sets OMP_NUM_THREADS to the booked cores, and variables of its own.
    """
    import ray

    given = ray.get_runtime_context().runtime_env.get("env_vars") or {}
    node = _environment_of(os.getppid())
    of_ray = {"OMP_NUM_THREADS", "PYTHONBREAKPOINT", "SPT_NOENV"} - node.keys() - given.keys()
    return {name: value for name, value in os.environ.items() if name not in of_ray and not name.startswith("RAY_")}


def _environment_of(pid: int) -> dict[str, str]:
    with suppress(OSError):
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="surrogateescape").split("\0")
        return {name: value for name, found, value in (entry.partition("=") for entry in entries) if found}
    return {}


def _connected(address: str, stack: ExitStack) -> Any:
    """The module ``ray``, connected until the stack is closed; SetupError without Ray or an answering cluster."""
    try:
        import ray
    except ImportError:
        raise SetupError("Ray is not installed", "pip install 'fakedist[ray]'") from None
    if address != "auto":
        _see_that_it_answers(address)
    with _as_before():
        try:
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = "on this machine" if address == "auto" else f"at {address}"
            raise SetupError(f"no Ray cluster can be used {where}: {_one_line(error)}", _HINT) from None
    stack.callback(ray.shutdown)
    return ray


@contextmanager
def _as_before() -> Iterator[None]:
    """Undo Ray's SIGTERM handler and its ``breakpoint()``."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    hook = os.environ.get("PYTHONBREAKPOINT")
    try:
        yield
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, handler)
        os.environ.pop("PYTHONBREAKPOINT", None)
        if hook is not None:
            os.environ["PYTHONBREAKPOINT"] = hook


@contextmanager
def _remarks_of_ray(say: Callable[[str], None]) -> Iterator[None]:
    """Pass on the first line of Ray's report of lost workers, once. Ray prints 20 lines of its log on stdout."""
    from ray._private import worker

    shown: set[str] = set()

    def pass_on(data: Mapping[str, Any], **options: object) -> None:
        for text in data["lines"]:
            line = text.partition("\n")[0].partition(" Possible reasons")[0].strip().removesuffix(" Error:")
            if line not in shown:
                shown.add(line)
                say(f"Ray: {line}")

    before, worker.print_to_stdstream = worker.print_to_stdstream, pass_on
    try:
        yield
    finally:
        worker.print_to_stdstream = before


def _see_that_it_answers(address: str) -> None:
    """Raise SetupError unless a gRPC server answers. Ray waits for one for two minutes, then ends the process."""
    import grpc

    if (match := _ADDRESS.fullmatch(address)) is None:
        raise SetupError(f"{address!r} is not the address of a Ray cluster", _HINT)
    server = f"{match['host']}:{match['port']}"
    until = time.monotonic() + ANSWER_S
    try:
        socket.create_connection((match["host"].strip("[]"), int(match["port"])), ANSWER_S).close()
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return  # only Ray knows the certificates
        with grpc.insecure_channel(server) as channel:
            grpc.channel_ready_future(channel).result(timeout=max(0.1, until - time.monotonic()))
    except (OSError, OverflowError, grpc.FutureTimeoutError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "what listens there is not Ray"
        raise SetupError(f"no Ray cluster answers at {address}: {why}", _HINT) from None


def _one_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
