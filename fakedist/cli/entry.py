"""The program: its commands, and how errors are printed."""

from __future__ import annotations

import codecs
import errno
import io
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType

import click
from click.shell_completion import get_completion_class

from fakedist import extras
from fakedist._version import __version__
from fakedist.cli.check import check
from fakedist.cli.compare import compare
from fakedist.cli.doctor import doctor
from fakedist.cli.explain import explain
from fakedist.cli.lines import lines
from fakedist.cli.match import match
from fakedist.cli.nsys import nsys
from fakedist.cli.output import (
    CSV,
    HTML,
    MARKDOWN,
    MORE_MEMORY,
    TOO_LITTLE_MEMORY,
    last_line,
    print_error,
    say,
)
from fakedist.cli.profile import profile
from fakedist.cli.report import report
from fakedist.cli.run_list import runs
from fakedist.cli.sweep import sweep
from fakedist.cli.time import time
from fakedist.cli.view import view
from fakedist.docstrings import docstring_of
from fakedist.errors import ExitCode, FakedistError, JobError
from fakedist.launcher.checked_script import ScriptSyntaxError
from fakedist.temporary import remove_left_over

_HANDLER = "fakedist.plain"
_PLAIN = {"µ": "u", "…": "...", "→": "->"}
_LOW_BYTE = range(0xDC80, 0xDD00)  # a byte of a file name that is not text, as Python keeps it


def _plain(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letter = error.object[error.start]
    if ord(letter) in _LOW_BYTE:
        return bytes([ord(letter) - 0xDC00]), error.start + 1
    return _PLAIN.get(letter, "?"), error.start + 1


codecs.register_error(_HANDLER, _plain)


@contextmanager
def plain_where_needed() -> Iterator[None]:
    """Print on stdout and stderr what their encoding has, and ASCII for what it lacks."""
    changed = [(stream, stream.errors) for stream in (sys.stdout, sys.stderr) if isinstance(stream, io.TextIOWrapper)]
    for stream, _ in changed:
        stream.reconfigure(errors=_HANDLER)
    try:
        yield
    finally:
        for stream, errors in changed:
            if not stream.closed:
                stream.reconfigure(errors=errors)


#: The variable by which a shell asks the program for completions; click's convention.
VARIABLE = "_FAKEDIST_COMPLETE"
_SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> int:
    """Print a script that completes commands and options in a shell.

    \b
    bash, in ~/.bashrc:                eval "$(fakedist completion bash)"
    zsh, in ~/.zshrc after compinit:   eval "$(fakedist completion zsh)"
    fish: fakedist completion fish > ~/.config/fish/completions/fakedist.fish
    """  # noqa: D301 - click looks for the character \b
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(ctx.find_root().command, {}, "fakedist", VARIABLE).source())
    return 0


_FULL = (errno.ENOSPC, errno.EDQUOT)
#: What a machine refuses: a read-only file system, too few rights, a limit of size or number, a broken disk.
_REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE)


#: Commands that were removed -> what to type instead.
_REMOVED = {"topology": "fakedist report RUN --section communication"}
#: What is typed for a command of another name -> what to type.
_MEANT = {
    **dict.fromkeys(("run", "torchrun", "python"), "fakedist profile --world-size 1024 --rank 0 train.py"),
    "diff": "fakedist compare A B",
    **{f"{kind}s": f"fakedist profile --{kind} list" for kind in ("gpu", "fabric", "host")},
    **dict.fromkeys(("list", "ls"), "fakedist runs"),
    **dict.fromkeys(("prune", "clean"), "fakedist runs --prune"),
    "show": "fakedist report RUN",
    "open": "fakedist view RUN",
    "help": "fakedist --help",
}


class _Commands(click.Group):
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with what to type for a script, and for a command of another name or that was removed."""
        if args[0] in _REMOVED:
            raise click.UsageError(f"{args[0]} was removed: {_REMOVED[args[0]]}", ctx)
        meant = _MEANT.get(args[0])
        if args[0].endswith(".py"):
            meant = f"fakedist profile --world-size 1024 --rank 0 {shlex.join(args)}"
        elif args[0] not in self.commands and os.path.exists(args[0]):
            meant = f"fakedist report {shlex.join(args)}"
        if meant and args[0] not in self.commands:
            raise JobError(f"no command is called {args[0]!r}", meant)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """As click does; an error of a command's options names the command."""
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            name = ctx.invoked_subcommand or ""
            if error.ctx is None and name in self.commands:
                error.ctx = click.Context(self.commands[name], ctx, name)
            raise


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, message="fakedist %(version)s")
def cli() -> None:
    """Run one rank of a thousand-GPU PyTorch job, unmodified, on one GPU or none.

    See to the byte and to the layer where its memory and its time go.
    """


for _command in (
    profile,
    sweep,
    report,
    view,
    runs,
    lines,
    compare,
    time,
    match,
    explain,
    check,
    nsys,
    doctor,
    completion,
    *(part.COMMAND for part in extras.parts("command")),
):
    cli.add_command(_command)
for _documented in (cli, *cli.commands.values()):
    assert isinstance(_documented.callback, FunctionType)
    _documented.help = _documented.help or docstring_of(_documented.callback)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    remove_left_over()
    with plain_where_needed():
        return exit_code_of(lambda: cli.main(args=argv, prog_name="fakedist", standalone_mode=False))


#: Options that are typed for a format.
_FORMATS = {f"--{form}": f"--format {form}" for form in (HTML, CSV, MARKDOWN)} | {"-f": "--format FORMAT"}


def _usage(context: click.Context, command: str) -> str:
    """A command with what it needs: "fakedist calibrate RUN --from-trace FILE"."""
    arguments = [piece for piece in context.command.collect_usage_pieces(context) if piece != "[OPTIONS]"]
    options = [param for param in context.command.params if isinstance(param, click.Option) and param.required]
    needed = [f"{option.opts[0]} {option.make_metavar(context).strip('[]')}" for option in options]
    return " ".join([command, *arguments, *needed])


def exit_code_of(run: Callable[[], int | None]) -> int:
    """The exit code of what runs. An error is printed."""
    try:
        return run() or 0
    except click.ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # click 8.2 and newer; its message is the help
            click.echo(error.format_message(), err=True)
            return ExitCode.USAGE
        context = error.ctx if isinstance(error, click.UsageError) else None
        command = context.command_path if context else "fakedist"
        hint = f"{command} --help"
        message = " ".join(error.format_message().split())
        if context and (isinstance(error, click.MissingParameter) or "unexpected extra argument" in message):
            hint = f"{_usage(context, command)}; {hint}"
        if isinstance(error, click.NoSuchOption) and (option := _FORMATS.get(error.option_name)):
            hint = f"{option}; {hint}"
        return print_error(message, hint, ExitCode.USAGE)
    except ScriptSyntaxError as error:
        say(str(error), err=True)
        return last_line(ExitCode.ERROR, "the script does not compile; nothing was run")
    except FakedistError as error:
        return print_error(error.message, error.hint, error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return last_line(ExitCode.INTERRUPTED, "interrupted")
    except BrokenPipeError:  # the reader of stdout went away: `fakedist report RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.BROKEN_PIPE
    except MemoryError:
        return print_error(TOO_LITTLE_MEMORY, MORE_MEMORY, ExitCode.ERROR)
    except OSError as error:
        if error.errno not in (*_FULL, *_REFUSED):
            raise
        message = "the disk is full" if error.errno in _FULL else f"a file cannot be written or read: {error.strerror}"
        where = f" ({error.filename})" if error.filename else ""
        return print_error(f"{message}{where}", "make room on the disk, or write elsewhere with -o", ExitCode.ERROR)
