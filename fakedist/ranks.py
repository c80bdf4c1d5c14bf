"""Several ranks of a job, one after the other, each answered from the tapes of those before it."""

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
from fakedist.run.tape import find_tapes

INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class RankRun:
    """One rank that has run.

    Attributes:
        rank: Which.
        run_directory: Its run; None where it could not begin.
        ending: How it ended; the outcome "error" where it could not begin.
        wall_s: Seconds that its run took, recording and tables included.
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

    A rank that fails keeps no other from running: its tape goes as far as it came. A Ctrl-C ends all.

    Args:
        job: What to run; its own rank does not count. :func:`fakedist.launch.check` has been called.
        ranks: Which ranks.
        output: A directory for the run directories ``rank0``, ``rank4``, ...; None names one after the script.
        force: Whether runs of these ranks in it may be overwritten.
        streams: Where things go meanwhile.

    Raises:
        RunDirectoryError: The directory is not one of runs, or has runs of these ranks.
    """
    directory = output or default_name(job, ranks)
    _check_directory(directory, ranks, force)
    tapes = {tape.rank: str(tape.run_directory) for tape in find_tapes(job)}
    for rank in ranks:
        start, run_directory = time.monotonic(), None
        one = dataclasses.replace(job, rank=rank, tapes=tuple(tapes.values()))
        try:
            run_directory, ending = launch.profile(one, directory / f"rank{rank}", force, streams)
        except FakedistError as error:
            ending = launch.Ending("error", error.exit_code, error.message)
        if run_directory is not None:
            tapes[rank] = str(run_directory)  # in the place of one that was given
        yield RankRun(rank, run_directory, ending, time.monotonic() - start)
        if ending.outcome == INTERRUPTED:
            return


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
