"""Compare two recordings job by job: the first event that differs with its neighbours, and every statistic.

    python -m tests.gpu.compare REAL.jsonl.gz VIRTUAL.jsonl.gz [--job NAME ...] [--other-torch]

Exit code 0: every job of the first is the same in the second, byte for byte. 1: a difference. 2: not comparable.
Standard library only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.gpu.recording import JobRecord, Recording, RecordingFileError, load

NEIGHBOURS = 4
#: How far events are searched for the place where both sides agree again.
_SEARCH = 200
_AGREE = 8


@dataclass
class Difference:
    """What differs in one job; empty ``reason`` where nothing does.

    Attributes:
        job: Its name.
        verdict: "same", "events", "statistics", "error" (of one side), "failed" (on both sides alike) or "missing".
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
        return self.verdict == "same"


class NotComparableError(Exception):
    """Two recordings of which a difference would say nothing."""


def check_comparable(first: Recording, second: Recording, other_torch: bool = False) -> None:
    """Refuse what cannot be expected to be equal.

    Raises:
        NotComparableError: Another GPU, or another torch.
    """
    for what, mine, others in (
        ("torch", first.head.torch, second.head.torch),
        ("GPU", first.head.gpu, second.head.gpu),
    ):
        if mine != others and not (what == "torch" and other_torch):
            hint = "" if what == "GPU" else "; --other-torch compares them all the same"
            raise NotComparableError(
                f"recorded with {what} {mine} and {what} {others}, whose allocations may differ by themselves{hint}"
            )


def compare(first: Recording, second: Recording, jobs: Sequence[str] = ()) -> list[Difference]:
    """Every job of the first recording (or those named) against the second's."""
    sides = first.head.device, second.head.device
    names = sides if sides[0] != sides[1] else (first.head.way, second.head.way)
    if names[0] == names[1]:
        names = ("first", "second")
    return [compare_job(job, first.jobs.get(job), second.jobs.get(job), names) for job in jobs or first.jobs]


def compare_job(
    job: str, first: JobRecord | None, second: JobRecord | None, names: tuple[str, str] = ("real", "virtual")
) -> Difference:
    """One job of both recordings; ``names`` are what the sides are called."""
    for name, side in zip(names, (first, second), strict=True):
        if side is None:
            return Difference(job, "missing", f"{job} was not recorded on the side called {name}")
    assert first is not None
    assert second is not None
    found = Difference(job, peaks=_peaks(first, second))
    if first.error or second.error:
        found.verdict = "failed" if first.error and second.error else "error"
        found.reason = "; ".join(
            f"{name}: {side.error}" for name, side in zip(names, (first, second), strict=True) if side.error
        )
        return found
    at = first_difference(first, second)
    if at is not None:
        found.verdict, found.reason = "events", f"event {at}: {_both(first, second, at, names)}"
        found.lines = [*_neighbourhood(first, second, at, names), *_after(first, second, at, names)]
    differing = differing_statistics(first, second)
    if differing:
        if at is None:
            found.verdict = "statistics"
            name, one, other = differing[0]
            found.reason = f"{name}: {names[0]} {one}, {names[1]} {other}, though every event is the same"
        found.lines += _table(differing, names)
    return found


def _peaks(first: JobRecord, second: JobRecord) -> tuple[int, int, int, int]:
    return (
        first.peak_allocated_bytes,
        first.peak_reserved_bytes,
        second.peak_allocated_bytes,
        second.peak_reserved_bytes,
    )


def first_difference(first: JobRecord, second: JobRecord) -> int | None:
    """Index of the first event that is not the same on both sides; None where all are."""
    one, other = first.events, second.events
    shared = min(len(one), len(other))
    for index in range(shared):
        if one.key(index) != other.key(index):
            return index
    return None if len(one) == len(other) else shared


def _both(first: JobRecord, second: JobRecord, at: int, names: tuple[str, str]) -> str:
    sides = [
        f"{name} {side.events.describe(at) if at < len(side.events) else 'ended'}"
        for name, side in zip(names, (first, second), strict=True)
    ]
    return ", ".join(sides)


def _neighbourhood(first: JobRecord, second: JobRecord, at: int, names: tuple[str, str]) -> list[str]:
    """Both sides around the first difference, each with the line or operation that made the event."""
    lines = []
    for name, side in zip(names, (first, second), strict=True):
        lines.append(f"{name}, {len(side.events)} events:")
        for index in range(max(0, at - NEIGHBOURS), min(len(side.events), at + NEIGHBOURS + 1)):
            mark = ">" if index == at else " "
            lines.append(f" {mark} {index:6d}  {side.events.describe(index):<40} {side.events.where(index)}".rstrip())
    return lines


def _after(first: JobRecord, second: JobRecord, at: int, names: tuple[str, str]) -> list[str]:
    """Whether both sides agree again soon, and what one of them has more until then."""
    one, other = first.events, second.events
    near = (len(one) - at, len(other) - at)
    best: tuple[int, int] | None = None
    for more in range(1, min(_SEARCH, max(near)) + 1):
        for skip in ((more, 0), (0, more), (more, more)):
            if _agree(first, second, at + skip[0], at + skip[1]):
                best = skip
                break
        if best is not None:
            break
    if best is None:
        return [f"no agreement within {_SEARCH} events after it"]
    if best[0] == best[1]:
        return [f"both sides agree again after {best[0]} event{'s' * (best[0] > 1)}"]
    more_name, count = (names[0], best[0]) if best[0] else (names[1], best[1])
    return [f"{more_name} has {count} event{'s' * (count > 1)} more here; then both sides agree again"]


def _agree(first: JobRecord, second: JobRecord, one_at: int, other_at: int) -> bool:
    """Whether the next events on both sides are the same; at the ends of both, whether both end together."""
    one, other = first.events, second.events
    length = min(_AGREE, len(one) - one_at, len(other) - other_at)
    if length < 0:
        return False
    if length < _AGREE and len(one) - one_at != len(other) - other_at:
        return False
    return all(one.key(one_at + index) == other.key(other_at + index) for index in range(length))


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


def summary(found: Sequence[Difference]) -> list[str]:
    """One line a job."""
    width = max((len(each.job) for each in found), default=3)
    lines = [f"{'job':<{width}} {'verdict':<11} {'peak allocated':>16} {'peak reserved':>16}  difference"]
    for each in found:
        allocated = _peak_cell(each.peaks[0], each.peaks[2])
        reserved = _peak_cell(each.peaks[1], each.peaks[3])
        lines.append(f"{each.job:<{width}} {each.verdict:<11} {allocated:>16} {reserved:>16}  {each.reason}".rstrip())
    same = sum(each.is_same for each in found)
    return [*lines, f"{same} of {len(found)} jobs are the same, byte for byte"]


def _peak_cell(one: int, other: int) -> str:
    return f"{one}" if one == other else f"{other - one:+d}"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--job", action="append", default=[], help="only this job; repeatable")
    parser.add_argument("--other-torch", action="store_true", help="compare also where torch differs")
    args = parser.parse_args(argv)
    try:
        first, second = load(args.first), load(args.second)
        check_comparable(first, second, args.other_torch)
    except (RecordingFileError, NotComparableError) as error:
        print(error, file=sys.stderr)
        return 2
    found = compare(first, second, args.job)
    for each in found:
        if each.lines:
            print(f"== {each.job}: {each.reason}", *each.lines, "", sep="\n")
    print(*summary(found), sep="\n")
    return 0 if all(each.is_same for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
