"""``fakedist time --lengths``: the rollout of an inference engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import click

from fakedist.cli.job_options import as_click, given, pricing_of
from fakedist.extras.rl.rollout import ROLLOUT_OPTIONS, read_rollout
from fakedist.options.kinds import OptionGroup

if TYPE_CHECKING:
    from fakedist.report.content.report_blocks import Report
    from fakedist.results.run import Run

HEADING = OptionGroup.ROLLOUT.value
OPTIONS: list[click.Parameter] = [as_click(option) for option in ROLLOUT_OPTIONS]


def report(values: Mapping[str, object], *, is_alone: bool) -> Callable[[Run], Report] | None:
    """The report of a run's rollout; None if no option asks for one. UsageError with other than one run and price."""
    rollout = read_rollout(given(ROLLOUT_OPTIONS, values))
    if rollout is None:
        return None
    if not is_alone:
        raise click.UsageError("a rollout is for one run, GPU and fabric, as text, markdown or JSON")
    gpu, pricing = pricing_of(values)

    def simulate(run: Run) -> Report:
        from fakedist.extras.rl.rollout_report import rollout_report
        from fakedist.extras.rl.rollout_time import run_rollout

        return rollout_report(run_rollout(run, rollout, gpu, **pricing))

    return simulate
