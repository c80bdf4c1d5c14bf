"""Whole runs that tests share: a rank of a job, profiled once on the virtual GPU for all tests that want the same."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import pandas as pd

    from tests.conftest import Finished


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
        *script: str | Path,
        world_size: int = 8,
        rank: int = 0,
        options: tuple[str, ...] = ("--json",),
        env: dict[str, str] | None = None,
    ) -> Profiled: ...
