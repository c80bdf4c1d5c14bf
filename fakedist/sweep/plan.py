"""A sweep as it was asked for: its space, its points' commands and identities, and the same as text for a dry run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.text import Text

from fakedist._version import __version__
from fakedist.errors import JobError, SweepError
from fakedist.options import Job, profile_command
from fakedist.rank_list import parse_rank_list
from fakedist.report.text.sheet import print_heading, print_remark
from fakedist.sweep.command import PointRun, PricedFor, SweptCommand
from fakedist.sweep.space import Expression, Point, Space, all_points
from fakedist.units import parse_share
from fakedist.visible import MOST_OF_A_TEXT, visible

SAMPLERS = ("tpe", "random")
#: How many of the best points run every stage, with ``ranks = "stages"``.
NUM_BEST = 10
#: Free memory that the ranking asks for, as a share of the GPU's.
HEADROOM = 0.05
_COUNTED = re.compile(r"(?P<word>stages|best):(?P<number>\d{1,6}|all)")


@dataclass(frozen=True)
class RankChoice:
    """Which ranks of a point run.

    Attributes:
        which: "ends": the first and the last pipeline stage. "stages": those, and every stage of the best points.
            "listed": the ranks below.
        ranks: The ranks.
        num_best: Of how many points every stage runs; None for all.
    """

    which: Literal["ends", "stages", "listed"] = "ends"
    ranks: tuple[int, ...] = (0,)
    num_best: int | None = NUM_BEST

    @property
    def text(self) -> str:
        """As it is written."""
        if self.which == "stages":
            return "stages:all" if self.num_best is None else f"stages:{self.num_best}"
        return ",".join(map(str, self.ranks)) if self.which == "listed" else self.which


@dataclass(frozen=True)
class SweepPlan:
    """A sweep as it was asked for.

    Attributes:
        name: What its directory is called after.
        space: The points.
        command: What each runs.
        ranks: Which ranks of each.
        num_kept: Of how many of the best points the run directories stay; None for all.
        headroom: Free memory that the ranking asks for, as a share of the GPU's.
        tokens: Tokens of a step, of all ranks; None to find them in the runs.
        micro_batches: Micro-batches of a step; None for those that run.
        context_bytes: Memory of the CUDA context; None for what is published.
        num_trials: How many points a sampler chooses; None runs all.
        sampler: Who chooses them: "tpe" or "random".
        seed: The sampler's seed.
    """

    name: str
    space: Space
    command: SweptCommand
    ranks: RankChoice = RankChoice()
    num_kept: int | None = None
    headroom: float = HEADROOM
    tokens: Expression | None = None
    micro_batches: Expression | None = None
    context_bytes: int | None = None
    num_trials: int | None = None
    sampler: str = "tpe"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sampler not in SAMPLERS:
            raise SweepError(f"there is no sampler {self.sampler!r}", f"--sampler {' or '.join(SAMPLERS)}")
        if self.num_trials is not None and not self.space.axes:
            raise SweepError("a sampler has nothing to choose: there is no axis", "--axis tp=1,2,4")
        self.command.check(self.space)

    def counts_at(self, point: Point) -> tuple[int | None, int | None]:
        """Tokens and micro-batches of a step at a point, as the sweep gives them.

        Raises:
            SweepError: An expression gives no whole number above 0 there.
        """
        tokens, micro_batches = (self._count(each, point) for each in (self.tokens, self.micro_batches))
        return tokens, micro_batches

    def _count(self, expression: Expression | None, point: Point) -> int | None:
        if expression is None:
            return None
        value = expression.value(self.space.named_values(point))
        if not isinstance(value, int | float) or isinstance(value, bool) or value < 1 or value != int(value):
            raise SweepError(f"{expression.text!r} is {value} at {point.label}, not a whole number", "use // to divide")
        return int(value)


def read_ranks(plain: object) -> RankChoice:
    """Which ranks run, from a plain value: "ends", "stages", "stages:5", "stages:all", or ranks.

    Raises:
        SweepError: It is none of these.
    """
    if plain is None or plain == "ends":
        return RankChoice()
    if plain == "stages":
        return RankChoice("stages")
    if isinstance(plain, str) and (found := _COUNTED.fullmatch(plain)) and found["word"] == "stages":
        return RankChoice("stages", num_best=None if found["number"] == "all" else int(found["number"]))
    try:
        numbers = parse_rank_list(plain) if isinstance(plain, str) else plain
    except JobError:
        numbers = None
    if isinstance(numbers, int) and not isinstance(numbers, bool):
        numbers = [numbers]
    if not isinstance(numbers, list | tuple) or not numbers or not all(type(each) is int for each in numbers):
        raise SweepError(f"ranks is ends, stages or a list of ranks, not {plain!r}", 'ranks = "ends"')
    return RankChoice("listed", tuple(dict.fromkeys(numbers)))


def read_keep(plain: object) -> int | None:
    """How many of the best points keep their run directories, from "all", "none" or "best:10".

    Raises:
        SweepError: It is none of these.
    """
    if plain in (None, "all"):
        return None
    if plain == "none":
        return 0
    found = _COUNTED.fullmatch(plain) if isinstance(plain, str) else None
    if found is None or found["word"] != "best" or found["number"] == "all":
        raise SweepError(f"keep is all, none or best:10, not {plain!r}", 'keep = "best:10"')
    return int(found["number"])


def read_headroom(plain: object) -> float:
    """A share of the GPU's memory from "5%".

    Raises:
        SweepError: It is none.
    """
    if plain is None:
        return HEADROOM
    try:
        share = parse_share(plain) if isinstance(plain, str) else -1.0
    except JobError:
        share = -1.0
    if not 0 <= share < 1:
        raise SweepError(f"headroom is a share of the GPU's memory, not {plain!r}", 'headroom = "5%"')
    return share


#: Inherited variables that differ from one terminal to the next, and that no training script goes by.
_TERMINAL_VARIABLES = {
    *("_", "PWD", "OLDPWD", "SHLVL", "TERM", "TERM_PROGRAM", "TERM_PROGRAM_VERSION", "TERM_SESSION_ID", "COLORTERM"),
    *("COLUMNS", "LINES", "LS_COLORS", "LESSOPEN", "LESSCLOSE", "PS1", "PS2", "PROMPT_COMMAND", "HISTFILE", "HISTSIZE"),
    *("DISPLAY", "WINDOWID", "XAUTHORITY", "DBUS_SESSION_BUS_ADDRESS", "STY", "TMUX", "TMUX_PANE", "EDITOR", "PAGER"),
    *("INVOCATION_ID", "JOURNAL_STREAM", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_TESTRUNUID"),
    *("RAY_ADDRESS", "MAIL", "MOTD_SHOWN", "CONDA_PROMPT_MODIFIER", "VIRTUAL_ENV_PROMPT", "NO_COLOR", "FORCE_COLOR"),
}
_SESSION_PREFIXES = ("SSH_", "XDG_", "VSCODE_", "GPG_", "ITERM_", "KITTY_", "LC_TERMINAL", "SUDO_", "WT_")
#: Python files that belong to a script. More are told apart by size and time of change.
_MOST_FILES = 2_000
_NOT_OURS = {"site-packages", "node_modules", "__pycache__"}


@dataclass(frozen=True)
class Ground:
    """What all points of a sweep have in common, besides their jobs.

    Attributes:
        parts: A digest by part: "versions", each Python file as its path, each inherited variable as "variable HOME".
    """

    parts: Mapping[str, str]

    @property
    def digest(self) -> str:
        """One digest of all parts."""
        return _digest(sorted(self.parts.items()))

    def differences(self, earlier: Mapping[str, str]) -> list[str]:
        """The parts that differ from those of an earlier ground."""
        return sorted(name for name in {*self.parts, *earlier} if self.parts.get(name) != earlier.get(name))


def find_ground(job: Job) -> Ground:
    """The ground of a sweep, here and now.

    Args:
        job: The job of any point. Only its script counts.
    """
    versions = [*_installed(), f"python {platform.python_version()}", f"fakedist {__version__}"]
    parts = {"versions": _digest(versions), **_script_digests(job)}
    for name, value in os.environ.items():
        if name not in _TERMINAL_VARIABLES and not name.startswith(_SESSION_PREFIXES):
            parts[f"variable {name}"] = _digest(value)
    return Ground(parts)


def key_of(run: PointRun, ground: Ground) -> str:
    """What tells a run from all others, as 24 characters."""
    job = dataclasses.replace(run.job, rank=0).to_dict()
    return _digest([ground.digest, job])[:24]


def id_of(key: str, pricing: PricedFor, plan: SweepPlan) -> str:
    """What tells a row from all others, as 24 characters."""
    ranks = plan.ranks.text if plan.ranks.which == "listed" else "ends"
    counted = [None if each is None else each.text for each in (plan.tokens, plan.micro_batches)]
    return _digest([key, dataclasses.asdict(pricing), ranks, counted, plan.context_bytes])[:24]


@cache
def _installed() -> list[str]:
    """The installed packages with their versions, as the names of their metadata's directories."""
    patterns = ("*.dist-info", "*.egg-info")
    return sorted({path.name for folder in sys.path for each in patterns for path in Path(folder or ".").glob(each)})


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _script_digests(job: Job) -> dict[str, str]:
    """A digest of the script and of each Python file next to it and below."""
    path = _module_file(job.target) if job.is_module else Path(job.target)
    if path is None or not path.exists():
        return {}
    found = {str(path): _content(path)} if path.is_file() else {}
    for count, file in enumerate(sorted(_python_files(path if path.is_dir() else path.parent))):
        stat = file.stat()
        found[str(file)] = _content(file) if count < _MOST_FILES else _digest([stat.st_size, stat.st_mtime_ns])
    return found


def _python_files(directory: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(directory):
        folders[:] = [
            each
            for each in folders
            if not each.startswith(".") and each not in _NOT_OURS and not (Path(folder) / each / "pyvenv.cfg").exists()
        ]
        yield from (Path(folder) / each for each in files if each.endswith(".py"))


def _content(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _module_file(name: str) -> Path | None:
    """The file or directory of a module's first package, without importing it."""
    spec = PathFinder.find_spec(name.partition(".")[0], [os.getcwd(), *sys.path])
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or ())
    return Path(places[0]) if places else Path(spec.origin or "")


_RANKS = {
    "ends": "rank 0, then the last stage of its pipeline",
    "stages": "rank 0, then the last stage of its pipeline; then every stage of {best}",
}


@dataclass(frozen=True)
class DryRun:
    """What a sweep would run.

    Attributes:
        plan: The sweep.
        points: What each point would run, in order; empty if a sampler chooses the points.
        num_runs: Different runs: points that differ only in what they are priced for share one.
    """

    plan: SweepPlan
    points: Sequence[PointRun]
    num_runs: int


def dry_run(plan: SweepPlan) -> DryRun:
    """What a sweep would run.

    Raises:
        SweepError: A point is not valid, no point meets the conditions, or there are too many.
    """
    points: Sequence[Point] = [] if plan.num_trials is not None else all_points(plan.space)
    found = [plan.command.at(plan.space, point) for point in points]
    return DryRun(plan, found, len({run.job for run in found}))


def render_dry_run(found: DryRun, directory: Path, console: Console) -> None:
    """Print the points, and what each would run."""
    plan = found.plan
    if plan.num_trials is not None:
        print_heading(console, f"{plan.num_trials:,} of {plan.space.size:,} points, chosen as results come")
        return
    print_heading(console, f"{len(found.points):,} points of {plan.space.size:,}, {found.num_runs:,} runs")
    for number, run in enumerate(found.points, 1):
        console.print(Text(f"{number}  {visible(run.point.label)}", style="bold"), soft_wrap=True)
        for line in _lines(run, directory):
            console.print(Text(f"   {visible(line, MOST_OF_A_TEXT)}"), soft_wrap=True)
    print_remark(console, f"ranks of each: {ranks_text(plan.ranks)}")
    print_remark(console, f"into {directory}; nothing was run")


def dry_run_object(found: DryRun, directory: Path) -> dict[str, object]:
    """What ``--json`` prints."""
    points = [
        {
            "values": dict(run.point.values),
            "command": command_of(run, directory),
            "pricing": dict(_pricing(run.pricing)),
            "files": {file.file_name: text for file, text in run.files},
        }
        for run in found.points
    ]
    return {"num_points": len(points), "num_runs": found.num_runs, "ranks": found.plan.ranks.text, "points": points}


def command_of(run: PointRun, directory: Path) -> str:
    """The command that runs rank 0 of a point."""
    return profile_command(run.placed(directory))


def ranks_text(ranks: RankChoice) -> str:
    """Which ranks of a point run, in words."""
    if ranks.which == "listed":
        return ", ".join(map(str, ranks.ranks))
    return _RANKS[ranks.which].format(best="all points" if ranks.num_best is None else f"the best {ranks.num_best}")


def _lines(run: PointRun, directory: Path) -> Iterator[str]:
    yield command_of(run, directory)
    if priced := " ".join(f"{name}={value}" for name, value in _pricing(run.pricing)):
        yield f"priced for {priced}"
    for file, text in run.files:
        yield f"{file.file_name}:"
        yield from (f"  {line}" for line in text.splitlines()[:_MOST_LINES])
        if len(text.splitlines()) > _MOST_LINES:
            yield "  ..."


#: Lines of a point's file that are shown.
_MOST_LINES = 40


def _pricing(pricing: PricedFor) -> Iterator[tuple[str, object]]:
    for field in fields(pricing):
        if (value := getattr(pricing, field.name)) not in (None, field.default):
            yield field.name, value
