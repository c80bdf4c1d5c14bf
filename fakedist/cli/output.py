"""Destination and format of a command's result: ``--format``, ``--json`` and ``-o FILE``, the same everywhere."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fakedist.rundir.directory import HOME, keep_named
from fakedist.visible import MOST_OF_A_TEXT, visible, visible_lines

if TYPE_CHECKING:
    from rich.console import Console

    from fakedist.report.content.report_blocks import Report

TEXT, JSON, MARKDOWN, HTML, CSV = "text", "json", "markdown", "html", "csv"
#: Lines in a file or a pipe. There, whole lines are worth more than lines that fit a terminal.
PIPED_WIDTH = 160
_Command = TypeVar("_Command", bound=Callable[..., object])


@dataclass(frozen=True)
class Output:
    """Destination and format of a command's result. Without a file it is printed."""

    format: str = TEXT
    file: Path | None = None

    @property
    def folder(self) -> Path | None:
        """The directory that the result goes to; None if it is printed."""
        return None if self.file is None else self.file.parent

    @property
    def prints_text(self) -> bool:
        """True if the result is on the terminal, for people."""
        return self.format == TEXT and self.file is None

    def write(self, report: Report) -> None:
        """Print or write a report in the format that was chosen."""
        if self.format == JSON:
            self.write_object(report.data())
        elif self.format == MARKDOWN:
            from fakedist.report.render.markdown import report_markdown

            self.write_text(report_markdown(report))
        elif self.format == CSV:
            if report.rows is None:
                raise click.UsageError(f"--format {CSV} is for one run, or for a sweep")
            self.write_text(str(report.rows().to_csv(index=False)))
        elif self.format == HTML:
            from fakedist.report.render.html import report_page

            self.write_text(report_page(report))
        else:
            from fakedist.report.render.terminal import render

            self.render(partial(render, report))

    def write_text(self, text: str) -> None:
        """Print a text, or write it into the file and print the file's name."""
        if self.format not in (JSON, HTML):  # JSON escapes control characters itself, and HTML is for a browser
            text = visible_lines(text)
        if self.file is None:
            click.echo(text, nl=not text.endswith("\n"))
            return
        from fakedist.report.writing import replace_text

        self.file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(self.file, text)
        click.echo(visible(str(self.file), MOST_OF_A_TEXT))

    def write_object(self, value: object) -> None:
        """Print or write a result as JSON."""
        self.write_text(json.dumps(value, indent=2) + "\n")

    def render(self, draw: Callable[[Console], None]) -> None:
        """Print tables, or write them into the file without colours."""
        from rich.console import Console

        class PipedConsole(Console):
            """A console that leaves a broken pipe to the program's end. rich's own ends with exit code 1."""

            def on_broken_pipe(self) -> None:
                raise BrokenPipeError

        if self.file is None:
            draw(PipedConsole(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH))
            return
        text = StringIO()
        draw(Console(file=text, width=PIPED_WIDTH))
        self.write_text(text.getvalue())


def _one(ctx: click.Context, param: click.Parameter, value: tuple[object, ...]) -> object:
    """The one value of an option; None if it was not given. Raises UsageError if it was given more than once."""
    if len(value) > 1:
        raise click.UsageError(f"{param.opts[-1]} was given {len(value)} times, and takes one value", ctx)
    return value[0] if value else None


def _named(ctx: click.Context, param: click.Parameter, value: tuple[Path, ...]) -> Path | None:
    """As :func:`_one`, of a directory that is from now on kept."""
    path = _one(ctx, param, value)
    return keep_named(path) if isinstance(path, Path) else None


#: Settings of an option that says where or how a result goes: of two values, neither may be taken in silence.
ONCE: dict[str, Any] = {"multiple": True, "callback": _one}


def format_options(*formats: str) -> Callable[[_Command], _Command]:
    """Add ``--format``, of which a command supports these, and ``--json``."""
    help_text = "Format of the result.  [default: text]"
    form = click.option("--format", "form", type=click.Choice(formats), help=help_text, **ONCE)
    short = click.option("--json", "as_json", is_flag=True, help="Short for --format json.")
    return lambda command: form(short(command))


def output_option(
    name: str, metavar: str, help_text: str, *, required: bool = False, is_file: bool = False
) -> Callable[[_Command], _Command]:
    """Add ``-o METAVAR``, a path that reaches the command as ``name``. A file's path may not be a directory's."""
    kind = click.Path(path_type=Path, dir_okay=not is_file)
    settings = ONCE if is_file else {**ONCE, "callback": _named}
    return click.option(
        "-o", "--output", name, type=kind, metavar=metavar, help=help_text, required=required, **settings
    )


class RunPath(click.Path):
    """A run: its path, or its name alone if it is in ``.fakedist/``."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, which need not exist."""
        in_home = HOME / value
        return super().convert(in_home if not Path(value).exists() and in_home.exists() else value, param, ctx)


def file_option(command: _Command) -> _Command:
    """Add ``-o FILE``."""
    return output_option("file", "FILE", "Write the result into a file.", is_file=True)(command)


def all_rows_option(
    help_text: str = "Show small layers too, and do not fold repeated ones.",
) -> Callable[[_Command], _Command]:
    """Add ``--all-rows``, for the rows that tables leave out."""
    return click.option("--all-rows", is_flag=True, help=help_text)


def force_option(kind: str) -> Callable[[_Command], _Command]:
    """Add ``--force``, without which a command replaces nothing."""
    return click.option("--force", is_flag=True, help=f"Replace an existing {kind}.")


def run_directory_options(command: _Command) -> _Command:
    """Add ``-o DIR`` and ``--force`` of a command that writes a run directory."""
    return output_option("directory", "DIR", "The run directory to write.  [default: a new one in .fakedist/]")(
        force_option("run directory")(command)
    )


def chosen_output(form: str | None, as_json: bool, file: Path | None = None) -> Output:
    """The output that the options ask for. A file is checked before any work begins.

    Raises:
        UsageError: ``--json`` contradicts ``--format``.
        JobError: The file cannot be written.
    """
    if as_json and form not in (None, JSON):
        raise click.UsageError(f"--json and --format {form} contradict each other")
    if file is not None:
        from fakedist.report.writing import see_that_it_can_be_written

        see_that_it_can_be_written(file)
    return Output(JSON if as_json else form or TEXT, file)


def length_options(command: _Command) -> _Command:
    """Give a command ``--full`` and ``--section``, for more than its short report."""
    full = click.option("--full", is_flag=True, help="Print every table.")
    names = click.Choice(("memory", "time", "communication", "findings", "advice", "notes"))
    section = click.option("--section", type=names, help="Print one part of the report, in full.")
    return full(section(command))


def removed_option(flag: str, why: str, *, is_flag: bool = False) -> Callable[[_Command], _Command]:
    """An option that was removed: it is refused, with what to type instead."""

    def refuse(ctx: click.Context, param: click.Parameter, value: object) -> None:
        if value:
            raise click.UsageError(why, ctx)

    return click.option(flag, hidden=True, multiple=not is_flag, is_flag=is_flag, expose_value=False, callback=refuse)
