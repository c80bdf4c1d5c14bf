"""The parts of a script that a recording lacks: the script was stopped, or nothing marked its steps."""

from __future__ import annotations

from fakedist.analysis.recording import Recording
from fakedist.job import Until
from fakedist.run import notes
from fakedist.run.notes import Note
from fakedist.run.outcome import Outcome


def coverage_notes(recording: Recording, outcome: Outcome, until: int | Until | None) -> list[Note]:
    """Notes on what the recording does not cover.

    Args:
        recording: The recording.
        outcome: How the run ended.
        until: What was to stop the script; None if nothing but a number of steps was.
    """
    training = None if recording.outcome is None else recording.outcome.training
    if outcome is Outcome.STOPPED:
        missing = [] if training is not None and training.evaluated else ["validation"]
        missing += [] if until == "save" else ["saving"]
        return [notes.stopped_before_the_end(len(recording.steps), str(until), missing)]
    if training is None or training.optimizer_steps or training.counts_itself:
        return []
    if outcome in (Outcome.FINISHED, Outcome.EXIT):
        return [notes.no_optimizer_step()]
    return []
