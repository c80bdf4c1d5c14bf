"""Whole runs that tests share: a rank of a job, profiled once on the virtual GPU for all tests that want the same."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import pandas as pd

ROOT = Path(__file__).parents[2]
#: Runs of the present sources, which all workers and later test runs share.
_KEPT = ROOT / "build" / "test-runs"


@dataclass(frozen=True)
class Finished:
    code: int
    stdout: str
    stderr: str

    def json(self) -> dict[str, Any]:
        """The one object that ``--json`` prints; fails with everything said when the command failed."""
        assert self.code in (0, 4), f"exit {self.code}\n{self.stdout}\n{self.stderr}"
        loaded = json.loads(self.stdout)
        assert isinstance(loaded, dict)
        return loaded


@dataclass(frozen=True)
class Profiled:
    """A finished run: its directory, and the command that made it."""

    path: Path
    finished: Finished

    @functools.cached_property
    def summary(self) -> dict[str, Any]:
        """The object that ``--json`` printed."""
        return self.finished.json()

    def table(self, name: str) -> pd.DataFrame:
        """A table of the run directory."""
        import pandas as pd

        return pd.read_parquet(self.path / "tables" / f"{name}.parquet")

    def note(self, code: str) -> str:
        """The text of a note; empty if there is none of that code."""
        return next((str(note["text"]) for note in self.summary["notes"] if note["code"] == code), "")


class ProfileOnce(Protocol):
    """The type of the fixture of the same name."""

    def __call__(
        self,
        script: str | Path,
        *arguments: str | Path,
        world_size: int = 8,
        rank: int = 0,
        options: tuple[str, ...] = ("--json",),
        env: dict[str, str] | None = None,
    ) -> Profiled: ...


def run_once(job: object, script: Path, profile: Callable[[Path], Finished]) -> Profiled:
    """The run of a job: one that is kept if the sources have not changed since, or a new one.

    Args:
        job: All that chooses the run, as JSON.
        script: Files next to it count as its sources.
        profile: Profiles it into a directory.
    """
    own = sorted((name, value) for name, value in os.environ.items() if name.startswith(("FAKEDIST_", "PYTORCH_")))
    digest = hashlib.sha256(json.dumps([job, own]).encode())
    for path in sorted(script.parent.glob("*.py")):
        digest.update(path.read_bytes())

    def make(folder: Path) -> None:
        (folder / "finished.json").write_text(json.dumps(asdict(profile(folder / "run"))))

    folder = made_once(digest.hexdigest(), make)
    return Profiled(folder / "run", Finished(**json.loads((folder / "finished.json").read_text())))


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """The folder that ``make`` fills, once for all workers and later test runs of the same sources and versions."""
    versions = hashlib.sha256(f"{name} {sys.version} {version('torch')}".encode()).hexdigest()[:16]
    folder = _KEPT / _digest_of_sources() / versions
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".made").open("a+") as made:
        fcntl.flock(made, fcntl.LOCK_EX)
        made.seek(0)
        if not made.read():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            made.write("all of it")
    return folder


@functools.cache
def _digest_of_sources() -> str:
    """It names the folder of the present sources' runs. Runs of earlier sources are removed."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "fakedist").rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            digest.update(path.read_bytes())
    name = digest.hexdigest()[:16]
    for other in _KEPT.glob("*"):
        if other.name != name:
            shutil.rmtree(other, ignore_errors=True)
    return name
