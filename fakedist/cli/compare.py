"""``fakedist compare``."""

from __future__ import annotations

from pathlib import Path

import click

from fakedist.cli.output import HTML, JSON, MARKDOWN, TEXT, all_rows_option, chosen_output, file_option, format_options
from fakedist.cli.say import reading


@click.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@file_option
@format_options(TEXT, JSON, MARKDOWN, HTML)
@all_rows_option("Show small changes too.")
def compare(a: Path, b: Path, *, file: Path | None, form: str | None, as_json: bool, all_rows: bool) -> int:
    """Show what changed from run A to run B, and why.

    A and B are run directories: of two commits, two ranks, two layouts, two GPUs, two versions of torch. Each may also
    be a memory snapshot of torch; the memory is then compared by source line. Markdown fits a comment on a pull
    request, HTML is one page.
    """
    output = chosen_output(form, as_json, file)
    from fakedist.report.compare.change_sheets import comparison_markdown, render_comparison
    from fakedist.report.compare.comparison import compared_object, open_comparison

    with reading(a, b):
        comparison = open_comparison(a, b)
        if output.format == HTML:
            from fakedist.report.compare.comparison_page import comparison_page

            output.write(comparison_page(comparison))
        elif output.format == JSON:
            output.write_object(compared_object(comparison))
        elif output.format == MARKDOWN:
            output.write(comparison_markdown(comparison, all_rows=all_rows))
        else:
            output.render(lambda console: render_comparison(comparison, all_rows=all_rows, console=console))
    return 0
