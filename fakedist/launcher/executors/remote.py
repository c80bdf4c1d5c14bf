"""The worker of a cluster: runs a task there, and packs its run directory unless it lies on a shared path."""

from __future__ import annotations

import dataclasses
import io
import os
import platform
import secrets
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fakedist._version import __version__
from fakedist.errors import ExitCode, RunDirectoryError
from fakedist.launcher.executors.process import TaskProcesses
from fakedist.launcher.executors.task import Task, TaskResult
from fakedist.rundir.outcome import Outcome
from fakedist.temporary import scratch_directory

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
        told = f"{platform.node()} has fakedist {__version__}, and the tasks come from {handed.version}"
        return failed(task, told), b""
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
