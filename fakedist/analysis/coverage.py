"""The parts of a script that a recording lacks: the script was stopped, or nothing marked its steps."""

from __future__ import annotations

from fakedist.analysis.recording import Recording
from fakedist.job import Until
from fakedist.run.outcome import Outcome


def coverage_notes(recording: Recording, outcome: Outcome, until: int | Until | None) -> list[str]:
    """Notes on what the recording does not cover, one sentence each.

    Args:
        recording: The recording.
        outcome: How the run ended.
        until: What was to stop the script; None if nothing but a number of steps was.
    """
    training = None if recording.outcome is None else recording.outcome.training
    if outcome is Outcome.STOPPED:
        evaluated = training is not None and training.evaluated
        return [_not_reached(len(recording.steps), evaluated, until)]
    if training is None or training.optimizer_steps or training.counts_itself:
        return []
    if outcome in (Outcome.FINISHED, Outcome.EXIT):
        text = (
            "no training step: no optimizer stepped; the figures are of all that the script did, and "
            "fakedist.step() at the end of each iteration of its loop (inference, evaluation) counts them as steps"
        )
        return [text]
    return []


def _not_reached(num_steps: int, evaluated: bool, until: int | Until | None) -> str:
    steps = "1 step" if num_steps == 1 else f"{num_steps} steps"
    after = {"validation": "after its first validation", "save": "after its first checkpoint"}.get(str(until), "")
    missing = [*([] if evaluated else ["validation"]), *([] if until == "save" else ["saving"])]
    missing.append("what else follows" if missing else "what follows")
    listed = " and ".join([", ".join(missing[:-1]), missing[-1]] if missing[1:] else missing)
    where = f"{after}, with {steps} recorded" if after else f"after {steps}"
    return f"the script was stopped {where}; not recorded: {listed} (--until end records the whole script)"
