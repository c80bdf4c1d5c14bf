"""The history of the caching allocator in a set of jobs on one GPU, and its file, which holds nothing but builtins.

A file ``*.jsonl.gz`` holds one JSON object a line: a head (what ran, on what, when, by which command), then one line a
job. The same recording gives the same bytes: keys are sorted, and gzip's header holds no time. Standard library only.
"""

from __future__ import annotations

import gzip
import io
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fakedist.rundir.journal import read_journal
from fakedist.rundir.memory_records import EventsRecord
from fakedist.rundir.records import OperationNamesRecord, OperationsRecord
from fakedist.rundir.schema import ACTIONS as ACTION_NAMES

FORMAT = 1
#: The most bytes of a file when it is unpacked. That of 36 jobs on an H200 has 1.7 MB.
_MOST_BYTES = 256 << 20
#: The allocator's actions (c10/cuda/CUDACachingAllocator.h, TraceEntry::Action) as one character each. Snapshots and
#: annotations change nothing in the allocator and are left out.
CODES = {
    "alloc": "a",
    "free_requested": "r",
    "free_completed": "f",
    "segment_alloc": "S",
    "segment_free": "F",
    "segment_map": "M",
    "segment_unmap": "U",
    "oom": "o",
}
ACTIONS = {code: action for action, code in CODES.items()}


class RecordingFileError(Exception):
    """A file that cannot be read as a recording, in one line."""


@dataclass
class Events:
    """The allocator's events, in order; the columns are equally long.

    Attributes:
        actions: One character each, see :data:`CODES`.
        sizes: Bytes that were asked for; of segments, bytes.
        streams: CUDA streams, numbered from 0 in the order of their first event.
        places: Index into ``names``, of the line or operation that allocated; -1 where none is known.
        names: Lines of Python or names of operations. They are for reading alone and never compared.
    """

    actions: str = ""
    sizes: list[int] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.actions)

    def key(self, index: int) -> tuple[str, int, int]:
        """The key by which the event at ``index`` equals another: action, size, stream."""
        return self.actions[index], self.sizes[index], self.streams[index]

    def describe(self, index: int) -> str:
        """One event in words, without its place: ``alloc 2097152 stream 0``."""
        code, size, stream = self.key(index)
        return f"{ACTIONS[code]} {size} stream {stream}"

    def where(self, index: int) -> str:
        """The line or operation that made an event; empty where it is not known."""
        place = self.places[index] if index < len(self.places) else -1
        return self.names[place] if place >= 0 else ""


class EventsBuilder:
    """Collects events one by one, numbering streams and naming places."""

    def __init__(self) -> None:
        self._events = Events()
        self._actions: list[str] = []
        self._streams: dict[int, int] = {}
        self._names: dict[str, int] = {}

    def add(self, action: str, size: int, stream: int, name: str = "") -> None:
        """Add one event; snapshots and annotations are skipped.

        Args:
            action: The allocator's own word.
            size: Bytes.
            stream: The CUDA stream's handle.
            name: What made it; empty where it is not known.
        """
        code = CODES.get(action)
        if code is None:
            return
        self._actions.append(code)
        self._events.sizes.append(size)
        self._events.streams.append(self._streams.setdefault(stream, len(self._streams)))
        self._events.places.append(self._names.setdefault(name, len(self._names)) if name else -1)

    def build(self) -> Events:
        """Return the collected events."""
        self._events.actions = "".join(self._actions)
        self._events.names = list(self._names)
        return self._events


@dataclass
class JobRecord:
    """One job's recording.

    Attributes:
        name: The job's, see :mod:`fakedist.extras.confirm.jobs`.
        error: Why there is no recording, in words; empty where there is one.
        statistics: ``torch.cuda.memory_stats()`` at the job's end.
        events: The allocator's history from before the job to its end.
        notes: What a reader must know: what the virtual GPU refused or made up.
        seconds: How long the process took; never compared.
    """

    name: str
    error: str = ""
    statistics: dict[str, int] = field(default_factory=dict)
    events: Events = field(default_factory=Events)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def peak_allocated_bytes(self) -> int:
        """Most bytes in blocks at once."""
        return self.statistics.get("allocated_bytes.all.peak", 0)

    @property
    def peak_reserved_bytes(self) -> int:
        """Most bytes in segments at once."""
        return self.statistics.get("reserved_bytes.all.peak", 0)


@dataclass
class Head:
    """A recording and where it was made.

    Attributes:
        device: "real" or "virtual".
        way: "bare": the job in a process of its own; "profiled": under ``fakedist profile``.
        gpu: The GPU's name, as CUDA gives it.
        capacity_bytes: Its memory, as CUDA gives it.
        driver: The driver's version; empty on a virtual GPU.
        torch: torch's version with its CUDA, e.g. "2.11.0+cu130".
        python: Python's version.
        date: Day of the recording, UTC.
        command: What was typed.
    """

    device: str
    way: str
    gpu: str
    capacity_bytes: int
    driver: str
    torch: str
    python: str
    date: str
    command: str

    @property
    def directory_name(self) -> str:
        """Directory of tests/data/gpu that such a recording goes into, e.g. ``nvidia-h200-torch2.11.0``."""
        return f"{self.gpu.lower().replace(' ', '-')}-torch{self.torch.partition('+')[0]}"


@dataclass
class AllocatorRecording:
    """A head and its jobs by name."""

    head: Head
    jobs: dict[str, JobRecord] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write the file; the same recording gives the same bytes."""
        path.parent.mkdir(parents=True, exist_ok=True)
        lines: Iterable[dict[str, Any]] = (
            {"format": FORMAT, **asdict(self.head)},
            *(asdict(job) for job in self.jobs.values()),
        )
        text = "".join(json.dumps(line, sort_keys=True, separators=(",", ":")) + "\n" for line in lines)
        packed = io.BytesIO()
        with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=9, mtime=0, filename="") as file:
            file.write(text.encode())
        path.write_bytes(packed.getvalue())


def replace_with(path: Path, value: object) -> None:
    """Replace a file by this JSON, as a whole: a process that is killed leaves the previous one."""
    scratch = path.with_suffix(".new")
    scratch.write_text(json.dumps(value))
    scratch.replace(path)


def load(path: Path) -> AllocatorRecording:
    """Read a recording.

    Raises:
        RecordingFileError: There is none, or it is of another format.
    """
    try:
        with gzip.open(path) as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise RecordingFileError(f"{path} has more than {_MOST_BYTES:,} bytes when it is unpacked")
        first, *lines = content.decode().splitlines()
        head = json.loads(first)
        if head.pop("format", None) != FORMAT:
            raise RecordingFileError(f"{path} is not a recording of format {FORMAT}: record it again")
        jobs = [job_from_json(json.loads(line)) for line in lines]
        return AllocatorRecording(Head(**head), {job.name: job for job in jobs})
    except (OSError, EOFError, ValueError, TypeError, KeyError) as error:
        raise RecordingFileError(f"{path} cannot be read as a recording: {error}") from error


def job_from_json(found: dict[str, Any]) -> JobRecord:
    """The job that ``dataclasses.asdict`` and JSON made one object of.

    Raises:
        ValueError: Its columns are not equally long.
    """
    events = Events(**found.pop("events"))
    if not len(events.actions) == len(events.sizes) == len(events.streams):
        raise ValueError("the columns of its events are not equally long")
    return JobRecord(events=events, **found)


def journal_events(run_directory: Path, statistics: Mapping[str, int], device: int = 0) -> Events:
    """The events of the allocator of ``device`` until its counts were those of ``statistics``.

    The job takes its statistics at its end; what is freed while the process ends comes after them.

    Args:
        run_directory: Of a run with its journal.
        statistics: ``torch.cuda.memory_stats()`` at the job's end.
        device: Which GPU.
    """
    names: dict[int, str] = {}
    operation_of: dict[int, int] = {}
    columns: list[tuple[array[int], ...]] = []
    for record in read_journal(run_directory / "journal.bin"):
        if isinstance(record, OperationNamesRecord):
            names.update(record.rows)
        elif isinstance(record, OperationsRecord):
            operation_of.update(enumerate(array("I", record.operation), record.first))
        elif isinstance(record, EventsRecord) and record.device == device:
            action, size = array("B", record.action), array("q", record.size)
            columns.append((action, size, array("Q", record.stream), array("q", record.op)))
    builder = EventsBuilder()
    wanted = tuple(statistics.get(name, 0) for name in ("allocation.all.allocated", "allocation.all.freed"))
    for kind, num_bytes, handle, op in _until(_rows(columns), wanted):
        name = names.get(operation_of.get(op, -1), "") if kind == "alloc" else ""
        builder.add(kind, num_bytes, handle, name)
    return builder.build()


def _rows(columns: list[tuple[array[int], ...]]) -> Iterator[tuple[str, int, int, int]]:
    for each in columns:
        for action, size, stream, op in zip(*each, strict=True):
            yield ACTION_NAMES[action], size, stream, op


def _until(rows: Iterator[tuple[str, int, int, int]], wanted: tuple[int, ...]) -> Iterator[tuple[str, int, int, int]]:
    """Events until as many blocks were allocated and freed as wanted, and what followed before the next block."""
    allocated = freed = 0
    for row in rows:
        is_block = row[0] in ("alloc", "free_requested", "free_completed")
        if is_block and (allocated, freed) == wanted:
            # The statistics count a free when it is asked for, or when it is done: either way none is half done there.
            return
        allocated += row[0] == "alloc"
        freed += row[0] == "free_completed"
        yield row
