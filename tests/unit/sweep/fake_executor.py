"""An executor that writes small runs by hand instead of running anything."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from fakedist.launcher.executors.task import Task, TaskResult
from fakedist.results.building import build_tables
from fakedist.rundir.directory import SOURCES_NAME, load_manifest, write_manifest
from fakedist.rundir.outcome import BY_ITSELF, Ending, Outcome
from tests.unit.analysis.recorded import new_run
from tests.unit.report.handmade import recorded

#: What a task comes to. "ran" is a run with a step whose pipeline has the ranks 0 and 4.
RAN, OUT_OF_MEMORY, REFUSED, RAISED, LOST, INTERRUPTED, CRASHED, KILLED_ITSELF = (
    "ran",
    "out of memory",
    "refused",
    "raised",
    "lost",
    "interrupted",
    "crashed",
    "killed itself",
)


class FakeExecutor:
    """Ends each task with ``outcome``, and copies its run from the directory ``made``: ``rank0`` or ``rank4``."""

    def __init__(self, made: Path, outcome: Callable[[Task], str] = lambda task: RAN) -> None:
        self._made, self._outcome = made, outcome
        self.tasks: list[Task] = []
        self.is_closed = False
        self.sources: Callable[[Task], str] | None = None  # the list of what a run read

    def run(self, tasks: Iterable[Task | None]) -> Iterator[TaskResult]:
        for task in tasks:
            assert task is not None, "nothing runs that it could wait for"
            self.tasks.append(task)
            yield self._ended(task)

    def close(self) -> None:
        self.is_closed = True

    def _ended(self, task: Task) -> TaskResult:
        kind = self._outcome(task)
        shutil.rmtree(task.directory, ignore_errors=True)
        if kind == RAN:
            shutil.copytree(self._made / f"rank{task.job.rank}", task.directory)
            if self.sources is not None:
                (task.directory / SOURCES_NAME).write_text(self.sources(task))
            return result(task, Outcome.STOPPED)
        if kind == LOST:
            return result(task, Outcome.ERROR, "the worker was lost")
        if kind == INTERRUPTED:
            return result(task, Outcome.INTERRUPTED, "it was cancelled")
        outcome, message, step = _FAILURES[kind]
        made = self._made / f"{kind} {task.job.rank}"
        if not made.exists():
            make_failed(made, task.job.rank, (outcome, message, step))
        shutil.copytree(made, task.directory)
        return result(task, outcome, f"killed {message}" if outcome is Outcome.KILLED else message)


def result(task: Task, outcome: Outcome, failure: str = "") -> TaskResult:
    return TaskResult(
        key=task.key,
        outcome=outcome,
        code=1 if failure else 0,
        failure=failure,
        output="Traceback ...\nthe end" if failure else "",
        directory=task.directory,
        host="here",
        worker="1",
        wall_s=1.5,
        peak_rss_bytes=1 << 30,
        is_accident=Ending(outcome, 1, failure.removeprefix("killed ")).is_accident,
    )


_FAILURES = {
    OUT_OF_MEMORY: (Outcome.OUT_OF_MEMORY, "torch.OutOfMemoryError: CUDA out of memory", 1),
    REFUSED: (Outcome.EXCEPTION, "AssertionError: heads cannot be divided by tp", 0),
    RAISED: (Outcome.EXCEPTION, "RuntimeError: shapes differ", 0),
    CRASHED: (Outcome.KILLED, "by SIGSEGV", 1),
    KILLED_ITSELF: (Outcome.KILLED, f"by SIGSEGV{BY_ITSELF}", 1),
}


def make_failed(
    directory: Path, rank: int, how: tuple[Outcome, str, int], line: str = "/job/train.py:7 (main)"
) -> None:
    """Write the run of a rank that failed: its outcome, its message and the last step, and the line."""
    outcome, message, step = how
    made = recorded()
    made.record("outcome", outcome=outcome, code=1, message=message, line=line, last_step=step)
    made.write(new_run(directory, rank=rank))
    write_manifest(directory, dataclasses.replace(load_manifest(directory), exit=Ending(outcome, 1, message)))
    build_tables(directory)
