"""What makes two points one run: the script's files, its arguments and environment, the job, and the versions."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path

from fakedist._version import __version__
from fakedist.job import Job
from fakedist.sweep.command import PointRun, PricedFor
from fakedist.sweep.plan import SweepPlan

#: Inherited variables that differ from one terminal to the next, and that no training script goes by.
_OF_TERMINALS = {
    *("_", "PWD", "OLDPWD", "SHLVL", "TERM", "TERM_PROGRAM", "TERM_PROGRAM_VERSION", "TERM_SESSION_ID", "COLORTERM"),
    *("COLUMNS", "LINES", "LS_COLORS", "LESSOPEN", "LESSCLOSE", "PS1", "PS2", "PROMPT_COMMAND", "HISTFILE", "HISTSIZE"),
    *("DISPLAY", "WINDOWID", "XAUTHORITY", "DBUS_SESSION_BUS_ADDRESS", "STY", "TMUX", "TMUX_PANE", "EDITOR", "PAGER"),
    *("INVOCATION_ID", "JOURNAL_STREAM", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_TESTRUNUID"),
    *("RAY_ADDRESS", "MAIL", "MOTD_SHOWN", "CONDA_PROMPT_MODIFIER", "VIRTUAL_ENV_PROMPT", "NO_COLOR", "FORCE_COLOR"),
}
_OF_SESSIONS = ("SSH_", "XDG_", "VSCODE_", "GPG_", "ITERM_", "KITTY_", "LC_TERMINAL", "SUDO_", "WT_")
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
        if name not in _OF_TERMINALS and not name.startswith(_OF_SESSIONS):
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
