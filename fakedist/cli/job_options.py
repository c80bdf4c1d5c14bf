"""The job's options as click's, and commands whose ``--help`` has them in groups.

Options with an invalid value, or that make no job, raise JobError.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import click

from fakedist.cli.output import BEFORE_SCRIPT, Output, command_as_typed, own_flags, remark
from fakedist.errors import JobError
from fakedist.launcher.checked_script import find_source
from fakedist.options import Door, Job, JobProgram, make_jobs, options_among, world_from_environment
from fakedist.options.definition import OPTIONS
from fakedist.options.kinds import Option
from fakedist.options.pricing import MICRO_BATCHES, PRICING_OPTIONS, TOKENS_PER_STEP, PricingOptions

_Command = TypeVar("_Command", bound=Callable[..., object])


cold_option = click.option(
    "--cold",
    is_flag=True,
    help="Start every rank in a new interpreter. Otherwise ranks fork from a process that has imported torch.",
)


def executor_options(command: _Command) -> _Command:
    """Give a command ``--on``, ``--jobs`` and ``--cold``.

    They are for :func:`fakedist.launcher.executors.choosing.make_executor`.
    """
    where = click.option(
        "--on",
        default="local",
        show_default=True,
        metavar="PLACE",
        help="Where jobs run: local, ray (the cluster of RAY_ADDRESS, or the one this machine is part of) or "
        "ray://HOST:PORT.",
    )
    how_many = click.option(
        "--jobs",
        "-j",
        type=click.IntRange(min=1),
        metavar="N",
        help="How many jobs to run at once on this machine.  [default: as many as its cores and free memory allow]",
    )
    return where(how_many(cold_option(command)))


_EXECUTION = "Execution"
#: Headings of options that several commands have. Those that neither this nor a command lists are about the output.
_HEADINGS = {
    **{option.name: option.group.value for option in OPTIONS},
    "module": OPTIONS[0].group.value,
    **dict.fromkeys(("on", "jobs", "cold", "memory_limit", "fresh", "dry_run"), _EXECUTION),
}
_NAMES_WIDTH = 22
_SIZES = ("--world-size", "--nnodes")
#: The value of --gpu, --fabric or --host that prints what there is.
_LIST = "list"
_LISTS = ("gpu", "fabric", "host")
#: Programs that start a job's ranks, each of which is what fakedist runs.
_LAUNCHER = re.compile(r"torchrun|python(\d+(\.\d+)?)?")
_LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch")
#: torchrun's options about processes that fakedist does not start: flag, and whether a value follows.
_IGNORED = {
    "--standalone": False,
    "--node-rank": True,
    "--master-addr": True,
    "--master-port": True,
    "--local-addr": True,
    "--rdzv-backend": True,
    "--rdzv-endpoint": True,
    "--rdzv-id": True,
    "--rdzv-conf": True,
    "--max-restarts": True,
    "--monitor-interval": True,
}


class GroupedCommand(click.Command):
    """A command whose ``--help`` has its options in groups.

    Attributes:
        headings: Headings of its own options, by their names.
    """

    headings: ClassVar[Mapping[str, str]] = {}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under their headings."""
        headings = {**_HEADINGS, **self.headings}
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None:
                # Padded to one width, so that the columns of all groups are aligned.
                padded = (record[0].ljust(_NAMES_WIDTH), record[1])
                groups.setdefault(headings.get(str(param.name), "Output"), []).append(padded)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records, col_max=_NAMES_WIDTH)


class ScriptCommand(GroupedCommand):
    """A command whose options end where the script begins.

    What follows the script, or ``-m module``, is the script's own. As for torchrun, options may be written with
    underscores.
    """

    allow_interspersed_args = False

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does, with the script's own arguments set apart."""
        ctx.token_normalize_func = _dashed
        ctx.meta[BEFORE_SCRIPT] = args[: self.end_of_options(args)]
        return super().parse_args(ctx, self._end_options_after_module(ctx, args))

    def _end_options_after_module(self, ctx: click.Context, args: list[str]) -> list[str]:
        position = self.end_of_options(args)
        name = args[position].partition("=")[0] if position < len(args) else ""
        if not _is_module(name):
            return args
        end = position + (2 if name == "-m" else 1)
        if end > len(args):
            raise click.BadOptionUsage(name, "-m needs the name of a module: -m package.train", ctx)
        return [*args[:end], "--", *args[end:]]

    def end_of_options(self, args: Sequence[str]) -> int:
        """The place of what ends the command's own options: the script, ``-m`` or ``--``. The length without one."""
        takes_value = {
            name: isinstance(option, click.Option) and not option.is_flag
            for option in self.params
            for name in option.opts
        }
        position = 0
        while position < len(args) and args[position].startswith("-") and args[position] != "--":
            name, _, joined = args[position].partition("=")
            if _is_module(name):
                break
            position += 2 if takes_value.get(_dashed(name)) and not joined else 1
        return min(position, len(args))


def _is_module(name: str) -> bool:
    return name.startswith("-m") and not name.startswith("--")


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def job_options(
    *, without: Collection[str] = (), rank_help: str = "", rank_default: str = "$RANK"
) -> list[click.Parameter]:
    """The options of a job, ``-m``, and torchrun's options that are ignored.

    Args:
        without: Names of the options that have no effect on the command.
        rank_help: The help of ``--rank`` where it takes more than numbers.
    """
    listed = [option for option in OPTIONS if option.name not in without]
    after_rank = 1 + next(number for number, option in enumerate(listed) if option.name == "rank")
    rank = replace(listed[after_rank - 1], default_text=rank_default)
    listed[after_rank - 1] = replace(rank, help=rank_help) if rank_help else rank
    options: list[click.Parameter] = [as_click(option) for option in listed]
    help_text = "Run a module, as python -m does. Its arguments follow."
    options.insert(after_rank, click.Option(["-m", "module"], metavar="MODULE", help=help_text))
    ignored = [
        click.Option([flag], hidden=True, is_flag=not takes_value, expose_value=False, callback=_note)
        for flag, takes_value in _IGNORED.items()
    ]
    return [*options, *ignored]


def pricing_options(several: Collection[str] = ()) -> list[click.Parameter]:
    """Every option of pricing. Those named in ``several`` may be repeated; their texts are then joined by commas."""
    options = [as_click(option) for option in PRICING_OPTIONS]
    for option in options:
        if option.name in several:
            option.callback = _joined
    return [*options]


def count_options(metavar: str = "") -> list[click.Parameter]:
    """The options that say how much a priced step does, as texts: ``--tokens-per-step`` and ``--micro-batches``."""
    return [as_click(replace(option, metavar=metavar)) for option in (TOKENS_PER_STEP, MICRO_BATCHES)]


def pricing_of(values: Mapping[str, object]) -> tuple[str | None, PricingOptions]:
    """The GPU to price for, and the other settings."""
    stored = given(PRICING_OPTIONS, values)
    gpu = stored.pop("gpu", None)
    if "nccl_env" in stored:
        stored["nccl_env"] = dict(stored["nccl_env"])
    return gpu, cast(PricingOptions, stored)


def counts_of(values: Mapping[str, object]) -> dict[str, int]:
    """Tokens and micro-batches of a step, as far as they were given."""
    return given((TOKENS_PER_STEP, MICRO_BATCHES), values)


def given(options: Sequence[Option], values: Mapping[str, object]) -> dict[str, Any]:
    """The values of the options that were given, by name, as their kinds have them."""
    return {
        option.name: option.read(_plain(option, values[option.name]), Door.COMMAND_LINE)
        for option in options
        if values[option.name] not in (None, ())
    }


def as_click(option: Option) -> click.Option:
    """An option of ours as click's."""
    names = "/".join(filter(None, (option.flags[0], option.off_flag)))
    is_once = not option.kind.is_repeatable and not option.kind.is_switch
    return click.Option(
        [names, *option.flags[1:], option.name],
        type=None if option.kind.is_switch else str,
        default=None,
        metavar=option.metavar or option.kind.metavar or None,
        help=option.help + _default(option),
        multiple=not option.kind.is_switch,
        is_flag=option.kind.is_switch,
        callback=_only if is_once else None,
    )


def _only(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> str | None:
    """The text of an option that counts once; JobError if it was given twice, and not the same."""
    if len(set(texts)) > 1:
        flag = max(param.opts, key=len)
        hint = f"give one of them: {flag} {shlex.quote(texts[-1])}"
        raise JobError(f"{flag} was given {len(texts)} times: {', '.join(texts)}", hint)
    if texts and texts[-1] == _LIST and param.name in _LISTS:
        _print_list(param.name)
        ctx.exit()
    return texts[-1] if texts else None


def _joined(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> str | None:
    return _only(ctx, param, (",".join(dict.fromkeys(texts)),) if texts else ())


def _print_list(name: str) -> None:
    """Print every GPU model, fabric or host that fakedist knows."""
    from fakedist.report.content.gpu_models import fabric_list, gpu_list, host_list
    from fakedist.report.render.terminal import print_sheets

    sheet = {"gpu": gpu_list, "fabric": fabric_list, "host": host_list}[name]()
    Output().render(lambda console: print_sheets(console, [sheet]))


def _default(option: Option) -> str:
    """The default, unless it is simply off or empty."""
    texts = {
        "world_size": "$WORLD_SIZE",
        "device": "cuda if this machine has a GPU, otherwise virtual",
    }
    text = texts.get(option.name) or option.default_text
    if option.kind.is_switch:
        text = "on" if option.default else ""
    elif not text and option.field and option.default not in (None, ()):
        (text,) = option.kind.texts(option.default)
    return f"  [default: {text}]" if text else ""


def _note(ctx: click.Context, param: click.Parameter, value: object) -> None:
    if value not in (None, False):
        ctx.meta.setdefault(__name__, []).append(param.opts[0])


def ignored(ctx: click.Context) -> list[str]:
    """The options of torchrun's that were given and have no effect."""
    return list(ctx.meta.get(__name__, []))


def jobs_of(arguments: tuple[str, ...], module: str | None, values: Mapping[str, object]) -> tuple[Job, ...]:
    """The job of every rank that the command line names; rank 0 if it and the environment name none.

    Options that ``values`` lacks keep their defaults.
    """
    if module is None and not arguments:
        raise JobError("no script was given", "fakedist profile [options] SCRIPT [ARGS]...")
    plain = {option.name: _plain(option, values.get(option.name)) for option in OPTIONS if option.name != "rank"}
    world_size, rank = world_from_environment(os.environ)
    if plain["world_size"] is None and plain["nnodes"] is None:
        plain["world_size"] = world_size
    program = program_of(arguments, module)
    if plain["world_size"] is None and plain["nnodes"] is None:
        _refuse_world_after_script(program)
        find_source(program.target, program.is_module)  # a wrong path is the first error
    plain["rank"] = _ranks(values.get("rank"), make_jobs(program, plain, Door.COMMAND_LINE)[0].world_size)
    if plain["rank"] is None:
        plain["rank"] = rank
    if plain["device"] is None:
        from fakedist.launcher.machine import count_real_gpus

        plain["device"] = "cuda" if count_real_gpus() else "virtual"
    jobs = make_jobs(program, plain, Door.COMMAND_LINE)
    if plain["rank"] is None:
        taken = any(word.partition("=")[0] == "--rank" for word in program.arguments)
        remark("no --rank was given" + (" before the script, which gets its own" if taken else "") + ": rank 0 runs")
    if len(jobs) > 1 and jobs[0].with_peers:
        raise JobError(
            "--with-peers is for one rank: it finds the others by itself", f"--rank {jobs[-1].rank} --with-peers"
        )
    return jobs


def _ranks(given: object, world_size: int) -> object:
    """The plain value of ``--rank``; JobError for the last rank in other words, with its number."""
    option = next(option for option in OPTIONS if option.name == "rank")
    if given in (("last",), ("-1",)):
        raise JobError(
            f"--rank takes numbers, and the last of {world_size:,} ranks is {world_size - 1}",
            f"--rank {world_size - 1}",
        )
    return _plain(option, given)


def _refuse_world_after_script(program: JobProgram) -> None:
    """Raise JobError if the number of ranks follows the script; the hint has all of fakedist's options before it."""
    flags = {flag: takes for flag, takes in own_flags().items() if flag.startswith("--")}
    own, others = options_among(program.arguments, flags)
    sizes = [words[0] for words in own if words[0].partition("=")[0].replace("_", "-") in _SIZES]
    if sizes:
        command = command_as_typed([*(["-m"] if program.is_module else []), program.target, *others], own)
        raise JobError(f"{sizes[0]} follows the script, so it is the script's", f"write it before: {command}")


def _refuse_launcher(arguments: Sequence[str]) -> None:
    """Raise JobError if the program is torchrun or python; the hint is the command without it."""
    name = Path(arguments[0]).name
    rest = list(arguments[1:])
    if not _LAUNCHER.fullmatch(name):
        return
    while rest and name != "torchrun" and rest[0].startswith("-") and rest[0] != "-m":
        del rest[: 2 if rest[0] in ("-X", "-W") else 1]
    if rest[:1] == ["-m"] and rest[1:2] and rest[1] in _LAUNCHER_MODULES:
        del rest[:2]
    raise _starts_ranks(name, rest)


def _starts_ranks(name: str, rest: Sequence[str]) -> JobError:
    return JobError(
        f"{name} starts ranks, and fakedist runs one in its place", f"leave it out: {command_as_typed(rest)}"
    )


def program_of(arguments: tuple[str, ...], module: str | None) -> JobProgram:
    """The script, or the module, with its arguments; JobError if a launcher's name is in its place."""
    if module in _LAUNCHER_MODULES:
        raise _starts_ranks(str(module), arguments)
    if module is None:
        _refuse_launcher(arguments)
        return JobProgram(arguments[0], arguments[1:])
    return JobProgram(module, arguments, is_module=True)


def _plain(option: Option, value: object) -> object:
    """The plain value of what click found: None, true or false, one text or several."""
    if isinstance(value, str):
        return option.read_texts((value,))
    if isinstance(value, tuple):
        return option.read_texts(value) if value else None
    return value
