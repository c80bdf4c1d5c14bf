"""Runs jobs as ``fakedist profile`` does, each in its own process, several at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from fakedist.errors import ExitCode, RunDirectoryError, ScriptError
from fakedist.job import Job, profile_command
from fakedist.launch import launching
from fakedist.launch.checked_script import ScriptSyntaxError
from fakedist.launch.machine import free_memory_bytes, num_cores
from fakedist.run.manifest import load_manifest
from fakedist.run.outcome import Ending, Outcome
from fakedist.units import GIB

#: Host memory that is assumed for a running job. A rank of a 70B model with its tables takes half of it.
JOB_MEMORY_BYTES = 4 * GIB
_OUTPUT_CHARACTERS = 8_000

# The child runs the same fakedist, even from a bare clone, and nothing next to the script can shadow it.
_BOOT = """
import sys
sys.path[0] = sys.argv[1]
from fakedist.cli.handed import run_handed_job
sys.exit(run_handed_job(sys.argv[2]))
"""
_ROOT = os.fspath(Path(__file__).parents[2])


@dataclass(frozen=True)
class Task:
    """One rank to run.

    Attributes:
        name: Its name in messages: "llama-70b rank 0".
        job: The job to run.
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
        return self.directory / f"rank{self.job.rank}" if self.job.with_peers else self.directory


class TaskRunner:
    """Runs each task in its own process.

    Args:
        root: The directory in which tasks run.
        finished: Called for every task that ended, with its seconds.
    """

    def __init__(self, root: Path, finished: Callable[[Task, float], None] = lambda task, seconds: None) -> None:
        self._root = root
        self._finished = finished
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._is_over = False

    def run(self, task: Task) -> None:
        """Run one task to its end.

        Raises:
            ScriptError: The script failed, was killed or never used the GPU. A rank that does not fit has not failed.
        """
        start = time.monotonic()
        handed = {"job": task.job.to_dict(), "directory": os.fspath(task.directory)}
        # Not next to the run directory: if that disk is full, the log holds the error.
        with tempfile.TemporaryDirectory(prefix="fakedist-") as scratch:
            data, log = Path(scratch) / "job.json", Path(scratch) / "log"
            data.write_text(json.dumps(handed))
            with log.open("w") as file, self._process(data, file) as process:
                code = process.wait()
            _see_that_it_ran(task, code, log)
        self._finished(task, time.monotonic() - start)

    def run_all(self, tasks: Sequence[Task], at_once: int | None) -> list[ScriptError]:
        """Run every task, as many at once as cores and memory allow.

        Args:
            tasks: The tasks to run.
            at_once: How many to run at once. None chooses by the machine.

        Returns:
            The failures, in the order of the tasks.
        """
        number = at_once or max(1, min(num_cores(), free_memory_bytes() // JOB_MEMORY_BYTES, len(tasks)))
        if any(task.job.device == "cuda" for task in tasks):
            number = 1  # on one GPU they would take each other's memory and time
        with _ended_like_interrupted(), ThreadPoolExecutor(number) as pool:
            futures: list[Future[None]] = [pool.submit(self.run, task) for task in tasks]
            try:
                pending: set[Future[None]] = set(futures)
                while pending:
                    _, pending = wait(pending, return_when=FIRST_COMPLETED)
            except BaseException:  # Ctrl-C
                self._end(futures)
                raise
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None and not isinstance(error, ScriptError):
                raise error
        return [error for error in errors if isinstance(error, ScriptError)]

    @contextmanager
    def _process(self, data: Path, log: TextIO) -> Iterator[subprocess.Popen[str]]:
        """Start the process that runs the job in ``data``. It is over when the context ends."""
        with self._lock:
            if self._is_over:
                raise ScriptError("not run, because the check was interrupted")
            # The child gets its own session. Ctrl-C reaches only this process, which forwards it.
            one = subprocess.Popen(
                [sys.executable, "-c", _BOOT, _ROOT, os.fspath(data)],
                cwd=self._root,
                stdout=subprocess.DEVNULL,
                stderr=log,
                text=True,
                start_new_session=True,
            )
            self._running.add(one)
        try:
            yield one
        finally:
            if one.poll() is None:
                one.terminate()
                one.wait()
            with self._lock:
                self._running.discard(one)

    def _end(self, futures: Sequence[Future[None]]) -> None:
        for future in futures:
            future.cancel()
        with self._lock:
            self._is_over = True
            for one in self._running:
                with suppress(ProcessLookupError):
                    os.kill(one.pid, signal.SIGTERM)


def see_that_it_can_run(job: Job) -> None:
    """Check that a job can run on this machine, before anything is written.

    Raises:
        ScriptError: The script does not compile. The error's ``output`` holds what Python prints.
        FakedistError: The job cannot run, see :func:`fakedist.launch.launching.check`.
    """
    try:
        launching.check(job)
    except ScriptSyntaxError as error:
        raise ScriptError("the script does not compile; nothing was run", output=str(error)) from None


@contextmanager
def _ended_like_interrupted() -> Iterator[None]:
    """Treat SIGTERM, which a CI service sends to cancel a job, like Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _see_that_it_ran(task: Task, code: int, log: Path) -> None:
    """Raise an error for a run that failed."""
    output = log.read_text(errors="replace")[-_OUTPUT_CHARACTERS:].rstrip()
    again = profile_command(task.job)
    try:
        manifest = load_manifest(task.run_directory)
    except RunDirectoryError:
        raise ScriptError(f"{task.name}: the run could not start (exit {code})", again, output) from None
    ending = manifest.exit
    fits = ending.outcome is not Outcome.OUT_OF_MEMORY
    summary = manifest.summary
    if summary is None:
        raise ScriptError(f"{task.name}: the run was killed before it ended (exit {code})", again, output)
    if (ending.ended_well and code != 0) or (not fits and code != ExitCode.OUT_OF_MEMORY):
        # The files belong to an earlier run, which could not be replaced.
        raise ScriptError(f"{task.name}: the run could not start (exit {code})", again, output)
    if not ending.ended_well and fits:
        raise ScriptError(f"{task.name}: {_failure(ending)}", again, output)
    left = task.may_leave and summary.left_during_init is not None
    if ending.ended_well and not left and not summary.peak_allocated_bytes:
        raise ScriptError(f"{task.name}: the script allocated nothing on the GPU", again, output)


def _failure(ending: Ending) -> str:
    message = f": {ending.message}" if ending.message else ""
    told = {
        Outcome.EXCEPTION: "the script failed",
        Outcome.EXIT: f"the script failed with exit code {ending.code}",
        Outcome.TIMEOUT: "the script did not end in time",
        Outcome.KILLED: "the script was killed",
        Outcome.INTERRUPTED: "the script was interrupted",
    }
    return told.get(ending.outcome, f"the script ended as {ending.outcome}") + message
