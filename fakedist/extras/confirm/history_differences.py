"""Compare two recordings job by job: the first event that differs with its neighbours, and every statistic.

Blocks that are freed one after the other, with nothing between them, may be freed in another order: torch's autocast
keeps its casts in a table ordered by addresses of host memory, which no two processes share. So may segments that are
given back: the allocator orders them by their stream's handle, on a real GPU also an address. What is allocated next
finds the same free memory whatever the order was. Such a job is reported as "order", and counts as the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from fakedist.extras.confirm.allocator_history import AllocatorRecording, Events, JobRecord

NEIGHBOURS = 4
#: How far events are searched for the place where both sides agree again.
_SEARCH = 200
_AGREE = 8
_MOST = 120  # characters of a reason in the table
#: Of what may come in another order: blocks that are freed, segments that are given back.
_RUNS = {"r": 1, "f": 1, "F": 2, "U": 2}
#: Statistics of what lies between blocks while they are freed one after the other; peaks of memory are not among them.
_BY_ORDER = ("inactive_split.", "inactive_split_bytes.")


@dataclass
class HistoryDifference:
    """The difference in one job; empty ``reason`` where nothing does.

    Attributes:
        job: The job's name.
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
    differing = differing_statistics(first, second)
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
        found.lines = [*_neighbourhood((one, other), settled_at, names), *_after((one, other), settled_at, names)]
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


def _neighbourhood(sides: tuple[Events, Events], at: int, names: tuple[str, str]) -> list[str]:
    """Both sides around the first difference, each with the line or operation that made the event."""
    lines = []
    for name, side in zip(names, sides, strict=True):
        lines.append(f"{name}, {len(side)} events:")
        for index in range(max(0, at - NEIGHBOURS), min(len(side), at + NEIGHBOURS + 1)):
            mark = ">" if index == at else " "
            lines.append(f" {mark} {index:6d}  {side.describe(index):<40} {side.where(index)}".rstrip())
    return lines


def _after(sides: tuple[Events, Events], at: int, names: tuple[str, str]) -> list[str]:
    """Whether both sides agree again soon, and what one of them has more until then."""
    one, other = sides
    for more in range(1, min(_SEARCH, max(len(one), len(other)) - at) + 1):
        if _agree(one, other, at + more, at + more):
            return [f"both sides agree again after {_events(more)}"]
        for name, places in zip(names, ((at + more, at), (at, at + more)), strict=True):
            if _agree(one, other, *places):
                return [f"{name} has {_events(more)} more here; then both sides agree again"]
    return [f"no agreement within {_SEARCH} events after it"]


def _events(number: int) -> str:
    return f"{number} event{'s' * (number > 1)}"


def _agree(one: Events, other: Events, one_at: int, other_at: int) -> bool:
    """Whether the next events on both sides are the same; at the ends of both, whether both end together."""
    left = len(one) - one_at, len(other) - other_at
    if min(left) < 0 or (min(left) < _AGREE and left[0] != left[1]):
        return False
    return all(one.key(one_at + index) == other.key(other_at + index) for index in range(min(_AGREE, *left)))


def differing_statistics(first: JobRecord, second: JobRecord) -> list[tuple[str, int | None, int | None]]:
    """Statistics (name, first's, second's) that are not equal, and those that only one side has."""
    keys = sorted(first.statistics.keys() | second.statistics.keys())
    values = [(key, first.statistics.get(key), second.statistics.get(key)) for key in keys]
    return [each for each in values if each[1] != each[2]]


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
