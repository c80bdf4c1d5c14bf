from __future__ import annotations

import dataclasses

from fakedist.extras.confirm.allocator_history import AllocatorRecording, EventsBuilder, Head, JobRecord

Event = tuple[str, int, int]
HEAD = Head(
    "real", "bare", "NVIDIA H200", 150_754_820_096, "580.159.04", "2.11.0+cu130", "3.12.3", "2026-11-21", "typed"
)
#: Ten blocks of a segment, on two streams.
EVENTS: tuple[Event, ...] = (
    ("segment_alloc", 20 << 20, 64),
    *((action, size << 20, stream) for size in range(1, 11) for action, stream in (("alloc", 64), ("alloc", 96))),
    *((action, 1 << 20, 64) for action in ("free_requested", "free_completed")),
)


def job(name: str = "train", events: tuple[Event, ...] = EVENTS, **statistics: int) -> JobRecord:
    """A job with those events; `statistics` with dots for double underscores."""
    builder = EventsBuilder()
    for number, (action, size, stream) in enumerate(events):
        builder.add(action, size, stream, f"line {number}")
    usual = {"allocated_bytes.all.peak": 110 << 20, "reserved_bytes.all.peak": 120 << 20}
    counted = {key.replace("__", "."): value for key, value in statistics.items()}
    return JobRecord(name, statistics=usual | counted, events=builder.build())


def recording(*jobs: JobRecord, **head: str) -> AllocatorRecording:
    return AllocatorRecording(dataclasses.replace(HEAD, **head), {each.name: each for each in jobs})  # type: ignore[arg-type]
