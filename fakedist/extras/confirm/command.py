"""The command ``confirm``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from fakedist.cli.output import force_option, last_line, output_option, say
from fakedist.errors import ExitCode, JobError, SetupError, did_you_mean


@click.command()
@click.argument("pieces", metavar="[PIECE]...", nargs=-1)
@output_option("file", "FILE", "The file of results.  [default: fakedist-confirm.json]", is_file=True)
@force_option("file")
@click.option(
    "--patience",
    type=click.FloatRange(min=0.1),
    default=1.0,
    metavar="FACTOR",
    help="Multiply every time limit by FACTOR.",
)
@click.option("--rehearse", is_flag=True, help="Rehearse on the virtual GPU; the result is not valid.")
@click.option(
    "--check",
    "arrived",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Validate an existing result file.",
)
@click.option("--job", "jobs", multiple=True, metavar="NAME", help="Only this job of the accuracy set; repeatable.")
def confirm(
    pieces: tuple[str, ...],
    *,
    file: Path | None,
    force: bool,
    patience: float,
    rehearse: bool,
    arrived: Path | None,
    jobs: tuple[str, ...],
) -> int:
    """Compare your GPU with the virtual GPU on 36 jobs.

    This takes 14 minutes at most, and writes one JSON file. The pieces are recordings (each event of the caching
    allocator, bare, recorded and virtual), outside (memory that PyTorch does not see), out-of-memory (where a job
    fails as memory shrinks) and times (kernels of a step: measured, and estimated). Without a name all of them run.
    Nothing else should use the GPU meanwhile. The file holds the GPU's name, memory, driver and versions, and nothing
    of your own jobs (docs/accuracy/method.md).
    """
    from fakedist.extras.confirm import confirming
    from fakedist.extras.confirm.jobs import JOBS
    from fakedist.launcher.machine import count_real_gpus
    from fakedist.report.writing import see_that_it_can_be_written

    if arrived is not None:
        try:
            found = list(confirming.defects(confirming.read_confirmation(arrived)))
        except (AttributeError, KeyError, TypeError) as error:
            raise JobError(f"{arrived} has a table of another form: {error!r}", "do not use this file") from None
        say("\n".join(found or [f"{arrived}: it can be kept"]))
        return last_line(ExitCode.ERROR, f"{arrived} cannot be kept") if found else ExitCode.DONE
    for kind, names, known in (("piece", pieces, confirming.PIECES), ("job", jobs, JOBS)):
        for name in names:
            if name not in known:
                raise JobError(f"there is no {kind} {name!r}", did_you_mean(name, known))
    if not rehearse and not count_real_gpus():
        raise SetupError("there is no GPU here to confirm", "fakedist confirm --rehearse runs it on the virtual GPU")
    target = file or Path(f"fakedist-confirm{'-rehearsal' if rehearse else ''}.json")
    if target.exists() and not force:
        raise JobError(f"{target} exists", "--force replaces it, -o FILE writes another")
    see_that_it_can_be_written(target)
    went_well = confirming.confirm(
        {name: confirming.PIECES[name] for name in pieces or confirming.PIECES},
        target,
        " ".join(["fakedist confirm", *sys.argv[2:]]),
        say,
        is_rehearsal=rehearse,
        at_once=max(1, (os.cpu_count() or 1) // 2),
        patience=patience,
        jobs=jobs,
    )
    say(f"written: {target}")
    return ExitCode.DONE if went_well else last_line(ExitCode.ERROR, "not every piece went well: see above")


COMMAND = confirm
