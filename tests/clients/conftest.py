"""A fixture that many tests share: runs of the catalogue's jobs."""

from __future__ import annotations

from typing import Protocol

import pytest

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
