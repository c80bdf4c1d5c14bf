"""The directory of a sweep: its lock, what it was asked for, its runs, and the journal of its points.

A sweep that is killed leaves at most one incomplete line at the end. It is cut off when the sweep goes on.

A directory that is not a sweep's, or a file in it that is damaged, raises SweepError.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

import pandas as pd

from fakedist._version import __version__
from fakedist.bounded import UnreadableError, open_file, read_json
from fakedist.errors import SweepError
from fakedist.report.content.run_list import ListedRun, size_of
from fakedist.rundir.directory import HOME
from fakedist.rundir.plain import PlainValueError, from_plain, to_plain
from fakedist.sweep.plan import SourceDigests
from fakedist.sweep.point_rows import RankResult, Row, Status, StepEstimate
from fakedist.sweep.ranking import UNITS, Ranking, rank_rows, sentences
from fakedist.sweep.space import COLUMNS, Scalar, text_of
from fakedist.temporary import replacing
from fakedist.visible import MOST_OF_A_TEXT, visible

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
    known = JournalContent()
    end = 0
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
    match kind, value:
        case "row", _:
            row = from_plain(Row, value)
            if row.status in (Status.FITS, Status.MAY_NOT_FIT) and row.fullest is None:
                raise ValueError(f"row.status is '{row.status}', and no rank ran to the end")
            _check_step(row.step)
            known.rows[row.id] = row
        case "rank", {"key": key, "result": plain}:
            result = from_plain(RankResult, plain)
            known.ranks.setdefault(str(key), {})[result.rank] = result
        case "sources", {"digest": digest, "read": plain}:
            known.sources[str(digest)] = from_plain(SourceDigests, plain)
        case _:
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


class Sweep:
    """A sweep, finished or not. Rows are in the order of the points."""

    def __init__(self, path: Path, about: About, rows: Sequence[Row]) -> None:
        self.path, self.about, self.rows = path, about, list(rows)
        self.ranking: Ranking = rank_rows(self.rows, about.headroom)

    @property
    def varied_axes(self) -> list[str]:
        """The axes with several values, those that matter most first."""
        order = [effect.axis for effect in self.ranking.effects]
        names = [name for name, values in self.about.axes.items() if len(values) > 1]
        return sorted(names, key=lambda name: order.index(name) if name in order else len(order))

    def frame(self) -> pd.DataFrame:
        """A row for each point, in the order of the points: the values of the axes, then ``COLUMNS``.

        Bytes and microseconds. Memory is that of the rank that leaves least of its GPU free; ``stages`` has every rank
        that ran. What is not known is missing.
        """
        ranks = {entry.row.id: entry.place for entry in self.ranking.ranked}
        made = [_flat(row, ranks.get(row.id), row.id in self.ranking.front) for row in self.rows]
        frame = pd.DataFrame(made, columns=[*self.about.axes, *COLUMNS])
        for name in self.about.axes:
            if frame[name].map(type).nunique() > 1:
                frame[name] = frame[name].map(text_of)
        whole = ("place", "tokens_per_step", "samples_per_step", *(name for name in COLUMNS if name.endswith("_bytes")))
        return frame.astype(dict.fromkeys(whole, "Int64"))

    def write_table(self) -> Path:
        """Write the rows into ``sweep.parquet``. ``stages`` becomes JSON."""
        path = self.path / TABLE_NAME
        frame = self.frame()
        frame["stages"] = frame["stages"].map(json.dumps)
        frame["ranks"] = frame["ranks"].map(lambda ranks: ",".join(map(str, ranks)))
        with replacing(path) as fresh:
            frame.to_parquet(fresh, index=False)
        return path

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__}({str(self.path)!r})", *sentences(self.ranking)]
        return "\n  ".join(lines)


def open_sweep(path: str | os.PathLike[str]) -> Sweep:
    """Open the directory of a sweep, also of one that was killed or still runs.

    Raises:
        SweepError: It is not the directory of a sweep, or is damaged.
    """
    directory = Path(path)
    about = read_about(directory)
    journal = directory / JOURNAL_NAME
    known = read_known(journal).rows
    texts = {name: {text_of(value) for value in values} for name, values in about.axes.items()}
    if about.points is None:  # a sampler's earlier sweep, of other axes, left rows too
        return Sweep(directory.resolve(), about, [row for row in known.values() if _is_on(row, texts)])
    rows = [known[row_id] for row_id in about.points if row_id in known]
    if (wrong := next((row for row in rows if not _is_on(row, texts)), None)) is not None:
        label = visible(wrong.label, MOST_OF_A_TEXT)
        raise SweepError(f"{journal} has a row for {label}, which is not a point of {ABOUT_NAME}", RUN_AGAIN)
    return Sweep(directory.resolve(), about, rows)


def list_sweeps() -> list[ListedRun]:
    """Every sweep in the current directory and in ``.fakedist/``."""
    return [_listed(path.parent) for folder in (HOME, Path()) for path in folder.glob(f"*/{ABOUT_NAME}")]


def _listed(path: Path) -> ListedRun:
    job, verdict = "a sweep", "cannot be read"
    with suppress(SweepError):
        sweep = open_sweep(path)
        job = f"sweep of {Path(sweep.about.program).name}"
        verdict = f"{sum(row.status is Status.FITS for row in sweep.rows)} of {len(sweep.rows)} points fit"
    begun = datetime.fromtimestamp((path / ABOUT_NAME).stat().st_mtime).astimezone()
    return ListedRun(path=path, created=begun, job=job, verdict=verdict, size_bytes=size_of(path), kept="a sweep")


def _is_on(row: Row, axes: Mapping[str, Container[str]]) -> bool:
    """True if a row has one value of each axis."""
    is_named = sorted(name for name, _ in row.values) == sorted(axes)
    return is_named and all(text_of(value) in axes[name] for name, value in row.values)


def _flat(row: Row, place: int | None, on_front: bool) -> dict[str, object]:
    fullest, step = row.fullest, row.step
    cells: dict[str, object] = {
        **dict(row.values),
        "id": row.id,
        "status": str(row.status),
        "place": place,
        "on_front": on_front,
        "reason": row.reason,
        "layer": row.layer,
        "line": row.line,
    }
    if fullest is not None:
        cells |= {name: value for name, value in asdict(fullest).items() if name in COLUMNS}
        cells |= {"total_bytes": fullest.total_bytes, "headroom_bytes": row.headroom_bytes}
    if step is not None:
        cells |= {name: value for name, value in asdict(step).items() if name in COLUMNS}
        cells |= {"step_low_us": step.low_us, "step_high_us": step.high_us}
        cells |= {"priced_gpu": step.gpu, "priced_fabric": step.fabric}
    return cells | {
        "ranks": [result.rank for result in row.ranks],
        "has_every_stage": row.has_every_stage,
        "stages": to_plain(row.ranks),
        "is_check": row.is_check,
        "run": row.run_directory,
        "reason": row.reason,
        "layer": row.layer,
        "line": row.line,  # of the point, where a rank has its own
        "host": ",".join(dict.fromkeys(result.host for result in row.ranks)),
        "worker": ",".join(dict.fromkeys(result.worker for result in row.ranks)),
        "wall_s": sum(result.wall_s for result in row.ranks),
        "peak_rss_bytes": max((result.peak_rss_bytes for result in row.ranks), default=None),
    }
