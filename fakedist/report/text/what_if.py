"""What-ifs as text and as an object: what a step would gain from a change, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fakedist.analysis.compare import changed_times
from fakedist.report.compare.comparison import format_relative
from fakedist.report.compare.time_change_sheets import group_columns
from fakedist.report.compare.time_comparison import format_us_change
from fakedist.report.text.run_markdown import sheet_markdown
from fakedist.report.text.sheet import Sheet, SheetColumn
from fakedist.run.step_time import StepTime
from fakedist.units import format_us


@dataclass(frozen=True)
class WhatIfStep:
    """A step with a change.

    Attributes:
        what_if: The change, as ``--what-if`` takes it.
        before: The step as it is.
        after: The step with the change.
    """

    what_if: str
    before: StepTime
    after: StepTime

    @property
    def change_us(self) -> float:
        """By how much the step gets longer; negative if it gets shorter."""
        return self.after.step_us - self.before.step_us


def what_if_sheets(steps: Sequence[WhatIfStep]) -> list[Sheet]:
    """A table of all changes, each on its own, and for each a table of where the step's change comes from."""
    if not steps:
        return []
    overview = [
        SheetColumn("what if", [step.what_if for step in steps], is_text=True),
        SheetColumn("step", [format_us(step.after.step_us) for step in steps]),
        SheetColumn("change", [format_us_change(step.change_us) for step in steps]),
        SheetColumn("%", [format_relative(step.change_us, step.before.step_us) for step in steps]),
    ]
    as_it_is = f"the step as it is: {format_us(steps[0].before.step_us)}"
    return [Sheet("What if, estimated, each on its own", overview, [as_it_is]), *map(_change_sheet, steps)]


def what_if_markdown(steps: Sequence[WhatIfStep]) -> list[str]:
    """The same as Markdown."""
    return ["\n".join(sheet_markdown(sheet)) for sheet in what_if_sheets(steps)]


def what_if_objects(steps: Sequence[WhatIfStep]) -> list[dict[str, object]]:
    """The same as plain objects: the step, its change, its parts, and communication by group."""
    return [
        {
            "what_if": step.what_if,
            "step_us": step.after.step_us,
            "change_us": step.change_us,
            "parts": changed_times.part_changes(step.before, step.after).to_dict("records"),
            "groups": changed_times.group_changes(step.before, step.after).to_dict("records"),
        }
        for step in steps
    ]


def _change_sheet(step: WhatIfStep) -> Sheet:
    """Exposed communication by group, before and after; the step's other parts below."""
    groups = changed_times.group_changes(step.before, step.after)
    parts = changed_times.part_changes(step.before, step.after)
    changed = [
        f"{name} {format_us_change(change)}"
        for name, change in zip(parts["name"], parts["change_us"], strict=True)
        if change and name not in ("step", "all kernels")
    ]
    remark = f"the step changes by {format_us_change(step.change_us)}"
    remarks = [f"{remark}: {', '.join(changed)}" if changed else remark]
    title = f"Exposed communication with {step.what_if} (B), and in the run (A)"
    return Sheet(title, group_columns(groups), remarks)
