"""``fakedist report``."""

from __future__ import annotations

from pathlib import Path

import click

from fakedist.cli.output import (
    CSV,
    HTML,
    JSON,
    MARKDOWN,
    TEXT,
    Output,
    all_rows_option,
    chosen_output,
    file_option,
    format_options,
    length_options,
)
from fakedist.cli.say import DEFAULT_TABLE, print_report, reading, run_or_last
from fakedist.rundir.directory import rank_directories


@click.command()
@click.argument("run", type=click.Path(path_type=Path), required=False)
@file_option
@format_options(TEXT, JSON, MARKDOWN, HTML, CSV)
@click.option("--table", metavar="NAME", help=f"The table for --format csv.  [default: {DEFAULT_TABLE}]")
@all_rows_option()
@length_options
def report(
    run: Path | None,
    *,
    file: Path | None,
    form: str | None,
    as_json: bool,
    table: str | None,
    all_rows: bool,
    full: bool,
    section: str | None,
) -> int:
    """Print the report of a finished run.

    RUN is a run directory, or a file that torch.cuda.memory._dump_snapshot() wrote. It may also be a directory of
    several ranks' runs, or a sweep's. Without RUN, the last of these in the current directory is taken. Markdown fits a
    comment on a pull request, HTML is one page, CSV is one table. This needs no torch.
    """
    output = chosen_output(form, as_json, file)
    if table is not None and output.format != CSV:
        raise click.UsageError("--table is for --format csv")
    run = run_or_last(run, is_single=bool(table or all_rows or full or section))
    is_one = not (_is_sweep(run) or rank_directories(run))
    if not is_one and (table or all_rows or full or section):
        raise click.UsageError("--table, --all-rows, --full and --section are for one run")
    with reading(run):
        if not is_one and output.format != HTML:
            (_print_sweep if _is_sweep(run) else _print_ranks)(run, output)
            return 0
        print_report(run, output, all_layers=all_rows, table=table or DEFAULT_TABLE, full=full, section=section)
    return 0


def _is_sweep(path: Path) -> bool:
    from fakedist.sweep.sweep_directory import is_sweep

    return is_sweep(path)


def _print_sweep(path: Path, output: Output) -> None:
    from fakedist.sweep.opened import open_sweep
    from fakedist.sweep.sheets import render_sweep, sweep_markdown, sweep_object

    sweep = open_sweep(path)
    if output.format == JSON:
        output.write_object(sweep_object(sweep))
    elif output.format == MARKDOWN:
        output.write_text(sweep_markdown(sweep))
    elif output.format == CSV:
        output.write_text(str(sweep.frame().to_csv(index=False)))
    else:
        output.render(lambda console: render_sweep(sweep, console))


def _print_ranks(path: Path, output: Output) -> None:
    from fakedist.report.content.job import runs_report
    from fakedist.results.job_time import open_job_runs

    if output.format == CSV:
        raise click.UsageError(f"--format {CSV} is for one run, or for a sweep")
    output.write(runs_report(open_job_runs(path), folder=output.folder))
