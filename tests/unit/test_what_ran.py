from __future__ import annotations

from dataclasses import dataclass

from tests.summary import longest_files, summary


@dataclass
class Made:
    nodeid: str
    longrepr: object = None
    duration: float = 0.0


def _skipped(nodeid: str, reason: str) -> Made:
    return Made(nodeid, ("tests/clients/x.py", 12, f"Skipped: {reason}"))


def test_tests_are_counted_by_tier_and_skips_by_reason() -> None:
    stats = {
        "": [Made("tests/unit/a.py::setup")],
        "passed": [Made("tests/unit/rundir/a.py::one[a/b::c]"), Made("tests/unit/a.py::two")],
        "failed": [Made("tests/integration/a.py::three")],
        "error": [Made("tests/unit/a.py::two")],  # failed in its teardown too: one test
        "skipped": [_skipped("d", "no GPU"), _skipped("e", "not installed"), _skipped("f", "not installed")],
    }
    assert summary(stats) == ["3 ran: 2 unit, 1 integration", "3 skipped:", "      2  not installed", "      1  no GPU"]


def test_without_a_skip_there_is_one_line() -> None:
    assert summary({"passed": [Made("tests/unit/a.py::one")]}) == ["1 ran: 1 unit"]


def test_files_are_listed_with_all_that_their_tests_took() -> None:
    stats: dict[str, list[object]] = {
        "": [Made("tests/unit/a.py::one", duration=4.0), Made("tests/unit/b.py::two", duration=1.0)],
        "passed": [Made("tests/unit/a.py::one", duration=3.0), Made("tests/unit/c.py::three", duration=2.0)],
        "warnings": [object()],
    }
    assert longest_files(stats, 2) == ["      7 s  tests/unit/a.py", "      2 s  tests/unit/c.py"]
