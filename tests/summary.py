"""The end of a test run: the tests that ran by tier, reasons of skips, and the files that took longest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

#: Outcomes of a test that ran, by pytest's names for them.
RAN = ("passed", "failed", "error", "xfailed", "xpassed")


class Report(Protocol):
    """The part of pytest's reports that is read."""

    nodeid: str
    longrepr: object
    duration: float


def summary(stats: Mapping[str, Sequence[Report]]) -> list[str]:
    """Lines with the tests that ran, by tier, and the reasons of those that were skipped, the most frequent first."""
    ran = {report.nodeid for outcome in RAN for report in stats.get(outcome, ())}
    tiers = Counter(map(_tier, ran))
    skipped = Counter(_reason(report) for report in stats.get("skipped", ()))
    lines = [f"{len(ran):,} ran: {', '.join(f'{count:,} {tier}' for tier, count in _by_size(tiers))}"]
    if skipped:
        lines.append(f"{skipped.total():,} skipped:")
        lines += [f"{count:7,}  {reason}" for reason, count in _by_size(skipped)]
    return lines


def longest_files(stats: Mapping[str, Sequence[object]], num_files: int) -> list[str]:
    """Lines with the files whose tests, set-up included, took longest, in seconds of their worker."""
    seconds: Counter[str] = Counter()
    for report in (report for reports in stats.values() for report in reports):
        if hasattr(report, "nodeid") and hasattr(report, "duration"):
            seconds[report.nodeid.partition("::")[0]] += report.duration
    return [f"{duration:7.0f} s  {file}" for file, duration in seconds.most_common(num_files)]


def _tier(nodeid: str) -> str:
    """The folder of tests/ that the test is in."""
    parts = nodeid.partition("::")[0].split("/")
    return parts[1] if parts[0] == "tests" and len(parts) > 2 else "other"


def _reason(report: Report) -> str:
    """The reason of a skip, which pytest keeps behind the file and the line."""
    if isinstance(report.longrepr, (tuple, list)):
        return str(report.longrepr[-1]).removeprefix("Skipped: ")
    return str(report.longrepr)


def _by_size(counts: Counter[str]) -> Iterable[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))
