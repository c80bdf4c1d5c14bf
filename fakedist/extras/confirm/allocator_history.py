"""The history of the caching allocator in a set of jobs on one GPU, its file, and how two of them differ.

A file ``*.jsonl.gz`` holds one JSON object a line: a head (what ran, on what, when, by which command), then one line a
job. The same recording gives the same bytes: keys are sorted, and gzip's header holds no time.

Two recordings are compared job by job: the first event that differs with its neighbours, and every statistic. Blocks
that are freed one after the other, with nothing between them, may be freed in another order: torch's autocast keeps its
casts in a table ordered by addresses of host memory, which no two processes share. So may segments that are given back:
the allocator orders them by their stream's handle, on a real GPU also an address. What is allocated next finds the same
free memory whatever the order was. Such a job is reported as "order", and counts as the same.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import SequenceMatcher
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fakedist.rundir.schema import ACTIONS as ACTION_NAMES

if TYPE_CHECKING:
    from fakedist.analysis.recording import Recording

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


@dataclass
class AllocatorRecording:
    """A head and its jobs by name."""

    head: Head
    jobs: dict[str, JobRecord] = field(default_factory=dict)

    def packed(self) -> bytes:
        """The file; the same recording gives the same bytes."""
        lines: Iterable[dict[str, Any]] = (
            {"format": FORMAT, **asdict(self.head)},
            *(asdict(job) for job in self.jobs.values()),
        )
        text = "".join(json.dumps(line, sort_keys=True, separators=(",", ":")) + "\n" for line in lines)
        packed = io.BytesIO()
        with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=9, mtime=0, filename="") as file:
            file.write(text.encode())
        return packed.getvalue()


def load(path: Path | str, content: bytes | None = None) -> AllocatorRecording:
    """Read the recording of a file, or of the ``content`` of one of this name.

    Raises:
        RecordingFileError: There is none, or it is of another format.
    """
    try:
        with gzip.open(path if content is None else io.BytesIO(content)) as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise RecordingFileError(f"{path} has more than {_MOST_BYTES:,} bytes when it is unpacked")
        first, *lines = text.decode().splitlines()
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


def recorded_events(found: Recording, statistics: Mapping[str, int] | None = None) -> Events:
    """The events of a run's allocator, until its counts were those of ``statistics`` where there are any.

    A job takes its statistics at its end; what is freed while the process ends comes after them.

    Args:
        found: What the run recorded.
        statistics: ``torch.cuda.memory_stats()`` at the job's end.
    """
    names = {row.number: row.name for row in found.operations}
    operation_of = found.op_operation.tolist()
    wanted = [statistics.get(f"allocation.all.{name}", 0) for name in ("allocated", "freed")] if statistics else []
    allocated = freed = 0
    builder = EventsBuilder()
    columns = (found.device_events[name].tolist() for name in ("action", "size", "stream", "op"))
    for action, size, stream, op in zip(*columns, strict=True):
        kind = ACTION_NAMES[action]
        is_block = kind in ("alloc", "free_requested", "free_completed")
        if is_block and [allocated, freed] == wanted:
            # The statistics count a free when it is asked for, or when it is done: either way none is half done there.
            break
        allocated += kind == "alloc"
        freed += kind == "free_completed"
        is_named = kind == "alloc" and 0 <= op < len(operation_of)
        builder.add(kind, size, stream, names.get(operation_of[op], "") if is_named else "")
    return builder.build()


NEIGHBOURS = 4
#: How far events are searched for the place where both sides agree again.
_SEARCH = 200
_MOST = 120  # characters of a reason in the table
#: Of what may come in another order: blocks that are freed, segments that are given back.
_RUNS = {"r": 1, "f": 1, "F": 2, "U": 2}
#: Statistics of what lies between blocks while they are freed one after the other; peaks of memory are not among them.
_BY_ORDER = ("inactive_split.", "inactive_split_bytes.")


@dataclass
class HistoryDifference:
    """The difference in one job; empty ``reason`` where nothing does.

    Attributes:
        job: Its name.
        verdict: "same", "order" (the same but for the order of frees with nothing between them), "events",
            "statistics", "error" (of one side), "failed" (on both sides alike) or "missing".
        reason: The first difference in one line.
        lines: More about it.
        peaks: Peak allocated and reserved bytes of the first, then of the second.
    """

    job: str
    verdict: str = "same"
    reason: str = ""
    lines: list[str] = field(default_factory=list)
    peaks: tuple[int, int, int, int] = (0, 0, 0, 0)

    @property
    def is_same(self) -> bool:
        """Whether both sides recorded the same."""
        return self.verdict in ("same", "order")

    def text(self) -> list[str]:
        """Name the differences in lines; none where there is none."""
        return [] if self.is_same else ["", f"{self.job}: {self.verdict}: {self.reason}", *self.lines]


def compare(first: AllocatorRecording, second: AllocatorRecording, jobs: Sequence[str] = ()) -> list[HistoryDifference]:
    """Every job of the first recording (or those named) against the second's."""
    sides = first.head.device, second.head.device
    names = sides if sides[0] != sides[1] else (first.head.way, second.head.way)
    if names[0] == names[1]:
        names = ("first", "second")
    return [compare_job(job, first.jobs.get(job), second.jobs.get(job), names) for job in jobs or first.jobs]


def compare_job(
    job: str, first: JobRecord | None, second: JobRecord | None, names: tuple[str, str] = ("real", "virtual")
) -> HistoryDifference:
    """One job of both recordings; ``names`` are what the sides are called."""
    for name, side in zip(names, (first, second), strict=True):
        if side is None:
            return HistoryDifference(job, "missing", f"{job} was not recorded on the side called {name}")
    assert first is not None
    assert second is not None
    found = HistoryDifference(job, peaks=_peaks(first, second))
    if first.error or second.error:
        found.verdict = "failed" if first.error and second.error else "error"
        found.reason = "; ".join(
            f"{name}: {side.error}" for name, side in zip(names, (first, second), strict=True) if side.error
        )
        return found
    at = first_difference(first.events, second.events)
    keys = sorted(first.statistics.keys() | second.statistics.keys())
    values = [(key, first.statistics.get(key), second.statistics.get(key)) for key in keys]
    differing = [each for each in values if each[1] != each[2]]
    if at is not None or differing:
        _explain(found, (first, second), at, differing, names)
    return found


def _explain(
    found: HistoryDifference,
    sides: tuple[JobRecord, JobRecord],
    at: int | None,
    differing: list[tuple[str, int | None, int | None]],
    names: tuple[str, str],
) -> None:
    """Say what differs, given the first event and the statistics that do."""
    one, other = (settled(side.events) for side in sides)
    settled_at = first_difference(one, other)
    telling = [row for row in differing if not row[0].startswith(_BY_ORDER) or None in row]
    if settled_at is not None:
        found.verdict, found.reason = "events", f"event {settled_at}: {_both((one, other), settled_at, names)}"
        found.lines = _around((one, other), settled_at, names)
        found.lines += _table(differing, names) if differing else []
    elif telling:
        found.verdict = "statistics"
        name, mine, others = telling[0]
        found.reason = f"{name}: {names[0]} {mine}, {names[1]} {others}, though every event is the same"
        found.lines = _table(telling, names)
    else:
        found.verdict = "order"
        first = "of equal size" if at is None else f"from event {at} on"
        found.reason = f"frees with nothing between them come in another order, {first}"


def settled(events: Events) -> Events:
    """The events with frees that follow each other, of blocks or of segments, put into one order: by size, stream."""
    order: list[int] = []
    for kind, run in groupby(range(len(events)), key=lambda at: _RUNS.get(events.actions[at], 0)):
        places = list(run)
        if kind:
            places.sort(key=lambda at: (events.sizes[at], events.streams[at]))
        order += places
    names = events.places or [-1] * len(events)
    return Events(
        "".join(events.actions[at] for at in order),
        [events.sizes[at] for at in order],
        [events.streams[at] for at in order],
        [names[at] for at in order],
        events.names,
    )


def _peaks(first: JobRecord, second: JobRecord) -> tuple[int, int, int, int]:
    return (
        first.peak_allocated_bytes,
        first.peak_reserved_bytes,
        second.peak_allocated_bytes,
        second.peak_reserved_bytes,
    )


def first_difference(one: Events, other: Events) -> int | None:
    """Index of the first event that is not the same on both sides; None where all are."""
    shared = min(len(one), len(other))
    for index in range(shared):
        if one.key(index) != other.key(index):
            return index
    return None if len(one) == len(other) else shared


def _both(sides: tuple[Events, Events], at: int, names: tuple[str, str]) -> str:
    events = [
        f"{name} {side.describe(at) if at < len(side) else 'ended'}" for name, side in zip(names, sides, strict=True)
    ]
    return ", ".join(events)


def _around(sides: tuple[Events, Events], at: int, names: tuple[str, str]) -> list[str]:
    """Events around the first difference, with what made them: those of both sides once, and what one of them has."""
    begin = max(0, at - NEIGHBOURS)
    keys = [[side.key(index) for index in range(begin, min(len(side), at + _SEARCH))] for side in sides]
    lines = [f"{name}: {len(side)} events" for name, side in zip(names, sides, strict=True)]
    matcher = SequenceMatcher(None, keys[0], keys[1], autojunk=False)
    for tag, *bounds in next(iter(matcher.get_grouped_opcodes(NEIGHBOURS))):
        for name, side, first, last in zip(names, sides, bounds[::2], bounds[1::2], strict=True):
            if tag != "equal" or name == names[0]:
                lines += [
                    f"{'' if tag == 'equal' else name:>10} {index:6d}  {side.describe(index):<40} {side.where(index)}"
                    for index in range(begin + first, begin + last)
                ]
    return lines


def _table(rows: Sequence[tuple[str, int | None, int | None]], names: tuple[str, str]) -> list[str]:
    width = max(len(row[0]) for row in rows)
    head = f"{'statistic':<{width}} {names[0]:>16} {names[1]:>16} {'difference':>16}"
    lines = [head]
    for key, one, other in rows:
        shown = ["-" if value is None else str(value) for value in (one, other)]
        delta = "-" if one is None or other is None else f"{other - one:+d}"
        lines.append(f"{key:<{width}} {shown[0]:>16} {shown[1]:>16} {delta:>16}")
    return lines


def summary(found: Sequence[HistoryDifference]) -> list[str]:
    """One line a job."""
    width = max((len(each.job) for each in found), default=3)
    lines = [f"{'job':<{width}} {'verdict':<11} {'peak allocated':>16} {'peak reserved':>16}  difference"]
    for each in found:
        allocated = _peak_cell(each.peaks[0], each.peaks[2])
        reserved = _peak_cell(each.peaks[1], each.peaks[3])
        lines.append(
            f"{each.job:<{width}} {each.verdict:<11} {allocated:>16} {reserved:>16}  {each.reason[:_MOST]}".rstrip()
        )
    same = sum(each.is_same for each in found)
    return [*lines, f"{same} of {len(found)} jobs are the same, byte for byte"]


def _peak_cell(one: int, other: int) -> str:
    return f"{one}" if one == other else f"{other - one:+d}"
