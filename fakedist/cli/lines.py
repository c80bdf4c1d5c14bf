"""``fakedist lines``."""

from __future__ import annotations

from pathlib import Path

import click

from fakedist.cli.output import (
    JSON,
    TEXT,
    RunPath,
    all_rows_option,
    chosen_output,
    file_option,
    format_options,
    reading,
    run_or_last,
)


@click.command()
@click.argument("run", type=RunPath(), required=False)
@file_option
@format_options(TEXT, JSON)
@all_rows_option("Show every line.")
def lines(run: Path | None, *, file: Path | None, form: str | None, as_json: bool, all_rows: bool) -> int:
    """Show what each line of source holds and launches.

    For each line: its bytes at the peak, and the time of the kernels that it launches in the timed step, those of its
    backward included; --json has every line, for editors. RUN is a run directory or a memory snapshot; without RUN, the
    last run in the current directory is taken. This needs no torch.
    """
    from fakedist.report.content.lines import lines_report
    from fakedist.results.opening import open_run

    output = chosen_output(form, as_json, file)
    run = run_or_last(run, is_single=True)
    with reading(run):
        output.write(lines_report(open_run(run), all_rows=all_rows))
    return 0
