"""What is said of the part of a script that was not recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fakedist.analysis.coverage import coverage_notes
from fakedist.analysis.recording import Recording
from fakedist.run.outcome import Outcome
from tests.unit.analysis.recorded import HandMade


def notes(outcome: Outcome, num_steps: int = 2, until: Any = None, **told: Any) -> list[str]:
    steps = [{"step": step} for step in range(1, num_steps + 1)]
    return coverage_notes(Recording(steps=steps, outcome=told), outcome, until)


@pytest.mark.parametrize(
    ("until", "evaluated", "said"),
    [
        (None, False, "after 2 steps; not recorded: validation, saving and what else follows ("),
        (None, True, "after 2 steps; not recorded: saving and what else follows ("),
        (
            "validation",
            True,
            "after its first validation, with 2 steps recorded; not recorded: saving and what else",
        ),
        ("save", True, "after its first checkpoint, with 2 steps recorded; not recorded: what follows ("),
    ],
)
def test_a_script_that_was_stopped_has_not_reached_what_follows(until: Any, evaluated: bool, said: str) -> None:
    (note,) = notes(Outcome.STOPPED, until=until, evaluated=evaluated)
    assert note.startswith(f"the script was stopped {said}")
    assert note.endswith("(--until end records the whole script)")


def test_a_script_without_an_optimizer_is_told_how_to_count_steps() -> None:
    (note,) = notes(Outcome.FINISHED, 0, optimizer_steps=0, counts_itself=False)
    assert note.startswith("no training step: no optimizer stepped")
    assert "fakedist.step() at the end of each iteration" in note


@pytest.mark.parametrize("told", [{"optimizer_steps": 3, "counts_itself": False}, {}])
def test_nothing_is_said_of_a_script_that_trained_to_its_end(told: dict[str, Any]) -> None:
    assert notes(Outcome.FINISHED, **told) == []
    assert notes(Outcome.FINISHED, 0, optimizer_steps=0, counts_itself=True) == []


def test_a_step_that_went_on_holds_what_was_recorded_as_the_next(tmp_path: Path) -> None:
    made = HandMade()
    made.record("scopes", rows=[(0, 1, "forward", 0, False), (1, 2, "forward", 0, False)])
    made.step(1)
    made.record("step_went_on", step=1)
    made.record("scopes", rows=[(2, 2, "forward", 0, False)])
    recording = made.read(tmp_path)
    assert [scope[1] for scope in recording.rows["scopes"]] == [1, 1, 2]
    assert recording.steps == []
