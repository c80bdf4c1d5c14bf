"""The configuration of ``check``: ``[tool.fakedist.check]`` in pyproject.toml, or ``[check]`` in fakedist.toml."""

from __future__ import annotations

import dataclasses
import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fakedist.check.limits import Limit, read_budgets, read_tolerances
from fakedist.check.section import Section, did_you_mean
from fakedist.errors import CheckError, JobError
from fakedist.job import Job
from fakedist.units import parse_bytes

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
    tolerances = section.take_either("max_increase", str, dict)
    entries = section.take_either("jobs", list, dict)
    section.end()
    if isinstance(entries, dict):
        raise CheckError(f"{section.where}: jobs is a list of tables", f"write {example}")
    if not entries or not all(isinstance(entry, dict) for entry in entries):
        raise CheckError(f"{section.where}: there are no jobs", f"add {example}")
    jobs: list[CheckJob] = []
    taken: set[str] = set()  # in lower case: some file systems ignore case in the baselines' names
    for number, entry in enumerate(entries, start=1):
        job = _job(Section(f"{path.name} job {entry.get('name', number)!r}", entry), (tolerances, section))
        if job.name.lower() in taken:
            raise CheckError(f"{path.name}: two jobs are called {job.name!r}", "give each a name of its own")
        jobs.append(job)
        taken.add(job.name.lower())
    return CheckConfig(path.resolve(), path.resolve().parent / baselines, tuple(jobs))


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckError(f"{path} does not exist", f"--config FILE: {PROJECT_NAME} or {OWN_NAME}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CheckError(f"{path} cannot be read: {error}") from None


def _inside(values: Any, *keys: str) -> dict[str, Any] | None:
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else None


def _job(section: Section, default: tuple[Any, Section]) -> CheckJob:
    name = section.take("name", str)
    if not name or not _NAME.fullmatch(name):
        raise CheckError(f"{section.where}: a job has a name of letters, digits, dots, dashes", 'name = "llama-70b"')
    section.where = section.where.split(" job ")[0] + f" job {name!r}"
    values = _settings(section)
    ranks = section.take("ranks", list)
    ranks = [0] if ranks is None else ranks
    if not ranks or any(not isinstance(rank, int) or isinstance(rank, bool) for rank in ranks):
        raise CheckError(f"{section.where}: ranks is a list of numbers, not {ranks!r}", "ranks = [0, 7]")
    if len(set(ranks)) != len(ranks):
        raise CheckError(f"{section.where}: ranks names a rank twice: {ranks!r}", "name each once")
    budgets = read_budgets(section.take_table("budgets"))
    own = section.take_either("max_increase", str, dict)
    tolerances = read_tolerances(own, section) if own is not None else read_tolerances(*default)
    section.end()
    try:
        jobs = tuple(Job(rank=rank, **values) for rank in ranks)
    except JobError as error:
        raise CheckError(f"{section.where}: {error.message}", error.hint) from None
    return CheckJob(name, jobs, budgets, tolerances)


def _settings(section: Section) -> dict[str, Any]:
    """The settings of the Job, except the rank."""
    script, module = section.take("script", str), section.take("module", str)
    if (script is None) == (module is None):
        raise CheckError(f"{section.where}: a job has a script or a module, and not both", 'script = "train.py"')
    world_size = section.take("world_size", int)
    arguments = section.take_either("arguments", list, str)
    memory = section.take("gpu_memory", str)
    values: dict[str, Any] = {
        "target": script or module,
        "is_module": module is not None,
        "arguments": _split(section, arguments) if isinstance(arguments, str) else section.take_texts("arguments"),
        "environment": _environment(section.take_table("env")),
        "device": section.take("device", str) or "virtual",
        "gpu_memory_bytes": None if memory is None else _memory(section, memory),
        "timeout_s": section.take_either("timeout", int, float),
    }
    for key in ("gpus_per_node", "seed"):
        if (number := section.take(key, int)) is not None:
            values[key] = number
    for key in ("steps", "until"):
        if (length := section.take_either(key, int, str)) is not None:
            values[key] = length
    for key in ("gpu", "launcher", "collectives", "values"):
        if (text := section.take(key, str)) is not None:
            values[key] = text
    if (with_peers := section.take("with_peers", bool)) is not None:
        values["with_peers"] = with_peers
    if world_size is None:
        # A misspelt key is the likeliest reason.
        for key in ("name", "ranks", "budgets", "max_increase"):
            section.take_either(key, object)
        section.end()
        raise CheckError(f"{section.where}: how many ranks has the job?", "world_size = 1024")
    return {"world_size": world_size, **values}


def _split(section: Section, arguments: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(arguments))
    except ValueError as error:
        told = f"{section.where}: arguments: {str(error).lower()} in {arguments!r}"
        raise CheckError(told, 'write a list: arguments = ["--name", "it\'s"]') from None


def _environment(section: Section) -> tuple[tuple[str, str], ...]:
    found = []
    for key, value in section.items():
        if not isinstance(value, (str, int, float)) or isinstance(value, bool):
            raise CheckError(f"{section.where}: {key} is a text, not {value!r}", f'{key} = "1"')
        found.append((key, str(value)))
    return tuple(sorted(found))


def _memory(section: Section, text: str) -> int:
    try:
        return parse_bytes(text)
    except JobError as error:
        raise CheckError(f"{section.where}: gpu_memory: {error.message}", error.hint) from None
