"""The accuracy set, event by event: on the real GPU bare and recorded, on the virtual one bare and recorded."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TextIO

from tests.gpu.compare import Difference, compare, summary
from tests.gpu.record import NothingRanError, Way, file_name, record
from tests.gpu.recording import JobRecord, Recording
from tests.gpu.session import Session

#: Recording and the names it is compared by, with the prefix of the columns of gpu-recordings.json.
_COMPARED = (
    ("real bare", "virtual bare", "virtual"),
    ("real bare", "real profiled", "recorded"),
    ("virtual bare", "virtual profiled", ""),
)


def run(session: Session) -> bool:
    """Record and compare; whether every job could be recorded in every way."""
    found: dict[str, Recording] = {}
    for name in ("real bare", "virtual bare", "real profiled", "virtual profiled"):
        side, _, way = name.partition(" ")
        try:
            given = session.real if side == "real" else session.virtual
            found[name] = _record(session, name, replace(given, profiled=way == "profiled"))
        except NothingRanError as error:
            session.say(f"{name}: {error}")
            continue
        directory = session.recordings if side == "real" else session.others
        found[name].save(directory / file_name("rehearsed" if side == "real" and session.rehearsal else side, way))
    compared = _compare(session, found)
    session.write("gpu-recordings", _rows(found.get("real bare"), compared))
    return len(found) == len({name for pair in _COMPARED for name in pair[:2]}) and not any(
        job.error for recording in found.values() for job in recording.jobs.values()
    )


def _record(session: Session, name: str, way: Way) -> Recording:
    started = time.monotonic()
    recording = record(session.jobs, way, session.command, print)
    failed = [job.name for job in recording.jobs.values() if job.error]
    session.say(
        f"{name:<16} {recording.head.gpu}, torch {recording.head.torch}: {len(recording.jobs) - len(failed)} jobs "
        f"recorded in {time.monotonic() - started:.0f} s, {len(failed)} failed"
    )
    return recording


def _compare(session: Session, found: Mapping[str, Recording]) -> dict[str, dict[str, Difference]]:
    compared = {}
    with (session.others / "differences.txt").open("w") as file:
        for first, second, prefix in _COMPARED:
            if first not in found or second not in found:
                continue
            differences = compare(found[first], found[second])
            title = f"{first} against {second}" + (" (rehearsal: no real GPU)" if session.rehearsal else "")
            session.say("", f"== {title}", *summary(differences))
            for each in differences:
                _write(file, title, each)
            compared[prefix] = {each.job: each for each in differences}
    return compared


def _write(file: TextIO, title: str, each: Difference) -> None:
    if not each.is_same:
        file.write("\n".join([f"== {title}: {each.job}: {each.verdict}: {each.reason}", *each.lines, "", ""]))


def _rows(real: Recording | None, compared: Mapping[str, Mapping[str, Difference]]) -> list[dict[str, str | int]]:
    return [
        {
            "job": job.name,
            **peaks(job),
            **columns("virtual", compared.get("virtual", {}).get(job.name)),
            **columns("recorded", compared.get("recorded", {}).get(job.name)),
        }
        for job in (real.jobs.values() if real is not None else ())
    ]


def peaks(job: JobRecord) -> dict[str, int]:
    """A row's cells on the real GPU."""
    return {
        "num_events": len(job.events),
        "allocated_bytes": job.peak_allocated_bytes,
        "reserved_bytes": job.peak_reserved_bytes,
    }


def columns(prefix: str, found: Difference | None) -> dict[str, str | int]:
    """A row's cells on another side."""
    difference = found or Difference("", "not compared")
    return {
        f"{prefix}_verdict": difference.verdict,
        f"{prefix}_reason": difference.reason,
        f"{prefix}_allocated_difference_bytes": difference.peaks[2] - difference.peaks[0],
        f"{prefix}_reserved_difference_bytes": difference.peaks[3] - difference.peaks[1],
    }
