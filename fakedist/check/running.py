"""Runs jobs as ``fakedist profile`` does, each in its own process, and sees that each ran."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from fakedist.errors import RunDirectoryError, ScriptError
from fakedist.launcher import launching
from fakedist.launcher.checked_script import ScriptSyntaxError
from fakedist.launcher.executors.process import TaskProcesses
from fakedist.launcher.executors.task import Executor, Task, TaskResult
from fakedist.launcher.machine import ended_like_interrupted
from fakedist.options import Job, profile_command
from fakedist.rundir.directory import load_manifest
from fakedist.rundir.outcome import Ending, Outcome


@dataclass(frozen=True)
class RankToRun:
    """One rank to run, called ``name`` in messages: "llama-70b rank 0".

    Attributes:
        directory: The run directory or, with peers, the directory that holds the run directories of all ranks.
        may_leave: Whether it may leave the job during init without using the GPU, as a spare rank does.
    """

    name: str
    job: Job
    directory: Path
    may_leave: bool = False

    @property
    def run_directory(self) -> Path:
        """The rank's run directory."""
        return self.task(Path()).run_directory

    def task(self, cwd: Path) -> Task:
        """The rank as an executor's task, whose script runs in ``cwd``."""
        return Task(key=self.name, job=self.job, directory=self.directory, cwd=cwd)


def run_rank(rank: RankToRun, cwd: Path) -> None:
    """Run one rank to its end.

    Raises:
        ScriptError: The script failed, was killed or never used the GPU. A rank that does not fit has not failed.
    """
    see_that_it_ran(rank, TaskProcesses().run(rank.task(cwd)))


def run_ranks(
    ranks: Sequence[RankToRun],
    cwd: Path,
    executor: Executor,
    finished: Callable[[RankToRun, float], None] = lambda rank, seconds: None,
) -> list[ScriptError]:
    """Run every rank, several at once. The executor is closed afterwards.

    ``finished`` gets every rank that ended, with its seconds. Returns the failures, in the order of the ranks.
    """
    failed: dict[str, ScriptError] = {}
    named = {rank.name: rank for rank in ranks}
    with ended_like_interrupted(), closing(executor):
        for result in executor.run(rank.task(cwd) for rank in ranks):
            rank = named[result.key]
            try:
                see_that_it_ran(rank, result)
            except ScriptError as error:
                failed[rank.name] = error
            else:
                finished(rank, result.wall_s)
    return [failed[name] for name in named if name in failed]


def see_that_it_can_run(job: Job) -> None:
    """Check that a job can run on this machine, before anything is written.

    Raises:
        ScriptError: The script does not compile. The error's ``output`` holds what Python prints.
        FakedistError: The job cannot run, see :func:`fakedist.launcher.launching.check`.
    """
    try:
        launching.check(job)
    except ScriptSyntaxError as error:
        raise ScriptError("the script does not compile; nothing was run", output=str(error)) from None


def see_that_it_ran(rank: RankToRun, result: TaskResult) -> None:
    """Check that a rank ran and used its GPU. One that does not fit the GPU did.

    Raises:
        ScriptError: It did not.
    """
    again = profile_command(rank.job)
    fits = result.outcome is not Outcome.OUT_OF_MEMORY
    try:
        manifest = load_manifest(rank.run_directory)
    except RunDirectoryError:
        manifest = None
    if manifest is None or result.outcome is Outcome.ERROR:
        raise ScriptError(f"{rank.name}: the run could not start (exit {result.code})", again, result.output) from None
    if (summary := manifest.summary) is None:
        how = f"the run was killed before it ended (exit {result.code})"
        raise ScriptError(f"{rank.name}: {how}", again, result.output)
    if not result.ended_well and fits:
        seen = Ending(result.outcome, result.code, result.failure)
        ending = manifest.exit if manifest.exit.outcome is result.outcome else seen
        raise ScriptError(f"{rank.name}: {_failure(ending)}", again, result.output)
    left = rank.may_leave and summary.left_during_init is not None
    if result.ended_well and not left and not summary.peak_allocated_bytes:
        raise ScriptError(f"{rank.name}: the script allocated nothing on the GPU", again, result.output)


def _failure(ending: Ending) -> str:
    message = f": {ending.message}" if ending.message else ""
    messages = {
        Outcome.EXCEPTION: "the script failed",
        Outcome.FAULT: "fakedist failed, not the script: this is a bug in fakedist",
        Outcome.EXIT: f"the script failed with exit code {ending.code}",
        Outcome.TIMEOUT: "the script did not end in time",
        Outcome.KILLED: "the script was killed",
        Outcome.INTERRUPTED: "the script was interrupted",
    }
    return messages.get(ending.outcome, f"the script ended as {ending.outcome}") + message
