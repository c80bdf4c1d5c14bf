"""Measure this machine's GPU against the virtual one, into one file; and check such a file when it arrives."""

from __future__ import annotations

import base64
import json
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fakedist._version import __version__
from fakedist.bounded import UnreadableError, read_json
from fakedist.errors import FakedistError, JobError
from fakedist.extras.confirm.allocator_history import AllocatorRecording, JobRecord, RecordingFileError, load
from fakedist.extras.confirm.jobs import JOBS
from fakedist.extras.confirm.pieces import (
    DEFAULT_GPU,
    Session,
    like,
    real_machine,
    rehearsed_machine,
    run_kernel_times,
    run_out_of_memory,
    run_outside,
    run_recordings,
)
from fakedist.gpu.driver.build import ensure_driver
from fakedist.report.writing import replace_text
from fakedist.rundir.plain import PlainValueError, from_plain, to_plain

FORMAT = 1
#: Of a table or a recording: it stays in the directory that it is unpacked into.
_NAME = re.compile(r"[\w-][\w.+-]*(/[\w-][\w.+-]*)?")
REHEARSAL = (
    "REHEARSAL: no GPU here. The virtual GPU stands in for the real one, so nothing below says anything of a real GPU"
)


@dataclass(frozen=True)
class MeasuredPiece:
    """Something to measure, and the seconds it may take; ``run`` returns whether it went well."""

    title: str
    limit_s: float
    run: Callable[[Session], bool]


#: In this order: what matters most comes first, as the time may be short.
PIECES = {
    "recordings": MeasuredPiece("the accuracy set, event by event", 360.0, run_recordings),
    "outside": MeasuredPiece("device memory outside of the allocator", 45.0, run_outside),
    "out-of-memory": MeasuredPiece("where a job fails with less and less memory", 65.0, run_out_of_memory),
    "times": MeasuredPiece("kernel times: bare, recorded, estimated", 330.0, run_kernel_times),
}


@dataclass(frozen=True)
class PieceEnd:
    """How a piece ended, and after how many seconds."""

    went_well: bool
    seconds: float


@dataclass(frozen=True)
class Confirmation:
    """One file of results.

    Attributes:
        format: :data:`FORMAT`.
        fakedist: The version that measured.
        machine: ``gpu``, ``capacity_bytes``, ``driver``, ``torch``, ``python``.
        is_rehearsal: Whether the virtual GPU stood in for a real one.
        tables: Name -> ``head`` and ``rows`` of a table.
        recordings: ``<gpu>-torch<version>/<name>.jsonl.gz`` -> the file, in base64.
        log: The summary's lines.
    """

    format: int
    fakedist: str
    machine: dict[str, Any]
    is_rehearsal: bool
    pieces: dict[str, PieceEnd] = field(default_factory=dict)
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    recordings: dict[str, str] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)


def run_piece(session: Session, name: str, piece: MeasuredPiece, patience: float = 1.0) -> PieceEnd:
    """Run one piece within its time, or ``patience`` times that. One that breaks is reported and ends nothing else."""
    started = time.monotonic()
    session.ends_at = started + piece.limit_s * patience
    session.say("", f"==== {name}: {piece.title}")
    try:
        went_well = piece.run(session)
    except Exception:
        session.say(traceback.format_exc())
        went_well = False
    ended = PieceEnd(went_well, round(time.monotonic() - started, 1))
    state = "done" if went_well else "FAILED"
    session.say(f"==== {name}: {state}, {ended.seconds:.0f} of {piece.limit_s * patience:.0f} s")
    return ended


def confirm(
    pieces: Mapping[str, MeasuredPiece],
    file: Path,
    command: str,
    on_line: Callable[[str], None],
    *,
    is_rehearsal: bool,
    at_once: int = 1,
    patience: float = 1.0,
    jobs: Sequence[str] = (),
) -> bool:
    """Run these pieces on this machine's GPU, or on the virtual one, and write ``file`` anew after each of them.

    All jobs of the accuracy set run if none is named.

    Returns:
        Whether every piece went well.

    Raises:
        SetupError: torch cannot use the GPU.
        JobError: fakedist does not know the GPU.
    """
    machine = rehearsed_machine(DEFAULT_GPU) if is_rehearsal else real_machine()
    like(machine["gpu"], machine["capacity_bytes"])
    session = Session(file, machine, [JOBS[name] for name in jobs or JOBS], at_once, is_rehearsal, command, on_line)
    if is_rehearsal:
        session.say(REHEARSAL)
    session.say(", ".join(f"{key} {value}" for key, value in machine.items() if value != ""))
    try:
        ensure_driver()  # once, before many processes want it
    except FakedistError as error:
        session.say(f"there will be no virtual GPU: {error.message}: {error.hint}")
    ended: dict[str, PieceEnd] = {}
    found = (session.tables, session.recordings, session.log)
    for name, piece in pieces.items():
        ended[name] = run_piece(session, name, piece, patience)
        made = Confirmation(FORMAT, __version__, machine, is_rehearsal, ended, *found)
        replace_text(file, json.dumps(to_plain(made), indent=1) + "\n")
    return all(each.went_well for each in ended.values())


def read_confirmation(path: Path) -> Confirmation:
    """Read a file that anyone may have written.

    Raises:
        JobError: It cannot be read, is of another format, or holds a name or a recording that is not valid.
    """
    try:
        value = read_json(path)
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise UnreadableError(f"it is not a confirmation of format {FORMAT}")
        found = from_plain(Confirmation, value)
        for name in (*found.tables, *found.recordings):
            if not _NAME.fullmatch(name):
                raise UnreadableError(f"the name {name!r} leaves its directory")
        for text in found.recordings.values():
            base64.b64decode(text, validate=True)
        return found
    except (OSError, UnreadableError, PlainValueError, ValueError) as error:
        raise JobError(f"{path} cannot be read: {error}", "fakedist confirm -o FILE writes one") from None


def defects(confirmation: Confirmation) -> Iterator[str]:
    """Yield a line for each contradiction in a confirmation; there is none if it can be kept.

    Every piece must be there. Each recorded history, played event by event, must have the counts and the peaks that the
    allocator itself reported, and the table of recordings must have the same. Times must be positive.
    """
    if confirmation.is_rehearsal:
        yield "it is a rehearsal: the virtual GPU stood in for a real one"
        return
    try:
        like(confirmation.machine["gpu"], confirmation.machine["capacity_bytes"])
    except (KeyError, JobError) as error:
        yield f"the GPU is not known: {error}"
    yield from (
        f"the piece {name!r} did not go well" for name, ended in confirmation.pieces.items() if not ended.went_well
    )
    yield from (f"the piece {name!r} is missing" for name in PIECES if name not in confirmation.pieces)
    yield from contradictions(confirmation)


def contradictions(confirmation: Confirmation) -> Iterator[str]:
    """Yield a line for each figure that does not hold; what was not measured is none."""
    for name, text in sorted(confirmation.recordings.items()):
        if name.endswith("-bare.jsonl.gz"):
            try:
                yield from _recording_defects(name.rpartition("/")[2], load(name, base64.b64decode(text)), confirmation)
            except RecordingFileError as error:
                yield str(error)
    for name, column in (("gpu-estimates", "measured_us"), ("gpu-recording-cost", "bare_us")):
        for row in confirmation.tables.get(name, {}).get("rows", []):
            if not row.get(column, 0.0) > 0.0:
                yield f"{name}: {row.get('job')} took {row.get(column)} us"


def _recording_defects(name: str, recording: AllocatorRecording, confirmation: Confirmation) -> Iterator[str]:
    if recording.head.gpu != confirmation.machine.get("gpu"):
        yield f"{name} is of {recording.head.gpu}"
    rows = {row["job"]: row for row in confirmation.tables.get("gpu-recordings", {}).get("rows", [])}
    for job in recording.jobs.values():
        if job.error:
            continue
        yield from (f"{name}: {job.name}: {text}" for text in _history_defects(job))
        row = rows.get(job.name, {})
        shown = {"num_events": len(job.events), "allocated_bytes": job.peak_allocated_bytes}
        shown |= {"reserved_bytes": job.peak_reserved_bytes}
        yield from (
            f"{job.name}: the table has {column} {row.get(column)}, its recording {value}"
            for column, value in shown.items()
            if row.get(column) != value
        )


def _history_defects(job: JobRecord) -> Iterator[str]:
    """The statistics of a job that are not those of its own events."""
    requested = reserved = allocations = frees = 0
    most_requested = most_reserved = 0
    for action, size in zip(job.events.actions, job.events.sizes, strict=True):
        requested += size * ((action == "a") - (action == "f"))
        reserved += size * ((action in "SM") - (action in "FU"))
        allocations += action == "a"
        frees += action == "f"
        most_requested, most_reserved = max(most_requested, requested), max(most_reserved, reserved)
    played = {
        "allocation.all.allocated": allocations,
        "allocation.all.freed": frees,
        "requested_bytes.all.peak": most_requested,
        "reserved_bytes.all.peak": most_reserved,
    }
    for statistic, value in played.items():
        if job.statistics.get(statistic) != value:
            yield f"{statistic} is {job.statistics.get(statistic)}, by its events {value}"
