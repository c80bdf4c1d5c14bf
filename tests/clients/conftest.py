"""Fixtures that many tests share: runs of the catalogue's jobs, a browser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import pytest

from tests.clients.browser import Reader, browser, no_browser
from tests.clients.catalogue import ENTRIES
from tests.clients.running import Ran, run_rank


class RunEntry(Protocol):
    def __call__(self, name: str, rank: int) -> Ran: ...


@pytest.fixture(scope="session")
def ran(tmp_path_factory: pytest.TempPathFactory) -> RunEntry:
    """A rank of the catalogue's entry of that name, run. Skips where its framework is not installed."""
    entries = {entry.name: entry for entry in ENTRIES}
    known: dict[tuple[str, int], Ran] = {}

    def run(name: str, rank: int) -> Ran:
        entry = entries[name]
        if entry.missing:
            pytest.skip(f"not installed: {', '.join(entry.missing)}: make frameworks")
        if (name, rank) not in known:
            known[name, rank] = run_rank(entry, rank, tmp_path_factory.mktemp("entry"))
        return known[name, rank]

    return run


@pytest.fixture(scope="module")
def opened_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """A browser for the tests of a file. Skips where Chromium or Playwright is missing."""
    if missing := no_browser():
        pytest.skip(missing)
    with browser(tmp_path_factory.mktemp("chromium")) as reader:
        yield reader


@pytest.fixture
def reader(opened_browser: Reader) -> Iterator[Reader]:
    """That browser; a test fails where its page says anything on the console, throws, or fetches something."""
    yield opened_browser
    assert opened_browser.told == []
