"""What commands print alike: the tables of a run, an error, the last line on stderr."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

PIPED_WIDTH = 160


def print_report(run_directory: Path, as_json: bool, all_layers: bool) -> None:
    """Print the tables of a run, or its one JSON object."""
    if as_json:
        from fakedist.report.text.json_object import summary_object

        click.echo(json.dumps(summary_object(run_directory, all_layers=all_layers), indent=2))
        return
    from fakedist.report.text.terminal import render

    render(run_directory, all_layers=all_layers, console=console())


def console() -> Console:
    """Where tables are printed; into a file or a pipe, whole lines are worth more than lines that fit a terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH)


def remark(text: str) -> None:
    """Say on stderr what goes on meanwhile."""
    click.echo(f"fakedist: {text}", err=True)


def last_line(code: int, meaning: str) -> int:
    """Say on stderr what the exit code means, and give it back."""
    click.echo(f"fakedist: exit {code}: {meaning}", err=True)
    return code


def print_error(message: str, hint: str, code: int) -> int:
    """Say what happened and what to type next, and give the exit code back."""
    click.echo(f"fakedist: error: {message}", err=True)
    if hint:
        click.echo(f"  {hint}", err=True)
    return code
