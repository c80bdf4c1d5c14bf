"""The configuration of ``check``: ``[tool.fakedist.check]`` in pyproject.toml, or ``[check]`` in fakedist.toml.

A file, job, figure or unit that does not exist, or a value that is invalid, raises CheckError.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from fakedist import extras
from fakedist.bounded import UnreadableError, read_toml
from fakedist.errors import CheckError, JobError, did_you_mean
from fakedist.findings import finding_all  # noqa: F401 - registers the rules
from fakedist.findings.finding_all import path_of
from fakedist.findings.registry import RULES
from fakedist.options import Door, Job, JobProgram, make_jobs
from fakedist.options.definition import OPTIONS
from fakedist.rundir.finding import Finding
from fakedist.rundir.schema import CATEGORIES, FAMILIES
from fakedist.section import Section
from fakedist.units import format_bytes, parse_bytes, parse_percent, parse_us

_ALL = "ALL"


@dataclass(frozen=True)
class Selection:
    """Rules by their codes, or by what their codes begin with. The longest that fits wins; of two, what is ignored.

    Attributes:
        select: Rules that fail the check.
        ignore: Rules that do not.
        per_file_ignores: The same by a pattern of the path of a finding's line.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    per_file_ignores: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def takes(self, finding: Finding, root: Path) -> bool:
        """Whether a finding fails a check whose configuration is in ``root``."""
        selected, ignored = (_fitting(finding.code, codes) for codes in (self.select, self.ignore))
        if selected <= ignored:
            return False
        path = path_of(finding.line)
        names = {path, path.rpartition("/")[2]}
        if path and Path(path).is_relative_to(root):
            names.add(str(Path(path).relative_to(root)))
        return not any(
            _fitting(finding.code, codes) >= 0
            and any(fnmatch(name, form) for name in names for form in (pattern, pattern.replace("**/", "")))
            for pattern, codes in self.per_file_ignores
        )


#: No finding fails the check.
NOTHING = Selection()


def _fitting(code: str, chosen: Sequence[str]) -> int:
    """The length of the longest of the chosen codes that fits; 0 for all rules, -1 if none fits."""
    return max(
        (0 if part == _ALL else len(part) for part in chosen if part == _ALL or code.startswith(part)), default=-1
    )


def read_selection(section: Section, default: Selection) -> Selection:
    """Take the three keys of a section, each by itself with a default. An empty list or table selects nothing.

    Raises:
        CheckError: There is no such rule, or a value is not a list of texts.
    """
    table = section.take_table("per-file-ignores")
    of_files = [(pattern, _codes(table, pattern)) for pattern, _ in table.items()]
    return Selection(
        _codes(section, "select", default.select),
        _codes(section, "ignore", default.ignore),
        default.per_file_ignores if section.take_any("per-file-ignores") is None else tuple(of_files),
    )


def _codes(section: Section, key: str, default: tuple[str, ...] = ()) -> tuple[str, ...]:
    codes = section.take_texts(key)
    for code in codes:
        if code != _ALL and not (code and any(known.startswith(code) for known in RULES)):
            raise CheckError(f"{section.where}: {key}: there is no rule {code!r}", did_you_mean(code, list(RULES)))
    return default if section.take_any(key) is None else codes


#: Shares that extras measure, which have to be reached.
SHARES = tuple(extras.shares())
#: Figures of a rank as a whole.
PLAIN = ("peak_allocated", "peak_reserved", "headroom", "step_time", "host_bytes", "node_host_bytes", *SHARES)
_FAMILIES = tuple(name for name in FAMILIES if name != "communication")
#: Figures of a part of a rank, by the part's name.
PARTED = ("categories", "layers", "groups", "families")


_HOST_NAMES = {"host_bytes": "host memory", "node_host_bytes": "host memory of the node"}


@dataclass(frozen=True)
class Figure:
    """A figure that can have a budget.

    ``part`` is the category, the layers' pattern, the group or the family of kernels; empty for a PLAIN figure.
    """

    kind: str
    part: str = ""

    @property
    def name(self) -> str:
        """The figure's name in tables."""
        if self.kind in PLAIN:
            return _HOST_NAMES.get(self.kind, self.kind.replace("_", " "))
        one = {"categories": "category", "layers": "layers", "groups": "group", "families": "kernels of"}
        return f"{one[self.kind]} {self.part}"

    @property
    def is_of_host(self) -> bool:
        """True if the figure is of the host's memory."""
        return self.kind in _HOST_NAMES

    @property
    def is_time(self) -> bool:
        """True if the figure is in microseconds. All others are in bytes, or a share."""
        return self.kind in ("step_time", "families")

    @property
    def is_share(self) -> bool:
        """True if the figure is a part of one."""
        return self.kind in SHARES

    @property
    def has_least(self) -> bool:
        """True if a budget is the least that the figure may be."""
        return self.is_share or self.kind == "headroom"


@dataclass(frozen=True)
class Limit:
    """The allowed amount of a figure, or its growth over the baseline, in bytes or microseconds.

    With ``is_fraction``, it is a share: of the baseline, or of the GPU's memory for a headroom.
    """

    figure: Figure
    amount: float
    is_fraction: bool
    text: str

    def of(self, whole: float) -> float:
        """The amount. A share is taken of ``whole``."""
        return self.amount * whole if self.is_fraction else self.amount


def read_budgets(section: Section) -> tuple[Limit, ...]:
    """Read the budgets of a job."""
    return _read(section, PLAIN, _budget)


def read_tolerances(value: object, section: Section) -> tuple[Limit, ...]:
    """Read the growth over its baseline that a job may have: a text for both peaks, or a table; None for none."""
    where = f"{section.where}, max_increase"
    if isinstance(value, str):
        return tuple(_tolerance(Figure(kind), value, where) for kind in ("peak_allocated", "peak_reserved"))
    if value is not None and not isinstance(value, dict):
        raise CheckError(f"{section.where}: max_increase is a text or a table, not {value!r}", 'max_increase = "1%"')
    return _read(
        Section(where, value or {}),
        ("peak_allocated", "peak_reserved", "step_time", "host_bytes", "node_host_bytes"),
        _tolerance,
    )


def _read(section: Section, plain: tuple[str, ...], make: Callable[[Figure, object, str], Limit]) -> tuple[Limit, ...]:
    limits = [
        make(Figure(kind), value, section.where) for kind in plain if (value := section.take_any(kind)) is not None
    ]
    for kind in PARTED:
        parts = section.take_table(kind)
        for part, value in parts.items():
            if kind == "categories" and part not in CATEGORIES:
                raise CheckError(f"{parts.where}: there is no category {part!r}", did_you_mean(part, CATEGORIES))
            if kind == "families" and part not in _FAMILIES:
                raise CheckError(
                    f"{parts.where}: there is no family of kernels {part!r}", did_you_mean(part, _FAMILIES)
                )
            limits.append(make(Figure(kind, part), value, parts.where))
    section.end()
    return tuple(limits)


def _budget(figure: Figure, value: object, where: str) -> Limit:
    if figure.is_share or (figure.kind == "headroom" and isinstance(value, str) and "%" in value):
        example = "99.9%" if figure.is_share else "5%"
        limit = _parsed(parse_percent, figure, value, where, example=example)
        if limit.amount > 1:
            whole = "what is drawn cannot fit" if figure.is_share else "the GPU's memory cannot be left"
            raise CheckError(f"{where}: {figure.kind}: {value} of {whole}", f'{figure.kind} = "{example}"')
        return replace(limit, amount=round(limit.amount, 9), is_fraction=not figure.is_share)
    return _parsed(_parser(figure), figure, value, where, example="900 ms" if figure.is_time else "72 GiB")


def _tolerance(figure: Figure, value: object, where: str) -> Limit:
    if isinstance(value, str) and "%" in value:
        return replace(_parsed(parse_percent, figure, value, where, example="1%"), is_fraction=True)
    if isinstance(value, str) and value.strip().startswith("0 "):
        return Limit(figure, 0, False, value)
    return _parsed(_parser(figure), figure, value, where, example="1%")


def _parser(figure: Figure) -> Callable[[str], float]:
    return parse_us if figure.is_time else parse_bytes


def _parsed(parse: Callable[[str], float], figure: Figure, value: object, where: str, *, example: str) -> Limit:
    key = figure.part or figure.kind
    hint = f'write it like {key} = "{example}"'
    if not isinstance(value, str):
        raise CheckError(f"{where}: {key} = {value!r} has no unit", hint)
    try:
        return Limit(figure, parse(value), False, value)
    except JobError as error:
        raise CheckError(f"{where}: {key}: {error.message}", hint) from None


OWN_NAME, PROJECT_NAME = "fakedist.toml", "pyproject.toml"
DEFAULT_BASELINES = "fakedist-baselines"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_EXAMPLE = '[[{}.jobs]] with name = "...", script = "train.py", world_size = 8'


@dataclass(frozen=True)
class CheckJob:
    """A job and its limits. Each rank may exceed its baseline, a file with the job's name, by the tolerances.

    ``match``: whether the calls of its ranks have to match. ``selection``: the findings that fail it.
    """

    name: str
    jobs: tuple[Job, ...]
    budgets: tuple[Limit, ...]
    tolerances: tuple[Limit, ...]
    match: bool = False
    selection: Selection = NOTHING


@dataclass(frozen=True)
class CheckConfig:
    """The configuration of a check, jobs in the order of the file.

    Paths of scripts and baselines are relative to its directory.
    """

    path: Path
    baselines: Path
    jobs: tuple[CheckJob, ...]

    @property
    def root(self) -> Path:
        """The directory in which jobs run."""
        return self.path.parent

    def chosen(self, names: tuple[str, ...]) -> CheckConfig:
        """The configuration with only the named jobs, or with all jobs without names."""
        known = [job.name for job in self.jobs]
        for name in names:
            if name not in known:
                raise CheckError(f"there is no job {name!r} in {self.path.name}", did_you_mean(name, known))
        return dataclasses.replace(self, jobs=tuple(job for job in self.jobs if not names or job.name in names))


def find_config(start: Path) -> Path:
    """Find the nearest configuration, in a directory or above it."""
    for folder in (start.resolve(), *start.resolve().parents):
        if (folder / OWN_NAME).is_file():
            return folder / OWN_NAME
        project = folder / PROJECT_NAME
        if project.is_file() and _inside(_load(project), "tool", "fakedist", "check") is not None:
            return project
    raise CheckError(
        f"neither {OWN_NAME} nor [tool.fakedist.check] of {PROJECT_NAME} was found",
        f"add {_EXAMPLE.format('tool.fakedist.check')}",
    )


def read_config(path: Path) -> CheckConfig:
    """Read a configuration."""
    is_project = path.name == PROJECT_NAME
    values = _inside(_load(path), *(("tool", "fakedist", "check") if is_project else ("check",)))
    table = "tool.fakedist.check" if is_project else "check"
    example = _EXAMPLE.format(table)
    if values is None:
        raise CheckError(f"{path} has no [{table}]", f"add {example}")
    section = Section(f"{path.name} [{table}]", values)
    baselines = section.take("baselines", str) or DEFAULT_BASELINES
    tolerances = read_tolerances(section.take_any("max_increase"), section)
    selection = read_selection(section, NOTHING)
    entries = section.take_any("jobs")
    section.end()
    if isinstance(entries, dict):
        raise CheckError(f"{section.where}: jobs is a list of tables", f"write {example}")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise CheckError(f"{section.where}: there are no jobs", f"add {example}")
    jobs: list[CheckJob] = []
    taken: set[str] = set()  # in lower case: some file systems ignore case in the baselines' names
    for number, entry in enumerate(entries, start=1):
        job = _job(
            Section(f"{path.name} job {entry.get('name', number)!r}", entry),
            tolerances,
            selection,
            path.resolve().parent,
        )
        if job.name.lower() in taken:
            raise CheckError(f"{path.name}: two jobs are called {job.name!r}", "give each a name of its own")
        jobs.append(job)
        taken.add(job.name.lower())
    return CheckConfig(path.resolve(), path.resolve().parent / baselines, tuple(jobs))


def _load(path: Path) -> dict[str, object]:
    try:
        return read_toml(path)[0]
    except FileNotFoundError:
        raise CheckError(f"{path} does not exist", f"--config FILE: {PROJECT_NAME} or {OWN_NAME}") from None
    except (OSError, UnreadableError) as error:
        hint = f"expected TOML, as {PROJECT_NAME} or {OWN_NAME} has it"
        raise CheckError(f"{path} cannot be read: {getattr(error, 'strerror', error)}", hint) from None


def _inside(values: object, *keys: str) -> dict[str, object] | None:
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else None


def _job(
    section: Section, default_tolerances: tuple[Limit, ...], default_selection: Selection, directory: Path
) -> CheckJob:
    name = section.take("name", str)
    if not name or not _NAME.fullmatch(name):
        raise CheckError(f"{section.where}: a job has a name of letters, digits, dots, dashes", 'name = "llama-70b"')
    section.where = section.where.split(" job ")[0] + f" job {name!r}"
    program = _program(section)
    plain = {option.name: section.take_any(option.toml_key) for option in OPTIONS}
    budgets = section.take_table("budgets")
    own = section.take_any("max_increase")
    match = section.take("match", bool) or False
    selection = read_selection(section, default_selection)
    section.end()
    try:
        jobs = make_jobs(program, plain, Door.TOML, os.fspath(directory))
    except JobError as error:
        raise CheckError(f"{section.where}: {error.message}", error.hint) from None
    if match and len(jobs) < 2:
        raise CheckError(f"{section.where}: match needs two ranks or more, and one is to run", "ranks = [0, 1]")
    tolerances = default_tolerances if own is None else read_tolerances(own, section)
    return CheckJob(name, jobs, _with_host_memory(read_budgets(budgets), jobs[0]), tolerances, match, selection)


def _with_host_memory(budgets: tuple[Limit, ...], job: Job) -> tuple[Limit, ...]:
    """The budgets with what the node has (``host_memory``), unless the node has a budget of its own."""
    of_node = Figure("node_host_bytes")
    if job.host_memory_bytes is None or any(limit.figure == of_node for limit in budgets):
        return budgets
    return *budgets, Limit(of_node, job.host_memory_bytes, False, format_bytes(job.host_memory_bytes))


def _program(section: Section) -> JobProgram:
    script, module = section.take("script", str), section.take("module", str)
    target = script or module
    if target is None or (script is not None and module is not None):
        named = "a script and a module" if script and module else "neither a script nor a module"
        raise CheckError(f"{section.where} names {named}", 'expected one of them: script = "train.py"')
    arguments = section.take_any("arguments")
    if isinstance(arguments, str):
        return JobProgram(target, _split(section, arguments), is_module=module is not None)
    return JobProgram(target, section.take_texts("arguments"), is_module=module is not None)


def _split(section: Section, arguments: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(arguments))
    except ValueError as error:
        message = f"{section.where}: arguments: {str(error).lower()} in {arguments!r}"
        raise CheckError(message, 'write a list: arguments = ["--name", "it\'s"]') from None
