"""The directory of a sweep: its lock, what it was asked for, its runs, and the journal of its points.

A sweep that is killed leaves at most one incomplete line at the end. It is cut off when the sweep goes on.

A directory that is not a sweep's, or a file in it that is damaged, raises SweepError.
"""

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
from fakedist.bounded import UnreadableError, open_file, read_json
from fakedist.errors import SweepError
from fakedist.rundir.plain import PlainValueError, from_plain, to_plain
from fakedist.sweep.plan import SourceDigests
from fakedist.sweep.point_rows import RankResult, Row, Status, StepEstimate
from fakedist.sweep.ranking import UNITS
from fakedist.sweep.space import Scalar
from fakedist.temporary import replacing

JOURNAL_NAME = "journal.jsonl"
#: The most bytes of a line. A row of a thousand stages has 1 MB.
_MOST_OF_A_LINE = 16 << 20
RUN_AGAIN = "run the sweep again with --fresh, or into another directory with -o"


@dataclass
class JournalContent:
    """The ranks of a journal by key and rank, its rows by ID in the order in which they first came, and by their own
    digests what ranks read.

    A later line replaces an earlier one.
    """

    ranks: dict[str, dict[int, RankResult]] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    sources: dict[str, SourceDigests] = field(default_factory=dict)


class SweepJournal:
    """A journal that is being written."""

    def __init__(self, path: Path) -> None:
        self.known, end = _read(path)
        self._file = path.open("ab")
        self._file.truncate(end)

    def add_rank(self, key: str, result: RankResult) -> None:
        """Write down how a rank of a run ended."""
        self._append({"rank": {"key": key, "result": to_plain(result)}})
        self.known.ranks.setdefault(key, {})[result.rank] = result

    def add_row(self, row: Row) -> None:
        """Write down a row. It replaces an earlier one of the same ID."""
        self._append({"row": to_plain(row)})
        self.known.rows[row.id] = row

    def add_sources(self, sources: SourceDigests) -> str:
        """Write down what a rank read, once for all ranks that read the same. Returns its digest."""
        digest = sources.digest
        if digest not in self.known.sources:
            self._append({"sources": {"digest": digest, "read": to_plain(sources)}})
            self.known.sources[digest] = sources
        return digest

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, entry: dict[str, object]) -> None:
        """Append a line, or nothing of it.

        Raises:
            OSError: The disk is full.
        """
        start = self._file.seek(0, os.SEEK_END)
        try:
            self._file.write(json.dumps(entry, separators=(",", ":")).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            os.truncate(self._file.name, start)
            error.filename = self._file.name
            raise


def read_known(path: Path) -> JournalContent:
    """Read a journal."""
    return _read(path)[0]


def _read(path: Path) -> tuple[JournalContent, int]:
    """The content of a journal, and the offset at which its last whole line ends."""
    known, end = JournalContent(), 0
    try:
        with open_file(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(_MOST_OF_A_LINE), b""), 1):
                if len(line) == _MOST_OF_A_LINE:
                    raise SweepError(f"{path}, line {number} has more than {_MOST_OF_A_LINE:,} bytes", RUN_AGAIN)
                if line.endswith(b"\n"):
                    _take_line(known, line, f"{path}, line {number}")
                    end += len(line)
    except FileNotFoundError:
        return known, 0
    except (OSError, UnreadableError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SweepError(f"{path} cannot be read: {reason}", RUN_AGAIN) from None
    return known, end


def _take_line(known: JournalContent, line: bytes, where: str) -> None:
    try:
        entry = json.loads(line)
        if b"\\ud" in line.lower():  # half of a surrogate pair, which a table cannot hold
            entry = json.loads(json.dumps(entry, ensure_ascii=False).encode(errors="replace"))
        _take(known, entry)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, PlainValueError) as error:
        raise SweepError(f"{where} cannot be read: {str(error)[:100]}", RUN_AGAIN) from None


def _take(known: JournalContent, entry: dict[str, object]) -> None:
    ((kind, value),) = entry.items()
    if kind == "row":
        row = from_plain(Row, value)
        if row.status in (Status.FITS, Status.MAY_NOT_FIT) and row.fullest is None:
            raise ValueError(f"row.status is '{row.status}', and no rank ran to the end")
        _check_step(row.step)
        known.rows[row.id] = row
    elif kind == "rank" and isinstance(value, dict):
        result = from_plain(RankResult, value["result"])
        known.ranks.setdefault(str(value["key"]), {})[result.rank] = result
    elif kind == "sources" and isinstance(value, dict):
        known.sources[str(value["digest"])] = from_plain(SourceDigests, value["read"])
    else:
        raise ValueError(f"{kind} is not a kind of entry")


def _check_step(step: StepEstimate | None) -> None:
    """Refuse a time or a rate that is not positive; the ranking divides by them."""
    divisors = () if step is None else ("step_us", "low_us", "high_us", *UNITS.values())
    for name in divisors:
        value = getattr(step, name)
        if value is not None and value <= 0:
            raise ValueError(f"row.step.{name} is {value:g}, not positive")


ABOUT_NAME = "sweep.json"
TABLE_NAME = "sweep.parquet"
PAGE_NAME = "report.html"
RUNS_NAME, FILES_NAME = "runs", "files"
_LOCK_NAME = ".lock"
_ELSEWHERE = "choose another directory with -o"


@dataclass(frozen=True, kw_only=True)
class About:
    """The last request of a sweep: its command, axes and points.

    Attributes:
        headroom: Free memory that the ranking asks for, as a share of the GPU's.
        points: The IDs of the points' rows; None in older sweeps whose points a sampler chose.
        ground: Digests of what all points have in common.
        files: Digests of the Python files in the script's directory.
    """

    fakedist: str = __version__
    command: list[str]
    program: str
    axes: dict[str, list[Scalar]]
    ranks: str
    headroom: float
    points: list[str] | None
    ground: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)


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
    names = {path.name for path in directory.iterdir()} if directory.exists() else set()
    if names - {_LOCK_NAME} and not names & {ABOUT_NAME, JOURNAL_NAME}:
        raise SweepError(f"{directory} is neither empty nor a sweep's directory", _ELSEWHERE)


def is_sweep(directory: Path) -> bool:
    """True if a directory is a sweep's."""
    return (directory / ABOUT_NAME).is_file()


def write_about(directory: Path, about: About) -> None:
    """Write the request of the sweep, in place of an earlier one."""
    replace_file(directory / ABOUT_NAME, json.dumps(to_plain(about), indent=1) + "\n")


def read_about(directory: Path) -> About:
    """Read the last request of a sweep."""
    path = directory / ABOUT_NAME
    try:
        return from_plain(About, read_json(path))
    except (FileNotFoundError, NotADirectoryError):
        raise SweepError(
            f"{directory} is not the directory of a sweep", "fakedist sweep -o DIR ... makes one"
        ) from None
    except (OSError, UnreadableError, PlainValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SweepError(f"{path} cannot be read: {reason}", "run the sweep again") from None


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
    """The directory of the files of a run's point."""
    return sweep / FILES_NAME / key


def reports_of(sweep: Path, row: Row) -> list[tuple[int, str]]:
    """The ranks of a point whose run was kept with its page, and the pages, relative to the sweep's directory."""
    pages = [(result.rank, report_of(sweep, result.directory)) for result in row.ranks]
    return [(rank, page) for rank, page in pages if page]


def report_of(sweep: Path, run_directory: str) -> str:
    """The page of a run, relative to the sweep's directory; empty if the run was not kept or has no page."""
    path = f"{run_directory}/{PAGE_NAME}"
    return path if run_directory and (sweep / path).is_file() else ""
