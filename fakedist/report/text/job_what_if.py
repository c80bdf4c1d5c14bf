"""What-ifs of a whole job: what its step would gain from a change, and where."""

from __future__ import annotations

from collections.abc import Mapping

from fakedist.report.compare.comparison import format_relative
from fakedist.report.compare.time_comparison import format_us_change
from fakedist.report.text.sheet import Sheet, SheetColumn
from fakedist.results.job_time import JobTime
from fakedist.run.job_time import JobStep, StageTime
from fakedist.run.plain import to_plain
from fakedist.units import format_us

#: The parts of a stage's step, and what they are called.
_PARTS = {
    "compute_us": "computing",
    "communication_us": "exposed communication",
    "bubble_us": "bubble",
    "host_us": "host",
    "wait_us": "other",
}


def job_what_if_sheets(job: JobTime, changed: Mapping[str, JobTime]) -> list[Sheet]:
    """A table of all changes, each on its own, with the change of each part of the stage that sets the pace.

    Args:
        job: The job's step as it is.
        changed: The step with a change, by the change.
    """
    if not changed:
        return []
    before, steps = job.summary, {text: each.summary for text, each in changed.items()}
    columns = [
        SheetColumn("what if", list(steps), is_text=True),
        SheetColumn("step", [format_us(step.step_us) for step in steps.values()]),
        SheetColumn("change", [format_us_change(step.step_us - before.step_us) for step in steps.values()]),
        SheetColumn("%", [format_relative(step.step_us - before.step_us, before.step_us) for step in steps.values()]),
        SheetColumn("rank that sets the pace", [str(step.slowest_rank) for step in steps.values()], rank=1),
    ]
    remarks = [f"the step as it is: {format_us(before.step_us)}"]
    remarks += [said for text, step in steps.items() if (said := _parts(text, before, step))]
    return [Sheet("What if, estimated, each on its own", columns, remarks)]


def job_what_if_objects(job: JobTime, changed: Mapping[str, JobTime]) -> list[dict[str, object]]:
    """The same as plain objects: the step, its change, and the stages with it."""
    return [
        {
            "what_if": text,
            "step_us": each.summary.step_us,
            "change_us": each.summary.step_us - job.summary.step_us,
            "slowest_rank": each.summary.slowest_rank,
            "stages": to_plain(each.summary.stages),
        }
        for text, each in changed.items()
    ]


def _parts(text: str, before: JobStep, after: JobStep) -> str:
    """How the parts of the stage that set the pace change."""
    stages = [_stage(step, before.slowest_rank) for step in (before, after)]
    changes = {name: getattr(stages[1], part) - getattr(stages[0], part) for part, name in _PARTS.items()}
    told = [
        f"{name} {format_us_change(change)}"
        for name, change in changes.items()
        if abs(change) > before.step_us / 10_000
    ]
    return f"{text}, rank {before.slowest_rank}: {', '.join(told)}" if told else ""


def _stage(step: JobStep, rank: int) -> StageTime:
    return next(stage for stage in step.stages if stage.rank == rank)
