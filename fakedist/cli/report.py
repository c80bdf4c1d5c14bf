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
    all_rows_option,
    chosen_output,
    file_option,
    format_options,
    length_options,
)
from fakedist.cli.say import DEFAULT_TABLE, print_report, reading, run_or_last


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

    RUN is a run directory, or a file that torch.cuda.memory._dump_snapshot() wrote; without RUN, the last run in the
    current directory is taken. Markdown fits a comment on a pull request, HTML is one page, CSV is one table. This
    needs no torch.
    """
    output = chosen_output(form, as_json, file)
    if table is not None and output.format != CSV:
        raise click.UsageError("--table is for --format csv")
    run = run_or_last(run)
    with reading(run):
        print_report(run, output, all_layers=all_rows, table=table or DEFAULT_TABLE, full=full, section=section)
    return 0
