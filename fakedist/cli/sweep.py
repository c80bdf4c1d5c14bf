"""``fakedist sweep``."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import click

from fakedist import extras
from fakedist.cli.job_options import ScriptCommand, count_options, executor_options, job_options, program_of
from fakedist.cli.output import (
    JSON,
    TEXT,
    Output,
    chosen_output,
    format_options,
    last_line,
    output_option,
    remark,
    removed_option,
)
from fakedist.cli.profile import say_ignored
from fakedist.errors import ExitCode
from fakedist.launcher.checked_script import find_source
from fakedist.options import world_from_environment
from fakedist.options.definition import NOT_SWEPT, OPTIONS
from fakedist.rundir.directory import HOME, make_home
from fakedist.units import format_us, parse_bytes

if TYPE_CHECKING:
    from fakedist.launcher.executors.task import Executor
    from fakedist.sweep.command import Texts
    from fakedist.sweep.plan import CommandLineSettings, SweepPlan
    from fakedist.sweep.point_rows import Row, Status
    from fakedist.sweep.sweep_directory import Sweep


class SweepProgress:
    """Print a sweep's progress on stderr."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._number = self._known = 0
        self._ran: set[str] = set()
        self._pruned: dict[str, Status] = {}
        self._start = time.monotonic()

    def begins(self, number: int) -> None:
        """Take in the number of points."""
        self._number, self._start = number, time.monotonic()
        remark(f"{number:,} point{'' if number == 1 else 's'}, into {self._directory}")

    def finished(self, row: Row, was_known: bool) -> None:
        """Print a row. Rows of an earlier session are counted."""
        from fakedist.sweep.point_rows import Status
        from fakedist.sweep.ranking import row_text

        if was_known:
            self._known += 1
            return
        if row.status in (Status.PRUNED, Status.SLOWER):
            self._pruned[row.id] = row.status
            return
        self._pruned.pop(row.id, None)  # another point refuted the order that it was pruned by
        if self._known and not self._ran:
            remark(f"{self._known:,} of them ran before (--fresh runs them again)")
        self._ran.add(row.id)
        remark(f"{self._done:,} of {self._number:,}: {row_text(row)}{self._rate()}")

    def interrupted(self) -> None:
        """Print how to go on."""
        remark(f"{self._done:,} of {self._number:,} points are done; the same command goes on from here")

    def ended(self) -> None:
        """Print how many points did not need to run."""
        from fakedist.sweep.point_rows import Status

        by_memory = [*self._pruned.values()].count(Status.PRUNED)
        remark(
            f"{len(self._ran):,} recorded and priced, {self._known:,} of an earlier sweep, {by_memory:,} pruned by "
            f"memory, {len(self._pruned) - by_memory:,} by time"
        )

    @property
    def _done(self) -> int:
        return self._known + len(self._pruned) + len(self._ran)

    def _rate(self) -> str:
        ran = len(self._ran)
        left = self._number - self._done
        seconds = time.monotonic() - self._start
        if left <= 0 or seconds <= 0:
            return ""
        return f" ({60 * ran / seconds:.1f} points a minute, {format_us(1e6 * left * seconds / ran)} left)"


_TOML = ".toml"
_SWEEP_OPTIONS = (
    *("axes", "derived", "conditions", "prices", "keep", "headroom", "context", "tokens_per_step"),
    *("micro_batches", "shares", "trials"),
)
#: Modules of extras that find axes of a script.
_ADDED = extras.parts("sweep_options")
_RANKS = (
    "The ranks to run at each point: ends (the first and the last pipeline stage), stages (also every stage of the "
    "ten best points), or numbers such as 0,8."
)


class _SweepCommand(ScriptCommand):
    """Options may also follow a sweep file, which has no arguments of its own."""

    headings: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (*_SWEEP_OPTIONS, *(str(param.name) for part in _ADDED for param in part.OPTIONS)), "Sweep"
    )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As for a script; a sweep file, or a sweep's directory, ends no options."""
        position = self.end_of_options(args)
        if position < len(args) and (args[position].endswith(_TOML) or _is_sweep(Path(args[position]))):
            ctx.allow_interspersed_args = True
        return super().parse_args(ctx, args)


@click.command(
    cls=_SweepCommand,
    no_args_is_help=True,
    params=[
        *job_options(without=NOT_SWEPT, rank_help=_RANKS, rank_default="ends"),
        *count_options("EXPR"),
        *(param for part in _ADDED for param in part.OPTIONS),
    ],
)
@click.option(
    "--axis", "axes", multiple=True, metavar="NAME=VALUES", help="An axis: tp=1,2,4,8 or tp=1..8*2. Repeatable."
)
@click.option(
    "--let", "derived", multiple=True, metavar="NAME=EXPR", help="A value computed from the axes. Repeatable."
)
@click.option(
    "--where", "conditions", multiple=True, metavar="EXPR", help="Run only points that meet this condition. Repeatable."
)
@removed_option("--monotone", "--monotone was removed: every point runs; leave it out")
@click.option(
    "--price",
    "prices",
    multiple=True,
    metavar="NAME=VALUE",
    help="What to price the steps for, without another run: gpus-per-node or router-load. Repeatable.",
)
@click.option("--keep", metavar="WHICH", help="Run directories to keep: all or none.  [default: all]")
@click.option(
    "--headroom", metavar="SHARE", help="Share of the memory that the fastest point must leave free.  [default: 5%]"
)
@click.option("--context", metavar="SIZE", help="Memory of the CUDA context.  [default: as published]")
@click.option(
    "--share",
    "shares",
    multiple=True,
    metavar="NAME",
    help="Add a share to the table: the part that fits of 1,000 draws of the router load (fitting_draws), or of 1,000 "
    "steps of the recorded lengths (fitting_steps). Repeatable.",
)
@click.option("--trials", type=click.IntRange(min=1), metavar="N", help="Run only this many points, drawn from a seed.")
@removed_option("--sampler", "--sampler was removed: --trials N draws points from a seed; leave it out")
@executor_options
@click.option("--memory-limit", metavar="SIZE", help="End a rank whose processes hold more host memory than this.")
@click.option("--fresh", is_flag=True, help="Run every point again.")
@click.option("--dry-run", is_flag=True, help="Print each point with its command, and run nothing.")
@output_option("directory", "DIR", "Directory of the sweep.  [default: .fakedist/sweep-NAME]")
@format_options(TEXT, JSON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="SWEEP.toml | SCRIPT [ARGS]...")
@click.pass_context
def sweep(
    ctx: click.Context,
    /,
    *,
    arguments: tuple[str, ...],
    module: str | None,
    axes: tuple[str, ...],
    derived: tuple[str, ...],
    conditions: tuple[str, ...],
    prices: tuple[str, ...],
    keep: str | None,
    headroom: str | None,
    context: str | None,
    shares: tuple[str, ...],
    on: str,
    jobs: int | None,
    cold: bool,
    trials: int | None,
    memory_limit: str | None,
    fresh: bool,
    dry_run: bool,
    directory: Path | None,
    form: str | None,
    as_json: bool,
    **values: object,
) -> int:
    """Run a job at every point of a space, and rank the points.

    The answer has the points that fit in memory, and the fastest of them. The space comes from a sweep file, or from
    axes and a command with placeholders:

    \b
    fakedist sweep sweep.toml
    fakedist sweep --world-size 8 --axis tp=1,2,4 train.py --tp {tp}

    An interrupted sweep resumes where it stopped. Give its directory in place of the file to print its results so far
    (docs/sweeps.md).
    """  # noqa: D301 - click looks for the character \b
    output = chosen_output(form, as_json)
    settings = _settings(
        values, keep=keep, headroom=headroom, context=context, shares=list(shares) or None, trials=trials
    )
    from fakedist.launcher.executors.choosing import make_executor
    from fakedist.sweep.plan import CommandLineSettings

    if module is None and len(arguments) == 1 and Path(arguments[0]).is_dir():
        return _show(Path(arguments[0]), output)
    asked = CommandLineSettings(axes, derived, conditions, prices, _options(values), settings)
    say_ignored(ctx)
    plan = _plan(arguments, module, asked, values)
    older = Path(f"fakedist-sweep-{plan.name}")  # where sweeps went before
    directory = directory or (older if _is_sweep(older) else HOME / f"sweep-{plan.name}")
    if dry_run:
        return _dry_run(plan, directory, output)
    if directory.parent == HOME:
        make_home()
    limit_bytes = None if memory_limit is None else parse_bytes(memory_limit)
    executor = make_executor(on, jobs, remark, cold=cold)
    return _run(plan, directory, output, executor, fresh=fresh, limit_bytes=limit_bytes)


def _dry_run(plan: SweepPlan, directory: Path, output: Output) -> int:
    from fakedist.sweep.sheets import dry_run, dry_run_object, render_dry_run

    points = dry_run(plan)
    if output.format == JSON:
        output.write_object(dry_run_object(points, directory))
    else:
        output.render(lambda console: render_dry_run(points, directory, console))
    return 0


def _is_sweep(path: Path) -> bool:
    from fakedist.sweep.sweep_directory import is_sweep

    return is_sweep(path)


def _show(directory: Path, output: Output) -> int:
    from fakedist.sweep.sweep_directory import open_sweep
    from fakedist.sweep.sweeping import write_results

    try:
        sweep = write_results(directory)
    except OSError as error:  # a full disk, a directory of someone else
        remark(f"the table and the page in {directory} stay as they are: {error.strerror}")
        sweep = open_sweep(directory)
    return _print(sweep, output)


def _print(sweep: Sweep, output: Output) -> int:
    from fakedist.sweep.sheets import sweep_report

    output.write(sweep_report(sweep))
    if sweep.ranking.best is None:
        any_ran = any(row.status.ran for row in sweep.rows)
        return last_line(ExitCode.OUT_OF_MEMORY if any_ran else ExitCode.ERROR, "no point fits")
    return ExitCode.DONE


def _run(
    plan: SweepPlan,
    directory: Path,
    output: Output,
    executor: Executor,
    *,
    fresh: bool,
    limit_bytes: int | None,
) -> int:
    from fakedist.sweep.sweeping import SweepListener, run_sweep

    progress = SweepProgress(directory)
    listener = SweepListener(begins=progress.begins, finished=progress.finished, say=remark)
    try:
        if plan.grows:
            legal = "; ".join(condition.text for condition in plan.space.conditions)
            are = "are legal" if plan.num_trials is None else "are drawn of the legal ones"
            remark(f"{len(plan.points()):,} of {plan.space.size:,} layouts {are}{': ' * bool(legal)}{legal}")
        sweep = run_sweep(plan, directory, executor, listener, fresh=fresh, limit_bytes=limit_bytes)
        if plan.grows:
            progress.ended()
    except KeyboardInterrupt:
        progress.interrupted()
        raise
    return _print(sweep, output)


def _plan(
    arguments: Sequence[str], module: str | None, settings: CommandLineSettings, values: Mapping[str, object]
) -> SweepPlan:
    from fakedist.sweep.command import Texts
    from fakedist.sweep.plan import sweep_of_command, sweep_of_file

    if module is None and arguments and arguments[0].endswith(_TOML):
        if arguments[1:]:
            raise click.UsageError(f"a sweep file takes no arguments: {' '.join(arguments[1:])[:60]}")
        if any(values.get(str(param.name)) for part in _ADDED for param in part.OPTIONS):
            raise click.UsageError("a sweep file has its own axes")
        return sweep_of_file(Path(arguments[0]), settings)
    if module is None and not arguments:
        raise click.UsageError("no sweep file and no script was given")
    program = program_of(tuple(arguments), module)
    if settings.options.keys().isdisjoint({"world_size", "nnodes"}):
        world_size, _ = world_from_environment(os.environ)
        if world_size is None:
            find_source(program.target, program.is_module)  # a wrong path is the first error
        else:
            settings = replace(settings, options={**settings.options, "world_size": Texts((str(world_size),))})
    for part in _ADDED:
        program, settings = part.with_axes(values, program, settings)
    return sweep_of_command(program, settings)


def _settings(values: Mapping[str, object], **others: object) -> dict[str, object]:
    """The settings of the sweep itself, with those that are options of a job or of pricing elsewhere."""
    ranks = values["rank"]
    joined = ",".join(ranks) if isinstance(ranks, tuple) and ranks else None
    return {"ranks": joined, **{name: values[name] for name in ("tokens_per_step", "micro_batches")}, **others}


def _options(values: Mapping[str, object]) -> dict[str, Texts | bool]:
    from fakedist.sweep.command import Texts

    options: dict[str, Texts | bool] = {}
    for option in OPTIONS:
        value = values.get(option.name)
        if option.name == "rank" or value is None or value == ():
            continue
        texts = tuple(map(str, value)) if isinstance(value, tuple) else (str(value),)
        options[option.name] = value if isinstance(value, bool) else Texts(texts)
    return options
