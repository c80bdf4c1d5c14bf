"""The directory of a sweep: its lock, what it was asked for, its journal, and its runs."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fakedist._version import __version__
from fakedist.bounded import UnreadableError, read_json
from fakedist.errors import SweepError
from fakedist.run.plain import PlainValueError, from_plain, to_plain
from fakedist.sweep.axes import Scalar
from fakedist.sweep.journal import JOURNAL_NAME
from fakedist.temporary import replacing

ABOUT_NAME = "sweep.json"
TABLE_NAME = "sweep.parquet"
#: Optuna's journal of its study.
STORAGE_NAME = "optuna.log"
PAGE_NAME = "report.html"
RUNS_NAME, FILES_NAME = "runs", "files"
_LOCK_NAME = ".lock"
_ELSEWHERE = "choose another directory with -o"


@dataclass(frozen=True, kw_only=True)
class About:
    """What a sweep was asked for last.

    Attributes:
        fakedist: The version that wrote this.
        command: The command line.
        program: The command of each point, with its placeholders.
        axes: The values of each axis.
        ranks: Which ranks of each point run.
        headroom: Free memory that the ranking asks for, as a share of the GPU's.
        points: The IDs of the points' rows; None if a sampler chooses the points.
        ground: Digests of what all points have in common.
    """

    fakedist: str = __version__
    command: list[str]
    program: str
    axes: dict[str, list[Scalar]]
    ranks: str
    headroom: float
    points: list[str] | None
    ground: dict[str, str] = field(default_factory=dict)


@contextmanager
def locked_directory(directory: Path) -> Iterator[Path]:
    """The directory of a sweep, locked against other sweeps until the context exits.

    Raises:
        SweepError: It is in use, is not a sweep's, or cannot be written.
    """
    check_directory(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise SweepError(f"{directory} cannot be written: {error.strerror}", _ELSEWHERE) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise SweepError(f"{directory} is in use by another sweep", f"wait for it, or {_ELSEWHERE}") from None
    try:
        yield directory.resolve()
    finally:
        os.close(lock)


def check_directory(directory: Path) -> None:
    """Check that a directory is a sweep's, or free for one.

    Raises:
        SweepError: It is neither.
    """
    if directory.exists() and not directory.is_dir():
        raise SweepError(f"{directory} is a file", _ELSEWHERE)
    names = {each.name for each in directory.iterdir()} if directory.exists() else set()
    if names - {_LOCK_NAME} and not names & {ABOUT_NAME, JOURNAL_NAME}:
        raise SweepError(f"{directory} is neither empty nor a sweep's directory", _ELSEWHERE)


def is_sweep(directory: Path) -> bool:
    """Whether a directory is a sweep's."""
    return (directory / ABOUT_NAME).is_file()


def write_about(directory: Path, about: About) -> None:
    """Write what the sweep is asked for, in place of what it was."""
    replace_file(directory / ABOUT_NAME, json.dumps(to_plain(about), indent=1) + "\n")


def read_about(directory: Path) -> About:
    """What a sweep was asked for.

    Raises:
        SweepError: The directory is not a sweep's, or is damaged.
    """
    path = directory / ABOUT_NAME
    try:
        return from_plain(About, read_json(path))
    except (FileNotFoundError, NotADirectoryError):
        raise SweepError(
            f"{directory} is not the directory of a sweep", "fakedist sweep -o DIR ... makes one"
        ) from None
    except (OSError, UnreadableError, PlainValueError) as error:
        told = getattr(error, "strerror", None) or error
        raise SweepError(f"{path} cannot be read: {told}", "run the sweep again") from None


def earlier_ground(directory: Path) -> Mapping[str, str]:
    """The ground of the sweep that the directory has; empty without one."""
    return read_about(directory).ground if is_sweep(directory) else {}


def replace_file(path: Path, text: str) -> None:
    """Write a file, in place of an earlier one."""
    with replacing(path) as fresh:
        fresh.write_text(text, encoding="utf-8", errors="replace")


def rank_directory(sweep: Path, key: str, rank: int) -> Path:
    """The run directory of a rank."""
    return sweep / RUNS_NAME / key / f"rank{rank}"


def files_directory(sweep: Path, key: str) -> Path:
    """Where the files of a run's point are."""
    return sweep / FILES_NAME / key


def report_of(sweep: Path, run_directory: str) -> str:
    """The page of a run, relative to the sweep's directory; empty if the run was not kept or has no page.

    Args:
        sweep: The sweep's directory.
        run_directory: The run directory, relative to it.
    """
    path = f"{run_directory}/{PAGE_NAME}"
    return path if run_directory and (sweep / path).is_file() else ""
