"""A sweep as asked for, read from a file or a command line: its space, its command, and its points' identities.

Reading a file, an option or a value that is missing or not valid raises SweepError.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Literal

from fakedist import extras
from fakedist._version import __version__
from fakedist.bounded import UnreadableError, read_toml
from fakedist.errors import FakedistError, JobError, SweepError, did_you_mean
from fakedist.launcher.checked_script import find_editable
from fakedist.options import Door, Job, JobProgram
from fakedist.options.definition import NOT_SWEPT, OPTIONS
from fakedist.rundir.sources import RunSources
from fakedist.section import Section
from fakedist.sweep.command import (
    PRICES,
    PointFile,
    PointRun,
    PricedFor,
    SweptCommand,
    Texts,
    placeholders_of,
    read_point_file,
)
from fakedist.sweep.space import (
    Axis,
    Expression,
    Point,
    Scalar,
    Space,
    all_points,
    axis_of_text,
    axis_of_toml,
    check_name,
    drawn_points,
    read_scalar,
    text_of,
)
from fakedist.units import parse_bytes, parse_percent, parse_rank_list

#: How many of the best points run every stage, with ``ranks = "stages"``.
NUM_BEST = 10
#: Free memory that the ranking asks for, as a share of the GPU's.
HEADROOM = 0.05
_COUNTED = re.compile(r"(?P<word>stages|best):(?P<number>\d{1,6}|all)")


@dataclass(frozen=True)
class RankChoice:
    """The ranks of a point that run.

    Attributes:
        which: "ends": the first and the last pipeline stage. "stages": those, and every stage of the best points.
            "listed": the ranks below.
        num_best: Of how many points every stage runs; None for all.
    """

    which: Literal["ends", "stages", "listed"] = "ends"
    ranks: tuple[int, ...] = (0,)
    num_best: int | None = NUM_BEST

    @property
    def text(self) -> str:
        """The choice as a user writes it."""
        if self.which == "stages":
            return "stages:all" if self.num_best is None else f"stages:{self.num_best}"
        return ",".join(map(str, self.ranks)) if self.which == "listed" else self.which


@dataclass(frozen=True)
class SweepPlan:
    """A sweep as it was asked for.

    Attributes:
        keeps_runs: Whether the run directories stay.
        headroom: Free memory that the ranking asks for, as a share of the GPU's.
        tokens: Tokens of a step, of all ranks; None to find them in the runs.
        micro_batches: Micro-batches of a step; None for those that run.
        context_bytes: Memory of the CUDA context; None for the published figure.
        num_trials: Points that are drawn from the space, by the seed; None runs all.
        grows: Axes along whose levels nothing that a rank holds shrinks, and how what it computes for a step of the
            same tokens changes: 1 never shrinks, -1 never grows, 0 is not known.
        shares: What each rank that fits is also asked, by the names of :func:`fakedist.extras.shares`.
    """

    name: str
    space: Space
    command: SweptCommand
    ranks: RankChoice = RankChoice()
    keeps_runs: bool = True
    headroom: float = HEADROOM
    tokens: Expression | None = None
    micro_batches: Expression | None = None
    context_bytes: int | None = None
    num_trials: int | None = None
    seed: int = 0
    grows: Mapping[str, int] = field(default_factory=dict)
    shares: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.num_trials is not None and not self.space.axes:
            raise SweepError("there is nothing to draw from: there is no axis", "--axis tp=1,2,4")
        self.command.check(self.space)

    def counts_at(self, point: Point) -> tuple[int | None, int | None]:
        """Tokens and micro-batches of a step at a point, as the sweep gives them.

        Raises:
            SweepError: An expression gives no whole number above 0 there.
        """
        tokens, micro_batches = (self._count(expression, point) for expression in (self.tokens, self.micro_batches))
        return tokens, micro_batches

    def _count(self, expression: Expression | None, point: Point) -> int | None:
        if expression is None:
            return None
        value = expression.value(self.space.named_values(point))
        if not isinstance(value, int | float) or isinstance(value, bool) or value < 1 or value != int(value):
            raise SweepError(f"{expression.text!r} is {value} at {point.label}, not a whole number", "use // to divide")
        return int(value)

    def points(self) -> list[Point]:
        """The points that run: all of the space, or as many as are drawn from it.

        Raises:
            SweepError: No point meets the conditions, or there are too many.
        """
        if self.num_trials is None:
            return all_points(self.space)
        return drawn_points(self.space, self.num_trials, self.seed)


def read_ranks(plain: object) -> RankChoice:
    """The ranks that run, from a plain value: "ends", "stages", "stages:5", "stages:all", or ranks."""
    if plain is None or plain == "ends":
        return RankChoice()
    if plain == "stages":
        return RankChoice("stages")
    if isinstance(plain, str) and (match := _COUNTED.fullmatch(plain)) and match["word"] == "stages":
        return RankChoice("stages", num_best=None if match["number"] == "all" else int(match["number"]))
    try:
        numbers = parse_rank_list(plain) if isinstance(plain, str) else plain
    except JobError:
        numbers = None
    if isinstance(numbers, int) and not isinstance(numbers, bool):
        numbers = [numbers]
    if not isinstance(numbers, list | tuple) or not numbers or not all(type(number) is int for number in numbers):
        raise SweepError(f"ranks is ends, stages or a list of ranks, not {plain!r}", 'ranks = "ends"')
    return RankChoice("listed", tuple(dict.fromkeys(numbers)))


def read_keep(plain: object) -> bool:
    """Whether run directories stay, from "all" or "none"."""
    if plain not in (None, "all", "none"):
        raise SweepError(f"keep is all or none, not {plain!r}", 'keep = "all"')
    return plain != "none"


def read_headroom(plain: object) -> float:
    """A share of the GPU's memory from "5%"."""
    if plain is None:
        return HEADROOM
    try:
        fraction = parse_percent(plain) if isinstance(plain, str) else -1.0
    except JobError:
        fraction = -1.0
    if not 0 <= fraction < 1:
        raise SweepError(f"headroom is a share of the GPU's memory, not {plain!r}", 'headroom = "5%"')
    return fraction


#: Inherited variables that differ from one terminal to the next, and that no training script goes by.
_TERMINAL_VARIABLES = {
    *("_", "PWD", "OLDPWD", "SHLVL", "TERM", "TERM_PROGRAM", "TERM_PROGRAM_VERSION", "TERM_SESSION_ID", "COLORTERM"),
    *("COLUMNS", "LINES", "LS_COLORS", "LESSOPEN", "LESSCLOSE", "PS1", "PS2", "PROMPT_COMMAND", "HISTFILE", "HISTSIZE"),
    *("DISPLAY", "WINDOWID", "XAUTHORITY", "DBUS_SESSION_BUS_ADDRESS", "STY", "TMUX", "TMUX_PANE", "EDITOR", "PAGER"),
    *("INVOCATION_ID", "JOURNAL_STREAM", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_TESTRUNUID"),
    *("RAY_ADDRESS", "MAIL", "MOTD_SHOWN", "CONDA_PROMPT_MODIFIER", "VIRTUAL_ENV_PROMPT", "NO_COLOR", "FORCE_COLOR"),
}
_SESSION_PREFIXES = ("SSH_", "XDG_", "VSCODE_", "GPG_", "ITERM_", "KITTY_", "LC_TERMINAL", "SUDO_", "WT_")
#: Python files that belong to a script. More are identified by size and time of change.
_MOST_FILES = 2_000
_NOT_OURS = {"site-packages", "node_modules", "__pycache__"}


@dataclass(frozen=True)
class SourceDigests:
    """The user's Python files that a run read.

    Attributes:
        files: Digests by path. Empty for a file that was there and was not read.
        names: The last parts of the names of modules that it imported or tried to; None if that is not known.
    """

    files: dict[str, str]
    names: list[str] | None

    @property
    def digest(self) -> str:
        """A digest of it, 24 characters."""
        return _digest([sorted(self.files.items()), self.names])[:24]


@dataclass(frozen=True)
class Ground:
    """The environment that all points of a sweep share, as digests by part.

    Attributes:
        parts: "versions", and each inherited variable as "variable HOME". If one changes, every point runs again.
        files: Each Python file in the script's directory and below, by its path. A point runs again if it read one that
            changed.
    """

    parts: Mapping[str, str]
    files: Mapping[str, str]

    def read(self, sources: RunSources | None) -> SourceDigests:
        """The digests of what a run read; of every file if that is not known."""
        if sources is None or not sources.is_whole:
            read = {} if sources is None else {path: self._now(path) for path in sources.files}
            return SourceDigests({**self.files, **read}, None)
        present = {path: "" for path in self.files if path not in sources.files}
        return SourceDigests({path: self._now(path) for path in sources.files} | present, sorted(sources.names))

    def changed(self, read: SourceDigests) -> list[str]:
        """The files by which a run would read something else now.

        A file that was not there counts if the run imported a module of its name, or tried to.
        """
        changed = [path for path, digest in read.files.items() if digest and self._now(path) != digest]
        names = None if read.names is None else set(read.names)
        return changed + [
            path for path in self.files if path not in read.files and (names is None or _module_name(path) in names)
        ]

    def _now(self, path: str) -> str:
        return self.files[path] if path in self.files else _content_once(path)

    @property
    def digest(self) -> str:
        """One digest of all parts."""
        return _digest(sorted(self.parts.items()))

    def differences(self, earlier: Mapping[str, str]) -> list[str]:
        """The parts that differ from those of an earlier ground."""
        return sorted(name for name in {*self.parts, *earlier} if self.parts.get(name) != earlier.get(name))


def find_ground(job: Job, version: str = __version__) -> Ground:
    """The ground of a sweep by this version of fakedist, here and now."""
    versions = [*_installed(), f"python {platform.python_version()}", f"fakedist {version}"]
    variables = {
        f"variable {name}": _digest(value)
        for name, value in os.environ.items()
        if name not in _TERMINAL_VARIABLES and not name.startswith(_SESSION_PREFIXES)
    }
    _content_once.cache_clear()
    return Ground({"versions": _digest(versions), **variables}, _script_digests(job))


def key_of(run: PointRun, ground: Ground) -> str:
    """The key of a run: 24 characters."""
    job = dataclasses.replace(run.job, rank=0).to_dict()
    return _digest([ground.digest, job])[:24]


def id_of(key: str, pricing: PricedFor, plan: SweepPlan) -> str:
    """The ID of a row: 24 characters."""
    ranks = plan.ranks.text if plan.ranks.which == "listed" else "ends"
    counted = [None if expression is None else expression.text for expression in (plan.tokens, plan.micro_batches)]
    shares = [plan.shares] if plan.shares else []
    return _digest([key, dataclasses.asdict(pricing), ranks, counted, plan.context_bytes, *shares])[:24]


@cache
def _installed() -> list[str]:
    """The installed packages with their versions, as the names of their metadata's directories."""
    patterns = ("*.dist-info", "*.egg-info")
    return sorted(
        {path.name for folder in sys.path for pattern in patterns for path in Path(folder or ".").glob(pattern)}
    )


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _script_digests(job: Job) -> dict[str, str]:
    path = _module_file(job.target) if job.is_module else Path(job.target)
    if path is None or not path.exists():
        return {}
    path = Path(os.path.realpath(path))
    digests = {str(path): _content(path)} if path.is_file() else {}
    for count, file in enumerate(sorted(_python_files(path if path.is_dir() else path.parent))):
        stat = file.stat()
        digests[os.path.realpath(file)] = (
            _content(file) if count < _MOST_FILES else _digest([stat.st_size, stat.st_mtime_ns])
        )
    return digests


def _python_files(directory: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(directory):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and name not in _NOT_OURS and not (Path(folder) / name / "pyvenv.cfg").exists()
        ]
        yield from (Path(folder) / file for file in files if file.endswith(".py"))


def _content(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


@cache
def _content_once(path: str) -> str:
    """The digest of a file outside the script's directory, as the sweep first sees it."""
    return _content(Path(path))


def _module_name(path: str) -> str:
    """The last part of the name of the module in a file."""
    stem = Path(path).name.partition(".")[0]
    return Path(path).parent.name if stem == "__init__" else stem


def _module_file(name: str) -> Path | None:
    """The file or directory of a module's first package, without importing it."""
    first = name.partition(".")[0]
    spec = PathFinder.find_spec(first, [os.getcwd(), *sys.path]) or find_editable(first)
    if spec is None:
        return None
    locations = list(spec.submodule_search_locations or ())
    return Path(locations[0]) if locations else Path(spec.origin or "")


@dataclass(frozen=True)
class CommandLineSettings:
    """Settings of the command line as texts. They override those of the sweep file.

    Attributes:
        axes: ``--axis``, and axes that were read elsewhere.
        derived: ``--let``.
        conditions: ``--where``.
        files: Files that are written for each point.
        grows: As of :class:`SweepPlan`.
        settings: ``ranks``, ``keep``, ``headroom`` and the other keys of a sweep file that are about the sweep.
    """

    axes: Sequence[str | Axis] = ()
    derived: Sequence[str] = ()
    conditions: Sequence[str] = ()
    prices: Sequence[str] = ()
    options: Mapping[str, Texts | bool] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    files: tuple[PointFile, ...] = ()
    grows: Mapping[str, int] = field(default_factory=dict)


@dataclass
class _SweepParts:
    name: str
    program: JobProgram
    door: Door
    directory: str = ""
    axes: dict[str, Axis] = field(default_factory=dict)
    derived: dict[str, Expression] = field(default_factory=dict)
    conditions: list[Expression] = field(default_factory=list)
    options: dict[str, object] = field(default_factory=dict)
    files: list[PointFile] = field(default_factory=list)
    price: dict[str, object] = field(default_factory=dict)
    settings: dict[str, object] = field(default_factory=dict)


def sweep_of_file(path: Path, settings: CommandLineSettings) -> SweepPlan:
    """The sweep that a file describes, with what the command line changes."""
    try:
        values, _ = read_toml(path)
    except OSError as error:
        raise SweepError(f"{path} cannot be read: {error.strerror}", "fakedist sweep sweep.toml") from None
    except UnreadableError as error:
        raise SweepError(f"{path} is not TOML: {error}", "docs/sweeps.md shows a sweep file") from None
    try:
        return _plan(_parts_of_file(path, values), settings)
    except FakedistError as error:
        if path.name in error.message or settings != CommandLineSettings():  # then it may be an option that is wrong
            raise
        raise SweepError(f"{path.name}: {error.message}", error.hint) from None


def sweep_of_command(program: JobProgram, settings: CommandLineSettings) -> SweepPlan:
    """The sweep that a command line describes without a file."""
    stem = program.target.rpartition(".")[2] if program.is_module else Path(program.target).stem
    return _plan(_SweepParts(stem, program, Door.COMMAND_LINE), settings)


def _parts_of_file(path: Path, values: dict[str, object]) -> _SweepParts:
    section = Section(path.name, values, SweepError)
    directory = path.resolve().parent
    parts = _SweepParts(path.stem, _program(section, directory), Door.TOML, os.fspath(directory))
    parts.axes = {name: axis_of_toml(name, plain, path.name) for name, plain in section.take_table("axes").items()}
    for name, plain in section.take_table("let").items():
        parts.derived[check_name(name, path.name)] = _expression(plain, f"{path.name}, {name}:")
    parts.conditions = [
        _expression(condition, f"{path.name}, where:") for condition in _several(section.take_any("where"))
    ]
    files = section.take_table("files")
    for name, plain in files.items():
        if not isinstance(plain, dict):
            raise SweepError(f"{files.where}: {name} is a table, not {plain!r}", f"[files.{name}]")
        parts.files.append(
            read_point_file(
                check_name(name, files.where), Section(f"{files.where}, {name}", plain, SweepError), directory
            )
        )
    price = section.take_table("price")
    parts.price = {name: price.take_any(name) for name in PRICES}
    price.end()
    parts.settings = {name: section.take_any(name) for name in _SETTINGS}
    for option in OPTIONS:
        if option.name in ("rank", *NOT_SWEPT):
            continue
        if (plain := section.take_any(option.toml_key)) is not None:
            parts.options[option.name] = plain
    section.end()
    return parts


#: Keys of a sweep file that are about the sweep.
_SETTINGS = (
    "ranks",
    "keep",
    "headroom",
    "tokens_per_step",
    "micro_batches",
    "context",
    "shares",
    "trials",
    "sampler",
    "sampler_seed",
)


def _program(section: Section, directory: Path) -> JobProgram:
    script, module = section.take("script", str), section.take("module", str)
    if (script is None) is (module is None):
        named = "a script and a module" if script and module else "neither a script nor a module"
        raise SweepError(f"{section.where} names {named}", 'expected one of them: script = "train.py"')
    arguments = section.take_any("arguments")
    if isinstance(arguments, str):
        try:
            words = shlex.split(arguments)
        except ValueError as error:
            raise SweepError(
                f"{section.where}: arguments: {str(error).lower()}", 'arguments = ["--tp", "{tp}"]'
            ) from None
    else:
        words = list(section.take_texts("arguments"))
    if any("\0" in word for word in words):
        raise SweepError(f"{section.where}: arguments: an argument has a NUL character", "leave it out")
    target = module if script is None else os.path.normpath(directory / script)
    return JobProgram(str(target), tuple(words), is_module=module is not None)


def _several(plain: object) -> list[object]:
    return plain if isinstance(plain, list) else [] if plain is None else [plain]


def _shares(plain: object) -> tuple[str, ...]:
    names, known = [str(name) for name in _several(plain)], list(extras.shares())
    for name in names:
        if name not in known:
            raise SweepError(f"there is no share {name!r}", did_you_mean(name, known))
    return tuple(names)


def _expression(plain: object, where: str) -> Expression:
    if isinstance(plain, bool | int | float):
        plain = str(plain)
    if not isinstance(plain, str):
        raise SweepError(f"{where} an expression is a text, not {plain!r}", 'where = "tp * pp <= 64"')
    return Expression(plain, where)


def _plan(parts: _SweepParts, command_line: CommandLineSettings) -> SweepPlan:
    for given in command_line.axes:
        axis = given if isinstance(given, Axis) else axis_of_text(given)
        parts.axes[axis.name] = _with_arguments(axis, parts.axes.get(axis.name))
    for text in command_line.derived:
        name, value = _named(text, "--let", 'dp="64 // tp"')
        parts.derived[check_name(name, "--let")] = Expression(value, f"--let {name}:")
    parts.conditions += [Expression(text, "--where") for text in command_line.conditions]
    for text in command_line.prices:
        name, value = _named(text, "--price", "gpus-per-node={n}")
        if name.replace("-", "_") not in PRICES:
            raise SweepError(
                f"--price has no {name}", f"it has {' and '.join(price.replace('_', '-') for price in PRICES)}"
            )
        parts.price[name.replace("-", "_")] = value if any(placeholders_of(value)) else read_scalar(value)
    parts.options |= command_line.options
    if parts.settings.get("sampler") is not None:
        raise SweepError("sampler was removed: trials draws points from a seed", "trials = 60")
    settings = parts.settings | {name: value for name, value in command_line.settings.items() if value is not None}
    space = Space(
        tuple(parts.axes.values()), tuple(parts.derived.items()), tuple(parts.conditions), _constants(parts.options)
    )
    command = SweptCommand(
        parts.program,
        parts.options,
        (*parts.files, *command_line.files),
        {name: value for name, value in parts.price.items() if value is not None},
        parts.door,
        parts.directory,
    )
    return SweepPlan(
        name=parts.name,
        space=space,
        command=command,
        ranks=read_ranks(settings.get("ranks")),
        keeps_runs=read_keep(settings.get("keep")),
        headroom=read_headroom(settings.get("headroom")),
        tokens=_counted(settings.get("tokens_per_step"), "tokens_per_step", space),
        micro_batches=_counted(settings.get("micro_batches"), "micro_batches", space),
        context_bytes=_context(settings.get("context")),
        shares=_shares(settings.get("shares")),
        num_trials=_number(settings.get("trials"), "trials"),
        seed=_number(settings.get("sampler_seed"), "sampler_seed", least=0) or 0,
        grows={
            axis.name: command_line.grows[axis.name]
            for axis in space.axes
            if axis.name in command_line.grows and (axis.arguments or not any(isinstance(v, str) for v in axis.values))
        },
    )


def _with_arguments(axis: Axis, old: Axis | None) -> Axis:
    if old is None or not old.arguments:
        return axis
    values = tuple(text_of(value) for value in axis.values)
    for value in values:
        if value not in old.arguments:
            raise SweepError(f"axis {axis.name} has no {value}", did_you_mean(value, old.arguments))
    return Axis(axis.name, values, old.arguments)


def _named(text: str, flag: str, example: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise SweepError(f"{flag} {text!r} is not a name and a value", f"{flag} {example}")
    return name, value


def _constants(options: Mapping[str, object]) -> dict[str, Scalar]:
    """Options that conditions may use by name: the world size, if it is the same at every point."""
    plain = options.get("world_size")
    if isinstance(plain, Texts) and not any(placeholders_of(plain)):
        plain = int(plain.texts[-1]) if plain.texts[-1].isdecimal() else None
    return {"world_size": plain} if isinstance(plain, int) and not isinstance(plain, bool) else {}


def _counted(plain: object, name: str, space: Space) -> Expression | None:
    if plain is None:
        return None
    expression = _expression(plain, f"{name}:")
    Space(space.axes, space.derived, (expression,), space.constants)  # refuses names that do not exist
    return expression


def _context(plain: object) -> int | None:
    if plain is None:
        return None
    try:
        return parse_bytes(plain if isinstance(plain, str) else "")
    except JobError:
        raise SweepError(f"context is the memory of the CUDA context, not {plain!r}", 'context = "500MiB"') from None


def _number(plain: object, name: str, least: int = 1) -> int | None:
    if plain is None:
        return None
    if not isinstance(plain, int) or isinstance(plain, bool) or plain < least:
        raise SweepError(f"{name} is a whole number of {least} or more, not {plain!r}", f"{name} = 60")
    return plain
