"""``fakedist compare``."""

from __future__ import annotations

from pathlib import Path

import click

from fakedist.cli.output import (
    HTML,
    JSON,
    MARKDOWN,
    TEXT,
    all_rows_option,
    chosen_output,
    file_option,
    format_options,
)
from fakedist.cli.say import reading


@click.command()
@click.argument("runs", metavar="A B [C]...", nargs=-1, required=True, type=click.Path(path_type=Path))
@file_option
@format_options(TEXT, JSON, MARKDOWN, HTML)
@all_rows_option("Show small changes too.")
def compare(runs: tuple[Path, ...], *, file: Path | None, form: str | None, as_json: bool, all_rows: bool) -> int:
    """Show what changed from run A to run B, and why.

    A and B are run directories: of two commits, two ranks, two layouts, two GPUs, two versions of torch. Each may also
    be a memory snapshot of torch; the memory is then compared by source line. More than two runs stand side by side,
    each with its change from A. Markdown fits a comment on a pull request, HTML is one page.
    """
    if len(runs) < 2:
        raise click.UsageError("one run was given, and it takes two or more to compare")
    from fakedist.report.content.comparison import comparison_report, open_compared

    output = chosen_output(form, as_json, file)
    with reading(*runs):
        output.write(comparison_report(open_compared(runs), all_rows=all_rows))
    return 0
