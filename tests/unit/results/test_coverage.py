"""Notes on the part of a script that was not recorded."""

from typing import Any

import pytest

from fakedist.analysis.recording import Recording
from fakedist.results.summing_up import coverage_notes
from fakedist.rundir.outcome import Outcome
from fakedist.rundir.records import OutcomeRecord, StepRecord, TrainingFacts


def notes(outcome: Outcome, num_steps: int = 2, until: Any = None, training: TrainingFacts | None = None) -> list[str]:
    steps = [StepRecord(step, 0, 0) for step in range(1, num_steps + 1)]
    recording = Recording(steps=steps, outcome=OutcomeRecord(outcome, 0, training=training))
    return [note.text for note in coverage_notes(recording, outcome, until)]


@pytest.mark.parametrize(
    ("until", "evaluated", "said"),
    [
        (None, False, "after 2 steps; not recorded: validation, saving and what else follows ("),
        (None, True, "after 2 steps; not recorded: saving and what else follows ("),
        ("validation", True, "after its first validation, with 2 steps recorded; not recorded: saving and what else"),
        ("save", True, "after its first checkpoint, with 2 steps recorded; not recorded: what follows ("),
    ],
)
def test_a_script_that_was_stopped_has_not_reached_what_follows(until: Any, evaluated: bool, said: str) -> None:
    (note,) = notes(Outcome.STOPPED, until=until, training=TrainingFacts(evaluated, 2, counts_itself=False))
    assert note.startswith(f"the script was stopped {said}")
    assert note.endswith("(--until end records the whole script)")


def test_a_script_without_an_optimizer_is_told_how_to_count_steps() -> None:
    (note,) = notes(Outcome.FINISHED, 0, training=TrainingFacts(False, 0, counts_itself=False))
    assert note.startswith("no training step: no optimizer stepped")
    assert "fakedist.step() at the end of each iteration" in note


@pytest.mark.parametrize(
    "training",
    [TrainingFacts(evaluated=False, optimizer_steps=3, counts_itself=False), TrainingFacts(False, 0, True), None],
)
def test_nothing_is_said_of_a_script_that_trained_to_its_end(training: TrainingFacts | None) -> None:
    assert notes(Outcome.FINISHED, training=training) == []
