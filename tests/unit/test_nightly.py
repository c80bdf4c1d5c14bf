from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests import nightly
from tests.nightly import Part, Result, main, parts, run, summary


def test_every_version_has_a_part_and_poisoned_memory_its_variable() -> None:
    found = {part.name: part for part in parts(["2.10.0", "2.15.0"], ["3.12"])}
    assert {"torch 2.10.0", "torch 2.15.0", "python 3.12", "clients", "hostile files", "load", "mutants"} <= set(found)
    assert found["poisoned unit"].environment == {"FAKEDIST_POISON": "1"}
    assert found["load"].environment == {"FAKEDIST_LOAD": "1"}
    assert found["torch 2.10.0"].command == ("make", "torch", "TORCH=2.10.0")


def test_the_summary_says_what_passed_what_failed_and_what_ran() -> None:
    results = [Result("torch 2.10.0", 0, 600, ["12 ran: 12 unit"]), Result("mutants", 2, 60)]
    assert summary(results) == [
        "2 parts ran: 1 passed, 1 failed",
        "  torch 2.10.0           10 min  passed",
        "      12 ran: 12 unit",
        "  mutants                 1 min  FAILED (exit 2)",
        "failed: mutants",
    ]


def test_a_part_that_fails_does_not_keep_the_next_from_running(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def made(torches: object, pythons: object) -> list[Part]:
        return [
            Part("first", (sys.executable, "-c", "raise SystemExit(3)")),
            Part("second", (sys.executable, "-c", "import os; print('7 ran: 7', os.environ['OWN'])"), {"OWN": "unit"}),
            Part("other", ("false",)),
        ]

    monkeypatch.setattr(nightly, "parts", made)
    assert main(["--only", "s"]) == 1
    printed = capfd.readouterr().out
    assert "2 parts ran: 1 passed, 1 failed" in printed
    assert "      7 ran: 7 unit" in printed
    assert main(["--only", "second"]) == 0
    assert main(["--only", "none"]) == 1


def test_what_a_part_prints_is_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(Part("p", ("sh", "-c", "echo out; echo err >&2"))).code == 0
    assert capfd.readouterr().out == "== p: sh -c echo out; echo err >&2\nout\nerr\n"


def test_the_workflow_of_the_night_runs_every_part() -> None:
    text = (Path(__file__).parents[2] / ".github/workflows/nightly.yml").read_text()
    chosen = re.findall(r"^          - (.*)$", text, re.MULTILINE)
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    torches, pythons = (re.search(rf"^{name} := (.*)$", makefile, re.MULTILINE) for name in ("TORCHES", "PYTHONS"))
    assert torches
    assert pythons
    names = [part.name for part in parts(torches[1].split(), pythons[1].split())]
    assert [name for name in names if not any(part in name for part in chosen)] == []
    assert [part for part in chosen if not any(part in name for name in names)] == []
