"""Messages that commands share: the result of a run, errors, damaged files, and the last line on stderr."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fakedist.errors import TRACEBACK, ExitCode, FakedistError, JobError, RunDirectoryError, described
from fakedist.options import Job, options_among, profile_command
from fakedist.options.definition import OPTIONS
from fakedist.rundir.directory import (
    HOME,
    MANIFEST_NAME,
    TAPE_NAME,
    keep_named,
    last_run,
    last_written,
    rank_directories,
)
from fakedist.rundir.outcome import Ending, Outcome
from fakedist.visible import MOST_OF_A_TEXT, shortened, visible, visible_lines

if TYPE_CHECKING:
    from rich.console import Console

    from fakedist.launcher.ranks import RankRun
    from fakedist.report.content.report_blocks import Report
    from fakedist.results.run import Run
    from fakedist.rundir.tape import Guess


TEXT, JSON, MARKDOWN, HTML, CSV = "text", "json", "markdown", "html", "csv"
#: Endings of files that name a format.
_ENDINGS = {".json": JSON, ".md": MARKDOWN, ".html": HTML, ".csv": CSV}
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
    """Add ``--format``, of which a command supports these, ``--json``, and ``--html`` where it makes pages."""
    help_text = "Format of the result.  [default: text]"
    form = click.option("--format", "form", type=click.Choice(formats), help=help_text, **ONCE)
    short = click.option("--json", "as_json", is_flag=True, help="Short for --format json.")
    page = click.option("--html", is_flag=True, expose_value=False, callback=_page, help="Short for --format html.")
    return lambda command: form(short(page(command) if HTML in formats else command))


def _page(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    ctx.meta[HTML] = value


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
    """The output that the options ask for: without one, what the file's ending names, if the command has that format.

    A file is checked before any work begins.

    Raises:
        UsageError: ``--json`` or ``--html`` contradicts ``--format``.
        JobError: The file cannot be written.
    """
    context = click.get_current_context(silent=True)
    as_html = context is not None and context.meta.get(HTML, False)
    if as_html and as_json:
        raise click.UsageError("--json and --html contradict each other")
    short = JSON if as_json else HTML if as_html else form
    if form not in (None, short):
        raise click.UsageError(f"--{short} and --format {form} contradict each other")
    form = short
    if file is not None:
        from fakedist.report.writing import see_that_it_can_be_written

        see_that_it_can_be_written(file)
        choices = [param.type for param in context.command.params if param.name == "form"] if context else []
        named = _ENDINGS.get(file.suffix)
        if any(isinstance(kind, click.Choice) and named in kind.choices for kind in choices):
            form = form or named
    return Output(form or TEXT, file)


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


#: What is said of a machine, or a limit, that a long recording does not fit.
TOO_LITTLE_MEMORY = "there is too little memory"
MORE_MEMORY = "a recording takes up to six times the size of its journal.bin: report it on a machine with more memory"


def is_sweep(path: Path) -> bool:
    """Whether a path is a sweep's directory."""
    from fakedist.sweep import sweep_directory

    return sweep_directory.is_sweep(path)


def run_or_last(run: Path | None, *, is_single: bool = False) -> Path:
    """The run that was given; without one the last of this directory, which is said.

    It may be a directory of several ranks' runs or of a sweep, unless a single one is asked for.
    """
    if run is None:
        run = last_run(Path()) if is_single else _last_of_any_kind()
        remark(f"the last run here: {run}")
    return run


def _last_of_any_kind() -> Path:
    from fakedist.sweep.sweep_directory import ABOUT_NAME, JOURNAL_NAME

    run = last_written(Path(), MANIFEST_NAME)
    sweep = last_written(Path(), ABOUT_NAME, JOURNAL_NAME)
    if sweep is not None and (run is None or sweep.stat().st_mtime_ns > run.stat().st_mtime_ns):
        return sweep.parent
    last = last_run(Path())
    ranks = [] if last.parent == Path() else rank_directories(last.parent)
    return last.parent if len(ranks) > 1 and last in ranks else last


def report_of(path: Path | Run, folder: Path | None, **choices: Any) -> Report:
    """The report of a run, of a directory of several ranks' runs or of a sweep's directory.

    ``folder`` is the directory that a page goes to, if it goes to one: the page links to the files below it.
    ``choices`` are those of :func:`fakedist.report.content.run.run_report`.
    """
    if isinstance(path, Path) and is_sweep(path):
        from fakedist.sweep.sheets import sweep_report
        from fakedist.sweep.sweep_directory import open_sweep

        return sweep_report(open_sweep(path), folder=folder)
    if isinstance(path, Path) and rank_directories(path):
        from fakedist.report.content.job import runs_report
        from fakedist.results.job_time import open_job_runs

        return runs_report(open_job_runs(path), folder=folder)
    from fakedist.report.content.run import run_report

    return run_report(path, folder=folder, **choices)


def page_of(path: Path, folder: Path | None, *, is_served: bool = False) -> str:
    """The page of :func:`report_of`. One that ``is_served`` links to other pages alone: no other file is served."""
    from fakedist.report.render.html import report_page

    is_run = not is_sweep(path) and not rank_directories(path)
    return report_page(report_of(path, None if is_served and is_run else folder))


#: The addresses of ranks' pages on the pages of a job and of a sweep, relative to them.
_LINKED = re.compile(r"(?:runs/[0-9a-f]+/)?rank\d+/report\.html")


def linked_page(folder: Path, address: str) -> str | None:
    """The page of a rank that the page of a job or of a sweep links to, made anew; None if there is no such run."""
    run = (folder / address).parent
    if not _LINKED.fullmatch(address) or not (run / MANIFEST_NAME).is_file():
        return None
    if run.resolve() != folder.resolve() / run.relative_to(folder):
        return None  # a link leads elsewhere
    try:
        with reading(run):
            return page_of(run, None)
    except (FakedistError, OSError):
        return None


@contextmanager
def reading(*paths: Path) -> Iterator[None]:
    """Name these files in the error if what they hold cannot be shown.

    Their values are checked where they are read. What contradicts itself only later ends here: figures that do not
    belong together, for example.

    Raises:
        RunDirectoryError: Anything failed but for what has its own message, and a full disk.
    """
    try:
        yield
    except RunDirectoryError as error:
        if any(path.name in error.message for path in paths):
            raise
        raise RunDirectoryError(f"{' or '.join(map(str, paths))}: {error.message}", error.hint) from error
    except (FakedistError, OSError, click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except MemoryError as error:
        names = " or ".join(map(str, paths))
        raise RunDirectoryError(f"{names} cannot be shown: {TOO_LITTLE_MEMORY}", MORE_MEMORY) from error
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        names = " or ".join(map(str, paths))
        raise RunDirectoryError(
            f"{names} cannot be shown: {described(error)}",
            f"it is damaged, or this is a bug in fakedist: {TRACEBACK}=1 shows more",
        ) from error


#: Sections that a file of a real GPU may lack: attributes of a run, and what each has.
_PARTS = {"memory": "record of memory", "time": "timed step"}
#: What ``--format csv`` shows unless ``--table`` names another table.
DEFAULT_TABLE = "layers"
_MOST_OF_A_LINE = 2_000


def print_report(
    run_directory: Path | Run,
    output: Output,
    *,
    all_layers: bool,
    table: str = DEFAULT_TABLE,
    full: bool = False,
    section: str | None = None,
) -> None:
    """Print or write the result of a run: on a terminal the short report, unless more of it is asked for."""
    if section == "communication":
        from fakedist.report.content.comparison import collectives_report
        from fakedist.report.content.topology import topology_report
        from fakedist.results.opening import open_run

        run = open_run(run_directory)
        output.write((collectives_report if run.manifest.job is None else topology_report)(run))
        return
    if section in _PARTS:
        from fakedist.results.opening import open_run

        run_directory = open_run(run_directory)
        if getattr(run_directory, section) is None:
            hint = f"fakedist report {shlex.quote(str(run_directory.path))} --full   shows what it has"
            raise JobError(f"{run_directory.path} has no {_PARTS[section]}", hint)
    choices = {"all_layers": all_layers, "section": section or "", "table": table, "is_full": full}
    output.write(report_of(run_directory, output.folder, **choices))


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
    return "\n".join(shortened(line, _MOST_OF_A_LINE) for line in text.split("\n"))


_MAX_GUESSES = 3
#: What Python says of ``from . import x`` in a script.
_RELATIVE = "attempted relative import with no known parent package"


def say_ending(ending: Ending, job: Job, run_directory: Path) -> int:
    """The last line on stderr says whose exit code it is; nothing is said of a run that simply ended."""
    if not ending.code:
        return 0
    _say_what_may_have_failed_it(ending, job, run_directory)
    if _RELATIVE in ending.message and not job.is_module:
        say(f"  a script inside a package runs as a module: {_as_module(job)}", err=True)
    if (ending.outcome, ending.code) == (Outcome.EXIT, ExitCode.USAGE) or ending.outcome is Outcome.EXCEPTION:
        _say_what_follows_the_script(ending, job)
    return last_line(ending.code, _meaning(ending))


def _meaning(ending: Ending) -> str:
    return {
        Outcome.OUT_OF_MEMORY: "the rank does not fit the GPU",
        Outcome.TIMEOUT: ending.message or "the time limit given with --timeout was reached",
        Outcome.KILLED: f"the script was killed {ending.message}",
        Outcome.INTERRUPTED: f"the script was interrupted ({ending.message})",
        Outcome.EXCEPTION: f"the script raised {ending.message}",
        Outcome.FAULT: f"fakedist failed, not the script: {ending.message}",
    }.get(ending.outcome, "the script's own exit code")


#: The key of a context's arguments before the script.
BEFORE_SCRIPT = f"{__name__}.before"
_NEVER_MOVED = ("module", "help")


def own_flags() -> dict[str, bool]:
    """The flags of the running command, and whether a value follows; without one, those of a job's options."""
    context = click.get_current_context(silent=True)
    if context is None:
        return {
            flag: not option.kind.is_switch for option in OPTIONS for flag in (*option.flags, option.off_flag) if flag
        }
    return {
        flag: not option.is_flag
        for option in context.command.params
        if isinstance(option, click.Option) and option.name not in _NEVER_MOVED
        for flag in (*option.opts, *option.secondary_opts)
    }


def command_as_typed(rest: Sequence[str], own: Sequence[Sequence[str]] = ()) -> str:
    """The running command with these options before the script, in place of the same ones typed there, and the rest."""
    context = click.get_current_context(silent=True)
    if context is None:
        return shlex.join(["fakedist", "profile", *(word for words in own for word in words), *rest])
    options = [option for option in context.command.params if isinstance(option, click.Option)]
    name_of = {flag: option.name for option in options for flag in (*option.opts, *option.secondary_opts)}
    typed, others = options_among(context.meta.get(BEFORE_SCRIPT, []), own_flags())
    given = {name_of[_flag(words)] for words in own}
    kept = [words for words in typed if name_of[_flag(words)] not in given]
    words = [word for option in (*kept, *own) for word in option]
    return shlex.join([*context.command_path.split(), *others, *words, *rest])


def _flag(words: Sequence[str]) -> str:
    return words[0].partition("=")[0].replace("_", "-")


def _say_what_follows_the_script(ending: Ending, job: Job) -> None:
    """Name fakedist's own options among the arguments of a script that does not know them.

    They are those that its error names. Where it is not known, any long option may be.
    """
    found, _ = options_among(job.arguments, own_flags())
    if ending.message:
        refused = set(_WORD.findall(ending.message)) if _UNKNOWN.search(ending.message) else set()
        own = [words for words in found if words[0].partition("=")[0] in refused]
    else:
        own = [words for words in found if words[0].startswith("--")]
    if not own:
        return
    others = list(job.arguments)
    for words in own:
        at = next(at for at in range(len(others)) if others[at : at + len(words)] == words)
        del others[at : at + len(words)]
    command = command_as_typed([*(["-m"] if job.is_module else []), job.target, *others], own)
    say(f"  {own[0][0].partition('=')[0]} follows the script, so the script got it; as fakedist's: {command}", err=True)


#: What argument parsers say of an option that they do not know.
_UNKNOWN = re.compile(r"unrecogni[sz]ed|no such option|not used|unknown|unexpected", re.IGNORECASE)
_WORD = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")


def fault_hint(run_directory: Path) -> str:
    """The line that follows an error of fakedist's own."""
    return f"this is a bug in fakedist: please report it with the traceback above and {run_directory / MANIFEST_NAME}"


def _as_module(job: Job) -> str:
    """The command that runs the job's script as a module, and the directory to run it from."""
    path = Path(job.target).absolute()
    names = [path.stem]
    folder = path.parent
    while (folder / "__init__.py").exists():
        names.insert(0, folder.name)
        folder = folder.parent
    module = dataclasses.replace(job, target=".".join(names), is_module=True)
    where = f"cd {shlex.quote(str(folder))} && " if folder != Path.cwd() else ""
    return where + profile_command(module)


def say_first_failure(runs: Sequence[RankRun], job: Job) -> int:
    """The last line on stderr names the first of several ranks that did not end well, and how."""
    failed = next((run for run in runs if run.ending.code), None)
    if failed is None or not failed.ending.code:
        return 0
    if failed.run_directory is not None:
        one = dataclasses.replace(job, rank=failed.rank)
        _say_what_may_have_failed_it(failed.ending, one, failed.run_directory)
    return last_line(failed.ending.code, f"rank {failed.rank}: {_meaning(failed.ending)}")


def _say_what_may_have_failed_it(ending: Ending, job: Job, run_directory: Path) -> None:
    """Name the guesses that a failed script had gone on with, what it did not find, and what to type."""
    from fakedist.rundir.tape import Tape

    if ending.outcome is Outcome.FAULT:
        say(f"fakedist: {fault_hint(run_directory)}", err=True)
    if not ending.failed or not (run_directory / TAPE_NAME).exists():
        return
    tape = Tape(run_directory, job.rank)
    guesses, lost = tape.guesses(), tape.lost()
    for line in _guess_lines(guesses, job.rank):
        say(line, err=True)
    if lost:
        remark(lost.text)
    if tape.awaited() is not None:
        return  # its error has said what to type
    source = max(0, guesses[0].awaited.source) if guesses else 0
    if source != job.rank and (guesses or (lost and lost.may_be_written)):
        alone = dataclasses.replace(job, with_peers=False)
        say(f"  run rank {source} first: {profile_command(alone, (source, job.rank))}", err=True)
    if guesses and not job.with_peers:
        peers = profile_command(dataclasses.replace(job, with_peers=True))
        say(f"  or run this rank and every rank it needs: {peers}", err=True)


def _guess_lines(guesses: Sequence[Guess], rank: int) -> Iterator[str]:
    if guesses:
        calls = "a call" if len(guesses) == 1 else f"{len(guesses):,} calls"
        yield f"fakedist: rank {rank} continued with a guess in {calls}, which may be why it failed:"
    for guess in guesses[:_MAX_GUESSES]:
        whom = "any rank" if guess.awaited.source < 0 else f"rank {guess.awaited.source}"
        at = f" at {guess.line}" if guess.line else ""
        yield f"  {guess.called} from {whom}{at}: {guess.held} was used in place of that rank's"
    if len(guesses) > _MAX_GUESSES:
        yield f"  ... and {len(guesses) - _MAX_GUESSES:,} more"
