"""The step's time of a run that was priced for a GPU, as text, Markdown and an object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console

from fakedist.errors import RunDirectoryError
from fakedist.report.text.facts import run_title
from fakedist.report.text.markdown import escaped
from fakedist.report.text.run_markdown import sheet_markdown, time_markdown
from fakedist.report.text.sheet import Sheet, print_facts
from fakedist.report.text.terminal import print_sheets, print_time
from fakedist.report.text.time_sheets import path_sheet, time_sheets
from fakedist.report.text.time_wording import step_word
from fakedist.report.text.uncertainty import uncertainty_sheets
from fakedist.report.text.what_if import WhatIfStep, what_if_markdown, what_if_objects, what_if_sheets
from fakedist.results.run import Run
from fakedist.run.plain import to_plain
from fakedist.run.step_time import KernelSource, StepTime


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
