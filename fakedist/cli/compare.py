"""``fakedist compare``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from fakedist.cli.output import (
    HTML,
    JSON,
    MARKDOWN,
    TEXT,
    Output,
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
    be a memory snapshot of torch: the memory is then compared by source line, and allocation by allocation. Or one is
    a trace of torch.profiler or a report of Nsight Systems: where is the real step slower than the run's? More than two
    runs stand side by side, each with its change from A. Markdown fits a comment on a pull request, HTML is one page.
    """
    if len(runs) < 2:
        raise click.UsageError("one run was given, and it takes two or more to compare")
    output = chosen_output(form, as_json, file)
    with reading(*runs):
        if len(runs) > 2:
            _print_several(runs, output, all_rows=all_rows)
        else:
            _print_two(runs[0], runs[1], output, all_rows=all_rows)
    return 0


def _print_two(a: Path, b: Path, output: Output, *, all_rows: bool) -> None:
    from fakedist.report.compare.change_sheets import comparison_markdown, render_comparison
    from fakedist.report.compare.comparison import compared_object, open_comparison
    from fakedist.report.content.real_step import real_step_report
    from fakedist.results.opening import open_run
    from fakedist.traces.trace_files import kind_of

    if kind_of(a) != "other" or kind_of(b) != "other":
        real, run = (a, b) if kind_of(a) != "other" else (b, a)
        output.write(real_step_report(open_run(real), open_run(run), all_rows=all_rows))
        return
    comparison = open_comparison(a, b)
    if output.format == HTML:
        from fakedist.report.compare.comparison_page import comparison_page

        output.write_text(comparison_page(comparison))
    elif output.format == JSON:
        output.write_object(compared_object(comparison))
    elif output.format == MARKDOWN:
        output.write_text(comparison_markdown(comparison, all_rows=all_rows))
    else:
        output.render(lambda console: render_comparison(comparison, all_rows=all_rows, console=console))


def _print_several(runs: Sequence[Path], output: Output, *, all_rows: bool) -> None:
    from fakedist.report.compare import several_runs

    several = several_runs.SeveralRuns(runs)
    if output.format == HTML:
        output.write_text(several_runs.several_page(several))
    elif output.format == JSON:
        output.write_object(several_runs.several_object(several))
    elif output.format == MARKDOWN:
        output.write_text(several_runs.several_markdown(several, all_rows=all_rows))
    else:
        output.render(lambda console: several_runs.render_several(several, all_rows=all_rows, console=console))
