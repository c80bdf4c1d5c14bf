"""``fakedist topology``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from fakedist.cli.failure import say_ending, say_first_failure
from fakedist.cli.profile import STDERR, ScriptCommand, job_of, profile, run_one
from fakedist.cli.say import console, remark
from fakedist.errors import JobError

_NOT_ITS_OWN = ("all_layers",)


class _TopologyCommand(ScriptCommand):
    """Options may follow run directories, as in ``fakedist report RUN --json``; after a script they are its own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does."""
        first = next((argument for argument in args if not argument.startswith("-")), "")
        ctx.allow_interspersed_args = Path(first).is_dir()
        return super().parse_args(ctx, args)


@click.command(
    cls=_TopologyCommand,
    context_settings={"allow_interspersed_args": False},
    no_args_is_help=True,
    params=[option for option in profile.params if option.name not in (*_NOT_ITS_OWN, "arguments")],
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="RUN... | SCRIPT [ARGS]...")
@click.pass_context
def topology(ctx: click.Context, /, arguments: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Show a rank's groups, its calls on each in a step, and which can run at once.

    RUN is what fakedist profile made; several stand one below the other. For a SCRIPT and its arguments, with
    --world-size and --rank, the job is profiled first, options as of fakedist profile.
    """
    if arguments and Path(arguments[0]).is_dir() and not options["module"] and options["world_size"] is None:
        asked = [name for name in options if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        if asked:
            raise click.UsageError(f"--{asked[0].replace('_', '-')} is for a script; {arguments[0]} is a directory")
        _print([Path(argument) for argument in arguments], as_json)
        return 0
    if arguments and not options["module"] and not Path(arguments[0]).exists():
        text = "fakedist topology RUN, or fakedist topology --world-size 8 --rank 5 SCRIPT [ARGS]..."
        raise JobError(f"neither a run directory nor a script: {arguments[0]}", text)
    return _profiled(arguments, as_json, options)


def _profiled(arguments: tuple[str, ...], as_json: bool, options: dict[str, Any]) -> int:
    """Profile the job's ranks and show their groups; the first exit code that is not 0."""
    from fakedist.launch import launching
    from fakedist.launch.ranks import profile_ranks

    output, force = options.pop("output"), options.pop("force")
    job, ranks = job_of(arguments, **options)
    launching.check(job)
    streams = launching.Streams(child_stdout=STDERR, say=remark)
    if len(ranks) == 1:
        run_directory, ending = run_one(job, output, force, streams)
        _print([run_directory], as_json)
        return say_ending(ending, job, run_directory)
    runs = sorted(profile_ranks(job, ranks, output, force, streams), key=lambda run: ranks.index(run.rank))
    _print([run.run_directory for run in runs if run.run_directory is not None], as_json)
    for run in runs:
        if run.run_directory is None:
            remark(f"rank {run.rank}: {run.ending.message}")
    return say_first_failure(runs, job)


def _print(runs: list[Path], as_json: bool) -> None:
    from fakedist.report.text.group_sheets import RunTopology, render_topology
    from fakedist.results.opening import open_run_directory

    topologies = [RunTopology(open_run_directory(run)) for run in runs]
    if as_json:
        objects = [each.as_object() for each in topologies]
        click.echo(json.dumps(objects[0] if len(objects) == 1 else objects, indent=2))
        return
    for number, each in enumerate(topologies):
        if number:
            click.echo()
        render_topology(each, console())
