"""Tasks, which an executor is given, and results, which it returns. All records are frozen and can be pickled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from fakedist.options import Job
from fakedist.rundir.outcome import Outcome
from fakedist.units import GIB

#: Host memory that is assumed for a task as long as nothing is known. A rank of a 70B model takes half of it.
ASSUMED_MEMORY_BYTES = 4 * GIB
#: What a task is taken to need, as a multiple of the most that an earlier one held.
_MARGIN = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The resources that a task books, without limiting it; ``memory_bytes`` is None to go by earlier tasks."""

    cpus: int = 1
    memory_bytes: int | None = None

    def booked_bytes(self, most_bytes: int | None) -> int:
        """Host memory to book, given the most that an earlier task held, or None before the first."""
        if self.memory_bytes is not None:
            return self.memory_bytes
        return ASSUMED_MEMORY_BYTES if most_bytes is None else int(_MARGIN * most_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One run of a job, named uniquely among the tasks of one executor by ``key``.

    Attributes:
        directory: The run directory, or the parent of all ranks' if the job runs with its peers. An existing one is
            replaced.
        memory_limit_bytes: Resident host memory of all of its processes together that ends it. None for no limit.
        timeout_s: Seconds after which it is ended. None for no limit.
    """

    key: str
    job: Job
    directory: Path
    cwd: Path = field(default_factory=Path.cwd)
    need: Need = Need()
    memory_limit_bytes: int | None = None
    timeout_s: float | None = None

    @property
    def run_directory(self) -> Path:
        """The rank's run directory."""
        return self.directory / f"rank{self.job.rank}" if self.job.with_peers else self.directory


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """The end of a task. Every task has one: a task that fails raises nothing.

    Attributes:
        outcome: The rank's own, or ``HOST_MEMORY`` or ``TIMEOUT`` (its limits), ``KILLED`` (a signal), ``ERROR`` (it
            could not start, or its workers were lost) or ``INTERRUPTED`` (cancelled).
        code: The exit code of its process, as a shell has it: 128 + n for signal n.
        failure: The reason of a failure, one line; else empty.
        output: The end of what it printed.
        directory: Its directory on this machine. It may lack what a run that failed did not write.
        worker: ID of the process on ``host`` that ran it for the executor.
        peak_rss_bytes: The most resident host memory of its processes together, sampled a few times a second.
        is_accident: Whether a signal killed it that neither the job nor a limit had sent.
    """

    key: str
    outcome: Outcome
    code: int
    failure: str
    output: str
    directory: Path
    host: str
    worker: str
    wall_s: float
    peak_rss_bytes: int
    is_accident: bool = False

    @property
    def ended_well(self) -> bool:
        """Return whether the script ended without an error, at its end or after its last step."""
        return not self.failure


class Executor(Protocol):
    """Runs tasks somewhere, several at once."""

    def run(self, tasks: Iterable[Task | None]) -> Iterator[TaskResult]:
        """Run tasks and yield the result of each as it ends.

        The next task is requested only when there is room for it. None means that it is not ready: it is requested
        again after each result, and every second meanwhile.

        Raises:
            FakedistError: The tasks cannot run here.
        """
        ...

    def close(self) -> None:
        """End what still runs, and start nothing more. No process of a task is left when this returns."""
        ...


class Coming:
    """The tasks that an executor still has to start. Each is requested once and kept until it is taken."""

    def __init__(self, tasks: Iterable[Task | None]) -> None:
        self._tasks = iter(tasks)
        self._next: Task | None = None

    def next(self) -> Task | None:
        """The next task. None if there is none, or none until a running task ends."""
        if self._next is None:
            self._next = next(self._tasks, None)
        return self._next

    def take(self) -> Task:
        """Take the next task.

        Raises:
            LookupError: :meth:`next` has not found one.
        """
        if (task := self._next) is None:
            raise LookupError("no task is known to come")
        self._next = None
        return task
