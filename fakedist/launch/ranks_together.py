"""Runs ranks of a job side by side. A rank follows the tapes of those before it while they are written."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path

from fakedist.errors import RunDirectoryError
from fakedist.job import Job
from fakedist.launch.executors.task import Executor, Task, TaskResult
from fakedist.run.directory import MANIFEST_NAME, TAPE_NAME, create_run_directory
from fakedist.run.journal import read_journal
from fakedist.run.manifest import load_manifest
from fakedist.run.outcome import Ending
from fakedist.run.tape import TAPE_RECORDS, Tape


class RanksTogether:
    """Ranks of one job that run side by side, begun in the given order.

    A rank begins when the one before it has begun its tape. From then on it can wait for that tape, and nothing waits
    for a rank that has not begun.

    Args:
        job: The job. Its own rank is ignored.
        directory: The directory of the run directories ``rank0``, ``rank4``, ... Runs of these ranks are replaced.
        ranks: The ranks.
        tapes: The tapes of other ranks, which all of them have.
        executor: What runs them. It is closed afterwards.

    Raises:
        RunDirectoryError: A run directory cannot be replaced.
    """

    def __init__(
        self, job: Job, directory: Path, ranks: Sequence[int], tapes: Mapping[int, Tape], *, executor: Executor
    ) -> None:
        self._job = job
        self._directory = directory
        self._tapes = dict(tapes)
        self._left = {str(rank): rank for rank in ranks}
        self._ended: dict[str, TaskResult] = {}
        for rank in ranks:  # an earlier run's tape would be taken for the new one
            if (run := self._run_directory(rank)).exists():
                with create_run_directory(run, True):
                    pass
        self._results = _run(executor, self._tasks(tuple(ranks)))

    def __contains__(self, rank: int) -> bool:
        """Whether the rank's result has not been taken."""
        return str(rank) in self._left

    def result(self, rank: int) -> TaskResult:
        """Wait until the rank has ended, and take its result."""
        while str(rank) not in self._ended:
            result = next(self._results)
            self._ended[result.key] = result
        del self._left[str(rank)]
        return self._ended[str(rank)]

    def close(self) -> None:
        """End the ranks that still run."""
        self._results.close()

    def _tasks(self, ranks: Sequence[int]) -> Iterator[Task | None]:
        for rank in ranks:
            paths = tuple(str(tape.run_directory) for tape in self._tapes.values())
            job = dataclasses.replace(self._job, rank=rank, tapes=paths)
            run = self._run_directory(rank)
            yield Task(key=str(rank), job=job, directory=run)
            while str(rank) not in self._ended and not _has_begun(run):
                yield None
            if _has_begun(run):  # a rank that could not start has no tape
                self._tapes[rank] = Tape(run.absolute(), rank)

    def _run_directory(self, rank: int) -> Path:
        return self._directory / f"rank{rank}"


def ending_of(result: TaskResult, run_directory: Path) -> tuple[Path | None, Ending]:
    """The run that a rank left, if it did, and how it ended."""
    seen = Ending(result.outcome, result.code, result.failure)
    try:
        ending = load_manifest(run_directory).exit
    except RunDirectoryError:
        return None, seen
    return run_directory, ending if ending.outcome is result.outcome else seen


def _run(executor: Executor, tasks: Iterator[Task | None]) -> Generator[TaskResult, None, None]:
    with contextlib.closing(executor):
        yield from executor.run(tasks)


def _has_begun(run_directory: Path) -> bool:
    """Whether a rank has written the first record of its tape."""
    tape = run_directory / TAPE_NAME
    if not (tape.exists() and (run_directory / MANIFEST_NAME).exists()):
        return False
    return next(iter(read_journal(tape, TAPE_RECORDS)), None) is not None
