"""The last lines on stderr of a run that failed: what the script had guessed or missed, and whose exit code it is."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fakedist.cli.say import last_line, remark, say
from fakedist.job import Job, profile_command
from fakedist.run.directory import MANIFEST_NAME
from fakedist.run.outcome import Ending, Outcome

if TYPE_CHECKING:
    from fakedist.launch.ranks import RankRun
    from fakedist.run.tape import Guess

_MAX_GUESSES = 3
#: What Python says of ``from . import x`` in a script.
_RELATIVE = "attempted relative import with no known parent package"


def say_ending(ending: Ending, job: Job, run_directory: Path) -> int:
    """The last line on stderr says whose exit code it is; nothing is said of a run that simply ended."""
    if not ending.code:
        return 0
    _say_what_may_have_failed_it(ending, job, run_directory)
    if _RELATIVE in ending.message and not job.is_module:
        say(f"  a script inside a package runs as a module: {_as_module(job)}", err=True)
    meanings = {
        Outcome.OUT_OF_MEMORY: "the rank does not fit the GPU",
        Outcome.TIMEOUT: ending.message or "the time limit given with --timeout was reached",
        Outcome.KILLED: f"the script was killed {ending.message}",
        Outcome.INTERRUPTED: f"the script was interrupted ({ending.message})",
        Outcome.EXCEPTION: f"the script raised {ending.message}",
        Outcome.FAULT: f"fakedist failed, not the script: {ending.message}",
    }
    if ending.outcome is Outcome.FAULT:
        say(f"fakedist: {fault_hint(run_directory)}", err=True)
    return last_line(ending.code, meanings.get(ending.outcome, "the script's own exit code"))


def fault_hint(run_directory: Path) -> str:
    """The line that follows an error of fakedist's own."""
    return f"this is a bug in fakedist: please report it with the traceback above and {run_directory / MANIFEST_NAME}"


def _as_module(job: Job) -> str:
    """The command that runs the job's script as a module, and the directory to run it from."""
    path = Path(job.target).absolute()
    names, folder = [path.stem], path.parent
    while (folder / "__init__.py").exists():
        names.insert(0, folder.name)
        folder = folder.parent
    module = dataclasses.replace(job, target=".".join(names), is_module=True)
    where = f"cd {shlex.quote(str(folder))} && " if folder != Path.cwd() else ""
    return where + profile_command(module)


def say_first_failure(runs: Sequence[RankRun], job: Job) -> int:
    """The last line on stderr names the first of several ranks that did not end well, and how."""
    failed = next((run for run in runs if run.ending.code), None)
    if failed is None or not failed.ending.code:
        return 0
    if failed.run_directory is not None:
        if failed.ending.outcome is Outcome.FAULT:
            say(f"fakedist: {fault_hint(failed.run_directory)}", err=True)
        one = dataclasses.replace(job, rank=failed.rank)
        _say_what_may_have_failed_it(failed.ending, one, failed.run_directory)
    return last_line(failed.ending.code, f"rank {failed.rank} ended as {failed.ending.outcome}")


def _say_what_may_have_failed_it(ending: Ending, job: Job, run_directory: Path) -> None:
    """Name the guesses that a failed script had gone on with, what it did not find, and what to type."""
    from fakedist.run.directory import TAPE_NAME
    from fakedist.run.tape import Tape

    if not ending.failed or not (run_directory / TAPE_NAME).exists():
        return
    tape = Tape(run_directory, job.rank)
    guesses, lost = tape.guesses(), tape.lost()
    for line in _guess_lines(guesses, job.rank):
        say(line, err=True)
    if lost:
        remark(lost.text)
    if tape.awaited() is not None:
        return  # its error has said what to type
    source = max(0, guesses[0].awaited.source) if guesses else 0
    if source != job.rank and (guesses or (lost and lost.may_be_written)):
        alone = dataclasses.replace(job, with_peers=False)
        say(f"  run rank {source} first: {profile_command(alone, (source, job.rank))}", err=True)
    if guesses and not job.with_peers:
        peers = profile_command(dataclasses.replace(job, with_peers=True))
        say(f"  or run this rank and every rank it needs: {peers}", err=True)


def _guess_lines(guesses: Sequence[Guess], rank: int) -> Iterator[str]:
    if guesses:
        calls = "a call" if len(guesses) == 1 else f"{len(guesses):,} calls"
        yield f"fakedist: rank {rank} continued with a guess in {calls}, which may be why it failed:"
    for guess in guesses[:_MAX_GUESSES]:
        whom = "any rank" if guess.awaited.source < 0 else f"rank {guess.awaited.source}"
        at = f" at {guess.line}" if guess.line else ""
        yield f"  {guess.called} from {whom}{at}: {guess.held} was used in place of that rank's"
    if len(guesses) > _MAX_GUESSES:
        yield f"  ... and {len(guesses) - _MAX_GUESSES:,} more"
