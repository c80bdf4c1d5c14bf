"""``fakedist plan``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import click

from fakedist.cli.job_options import ScriptCommand, executor_options, given, job_options, jobs_of
from fakedist.cli.output import (
    HTML,
    JSON,
    MARKDOWN,
    TEXT,
    Output,
    RunPath,
    chosen_output,
    file_option,
    format_options,
    last_line,
    reading,
    remark,
    say_ending,
)
from fakedist.errors import ExitCode, JobError
from fakedist.options import Job
from fakedist.options.definition import OPTIONS
from fakedist.options.pricing import PRICING_OPTIONS, Pricing
from fakedist.rundir.directory import HOME, MANIFEST_NAME, make_home, rank_directories
from fakedist.rundir.outcome import Outcome
from fakedist.units import parse_bytes

#: Fields of ``Pricing`` that an option of a job sets under another name.
_NAMES = {"power_watts": "gpu_power"}
#: Options of a job that pricing reads; others are those of a recording.
_PRICED = {_NAMES.get(option.name, option.name) for option in PRICING_OPTIONS}
_PROJECT, _TABLE = Path("pyproject.toml"), "tool.fakedist.plan.apply"


class _PlanCommand(ScriptCommand):
    """Options may also follow a run, which has no arguments of its own."""

    headings: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("num_gpus", "pipeline", "micro_batches", "size", "flags", "replays"), "Plan"
    )

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
@click.option("--pipeline", is_flag=True, help="With a RUN of each pipeline stage: other schedules and layouts.")
@click.option(
    "--micro-batches", metavar="N,...", help="With --pipeline: numbers of micro-batches.  [default: as recorded]"
)
@click.option("--fit", "size", metavar="SIZE", help="Find the changes that fit a GPU of this memory: 80GiB.")
@click.option(
    "--apply",
    "flags",
    multiple=True,
    metavar="CHANGE=FLAGS",
    help="With --fit: the script's own flags for a change: 'checkpoint=--checkpoint full'. Repeatable.",
)
@click.option("--replay-only", "replays", is_flag=True, help="With --fit: record no plan.")
@executor_options
@file_option
@format_options(TEXT, JSON, MARKDOWN, HTML)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="RUN... | SCRIPT [ARGS]...", required=True)
def plan(
    arguments: tuple[str, ...],
    *,
    module: str | None,
    num_gpus: int | None,
    pipeline: bool,
    micro_batches: str | None,
    size: str | None,
    flags: tuple[str, ...],
    replays: bool,
    on: str,
    jobs: int | None,
    cold: bool,
    file: Path | None,
    form: str | None,
    as_json: bool,
    **values: Any,
) -> int:
    """Plan another machine, less memory, or another schedule.

    \b
    fakedist plan RUN --gpu b200 --gpus 128
    fakedist plan --fit 80GiB --world-size 64 train.py --its --own --flags
    fakedist plan RUNS --pipeline --micro-batches 8,16

    The first prices and replays a run on the virtual GPU, or one of a rank of each pipeline stage, for another machine.
    With --fit, the script is recorded, or a RUN is taken: the changes that fit the memory at the least time are
    replayed, and the best three recorded as far as the script's flags for them are known. With --pipeline, schedules of
    torch.distributed.pipelining are played with what the recorded stages take (docs/plan.md).
    """  # noqa: D301 - click looks for the character \b
    output = chosen_output(form, as_json, file)
    wrong = [f"-m {module}"] if module is not None else [text for text in arguments if not _runs(text)]
    runs = [] if wrong else [run for text in arguments for run in _runs(text)]
    if pipeline or micro_batches:
        if not pipeline or size is not None or num_gpus is not None or wrong:
            raise click.UsageError(
                "--pipeline is for a RUN of each stage, without --fit and --gpus; --micro-batches needs it"
            )
        _plan_pipeline(runs, micro_batches, values, output)
        return 0
    if size is None:
        if flags or replays:
            raise click.UsageError("--apply and --replay-only need --fit")
        if wrong:
            raise click.UsageError(f"{wrong[0]} is not a run directory; a script needs --fit SIZE before it")
        _plan_machine(runs, num_gpus, values, output)
        return 0
    if num_gpus is not None or len(runs) > 1:
        raise click.UsageError("--fit is for one rank, and takes no --gpus")
    size_bytes = parse_bytes(size)
    if runs:
        _check_recorded(values, priced=False)
    path, code = (runs[0], 0) if runs else _recorded(jobs_of(arguments, module, values))
    return code or _fit(path, size_bytes, _flags(flags), output, None if replays else (on, jobs, cold))


def _check_recorded(values: Mapping[str, Any], *, priced: bool) -> None:
    """Refuse options of a job with a run, which has its own; those of its price only if ``priced``."""
    for option in OPTIONS:
        if values[option.name] not in (None, ()) and not (priced and option.name in _PRICED):
            raise click.UsageError(f"{option.flags[0]} is for a script, and RUN is recorded")


def _plan_machine(paths: Sequence[Path], num_gpus: int | None, values: Mapping[str, Any], output: Output) -> None:
    from fakedist.extras.plan.other_machine import plan_machine
    from fakedist.extras.plan.plan_reports import machine_report
    from fakedist.results.opening import open_run

    pricing = _pricing(values)
    if not pricing and num_gpus is None:
        raise click.UsageError("name the machine: --gpu MODEL, --gpus N or --fabric NAME")
    with reading(*paths):
        runs = [open_run(path).keeping_tables() for path in paths]
        output.write(machine_report(runs, plan_machine(runs, Pricing(**pricing), num_gpus)))


def _pricing(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a price that were given, with recorded runs."""
    _check_recorded(values, priced=True)
    named = {option.name: _NAMES.get(option.name, option.name) for option in PRICING_OPTIONS}
    return given(PRICING_OPTIONS, {name: values.get(own) for name, own in named.items()})


def _plan_pipeline(paths: Sequence[Path], micro_batches: str | None, values: Mapping[str, Any], output: Output) -> None:
    from fakedist.extras.plan.pipeline_plans import plan_pipeline
    from fakedist.extras.plan.pipeline_units import read_pipeline
    from fakedist.extras.plan.plan_reports import pipeline_report
    from fakedist.results.job_time import time_job
    from fakedist.results.opening import open_run

    pricing = _pricing(values)
    numbers = [int(text) for text in (micro_batches or "").split(",") if text.strip().isdecimal() and int(text)]
    if micro_batches and len(numbers) < len(micro_batches.split(",")):
        raise click.UsageError(f"--micro-batches takes numbers: 8,16, not {micro_batches}")
    with reading(*paths):
        runs = [open_run(path).keeping_tables() for path in paths]
        model = read_pipeline(runs, Pricing(**pricing))
        plans, refused = plan_pipeline(model, numbers or [model.ranks[0].num_micro_batches])
        if not plans:
            raise JobError(f"no schedule can be: {refused[0]}", "--micro-batches with more of them")
        output.write(pipeline_report(time_job(runs, **pricing), model, plans, refused))


def _recorded(jobs: Sequence[Job]) -> tuple[Path, int]:
    """The run of a script's rank, in ``.fakedist/``, and its exit code; that of a script that failed has been said."""
    from fakedist.launcher import launching

    if len(jobs) > 1:
        raise JobError("--fit is for one rank", f"--rank {jobs[0].rank}")
    launching.check(jobs[0])
    remark("recording the job as it is")
    path, ending = launching.profile(jobs[0], None, False, launching.Streams(child_stdout=2, progress=None, say=remark))
    failed = not ending.ended_well and ending.outcome is not Outcome.OUT_OF_MEMORY
    return path, say_ending(ending, jobs[0], path) if failed else 0


def _flags(given_flags: Sequence[str]) -> dict[str, str]:
    """The script's flags by change: those of pyproject.toml, and those of the command line."""
    known: dict[str, str] = {}
    if _PROJECT.is_file():
        try:
            table: Any = tomllib.loads(_PROJECT.read_text())
        except (OSError, ValueError) as error:
            raise JobError(f"{_PROJECT} cannot be read: {error}", "correct the file") from None
        for name in _TABLE.split("."):
            table = table.get(name, {}) if isinstance(table, dict) else {}
        if not isinstance(table, dict) or not all(isinstance(text, str) for text in table.values()):
            raise JobError(f"[{_TABLE}] maps changes to flags", 'checkpoint = "--checkpoint full"')
        known |= table
    for text in given_flags:
        name, equals, words = text.partition("=")
        if not name or not equals:
            raise JobError(f"--apply is CHANGE=FLAGS, not {text!r}", "--apply 'checkpoint=--checkpoint full'")
        known[name] = words
    return known


def _fit(
    path: Path, size_bytes: int, flags: Mapping[str, str], output: Output, where: tuple[str, int | None, bool] | None
) -> int:
    from fakedist.extras.plan.fitting import fit, record
    from fakedist.extras.plan.plan_reports import best_of, fit_report
    from fakedist.launcher.executors.choosing import make_executor
    from fakedist.results.opening import open_run

    with reading(path):
        fitted = fit(open_run(path).keeping_tables(), size_bytes, flags)
    if where is not None and any(plan.job for plan in fitted.plans):
        make_home()
        executor = make_executor(where[0], where[1], remark, cold=where[2])
        fitted = record(fitted, HOME.absolute() / f"plan-{path.name}", executor, remark)
    output.write(fit_report(fitted))
    if fitted.need.fits != "fits" and best_of(fitted) is None:
        return last_line(ExitCode.OUT_OF_MEMORY, "no known change is sure to fit")
    return ExitCode.DONE


COMMAND = plan
