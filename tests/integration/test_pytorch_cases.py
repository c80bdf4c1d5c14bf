"""PyTorch's own tests pass here, but for those that the page lists."""

from __future__ import annotations

import json

import pytest

from tests.clients.pytorch_cases.run import PAGE, RESULTS, run_here, table

FOUND = json.loads(RESULTS.read_text())


@pytest.mark.nightly
def test_the_cases_pass_that_the_page_says_pass() -> None:
    found = run_here(8, 5)
    assert {name for name, error in found.items() if error} == {
        case["case"] for case in FOUND["cases"] if "5 of 8" in case["errors"]
    }, found
    assert set(found) == {case["case"] for case in FOUND["cases"]}


def test_every_case_that_does_not_pass_says_why() -> None:
    assert len(FOUND["cases"]) >= 124
    for case in FOUND["cases"]:
        assert case["here"] != bool(case["why"]), case["case"]


def test_the_page_is_made_of_the_results() -> None:
    assert PAGE.read_text() == table(FOUND)
