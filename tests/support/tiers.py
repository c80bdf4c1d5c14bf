"""The tests that ``make test`` runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

import pytest

NIGHTLY_TIERS = ("clients", "gpu", "load")
#: Folders of which `make test` runs nothing.
NOT_SHORT = (*NIGHTLY_TIERS, "hostile", "page")


def tier(item: pytest.Item) -> str:
    """The folder of tests/ that the test is in; for an extra's whole runs "integration"."""
    folder, *rest = item.path.relative_to(Path(__file__).parents[1]).parts
    return "integration" if folder == "extras" and "runs" in rest else folder


def is_nightly(item: pytest.Item) -> bool:
    """Return whether no change has to wait for the test."""
    return tier(item) in NIGHTLY_TIERS or item.get_closest_marker("nightly") is not None


def short_tests(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Of the tests marked neither ``long`` nor ``nightly``: all unit tests and those of extras; and of each
    file of whole runs the first test, and those that share its run and start none of their own.
    """
    kept = (item for item in items if not (item.get_closest_marker("long") or is_nightly(item)))
    for _, group in groupby(kept, key=lambda item: item.path):
        tests = list(group)
        folder = tier(tests[0])
        if folder in ("unit", "extras"):
            yield from tests
        elif folder == "integration":
            yield from _one_run(tests)


def _one_run(tests: list[pytest.Item]) -> list[pytest.Item]:
    first = tests[0]
    runs = _shared_runs(first)
    return [first, *(test for test in tests[1:] if runs and _shared_runs(test) == runs and not _runs_more(test))]


def _runs_more(test: pytest.Item) -> bool:
    assert isinstance(test, pytest.Function)
    return not {"run_fakedist", "profile_once"}.isdisjoint(test._fixtureinfo.argnames)


def _shared_runs(test: pytest.Item) -> set[tuple[str, str]]:
    """The file's own fixtures that a test shares with others, each with its parameter."""
    assert isinstance(test, pytest.Function)
    parameters = test.callspec.params if hasattr(test, "callspec") else {}
    return {
        (name, repr(parameters.get(name)))
        for name, (*_, definition) in test._fixtureinfo.name2fixturedefs.items()
        if definition.scope == "module"
    }
