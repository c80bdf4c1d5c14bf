"""Several ranks of a job, one after the other, each answered from the tapes of the others."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fakedist import launch
from fakedist.errors import FakedistError, JobError, RunDirectoryError
from fakedist.job import Job
from fakedist.run.directory import MANIFEST_NAME, default_name, is_in_use
from fakedist.run.tape import ANY_RANK, Awaited, Tape, find_tapes

INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class RankRun:
    """One rank that has run.

    Attributes:
        rank: Which.
        run_directory: Its run; None where it could not begin.
        ending: How it ended; the outcome "error" where it could not begin.
        wall_s: Seconds that its runs took, recording and tables included.
    """

    rank: int
    run_directory: Path | None
    ending: launch.Ending
    wall_s: float


def parse_ranks(text: str, world_size: int) -> tuple[int, ...]:
    """Ranks as typed: numbers, ranges with both ends, and ranges with a step: ``0,4,8``, ``0-15``, ``0-1023:64``.

    Raises:
        JobError: It is none of these, a rank does not exist, or stands there twice.
    """
    found: list[int] = []
    for part in text.split(","):
        span, _, step = part.strip().partition(":")
        first, dash, last = span.partition("-")
        try:
            start, end, by = int(first), int(last if dash else first), int(step or 1)
        except ValueError:
            start, end, by = 0, -1, 1
        if end < start or by < 1 or part.strip() != part or (step and not last):
            raise JobError(f"--rank {text} is not a list of ranks", "--rank 0,4,8 or --rank 0-15 or --rank 0-1023:64")
        if end >= world_size:
            raise JobError(
                f"rank {end} does not exist in a world of {world_size}",
                f"ranks go from 0 to {world_size - 1}: --rank 0-{world_size - 1}",
            )
        found.extend(range(start, end + 1, by))
    if twice := sorted({rank for rank in found if found.count(rank) > 1}):
        raise JobError(f"--rank {text} has rank {twice[0]} twice", "give each rank once")
    return tuple(found)


def profile_ranks(
    job: Job, ranks: Sequence[int], output: Path | None, force: bool, streams: launch.Streams
) -> Iterator[RankRun]:
    """Run ranks of a job in the given order; each gets the tapes of those before it, and those of ``job.tapes``.

    A rank that fails keeps no other from running: its tape goes as far as it came. One that ended because it waited for
    what another one of them sends later runs again when that one's tape has it. A Ctrl-C ends all.

    Args:
        job: What to run; its own rank does not count. :func:`fakedist.launch.check` has been called.
        ranks: Which ranks.
        output: A directory for the run directories ``rank0``, ``rank4``, ...; None names one after the script.
        force: Whether runs of these ranks in it may be overwritten.
        streams: Where things go meanwhile.

    Yields:
        Each rank's last run, once.

    Raises:
        RunDirectoryError: The directory is not one of runs, or has runs of these ranks.
    """
    directory = output or default_name(job, ranks)
    _check_directory(directory, ranks, force)
    runner = _Runner(job, directory, force, streams)
    waiting: dict[int, tuple[RankRun, Awaited]] = {}
    for count, rank in enumerate(ranks, 1):
        streams.say(f"rank {rank} ({count} of {len(ranks)})")
        run = runner.run(rank)
        if (awaited := runner.awaited(run)) is not None and awaited.source in (ANY_RANK, *ranks):
            waiting[rank] = (run, awaited)
            streams.say(f"rank {rank} waits for {_whom(awaited)}; when that one's tape has it, it runs again")
            continue
        yield run
        if run.ending.outcome == INTERRUPTED:
            break
    else:
        yield from _again(runner, waiting, streams)
    yield from (run for run, _ in waiting.values())


def _again(runner: _Runner, waiting: dict[int, tuple[RankRun, Awaited]], streams: launch.Streams) -> Iterator[RankRun]:
    """Run ranks again while a tape has what one of them waited for; those that then wait no more leave ``waiting``."""
    asked = {(rank, awaited) for rank, (_, awaited) in waiting.items()}
    while ready := [rank for rank, (_, awaited) in waiting.items() if runner.has(awaited, rank)]:
        rank = ready[0]
        before = waiting.pop(rank)[1]
        streams.say(f"rank {rank} again: the tape of {_whom(before)} has what it waited for")
        run = runner.run(rank)
        awaited = runner.awaited(run)
        # Who asks again for what was answered would do so for ever.
        if awaited is not None and (rank, awaited) not in asked:
            asked.add((rank, awaited))
            waiting[rank] = (run, awaited)
            continue
        yield run
        if run.ending.outcome == INTERRUPTED:
            return


def _whom(awaited: Awaited) -> str:
    return "any rank" if awaited.source == ANY_RANK else f"rank {awaited.source}"


class _Runner:
    """Runs ranks one at a time, each with the newest tape of every other one."""

    def __init__(self, job: Job, directory: Path, force: bool, streams: launch.Streams) -> None:
        self._job = job
        self._directory = directory
        self._force = force
        self._streams = streams
        self._tapes = {tape.rank: tape for tape in find_tapes(job)}
        self._wall_s: dict[int, float] = {}

    def run(self, rank: int) -> RankRun:
        """Run a rank; one that has run is replaced."""
        start, run_directory = time.monotonic(), None
        tapes = tuple(str(tape.run_directory) for tape in self._tapes.values())
        force = self._force or rank in self._wall_s
        try:
            run_directory, ending = launch.profile(
                dataclasses.replace(self._job, rank=rank, tapes=tapes),
                self._directory / f"rank{rank}",
                force,
                self._streams,
            )
        except FakedistError as error:
            ending = launch.Ending("error", error.exit_code, error.message)
        if run_directory is not None:
            self._tapes[rank] = Tape(run_directory, rank)  # in the place of one that was given
        self._wall_s[rank] = self._wall_s.get(rank, 0.0) + time.monotonic() - start
        return RankRun(rank, run_directory, ending, self._wall_s[rank])

    def awaited(self, run: RankRun) -> Awaited | None:
        """What a run ended for: what only another rank's tape could have answered."""
        failed = run.run_directory is not None and run.ending.code and run.ending.outcome != INTERRUPTED
        return self._tapes[run.rank].awaited() if failed else None

    def has(self, awaited: Awaited, rank: int) -> bool:
        """Whether a tape has what a rank waited for."""
        return any(
            tape.has(awaited, rank)
            for tape in self._tapes.values()
            if tape.rank != rank and awaited.source in (ANY_RANK, tape.rank)
        )


def exit_code(runs: Sequence[RankRun]) -> int:
    """0 if every rank ended with 0, else the code of the first that did not."""
    return next((run.ending.code for run in runs if run.ending.code), 0)


def _check_directory(directory: Path, ranks: Sequence[int], force: bool) -> None:
    """See that the runs can be written before the first one runs."""
    if directory.exists() and not directory.is_dir():
        raise RunDirectoryError(f"{directory} is a file", "choose another place with -o")
    if (directory / MANIFEST_NAME).exists():
        raise RunDirectoryError(f"{directory} is the run of one rank", "choose another place for several with -o")
    for rank in ranks:
        run = directory / f"rank{rank}"
        if is_in_use(run):
            raise RunDirectoryError(f"{run} is in use by another run", "choose another place with -o")
        if run.exists() and not force:
            raise RunDirectoryError(f"{run} is there already", "add --force to replace it, or choose another -o")
