"""The configuration of ``check``: ``[tool.fakedist.check]`` in pyproject.toml, or ``[check]`` in fakedist.toml."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from fakedist.bounded import UnreadableError, read_toml
from fakedist.check.limits import Limit, read_budgets, read_tolerances
from fakedist.errors import CheckError, JobError, did_you_mean
from fakedist.job import Door, Job, Program, make_jobs
from fakedist.job.definition import OPTIONS
from fakedist.section import Section

OWN_NAME, PROJECT_NAME = "fakedist.toml", "pyproject.toml"
DEFAULT_BASELINES = "fakedist-baselines"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_EXAMPLE = '[[{}.jobs]] with name = "...", script = "train.py", world_size = 8'


@dataclass(frozen=True)
class CheckJob:
    """A job and its limits.

    Attributes:
        name: The job's name. Its baseline's file has the same name.
        jobs: The job of every rank to run.
        budgets: Limits that no rank may exceed.
        tolerances: How much each rank may exceed its baseline.
    """

    name: str
    jobs: tuple[Job, ...]
    budgets: tuple[Limit, ...]
    tolerances: tuple[Limit, ...]


@dataclass(frozen=True)
class CheckConfig:
    """The configuration of a check.

    Attributes:
        path: The file it was read from. Paths of scripts and baselines are relative to its directory.
        baselines: Directory of the baselines.
        jobs: The jobs, in the order of the file.
    """

    path: Path
    baselines: Path
    jobs: tuple[CheckJob, ...]

    @property
    def root(self) -> Path:
        """The directory in which jobs run."""
        return self.path.parent

    def chosen(self, names: tuple[str, ...]) -> CheckConfig:
        """The configuration with only the named jobs, or with all jobs if ``names`` is empty.

        Raises:
            CheckError: A named job does not exist.
        """
        known = [job.name for job in self.jobs]
        for name in names:
            if name not in known:
                raise CheckError(f"there is no job {name!r} in {self.path.name}", did_you_mean(name, known))
        return dataclasses.replace(self, jobs=tuple(job for job in self.jobs if not names or job.name in names))


def find_config(start: Path) -> Path:
    """Find the nearest configuration, in a directory or above it.

    Raises:
        CheckError: No configuration exists.
    """
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
    """Read a configuration.

    Raises:
        CheckError: The file is missing, is not TOML, or has an invalid value.
    """
    is_project = path.name == PROJECT_NAME
    values = _inside(_load(path), *(("tool", "fakedist", "check") if is_project else ("check",)))
    table = "tool.fakedist.check" if is_project else "check"
    example = _EXAMPLE.format(table)
    if values is None:
        raise CheckError(f"{path} has no [{table}]", f"add {example}")
    section = Section(f"{path.name} [{table}]", values)
    baselines = section.take("baselines", str) or DEFAULT_BASELINES
    tolerances = read_tolerances(section.take_any("max_increase"), section)
    entries = section.take_any("jobs")
    section.end()
    if isinstance(entries, dict):
        raise CheckError(f"{section.where}: jobs is a list of tables", f"write {example}")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise CheckError(f"{section.where}: there are no jobs", f"add {example}")
    jobs: list[CheckJob] = []
    taken: set[str] = set()  # in lower case: some file systems ignore case in the baselines' names
    for number, entry in enumerate(entries, start=1):
        job = _job(Section(f"{path.name} job {entry.get('name', number)!r}", entry), tolerances, path.resolve().parent)
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
        raise CheckError(f"{path} cannot be read: {getattr(error, 'strerror', error)}") from None


def _inside(values: object, *keys: str) -> dict[str, object] | None:
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else None


def _job(section: Section, default_tolerances: tuple[Limit, ...], directory: Path) -> CheckJob:
    name = section.take("name", str)
    if not name or not _NAME.fullmatch(name):
        raise CheckError(f"{section.where}: a job has a name of letters, digits, dots, dashes", 'name = "llama-70b"')
    section.where = section.where.split(" job ")[0] + f" job {name!r}"
    program = _program(section)
    given = {option.name: section.take_any(option.toml_key) for option in OPTIONS}
    budgets = section.take_table("budgets")
    own = section.take_any("max_increase")
    section.end()
    try:
        jobs = make_jobs(program, given, Door.TOML, os.fspath(directory))
    except JobError as error:
        raise CheckError(f"{section.where}: {error.message}", error.hint) from None
    tolerances = default_tolerances if own is None else read_tolerances(own, section)
    return CheckJob(name, jobs, read_budgets(budgets), tolerances)


def _program(section: Section) -> Program:
    """What the job runs."""
    script, module = section.take("script", str), section.take("module", str)
    target = script or module
    if target is None or (script is not None and module is not None):
        raise CheckError(f"{section.where}: a job has a script or a module, and not both", 'script = "train.py"')
    arguments = section.take_any("arguments")
    if isinstance(arguments, str):
        return Program(target, _split(section, arguments), is_module=module is not None)
    return Program(target, section.take_texts("arguments"), is_module=module is not None)


def _split(section: Section, arguments: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(arguments))
    except ValueError as error:
        told = f"{section.where}: arguments: {str(error).lower()} in {arguments!r}"
        raise CheckError(told, 'write a list: arguments = ["--name", "it\'s"]') from None
