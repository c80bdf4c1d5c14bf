"""Creates and replaces run directories. Nothing else is overwritten, and two runs never share a directory.

The journal: what the rank's process writes while it runs. It stays readable wherever it is cut off.

The file starts with ``FDJ1``. Each record is its length and its CRC-32 (both uint32, little endian), followed by a
pickle (protocol 4) of a dict of builtins: the record's kind and its fields (:mod:`fakedist.rundir.encoding`). The
reader refuses any pickle that names a global.
"""

from __future__ import annotations

import datetime
import errno
import fcntl
import itertools
import json
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from fakedist._version import __version__
from fakedist.bounded import ForeignCodeError, UnreadableError, load_builtins, open_file, read_json
from fakedist.errors import JobError, RunDirectoryError
from fakedist.gpu.models.spec import GpuSpec
from fakedist.options import Job
from fakedist.rundir.encoding import Record, decode, encode
from fakedist.rundir.notes import Note
from fakedist.rundir.outcome import Ending, Outcome
from fakedist.rundir.plain import PlainValueError, from_plain, to_plain
from fakedist.rundir.records import RECORDS
from fakedist.rundir.schema import SCHEMA_VERSION
from fakedist.rundir.summary import Summary
from fakedist.temporary import FRESH_PREFIX, replacing
from fakedist.visible import visible

MAGIC = b"FDJ1"
_HEAD = struct.Struct("<II")
_PICKLE = b"\x80\x04"  # the first bytes of a protocol 4 pickle
_MOST_OF_A_TAIL = 1 << 30  # bytes of a record that was cut off; the largest records have some 100 MB
_MOST_CHECKS = 64  # how often the bytes after a broken record are read to find whole records in them


class JournalWriter:
    """Appends records to a new journal, a file that must not exist yet. ``num_bytes`` have been written.

    Raises:
        OSError: The file cannot be created or written.
    """

    def __init__(self, path: Path) -> None:
        self.num_bytes = 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._write(MAGIC)

    def append(self, record: Record) -> None:
        """Write one record. It is in the file when this returns."""
        body = pickle.dumps(encode(record), protocol=4)
        self._write(_HEAD.pack(len(body), zlib.crc32(body)) + body)

    def close(self) -> None:
        """Close the file. No record can follow."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        self.num_bytes += len(data)
        while view:
            view = view[os.write(self._file, view) :]


_MOST_OF_A_KIND = 40


def damaged(path: Path, cause: str) -> RunDirectoryError:
    """The error for a recording file that no longer holds what was written."""
    return RunDirectoryError(f"the recording is damaged: {path} {cause}", "nothing was written; profile the job again")


class JournalReader:
    """Iterates over a journal's records, from where an earlier reader left it.

    A rank that is killed during a write leaves an incomplete record at the end of the file. A broken record with whole
    records after it was once written correctly, so the file is damaged.

    Attributes:
        truncated: Whether the file ended in the middle of a record. Known after iterating.
        position: Where the last whole record ended.
        unknown: Of records that no kind reads, such as those of an extra that is not here, how many by their kinds.
    """

    def __init__(self, path: Path, kinds: Mapping[str, type[Record]], start: int = 0) -> None:
        self._path = path
        self._kinds = kinds
        self.truncated = False
        self.position = start
        self.unknown: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Record]:
        with self._open() as file:
            # What is written from now on is left for the next reader: its last record may be half there.
            size = os.fstat(file.fileno()).st_size
            file.seek(self.position)
            magic = MAGIC if self.position else file.read(min(len(MAGIC), size))
            if magic != MAGIC:
                if MAGIC.startswith(magic):
                    self.truncated = True
                    return
                raise damaged(self._path, "is not a journal of fakedist")
            self.position = self.position or len(MAGIC)
            while head := file.read(min(_HEAD.size, size - self.position)):
                start = self.position + len(head)
                length, crc = _HEAD.unpack(head) if len(head) == _HEAD.size else (-1, 0)
                body = file.read(length) if 0 < length <= min(size - start, _MOST_OF_A_TAIL) else b""
                if not body or zlib.crc32(body) != crc:
                    if size - start > _MOST_OF_A_TAIL or _has_record(os.pread(file.fileno(), size - start, start)):
                        raise damaged(self._path, f"is broken at byte {self.position:,}, and more records follow")
                    self.truncated = True
                    return
                self.position = start + length
                if (record := self._record(body)) is not None:
                    yield record

    def _open(self) -> IO[bytes]:
        try:
            return open_file(self._path)
        except UnreadableError as error:
            raise damaged(self._path, f"cannot be read: {error}") from None

    def _record(self, body: bytes) -> Record | None:
        try:
            plain = load_builtins(body)
        except ForeignCodeError as error:
            raise RunDirectoryError(
                f"{self._path} cannot be read: {error}, and a journal holds only numbers and text",
                "it was not written by fakedist: do not trust this directory",
            ) from None
        except UnreadableError as error:  # its checksum is right, so the cause is not a cut-off run
            raise damaged(self._path, f"is not a journal of fakedist: {error}") from error
        if not isinstance(plain, dict) or "kind" not in plain:
            raise damaged(self._path, "is not a journal of fakedist")
        kind = str(plain["kind"])[:_MOST_OF_A_KIND]
        if kind not in self._kinds and self._kinds is RECORDS:  # a tape is read whole, or not at all
            self.unknown[kind] += 1
            return None
        try:
            return decode(plain, self._kinds)
        except (TypeError, ValueError) as error:
            raise damaged(self._path, f"has a record {kind!r} that is not fakedist's: {error}") from error


def _has_record(data: bytes) -> bool:
    """Return whether a whole record begins anywhere in the bytes after a broken one."""
    view = memoryview(data)
    at = data.find(_PICKLE)
    num_checked = 0
    while at >= 0 and num_checked <= _MOST_CHECKS * len(data):
        if at >= _HEAD.size:
            length, crc = _HEAD.unpack_from(data, at - _HEAD.size)
            if len(_PICKLE) < length <= len(data) - at:
                num_checked += length
                if zlib.crc32(view[at : at + length]) == crc:
                    return True
        at = data.find(_PICKLE, at + 1)
    return at >= 0  # made to look like records all over: no cut-off record does


def read_journal(path: Path, kinds: Mapping[str, type[Record]] = RECORDS) -> JournalReader:
    """The records of a journal. A cut-off tail is left out, and the reader's ``truncated`` is then true.

    Raises:
        RunDirectoryError: While iterating: the file is not a journal, is damaged, or holds anything but its records.
    """
    return JournalReader(path, kinds)


#: What to type about a run directory that cannot be read.
DAMAGED = "the run directory is damaged; profile the job again"

#: The directory, in the current one, of runs that got no name with -o.
HOME = Path(".fakedist")
#: An empty file in a directory whose name fakedist chose, locked until the process that chose it ends. Only such a
#: directory is ever pruned.
UNNAMED_NAME = ".unnamed"
MANIFEST_NAME = "run.json"
JOURNAL_NAME = "journal.bin"
LOCK_NAME = ".lock"
TABLES_NAME = "tables"
SNAPSHOT_NAME = "memory_snapshot.pickle"
PAGE_NAME = "report.html"
TRACE_NAME = "trace.json.gz"
TAPE_NAME = "tape.bin"
#: A second journal: what another program's report contains about the timed step, or a second run of the script. In the
#: directory of such a second run: the keys of the first run's timed step.
KERNELS_NAME = "kernels.bin"
#: nsys's report, without its suffix.
NSYS_NAME = "nsight"
#: Calls of the virtual GPU's ``nvidia-smi``, one per line.
SMI_NAME = "nvidia-smi.log"
#: The Python files that the script read, one per line.
SOURCES_NAME = "sources.txt"
#: Prefix of the directories, next to the tables, that hold tables being written or replaced.
SCRATCH_PREFIX = ".tables-"
#: A directory of several ranks' runs has one of these for each.
_RANK = re.compile(r"rank\d+")
_OURS = (
    *(MANIFEST_NAME, JOURNAL_NAME, LOCK_NAME, TABLES_NAME, SNAPSHOT_NAME, PAGE_NAME, TRACE_NAME, TAPE_NAME),
    *(KERNELS_NAME, f"{NSYS_NAME}.nsys-rep", f"{NSYS_NAME}.qdstrm", SMI_NAME, SOURCES_NAME),
    "lag.bin",  # of earlier versions
)
#: What a run that is killed may leave of a file or a table that it was writing. Whoever holds the lock may remove it.
_LEFT_OVER = re.compile(rf"(?:{re.escape(SCRATCH_PREFIX)}|{re.escape(FRESH_PREFIX)}).*")


def default_name(job: Job, ranks: Sequence[int] = (), *, which: str = "") -> Path:
    """A new directory of one run or several: script, ranks (or ``which``) and world size. See :func:`new_unnamed`."""
    stem = job.target.rpartition(".")[2] if job.is_module else Path(job.target).stem
    which = which or (f"ranks{min(ranks)}-{max(ranks)}" if ranks else f"rank{job.rank}")
    return new_unnamed(f"{stem}-{which}of{job.world_size}")


def new_unnamed(base: str) -> Path:
    """Create a directory in ``.fakedist/`` that the user did not name: ``base``, or ``base`` with a number.

    Raises:
        RunDirectoryError: It cannot be written.
    """
    make_home()
    with _writing(HOME / base):
        for number in itertools.count(1):
            path = HOME / (base if number == 1 else f"{base}-{number}")
            with suppress(FileExistsError):
                path.mkdir()
                mark = os.open(path / UNNAMED_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                fcntl.flock(mark, fcntl.LOCK_EX)
                return path
    raise AssertionError("unreachable")


def make_home() -> None:
    """Create ``.fakedist/``, which git ignores, unless it exists; RunDirectoryError if it cannot be written."""
    with _writing(HOME):
        HOME.mkdir(exist_ok=True)
        if not (HOME / ".gitignore").exists():
            (HOME / ".gitignore").write_text("*\n")


def keep_named(path: Path) -> Path:
    """Note that the user named this directory, so that it is never pruned. Returns it."""
    with suppress(OSError):
        (path / UNNAMED_NAME).unlink(missing_ok=True)
    return path


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raise RunDirectoryError if the path cannot be written; but OSError for a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise RunDirectoryError(
            f"{visible(str(path))} cannot be written: {error.strerror}", "choose another place with -o"
        ) from error


def rank_directories(path: Path) -> list[Path]:
    """The run directories of ranks in a directory of several ranks' runs, by rank; empty if it is none."""
    if (path / MANIFEST_NAME).exists() or not path.is_dir():
        return []
    runs = [run.parent for run in path.glob(f"rank*/{MANIFEST_NAME}") if _RANK.fullmatch(run.parent.name)]
    return sorted(runs, key=lambda run: int(run.name.removeprefix("rank")))


def last_written(folder: Path, *names: str) -> Path | None:
    """The file of these names written last, in a directory of this folder or of ``.fakedist/``, or one below."""
    depths = ("*", "*/*", f"{HOME}/*/*")
    found = [path for name in names for depth in depths for path in folder.glob(f"{depth}/{name}")]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


def last_run(folder: Path) -> Path:
    """The run in this folder that was written last; see :func:`last_written`.

    Raises:
        RunDirectoryError: There is none.
    """
    manifest = last_written(folder, MANIFEST_NAME)
    if manifest is None:
        raise RunDirectoryError(f"no run in {folder.resolve()}", "give a run directory, or go where it was made")
    return manifest.parent


@contextmanager
def create_run_directory(path: Path, force: bool) -> Iterator[Path]:
    """An empty run directory, locked against other runs until the context exits. Missing parents are created.

    Raises:
        RunDirectoryError: The path holds something that may not be replaced, cannot be written, or is in use by
            another run.
    """
    with _writing(path):
        _remove_ranks(path, check_replaceable(path, force))
        path.mkdir(parents=True, exist_ok=True)
        lock = _locked(path)
    try:
        if (path / MANIFEST_NAME).exists():  # chosen anew, by whoever replaces it
            keep_named(path)
        clear(path)
        yield path.resolve()
    finally:
        (path / LOCK_NAME).unlink(missing_ok=True)  # while still locked: later it could be another run's
        remove_if_empty(path)
        os.close(lock)


def remove_if_empty(path: Path) -> None:
    """Remove a directory that has nothing but a mark."""
    with suppress(OSError):
        if {entry.name for entry in path.iterdir()} <= {UNNAMED_NAME}:
            keep_named(path).rmdir()


def _locked(path: Path) -> int:
    """The descriptor of a directory's lock, held until it is closed; RunDirectoryError if another run holds it."""
    while True:
        lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise in_use(path) from None
        with suppress(OSError):
            if os.path.samestat(os.fstat(lock), (path / LOCK_NAME).stat()):
                return lock
        os.close(lock)  # the run that held it has ended, and removed it in between


def in_use(path: Path) -> RunDirectoryError:
    """The error that another run is writing to a directory."""
    return RunDirectoryError(f"{path} is in use by another run", "choose another place with -o")


def clear(path: Path, but: Collection[str] = ()) -> None:
    """Remove a run's files from its locked directory, but for the lock and the names in ``but``.

    The manifest goes last: until then this is a run directory.
    """
    for name in sorted(set(_OURS) - {LOCK_NAME, *but}, key=lambda name: name == MANIFEST_NAME):
        _remove(path / name)
    for left in path.iterdir():
        if _LEFT_OVER.fullmatch(left.name):
            _remove(left)


def check_replaceable(path: Path, force: bool) -> list[str]:
    """Check that a run may replace what a path holds, and return the names of the ranks' run directories in it.

    Raises:
        RunDirectoryError: It holds something that fakedist did not write, or runs that may not be replaced.
    """
    ranks = check_ours(path)
    if not force and ranks:
        held = f"the runs of {len(ranks)} ranks" if len(ranks) > 1 else f"a run in {ranks[0]}"
        raise RunDirectoryError(f"{path} holds {held}", "add --force to replace all of it, or choose another -o")
    if not force and (path / MANIFEST_NAME).exists():
        raise RunDirectoryError(f"{path} holds a run already", "add --force to replace it, or choose another -o")
    return ranks


def check_ours(path: Path) -> list[str]:
    """Check that a path is free or holds only a run or ranks' runs, and return the names of these ranks' directories.

    Raises:
        RunDirectoryError: It is something else.
    """
    if path.is_symlink() and not path.exists():
        raise RunDirectoryError(f"{path} is a link to nothing", "choose another place with -o")
    if path.exists() and not path.is_dir():
        raise RunDirectoryError(f"{path} is a file", "choose another place with -o")
    names = {entry.name for entry in path.iterdir()} if path.exists() else set()
    names -= {LOCK_NAME, UNNAMED_NAME, *filter(_LEFT_OVER.fullmatch, names)}
    ranks = sorted(name for name in names if _RANK.fullmatch(name))
    if names and MANIFEST_NAME not in names and not ranks:
        raise RunDirectoryError(f"{path} is neither empty nor a run directory", "choose another place with -o")
    tables = {entry.name for entry in path.glob(f"{TABLES_NAME}/*") if entry.suffix != ".parquet"}
    others = {f"{TABLES_NAME}/{name}" for name in tables if not _LEFT_OVER.fullmatch(name)}
    if foreign := sorted(others | names - set(_OURS) - set(ranks)):
        raise RunDirectoryError(
            f"{path} holds something that fakedist did not write: {visible(foreign[0])}",
            f"move it away: {path}, or choose another place with -o",
        )
    if MANIFEST_NAME in names and not _is_manifest(path / MANIFEST_NAME):
        raise RunDirectoryError(
            f"{path / MANIFEST_NAME} is damaged, or was not written by fakedist",
            "move it away, or choose another place with -o",
        )
    for name in ranks:
        if (path / name).is_symlink() or check_ours(path / name):
            raise RunDirectoryError(f"{path / name} is not a rank's run directory", "choose another place with -o")
    return ranks


def _is_manifest(path: Path) -> bool:
    try:
        values = read_json(path)
    except (OSError, UnreadableError):
        return False
    return isinstance(values, dict) and "schema_version" in values and "job" in values


def _remove_ranks(path: Path, ranks: Sequence[str]) -> None:
    """Remove ranks' run directories, once none of them is in use; RunDirectoryError if one is."""
    for name in ranks:
        if is_in_use(path / name):
            raise in_use(path / name)
    for name in ranks:
        remove_run(path / name)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def why_kept(path: Path) -> str:
    """Why :func:`prune` leaves a directory of one run or several, in a few words; empty if it goes."""
    if path.parent != HOME:
        return f"not in {HOME}"
    if HOME.is_symlink() or path.is_symlink():
        return "a link"
    if not (path / UNNAMED_NAME).is_file():
        return "named with -o"
    if is_in_use(path, UNNAMED_NAME) or any(map(is_in_use, (path, *rank_directories(path)))):
        return "still runs"
    try:
        check_ours(path)
    except RunDirectoryError as error:
        return error.message.removeprefix(f"{path} ")
    return ""


def prune(path: Path) -> None:
    """Delete a directory of one run or several, unless something keeps it: RunDirectoryError then."""
    if why := why_kept(path):
        raise RunDirectoryError(f"{path} stays: {why}")
    remove_run(path)


def remove_run(path: Path) -> None:
    """Delete a directory of one run or several: the files that fakedist wrote there, and it if nothing else is in it.

    Raises:
        RunDirectoryError: It is something else, or in use.
    """
    with create_run_directory(path, force=True):
        pass


def is_in_use(path: Path, lock_name: str = LOCK_NAME) -> bool:
    """Return whether a run is writing to the directory now."""
    try:
        lock = os.open(path / lock_name, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


_PROVENANCE = {
    "memory": "measured: the caching allocator's own history and statistics",
    "collectives": "simulated: the other ranks do not exist, and hold what this rank holds",
    "estimated_outside": "estimated: a model of NCCL's buffers by its sources, from groups, calls and environment",
    "wall_us": "measured on this machine, recording included",
}


@dataclass(frozen=True, slots=True)
class Imported:
    """The report of another program that the run was made from.

    Attributes:
        report: Path of the report.
        tool: The program.
    """

    report: str
    tool: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A run and how it ended.

    Attributes:
        schema_version: Version of this layout; a newer one than the reader's is refused.
        fakedist: Version that wrote it.
        command: The command line.
        cwd: Directory it was given in.
        git_commit: Commit of the directory's repository, with `+` if the tree was changed; empty without one.
        created: When, ISO 8601 with time zone.
        imported: The report that `fakedist nsys` read; None for a run of fakedist's own.
        job: The job as it was asked for: world size, rank, script, arguments, device and the rest; None if imported.
        gpu_model: The GPU model, on the virtual GPU with its power limit; None for an unknown one, and while the
            rank runs.
        exit: How the rank ended.
        versions: Of `python`, `torch` and `cuda` where the rank ran; empty while it runs.
        provenance: Which figures are measured, simulated or estimated.
        dropped: What of the run is not in the recording; these are among the notes too.
        notes: What limits what these figures mean.
        summary: The object that `--json` prints; None while the rank runs.
    """

    schema_version: int = SCHEMA_VERSION
    fakedist: str = __version__
    command: list[str]
    cwd: str
    git_commit: str
    created: str
    imported: Imported | None = None
    job: Job | None
    gpu_model: GpuSpec | None = None
    exit: Ending
    versions: dict[str, str]
    provenance: dict[str, str]
    dropped: list[Note] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    summary: Summary | None = None


def new_manifest(run_directory: Path, job: Job) -> Manifest:
    """Write the manifest of a run that is about to start: outcome ``running``. Returns it."""
    manifest = _made_here(job, None, Ending(Outcome.RUNNING, None), _PROVENANCE)
    write_manifest(run_directory, manifest)
    return manifest


def import_manifest(run_directory: Path, report: Path, tool: str) -> None:
    """Write the manifest of a run that another program, ``tool``, recorded in its report."""
    write_manifest(run_directory, imported_manifest(report, tool))


def imported_manifest(report: Path, tool: str) -> Manifest:
    """The manifest of a run that another program, ``tool``, recorded in its report."""
    imported = Imported(os.fspath(report.resolve()), tool)
    return _made_here(None, imported, Ending(Outcome.FINISHED, 0), {"kernels": f"measured: {tool}"})


def _made_here(job: Job | None, imported: Imported | None, ending: Ending, provenance: dict[str, str]) -> Manifest:
    return Manifest(
        command=list(sys.argv),
        cwd=os.getcwd(),
        git_commit=_git_commit(),
        created=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        imported=imported,
        job=job,
        exit=ending,
        versions={},
        provenance=provenance,
    )


def load_manifest(run_directory: Path) -> Manifest:
    """Load the manifest of a run directory.

    Raises:
        RunDirectoryError: It is missing, damaged or not fakedist's, or a newer fakedist wrote it.
    """
    path = run_directory / MANIFEST_NAME
    try:
        values = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        problem = "is not a run directory: it has no run.json" if run_directory.is_dir() else "does not exist"
        if run_directory.exists() and not run_directory.is_dir():
            problem = "is a file, and a run directory is needed here"
        hint = "fakedist runs lists the runs here; fakedist profile makes one"
        of_sweep = sorted(path.parent for path in run_directory.glob(f"runs/*/*/{MANIFEST_NAME}"))
        if several := rank_directories(run_directory) or of_sweep:
            problem = "holds several runs, and one is needed here"
            hint = f"such as {several[0]}"
        raise RunDirectoryError(f"{run_directory} {problem}", hint) from None
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror}", DAMAGED) from error
    except UnreadableError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error}", DAMAGED) from error
    version = values.get("schema_version") if isinstance(values, dict) and "job" in values else None
    if not isinstance(version, int):
        raise RunDirectoryError(f"{path} was not written by fakedist", "give a directory that fakedist profile made")
    if version > SCHEMA_VERSION:
        raise RunDirectoryError(
            f"{run_directory} has schema version {version}; this fakedist reads up to {SCHEMA_VERSION}",
            "pip install --upgrade fakedist",
        )
    job = values["job"] if isinstance(values, dict) else None
    if isinstance(job, dict) and job.get("gpu_lag") == "estimated":
        job["gpu_lag"] = "full"  # earlier versions had a value in between
    try:
        manifest = from_plain(Manifest, values)
    except (PlainValueError, JobError) as error:
        raise RunDirectoryError(f"{path} cannot be read: {str(error).splitlines()[0]}", DAMAGED) from error
    if manifest.job is None and manifest.imported is None:
        raise RunDirectoryError(f"{path} cannot be read: job is missing", DAMAGED)
    return manifest


def load_job(run_directory: Path) -> Job:
    """The job of a run directory.

    Raises:
        RunDirectoryError: See :func:`load_manifest`; or another program recorded the run.
    """
    manifest = load_manifest(run_directory)
    if manifest.job is None:
        raise RunDirectoryError(
            f"{run_directory} was imported by fakedist nsys, and has no job", "fakedist profile -o RUN ... makes one"
        )
    return manifest.job


def write_manifest(run_directory: Path, manifest: Manifest) -> None:
    """Write the manifest, in place of the one that the run directory has."""
    with replacing(run_directory / MANIFEST_NAME) as path:
        path.write_text(json.dumps(to_plain(manifest), indent=1, allow_nan=False) + "\n")


def _git_commit() -> str:
    """The commit, with "+" appended if tracked files are modified."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        if head.returncode:
            return ""
        status = ["git", "status", "--porcelain", "--untracked-files=no"]
        changed = subprocess.run(status, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
