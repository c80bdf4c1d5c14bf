"""A run's step priced for a GPU: its time, its interval and its what-ifs, as text, Markdown and an object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from fakedist.errors import RunDirectoryError
from fakedist.report.compare.change_sheets import group_columns
from fakedist.report.compare.comparison import format_relative, format_us_change
from fakedist.report.text.run_report import print_sheets, print_time, sheet_markdown, time_markdown
from fakedist.report.text.sheet import KEY, Sheet, SheetColumn, escaped, print_facts
from fakedist.report.text.time_sheets import path_sheet, time_sheets
from fakedist.report.text.wording import run_title, step_word
from fakedist.results.compare import changed_times
from fakedist.results.run import Run
from fakedist.rundir.plain import to_plain
from fakedist.rundir.step_time import KernelSource, StepTime, UncertainPart
from fakedist.units import format_us

_CALIBRATE = "a trace of your GPU: fakedist calibrate RUN --from-trace TRACE"
_OWN = "own times"


def uncertainty_sheets(source: KernelSource) -> list[Sheet]:
    """A table of the largest parts of the interval; none without an interval.

    Args:
        source: Where the step's time comes from.
    """
    parts, step_us = source.uncertain, source.step_us or 1.0
    if not parts:
        return []
    widths = [f"+{part.half_width_us / step_us:.1%}" for part in parts]
    return [
        Sheet(
            "What makes the step's interval wide, estimated",
            [
                SheetColumn("estimate of", [_named(part) for part in parts], is_text=True),
                SheetColumn("alone", widths, rank=KEY),
                SheetColumn("of the variance", [f"{part.share:.0%}" for part in parts], rank=1),
                SheetColumn("narrower with", [_measurement(part) for part in parts], is_text=True),
            ],
            ["alone: how much longer the step may be because of this estimate only"],
        )
    ]


def _named(part: UncertainPart) -> str:
    return f"{part.name} on {part.group}" if part.kind == "collectives" else part.name


def _measurement(part: UncertainPart) -> str:
    if part.kind == "kernels":
        return "a trace of more steps" if part.name == _OWN else _CALIBRATE
    if part.kind == "host":
        return "a profile of the job: how long the GPU waits for launches"
    if part.num_nodes > 1:
        return f"nccl-tests over {part.num_nodes:,} of your nodes: --fabric my_fabric.toml with spread"
    return "nccl-tests in one of your nodes, to compare with the time by group"


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


def render_priced(run: Run, console: Console, *, all_layers: bool, what_ifs: Sequence[WhatIfStep] = ()) -> None:
    """Print the step's time and its tables.

    Args:
        run: The run, priced for a GPU.
        console: Where to print.
        all_layers: Whether repeated layers stay apart and small ones are shown.
        what_ifs: The step with changes.

    Raises:
        RunDirectoryError: A table is missing or damaged.
    """
    time, source = _timed(run)
    print_facts(console, _facts(run, source))
    print_time(console, time, source)
    print_sheets(console, [*time_sheets(run, all_layers=all_layers), *_path_sheets(time, source)])
    print_sheets(console, [*what_if_sheets(what_ifs), *uncertainty_sheets(source)])


def priced_markdown(run: Run, *, all_layers: bool, what_ifs: Sequence[WhatIfStep] = ()) -> str:
    """The same as Markdown."""
    time, source = _timed(run)
    facts = [f"- {name}: {escaped(value)}" for name, value in _facts(run, source)]
    pieces = ["\n".join(["### fakedist: " + escaped(run_title(run)[:300]), "", *facts])]
    pieces += [*time_markdown(run, time, source, all_layers=all_layers), *what_if_markdown(what_ifs)]
    sheets = [*_path_sheets(time, source), *uncertainty_sheets(source)]
    pieces += ["\n".join(sheet_markdown(sheet)) for sheet in sheets]
    return "\n\n".join(pieces) + "\n"


def priced_object(run: Run, what_ifs: Sequence[WhatIfStep] = ()) -> dict[str, object]:
    """What ``--json`` prints: ``kernels`` and ``time`` as in the summary, ``run_directory``, and what-ifs if any."""
    time, source = _timed(run)
    found = {"run_directory": str(run.path), "kernels": to_plain(source), "time": to_plain(time)}
    return found | ({"what_ifs": what_if_objects(what_ifs)} if what_ifs else {})


def what_if_steps(run: Run, changed: Mapping[str, Run]) -> list[WhatIfStep]:
    """The steps of a run with changes.

    Args:
        run: The run, priced for a GPU.
        changed: The run priced with a change, by the change.
    """
    before = _timed(run)[0]
    return [WhatIfStep(text, before, _timed(each)[0]) for text, each in changed.items()]


def _path_sheets(time: StepTime, source: KernelSource) -> list[Sheet]:
    return [path_sheet(time, step_word(source))] if time.critical_path else []


def _facts(run: Run, source: KernelSource) -> list[tuple[str, str]]:
    made_for = run.summary.gpu
    priced = f"priced for {source.gpu}"
    if made_for != source.gpu:
        priced += f", run for {made_for}; its memory and its choice of kernels stay those of the run"
    return [("job", run_title(run)), ("GPU", priced), ("run", str(run.path))]


def _timed(run: Run) -> tuple[StepTime, KernelSource]:
    if run.summary.timed is None:
        raise RunDirectoryError(f"{run.path} has no times", "fakedist profile -o RUN ... makes a run with times")
    return run.summary.timed
