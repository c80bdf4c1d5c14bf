"""The fast half of the catalogue, run; and the document, which says of all of it what was seen."""

from __future__ import annotations

import pytest

from tests.clients.catalogue import ENTRIES
from tests.clients.conftest import RunEntry
from tests.clients.table import DOCUMENT, document, load_results

FAST = [(entry.name, rank) for entry in ENTRIES for rank in entry.fast]


@pytest.mark.parametrize(("name", "rank"), FAST)
def test_a_framework_runs_as_the_catalogue_says(ran: RunEntry, name: str, rank: int) -> None:
    ran(name, rank)


def test_no_two_entries_have_one_name() -> None:
    names = [entry.name for entry in ENTRIES]
    assert sorted(set(names)) == sorted(names)
    assert [entry.name for entry in ENTRIES if not set(entry.fast) <= set(entry.ranks)] == []


def test_every_entry_has_been_run_and_did_what_it_had_to() -> None:
    results = load_results()
    assert [entry.name for entry in ENTRIES if entry.name not in results] == [], "make clients-new"
    assert {name: result["failed"] for name, result in results.items() if result["failed"]} == {}


def test_the_document_is_made_from_the_results() -> None:
    assert DOCUMENT.read_text() == document(load_results(), ENTRIES), "python -m tests.clients.run --render"
