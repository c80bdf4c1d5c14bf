"""Runs several ranks of a job, in turn or side by side. Each rank receives from the tapes of the others."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from fakedist.errors import FakedistError, RunDirectoryError
from fakedist.launcher import launching
from fakedist.launcher.executors.local import LocalExecutor
from fakedist.launcher.executors.task import Executor, Task, TaskResult
from fakedist.launcher.fork_servers import RankServer
from fakedist.options import Job
from fakedist.rank.preloading import key_of
from fakedist.rundir.directory import (
    MANIFEST_NAME,
    TAPE_NAME,
    check_replaceable,
    default_name,
    in_use,
    is_in_use,
    load_manifest,
    read_journal,
    remove_if_empty,
    remove_run,
)
from fakedist.rundir.outcome import Ending, Outcome
from fakedist.rundir.tape import ANY_RANK, TAPE_RECORDS, Awaited, Tape, find_tapes
from fakedist.temporary import scratch_directory


class RanksTogether:
    """Ranks of one job that run side by side, begun in the given order.

    A rank begins when the one before it has begun its tape. From then on it can wait for that tape, and nothing waits
    for a rank that has not begun. Runs of these ranks in ``directory`` are replaced, and the executor is closed
    afterwards.

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
                remove_run(run)
        self._results = _run(executor, self._tasks(tuple(ranks)))

    def __contains__(self, rank: int) -> bool:
        """Return whether the rank's result is still to be taken."""
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
    tape = run_directory / TAPE_NAME
    if not (tape.exists() and (run_directory / MANIFEST_NAME).exists()):
        return False
    return next(iter(read_journal(tape, TAPE_RECORDS)), None) is not None


#: How many other ranks may run for one rank: a pipeline's stages, and as many again.
MAX_PEERS = 32


@dataclass(frozen=True)
class RankRun:
    """One rank that has run, all of its runs taking ``wall_s`` with recording and tables.

    If it could not start, there is no ``run_directory`` and its outcome is ``ERROR``.
    """

    rank: int
    run_directory: Path | None
    ending: Ending
    wall_s: float


def profile_ranks(
    job: Job,
    ranks: Sequence[int],
    output: Path | None,
    force: bool,
    streams: launching.Streams,
    *,
    more: Callable[[Sequence[RankRun]], Sequence[int]] | None = None,
    jobs: int = 1,
    cold: bool = False,
) -> Iterator[RankRun]:
    """Run ranks of a job in the given order, and yield each one's last run, once.

    Each gets the tapes of the ranks before it, and those of ``job.tapes``. A rank that fails does not stop the others:
    its tape holds what it sent until then. A rank that ends because it waits for what a later rank sends runs again
    once that rank's tape has it. A Ctrl-C ends all of them.

    Args:
        job: The job, which has passed :func:`fakedist.launcher.launching.check`. Its own rank is ignored.
        output: The parent of the run directories ``rank0``, ``rank4``, ... None names one after the script.
        force: Whether existing runs of these ranks in it, or of one rank that it holds, may be overwritten.
        more: Called with each rank's first run, and again after the ranks that it returned, until it returns none.
        jobs: Ranks that run at once. Each waits for earlier ranks' tapes, so it receives what it would in turn.
        cold: Whether each rank starts on its own. Otherwise ranks fork from a server, from the second on.

    Raises:
        RunDirectoryError: The directory cannot hold the runs, or already has runs of these ranks.
    """
    ranks = list(ranks)
    directory = output or default_name(job, ranks)
    _prepare_directory(directory, ranks, force)
    with ExitStack() as stack:
        server = None
        if not cold:
            scratch = stack.enter_context(scratch_directory("ranks"))
            server = stack.enter_context(closing(RankServer(scratch / "imports.json", streams.child_stdout)))
        runner = stack.enter_context(closing(_Runner(job, directory, force, streams, server)))
        yield from _in_order(runner, ranks, more, jobs)


def _in_order(
    runner: _Runner, ranks: list[int], more: Callable[[Sequence[RankRun]], Sequence[int]] | None, jobs: int
) -> Iterator[RankRun]:
    """Yield the last runs: in the given order those that wait for nothing, then those that run again."""
    waiting = _Waiting(runner)
    first_runs: list[RankRun] = []
    if more is None:
        runner.start_together(ranks, jobs)
    for count, rank in enumerate(ranks, 1):
        runner.say(f"rank {rank} ({count} of {len(ranks)})")
        run, awaited = waiting.run(rank)
        first_runs.append(run)
        if more is not None and count == len(ranks) and run.ending.outcome is not Outcome.INTERRUPTED:
            others = [wanted for wanted in more(first_runs) if wanted not in ranks]
            runner.prepare_directory(others)
            ranks += others
            runner.start_together(others, jobs)
        if any(wanted.source in (ANY_RANK, *ranks) for wanted in awaited):
            runner.say(f"rank {rank} waits for {_whom(awaited)}, and runs again once that tape has what it needs")
            continue
        waiting.over(rank)
        yield run
        if run.ending.outcome is Outcome.INTERRUPTED:
            break
    else:
        while (again := waiting.ready()) is not None:
            run, awaited = waiting.run(again)
            if awaited:
                continue
            yield run
            if run.ending.outcome is Outcome.INTERRUPTED:
                break
    yield from waiting.runs()


def profile_with_peers(job: Job, output: Path | None, force: bool, streams: launching.Streams) -> tuple[Path, Ending]:
    """Run a rank. If it needs what only another rank's tape has, run that peer, then run the rank again.

    A peer that waits for another rank gets the same treatment, and so on, as does a rank that failed after a guess.
    ``streams.say`` names each rank before it runs. ``output`` and ``force`` are as for :func:`profile_ranks`.

    Returns:
        The rank's run, and how it ended: "interrupted" if a peer was interrupted.

    Raises:
        FakedistError: The directory cannot be written, or the rank could not be set up.
    """
    directory = output or default_name(job)
    _prepare_directory(directory, [job.rank], force)
    runner = _Runner(job, directory, force, streams)
    waiting = _Waiting(runner, after_guesses=True)
    rank = job.rank
    first, awaited = waiting.run(rank, raises=True)
    run_directory = first.run_directory or directory
    ending = first.ending
    peers: set[int] = set()
    while awaited or rank != job.rank:
        wanted = (_peer_of(wanted, rank) for wanted in awaited)
        new = next((peer for peer in wanted if peer not in peers and not runner.has_tape(peer)), None)
        if new is not None and len(peers) < MAX_PEERS:
            streams.say(f"rank {rank} waits for rank {new}, which runs now, into {directory / f'rank{new}'}")
            peers.add(new)
            rank = new
        elif (again := waiting.ready()) is not None:
            rank = again
        else:
            if new is not None:
                streams.say(f"rank {rank} waits for rank {new}; {MAX_PEERS} peers have run, which is the limit")
            break
        run, awaited = waiting.run(rank)
        if rank == job.rank or run.ending.outcome is Outcome.INTERRUPTED:
            ending = run.ending
        if run.ending.outcome is Outcome.INTERRUPTED:
            break
        if run.ending.code and not awaited and rank != job.rank:
            streams.say(f"rank {rank} ended as {run.ending.outcome}: its tape ends there")
    return run_directory, ending


def _peer_of(awaited: Awaited, rank: int) -> int:
    """The peer to run. If any rank could have sent the message, the one that most scripts have speak for all."""
    if awaited.source != ANY_RANK:
        return awaited.source
    return 0 if rank else 1


def _whom(awaited: Sequence[Awaited]) -> str:
    return "any rank" if awaited[0].source == ANY_RANK else f"rank {awaited[0].source}"


class _Waiting:
    """Ranks that ended because they need what a later tape may hold, or with ``after_guesses`` failed after a guess."""

    def __init__(self, runner: _Runner, after_guesses: bool = False) -> None:
        self._runner = runner
        self._after_guesses = after_guesses
        self._waiting: dict[int, tuple[RankRun, list[Awaited]]] = {}
        self._answered: set[tuple[int, Awaited]] = set()

    def run(self, rank: int, raises: bool = False) -> tuple[RankRun, list[Awaited]]:
        """Run a rank, and return its run and what it waits for, without what was already answered."""
        run = self._runner.run(rank, raises)
        asked = self._runner.awaited(run, self._after_guesses)
        awaited = [wanted for wanted in asked if (rank, wanted) not in self._answered]
        if awaited:
            self._waiting[rank] = (run, awaited)
        return run, awaited

    def ready(self) -> int | None:
        """Take a rank that can go on, because a tape now has what it waited for. None if there is no such rank."""
        for rank, (_, awaited) in self._waiting.items():
            if answered := [wanted for wanted in awaited if self._runner.has(wanted, rank)]:
                self._answered.update((rank, wanted) for wanted in answered)
                self._runner.say(f"rank {rank} runs again: the tape of {_whom(answered)} has what it waited for")
                self.over(rank)
                return rank
        return None

    def over(self, rank: int) -> None:
        self._waiting.pop(rank, None)

    def runs(self) -> Iterator[RankRun]:
        return (run for run, _ in self._waiting.values())


class _Runner:
    """Runs ranks one at a time or side by side, each with the newest tape of every other rank."""

    def __init__(
        self,
        job: Job,
        directory: Path,
        force: bool,
        streams: launching.Streams,
        server: RankServer | None = None,
    ) -> None:
        self._job = job
        self._server = server
        self._directory = directory
        self._force = force
        self._streams = streams
        self._tapes = {tape.rank: tape for tape in find_tapes(job)}
        self._wall_s: dict[int, float] = {}
        self._together: RanksTogether | None = None

    def prepare_directory(self, ranks: Sequence[int]) -> None:
        _prepare_directory(self._directory, ranks, self._force)

    def start_together(self, ranks: Sequence[int], jobs: int) -> None:
        """Let the first runs of these ranks take place side by side, or with one job in turn."""
        self.close()
        if jobs > 1 and ranks:
            executor = LocalExecutor(jobs, cold=self._server is None)
            self._together = RanksTogether(self._job, self._directory, ranks, self._tapes, executor=executor)

    def close(self) -> None:
        if self._together is not None:
            self._together.close()

    def run(self, rank: int, raises: bool = False) -> RankRun:
        """Run a rank, and replace its earlier run. If it cannot start, raise the error or make it the ending."""
        if self._together is not None and rank in self._together:
            return self._run_of(self._together.result(rank), rank)
        start = time.monotonic()
        run_directory = None
        tapes = tuple(str(tape.run_directory) for tape in self._tapes.values())
        force = self._force or rank in self._wall_s
        job = dataclasses.replace(self._job, rank=rank, tapes=tapes)
        try:
            door = None if self._server is None else self._server.door(key_of(job))
            streams = dataclasses.replace(self._streams, door=door)
            run_directory, ending = launching.profile(job, self._directory / f"rank{rank}", force, streams)
        except FakedistError as error:
            remove_if_empty(self._directory)
            if raises:
                raise
            ending = Ending(Outcome.ERROR, error.exit_code, error.message)
        if run_directory is not None:
            self._tapes[rank] = Tape(run_directory, rank)  # replaces a tape that was given
        self._wall_s[rank] = self._wall_s.get(rank, 0.0) + time.monotonic() - start
        return RankRun(rank, run_directory, ending, self._wall_s[rank])

    def _run_of(self, result: TaskResult, rank: int) -> RankRun:
        """The run of a rank that ran with others. Shows the end of its output, which was kept."""
        run_directory, ending = ending_of(result, self._directory / f"rank{rank}")
        if run_directory is not None:
            self._tapes[rank] = Tape(run_directory, rank)
        if result.output:
            self.say(f"the end of the output of rank {rank}:\n{result.output}")
        self._wall_s[rank] = result.wall_s
        return RankRun(rank, run_directory, ending, result.wall_s)

    def awaited(self, run: RankRun, after_guesses: bool) -> list[Awaited]:
        """The values that a failed run needed from another rank's tape, or else its guesses."""
        if run.run_directory is None or not run.ending.failed:
            return []
        tape = self._tapes[run.rank]
        if (awaited := tape.awaited()) is not None:
            return [awaited]
        return [guess.awaited for guess in tape.guesses()] if after_guesses else []

    def say(self, text: str) -> None:
        self._streams.say(text)

    def has_tape(self, rank: int) -> bool:
        return rank in self._tapes

    def has(self, awaited: Awaited, rank: int) -> bool:
        return any(
            tape.has(awaited, rank)
            for tape in self._tapes.values()
            if tape.rank != rank and awaited.source in (ANY_RANK, tape.rank)
        )


def exit_code(runs: Sequence[RankRun]) -> int:
    """0 if every rank ended with 0, otherwise the code of the first that did not."""
    return next((run.ending.code for run in runs if run.ending.code), 0)


def _prepare_directory(directory: Path, ranks: Sequence[int], force: bool) -> None:
    """Check that the runs can be written. Remove the run of one rank that they replace."""
    if directory.exists() and not directory.is_dir():
        raise RunDirectoryError(f"{directory} is a file", "choose another place with -o")
    for rank in ranks:
        run = directory / f"rank{rank}"
        if is_in_use(run):
            raise in_use(run)
        check_replaceable(run, force)
    if (directory / MANIFEST_NAME).exists():
        check_replaceable(directory, force)
        remove_run(directory)
