"""``fakedist compare``."""

from __future__ import annotations

from pathlib import Path

import click

from fakedist.cli.output import (
    HTML,
    JSON,
    MARKDOWN,
    TEXT,
    RunPath,
    all_rows_option,
    chosen_output,
    file_option,
    format_options,
    reading,
)
from fakedist.errors import JobError
from fakedist.rundir.notes import counted


@click.command()
@click.argument("runs", metavar="A B [C]...", nargs=-1, type=RunPath())
@file_option
@format_options(TEXT, JSON, MARKDOWN, HTML)
@all_rows_option("Show small changes too.")
def compare(runs: tuple[Path, ...], *, file: Path | None, form: str | None, as_json: bool, all_rows: bool) -> int:
    """Show what changed from run A to run B, and why.

    A and B are run directories: of two commits, two ranks, two layouts, two GPUs, two versions of torch. Each may also
    be a memory snapshot of torch: the memory is then compared by source line, and allocation by allocation. Or one is
    a trace of torch.profiler or a report of Nsight Systems: where is the real step slower than the run's? Of two such
    files: where is B's step slower than A's? More than two runs stand side by side, each with its change from A.
    Markdown fits a comment on a pull request, HTML is one page.
    """
    if len(runs) < 2:
        given = f"{counted(len(runs), 'run')} given, and it takes two or more to compare"
        raise JobError(given, "fakedist compare A B; fakedist runs lists the runs here")
    from fakedist.report.content.comparison import comparison_report, real_step_report
    from fakedist.results.comparison import open_comparison
    from fakedist.results.opening import open_run
    from fakedist.traces.foreign_files import kind_of

    output = chosen_output(form, as_json, file)
    with reading(*runs):
        real = [path for path in runs if kind_of(path) != "other"]
        if real and len(runs) == 2:
            against = runs[0] if len(real) == 2 else next(path for path in runs if path != real[0])
            output.write(real_step_report(open_run(real[-1]), open_run(against), all_rows=all_rows))
        else:
            output.write(comparison_report(open_comparison(*runs), all_rows=all_rows))
    return 0
