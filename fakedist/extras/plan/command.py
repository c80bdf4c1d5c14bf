"""``fakedist plan``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import click

from fakedist.cli.job_options import ScriptCommand, given, job_options
from fakedist.cli.output import JSON, MARKDOWN, TEXT, Output, RunPath, chosen_output, file_option, format_options
from fakedist.cli.say import reading
from fakedist.options.definition import OPTIONS
from fakedist.options.pricing import PRICING_OPTIONS, Pricing
from fakedist.rundir.directory import MANIFEST_NAME, rank_directories

#: Fields of ``Pricing`` that an option of a job sets under another name.
_NAMES = {"power_watts": "gpu_power"}
#: Options of a job that pricing reads; others are those of a recording.
_PRICED = {_NAMES.get(option.name, option.name) for option in PRICING_OPTIONS}


class _PlanCommand(ScriptCommand):
    """Options may also follow a run, which has no arguments of its own."""

    headings: ClassVar[Mapping[str, str]] = {"num_gpus": "Plan"}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As for a script; a run ends no options."""
        position = self.end_of_options(args)
        if position < len(args) and _runs(args[position]):
            ctx.allow_interspersed_args = True
        return super().parse_args(ctx, args)


def _runs(text: str) -> list[Path]:
    """The run directories that a word of the command line names: one, or those of several ranks; none of a script."""
    path = RunPath().convert(text, None, None)
    return [path] if (path / MANIFEST_NAME).is_file() else rank_directories(path)


@click.command(cls=_PlanCommand, params=job_options(), no_args_is_help=True)
@click.option(
    "--gpus", "num_gpus", type=click.IntRange(min=1), metavar="N", help="With a RUN: GPUs of the job on the machine."
)
@file_option
@format_options(TEXT, JSON, MARKDOWN)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="RUN...", required=True)
def plan(
    arguments: tuple[str, ...],
    *,
    module: str | None,
    num_gpus: int | None,
    file: Path | None,
    form: str | None,
    as_json: bool,
    **values: Any,
) -> int:
    """Plan a recorded job for another machine: does it fit, how long is its step, and what no longer pays?

    RUN is a run on the virtual GPU, or one of a rank of each pipeline stage. Nothing runs: its memory is replayed, and
    its step priced, for --gpu, --fabric and so many --gpus. The job's ranks differ in number along its data parallel
    axis.
    """
    output = chosen_output(form, as_json, file)
    wrong = [text for text in arguments if not _runs(text)]
    if module is not None or wrong:
        raise click.UsageError(f"{wrong[0] if wrong else module} is not a run directory")
    _plan_machine([run for text in arguments for run in _runs(text)], num_gpus, values, output)
    return 0


def _plan_machine(paths: Sequence[Path], num_gpus: int | None, values: Mapping[str, Any], output: Output) -> None:
    from fakedist.extras.plan.machine_report import machine_report
    from fakedist.extras.plan.other_machine import plan_machine
    from fakedist.results.opening import open_run

    for option in OPTIONS:
        if option.name not in _PRICED and values[option.name] not in (None, ()):
            raise click.UsageError(f"{option.flags[0]} is for a script, and RUN is recorded")
    pricing = given(
        PRICING_OPTIONS, {option.name: values.get(_NAMES.get(option.name, option.name)) for option in PRICING_OPTIONS}
    )
    if not pricing and num_gpus is None:
        raise click.UsageError("name the machine: --gpu MODEL, --gpus N or --fabric NAME")
    with reading(*paths):
        runs = [open_run(path).keeping_tables() for path in paths]
        output.write(machine_report(runs, plan_machine(runs, Pricing(**pricing), num_gpus)))


COMMAND = plan
