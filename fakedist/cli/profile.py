"""``fakedist profile``."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fakedist.cli.failure import say_ending, say_first_failure
from fakedist.cli.say import console, print_report, remark
from fakedist.errors import JobError
from fakedist.job import Job, parse_length, place_from_environment
from fakedist.units import parse_bytes

if TYPE_CHECKING:
    from fakedist.launch.launching import Streams
    from fakedist.run.outcome import Ending

STDERR = 2  # the descriptor


class ScriptCommand(click.Command):
    """A command whose options end where the script begins: what stands after it, or after ``-m module``, is its own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does, with the script's own arguments set apart."""
        return super().parse_args(ctx, self._end_options_after_module(args))

    def _end_options_after_module(self, args: list[str]) -> list[str]:
        takes_value = {
            name: isinstance(option, click.Option) and not option.is_flag
            for option in self.params
            for name in option.opts
        }
        place = 0
        while place < len(args) and args[place].startswith("-") and args[place] != "--":
            name, _, joined = args[place].partition("=")
            width = 2 if takes_value.get(name) and not joined else 1
            if name.startswith("-m") and not name.startswith("--"):
                end = place + (2 if name == "-m" else 1)
                return [*args[:end], "--", *args[end:]]
            place += width
        return args


@click.command(cls=ScriptCommand, context_settings={"allow_interspersed_args": False}, no_args_is_help=True)
@click.option("--world-size", type=int, metavar="N", help="Ranks in the whole job.  [default: $WORLD_SIZE]")
@click.option(
    "--rank", multiple=True, metavar="N", help="The rank to run, or several: 0,4,8 or 0-1023:64.  [default: $RANK]"
)
@click.option("--with-peers", is_flag=True, help="Run the ranks whose objects this one waits for, too.")
@click.option("--tape", "tapes", multiple=True, metavar="RUN[,RUN]", help="Receive what these runs sent; repeatable.")
@click.option("--gpus-per-node", type=int, default=8, show_default=True, metavar="N", help="GPUs on each machine.")
@click.option("--device", type=click.Choice(["cuda", "virtual"]), help="Where it runs.  [default: cuda where a GPU is]")
@click.option("--gpu", default="h100-80g", show_default=True, metavar="MODEL", help="Which GPU the virtual one is.")
@click.option(
    "--gpu-memory", metavar="SIZE", help="Memory of the virtual GPU: 80GiB, unlimited.  [default: the model's]"
)
@click.option(
    "--steps",
    default="auto",
    show_default=True,
    metavar="N|auto",
    help="Training steps to run; auto: 2 to 6, until memory is the same at the end of two of them.",
)
@click.option(
    "--until",
    metavar="N|validation|save|end",
    help="Run until this step, the first validation or checkpoint after training began, or the script's end.",
)
@click.option("-m", "module", metavar="MODULE", help="Run a module, as python -m does; its arguments follow.")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="DIR", help="Run directory to write.")
@click.option("--force", is_flag=True, help="Overwrite the run directory if there is one.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout; the script's output goes to stderr.")
@click.option("--all-layers", is_flag=True, help="Do not fold repeated layers.")
@click.option(
    "--env", multiple=True, metavar="KEY=VALUE", help="Set a variable for the script, last of all; repeatable."
)
@click.option(
    "--nccl-env",
    multiple=True,
    metavar="KEY=VALUE",
    help="NCCL's variable as on the cluster: counts in the estimate of its memory; repeatable.",
)
@click.option("--timeout", type=float, metavar="SECONDS", help="End the script after so long.")
@click.option(
    "--launcher",
    type=click.Choice(["torchrun", "slurm", "mpi", "accelerate", "deepspeed"]),
    default="torchrun",
    show_default=True,
    help="Whose environment variables the script finds.",
)
@click.option(
    "--collectives",
    type=click.Choice(["values", "noop"]),
    default="values",
    show_default=True,
    help="Fill in what would have arrived, or move nothing.",
)
@click.option(
    "--values",
    type=click.Choice(["small", "strict", "off"]),
    default="small",
    show_default=True,
    help="Virtual GPU: compute small tensors and make up what nobody computed, fail there, or compute nothing.",
)
@click.option(
    "--kernels/--no-kernels",
    default=True,
    show_default=True,
    help="Time the kernels of one step: measured on a GPU, estimated on the virtual one.",
)
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Seed of all that is made up.")
@click.option("--nsys", is_flag=True, help="Run under Nsight Systems, which times that step; keeps its report.")
@click.option("--nsys-args", metavar="ARGS", help="More arguments of nsys profile, in one text.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
def profile(
    output: Path | None, force: bool, as_json: bool, all_layers: bool, arguments: tuple[str, ...], **options: Any
) -> int:
    """Run one rank of a job and report its memory.

    Several ranks run one after the other, each answered from the tapes of those before it (docs/tape.md).

    SCRIPT and all that follows it are what you would have given to torchrun.
    """
    from fakedist.launch import launching

    job, ranks = job_of(arguments, **options)
    launching.check(job)
    streams = launching.Streams(
        child_stdout=STDERR if as_json else None,
        progress=sys.stderr if sys.stderr.isatty() else None,
        say=remark,
    )
    if len(ranks) > 1:
        return _several(job, ranks, (output, force, as_json), streams)
    run_directory, ending = run_one(job, output, force, streams)
    print_report(run_directory, as_json, all_layers)
    return say_ending(ending, job, run_directory)


def run_one(job: Job, output: Path | None, force: bool, streams: Streams) -> tuple[Path, Ending]:
    """Run one rank, with the peers that it waits for where that is asked for; its run and how it ended."""
    from fakedist.launch import launching
    from fakedist.launch.ranks import profile_with_peers

    if not job.with_peers:
        return launching.profile(job, output, force, streams)
    return profile_with_peers(job, output, force, streams)


def _several(job: Job, ranks: Sequence[int], how: tuple[Path | None, bool, bool], streams: Streams) -> int:
    """Run several ranks and print one table of them."""
    from fakedist.launch.ranks import exit_code, profile_ranks
    from fakedist.report.text.rank_rows import RankRow, ranks_object, render_ranks

    output, force, as_json = how
    runs = sorted(profile_ranks(job, ranks, output, force, streams), key=lambda run: ranks.index(run.rank))
    rows = [RankRow(run.rank, run.run_directory, run.ending, run.wall_s) for run in runs]
    code = exit_code(runs)
    if as_json:
        click.echo(json.dumps(ranks_object(rows, job.world_size, code), indent=2))
    else:
        render_ranks(rows, job.world_size, console())
    return say_first_failure(runs, job)


def job_of(arguments: tuple[str, ...], module: str | None, **options: Any) -> tuple[Job, tuple[int, ...]]:
    """The job that the options describe, and the ranks of it to run."""
    from fakedist.launch.ranks import parse_ranks

    world_size, rank = place_from_environment(os.environ)
    world_size = options["world_size"] if options["world_size"] is not None else world_size
    chosen = ",".join(options["rank"]) if options["rank"] else rank
    if world_size is None:
        raise JobError("how many ranks has the job?", "--world-size 1024 (or WORLD_SIZE in the environment)")
    if chosen is None:
        raise JobError("which rank shall run?", "--rank 0 (or RANK in the environment)")
    if module is None and not arguments:
        raise JobError("no script was given", "fakedist profile [options] SCRIPT [ARGS]...")
    memory = options["gpu_memory"]
    ranks = parse_ranks(str(chosen), world_size) if world_size > 0 else (0,)
    if options["with_peers"] and len(ranks) > 1:
        raise JobError(
            "--with-peers is for one rank: it finds the others by itself", f"--rank {ranks[-1]} --with-peers"
        )
    job = Job(
        world_size=world_size,
        rank=ranks[0],
        target=module if module is not None else arguments[0],
        is_module=module is not None,
        arguments=arguments if module is not None else arguments[1:],
        gpus_per_node=options["gpus_per_node"],
        device=_device(options["device"]),
        gpu=options["gpu"],
        gpu_memory_bytes=parse_bytes(memory) if memory is not None else None,
        steps=parse_length(options["steps"]),  # type: ignore[arg-type]
        until=None if options["until"] is None else parse_length(options["until"]),  # type: ignore[arg-type]
        launcher=options["launcher"],
        collectives=options["collectives"],
        values=options["values"],
        kernels=options["kernels"],
        environment=tuple(_variable(text, "--env") for text in options["env"]),
        nccl_environment=tuple(_nccl_variable(text) for text in options["nccl_env"]),
        timeout_s=options["timeout"],
        seed=options["seed"],
        tapes=tuple(os.path.abspath(path) for text in options["tapes"] for path in text.split(",") if path),
        nsys=_nsys_arguments(options["nsys"], options["nsys_args"]),
        with_peers=options["with_peers"],
    )
    return job, ranks


def _nsys_arguments(nsys: bool, text: str | None) -> tuple[str, ...] | None:
    if text is not None and not nsys:
        raise JobError("--nsys-args is of use with --nsys alone", f"--nsys --nsys-args {shlex.quote(text)}")
    try:
        return tuple(shlex.split(text or "")) if nsys else None
    except ValueError as error:
        raise JobError(
            f"--nsys-args {text} cannot be split into words: {error}", "--nsys-args '--trace=cuda,nvtx'"
        ) from None


def _device(chosen: Any) -> Any:
    from fakedist.launch.machine import count_real_gpus

    return chosen or ("cuda" if count_real_gpus() else "virtual")


def _variable(text: str, option: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise JobError(f"{option} {text} is not KEY=VALUE", f"{option} {name or 'KEY'}=VALUE")
    return name, value


def _nccl_variable(text: str) -> tuple[str, str]:
    from fakedist.run.nccl import check_variable

    name, value = _variable(text, "--nccl-env")
    check_variable(name, value)
    return name, value
