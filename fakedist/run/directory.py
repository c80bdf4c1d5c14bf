"""Creates run directories. Nothing else is overwritten, and two runs never share a directory."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fakedist.errors import RunDirectoryError
from fakedist.job import Job
from fakedist.temporary import FRESH_PREFIX
from fakedist.visible import visible

#: What to type about a run directory that cannot be read.
DAMAGED = "the run directory is damaged; profile the job again"

MANIFEST_NAME = "run.json"
JOURNAL_NAME = "journal.bin"
LOCK_NAME = ".lock"
TABLES_NAME = "tables"
SNAPSHOT_NAME = "memory_snapshot.pickle"
PAGE_NAME = "report.html"
TRACE_NAME = "trace.json.gz"
TAPE_NAME = "tape.bin"
#: A second journal: what another program's report contains about the timed step.
KERNELS_NAME = "kernels.bin"
#: nsys's report, without its suffix.
NSYS_NAME = "nsight"
#: Calls of the virtual GPU's ``nvidia-smi``, one per line.
SMI_NAME = "nvidia-smi.log"
#: Prefix of the directories, next to the tables, that hold tables being written or replaced.
SCRATCH_PREFIX = ".tables-"
#: Prefixes of what a run that was killed may leave. Whoever holds the lock may remove it.
_SCRATCH = (SCRATCH_PREFIX, FRESH_PREFIX)
_OURS = (
    *(MANIFEST_NAME, JOURNAL_NAME, LOCK_NAME, TABLES_NAME, SNAPSHOT_NAME, PAGE_NAME, TRACE_NAME, TAPE_NAME),
    *(KERNELS_NAME, f"{NSYS_NAME}.nsys-rep", f"{NSYS_NAME}.qdstrm", SMI_NAME),
)


def default_name(job: Job, ranks: Sequence[int] = (), *, which: str = "") -> Path:
    """An unused name for a run directory or a directory of several runs: the script's, with rank and world size.

    Args:
        job: The job.
        ranks: The ranks of several runs.
        which: What to say instead of the ranks.
    """
    stem = job.target.rpartition(".")[2] if job.is_module else Path(job.target).stem
    which = which or (f"ranks{min(ranks)}-{max(ranks)}" if ranks else f"rank{job.rank}")
    return free_name(f"fakedist-{stem}-{which}of{job.world_size}")


def free_name(base: str) -> Path:
    """An unused name in the current directory: ``base``, or ``base`` with a number."""
    path, count = Path(base), 1
    while path.exists():
        count += 1
        path = Path(f"{base}-{count}")
    return path


@contextmanager
def create_run_directory(path: Path, force: bool) -> Iterator[Path]:
    """An empty run directory, locked against other runs until the context exits.

    Args:
        path: Where to create it. Missing parents are created.
        force: Whether to replace an existing run directory.

    Raises:
        RunDirectoryError: The path holds something that may not be replaced, cannot be written, or is in use by
            another run.
    """
    try:
        if path.exists():
            _check_replaceable(path, force)
        elif path.is_symlink():
            raise RunDirectoryError(f"{path} is a link to nothing", "choose another place with -o")
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise RunDirectoryError(
            f"{visible(str(path))} cannot be written: {error.strerror}", "choose another place with -o"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise RunDirectoryError(f"{path} is in use by another run", "choose another place with -o") from None
    try:
        for name in set(_OURS) - {LOCK_NAME}:
            _remove(path / name)
        for left in path.iterdir():
            if left.name.startswith(_SCRATCH):
                _remove(left)
        yield path.resolve()
    finally:
        (path / LOCK_NAME).unlink(missing_ok=True)  # while still locked: later it could be another run's
        os.close(lock)


def _check_replaceable(path: Path, force: bool) -> None:
    if not path.is_dir():
        raise RunDirectoryError(f"{path} is a file", "choose another place with -o")
    names = {entry.name for entry in path.iterdir() if not entry.name.startswith(_SCRATCH)}
    if not names:
        return
    if MANIFEST_NAME not in names:
        raise RunDirectoryError(f"{path} is neither empty nor a run directory", "choose another place with -o")
    if not force:
        raise RunDirectoryError(f"{path} holds a run already", "add --force to replace it, or choose another -o")
    if foreign := sorted(names - set(_OURS)):
        raise RunDirectoryError(
            f"{path} holds something that fakedist did not write: {foreign[0]}", f"move it away: {path}"
        )


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def is_in_use(path: Path) -> bool:
    """Whether a run is writing to the directory now."""
    try:
        lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False
