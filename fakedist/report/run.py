"""A run directory as the reports see it: the manifest, and each table when it is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from fakedist.errors import RunDirectoryError
from fakedist.run.directory import is_in_use
from fakedist.run.manifest import load_manifest
from fakedist.run.tables import read_table


class Run:
    """One finished run.

    Args:
        path: Its directory.

    Raises:
        RunDirectoryError: It is not one, it is still running, or its tables were never made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.manifest = load_manifest(path)
        if "summary" not in self.manifest:
            if is_in_use(path):
                raise RunDirectoryError(f"{path} is still being written", "wait for the run to end")
            from fakedist.analysis.build import build_tables

            build_tables(path)  # the parent was killed before it could
            self.manifest = load_manifest(path)

    @property
    def summary(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        return {**self.manifest["summary"], "run_directory": str(self.path)}

    def table(self, name: str) -> pd.DataFrame:
        """One table.

        Raises:
            RunDirectoryError: It is missing or damaged.
        """
        frame = read_table(self.path, name).to_pandas()
        assert isinstance(frame, pd.DataFrame)
        return frame
