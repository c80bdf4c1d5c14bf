"""``fakedist topology``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import click
from click.core import ParameterSource

from fakedist.cli.job_options import ScriptCommand, job_options, jobs_of
from fakedist.cli.output import (
    HTML,
    JSON,
    MARKDOWN,
    TEXT,
    Output,
    chosen_output,
    force_option,
    format_options,
    output_option,
)
from fakedist.cli.profile import STDERR, run_one, say_ignored
from fakedist.cli.say import reading, remark, say_ending, say_first_failure
from fakedist.errors import JobError

#: Options of a job that change its times and its files alone, and so nothing of what is shown here.
_WITHOUT = ("gpu_lag", "gpu_power", "fabric", "host", "kernels", "times", "page", "nsys", "nsys_args")
#: Options that are of use for run directories too.
_FOR_RUNS = ("path", "form", "as_json", "arguments")


class _TopologyCommand(ScriptCommand):
    """Options may follow run directories, as in ``fakedist report RUN --json``. After a script they are its own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does."""
        first = next((argument for argument in args if not argument.startswith("-")), "")
        ctx.allow_interspersed_args = Path(first).is_dir()
        return super().parse_args(ctx, args)


@click.command(cls=_TopologyCommand, no_args_is_help=True, params=job_options(without=_WITHOUT))
@output_option("path", "PATH", "With a SCRIPT, the run directory to write. With RUN, write the result into a file.")
@force_option("run directory")
@format_options(TEXT, JSON, MARKDOWN, HTML)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="RUN... | SCRIPT [ARGS]...")
@click.pass_context
def topology(
    ctx: click.Context,
    /,
    *,
    arguments: tuple[str, ...],
    module: str | None,
    path: Path | None,
    force: bool,
    form: str | None,
    as_json: bool,
    **values: object,
) -> int:
    """Show a rank's groups, its calls, and what can run at once.

    For each group: its ranks, the rank's calls on it in one step, and which of them can run at the same time.

    RUN is a run directory, and there may be several. A SCRIPT is profiled first, as by fakedist profile.
    """
    is_run = bool(arguments) and Path(arguments[0]).is_dir() and not module
    if is_run and values["world_size"] is None and values["nnodes"] is None:
        for param in ctx.command.params:
            is_given = ctx.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE
            if is_given and param.name not in _FOR_RUNS:
                raise click.UsageError(f"{param.opts[0]} is for a script; {arguments[0]} is a directory")
        _show([Path(argument) for argument in arguments], chosen_output(form, as_json, path))
        return 0
    if arguments and not module and not Path(arguments[0]).exists():
        text = "fakedist topology RUN, or fakedist topology --world-size 8 --rank 5 SCRIPT [ARGS]..."
        raise JobError(f"neither a run directory nor a script: {arguments[0]}", text)
    output = chosen_output(form, as_json)
    say_ignored(ctx)
    return _profiled(arguments, module, values, directory=path, force=force, output=output)


def _profiled(
    arguments: tuple[str, ...],
    module: str | None,
    values: Mapping[str, object],
    *,
    directory: Path | None,
    force: bool,
    output: Output,
) -> int:
    from fakedist.launcher import launching
    from fakedist.launcher.ranks import profile_ranks

    jobs = jobs_of(arguments, module, values)
    job, ranks = jobs[0], [job.rank for job in jobs]
    launching.check(job)
    streams = launching.Streams(child_stdout=STDERR, say=remark)
    if len(ranks) == 1:
        run_directory, ending = run_one(job, directory, force, streams)
        _show([run_directory], output)
        return say_ending(ending, job, run_directory)
    runs = sorted(profile_ranks(job, ranks, directory, force, streams), key=lambda run: ranks.index(run.rank))
    _show([run.run_directory for run in runs if run.run_directory is not None], output)
    for run in runs:
        if run.run_directory is None:
            remark(f"rank {run.rank}: {run.ending.message}")
    return say_first_failure(runs, job)


def _show(runs: Sequence[Path], output: Output) -> None:
    from fakedist.report.content.topology import topology_report
    from fakedist.results.opening import open_run_directory

    with reading(*runs):
        output.write(topology_report([open_run_directory(run) for run in runs]))
