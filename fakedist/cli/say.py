"""What commands print in the same way: the result of a run, an error, the last line on stderr."""

from __future__ import annotations

from pathlib import Path

import click

from fakedist.cli.output import CSV, HTML, JSON, MARKDOWN, Output
from fakedist.visible import shortened, visible_lines

#: What ``--format csv`` shows unless ``--table`` names another table.
DEFAULT_TABLE = "layers"
_MOST_OF_A_LINE = 2_000


def print_report(run_directory: Path, output: Output, *, all_layers: bool, table: str = DEFAULT_TABLE) -> None:
    """Print or write the result of a run.

    Args:
        run_directory: The run directory.
        output: Where it goes, and in which format.
        all_layers: Whether repeated layers stay apart.
        table: The table that CSV shows.
    """
    if output.format == JSON:
        from fakedist.report.text.json_object import summary_object

        output.write_object(summary_object(run_directory, all_layers=all_layers))
    elif output.format == MARKDOWN:
        from fakedist.report.text.run_markdown import run_markdown
        from fakedist.results.opening import open_run

        output.write(run_markdown(open_run(run_directory), all_layers=all_layers))
    elif output.format == CSV:
        from fakedist.report.text.csv_table import table_csv
        from fakedist.results.opening import open_run

        output.write(table_csv(open_run(run_directory), table, all_layers=all_layers))
    elif output.format == HTML:
        from fakedist.report.page.run_page import page
        from fakedist.results.opening import open_run

        output.write(page(open_run(run_directory), None if output.file is None else output.file.parent))
    else:
        from fakedist.report.text.terminal import render

        output.render(lambda console: render(run_directory, all_layers=all_layers, console=console))


def say(text: str, *, err: bool = False) -> None:
    """Print lines, safe for the terminal whatever file their words are from."""
    click.echo(visible_lines(text), err=err)


def remark(text: str) -> None:
    """Print a remark on stderr while the command continues."""
    say(f"fakedist: {text}", err=True)


def last_line(code: int, meaning: str) -> int:
    """Print on stderr what the exit code means, and return it."""
    say(f"fakedist: exit {code}: {meaning}", err=True)
    return code


def print_error(message: str, hint: str, code: int) -> int:
    """Print what happened and what to type next, and return the exit code."""
    say(f"fakedist: error: {_shortened_lines(message)}", err=True)
    if hint:
        say(f"  {_shortened_lines(hint)}", err=True)
    return code


def _shortened_lines(text: str) -> str:
    """Lines of which none is too long to read, whatever a file has for a number or a name."""
    return "\n".join(shortened(line, _MOST_OF_A_LINE) for line in text.split("\n"))
