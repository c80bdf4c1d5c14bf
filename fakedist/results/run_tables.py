"""Where the tables of a run are: in its directory, or in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import pandas as pd

from fakedist.errors import RunDirectoryError
from fakedist.rundir.schema import TABLES
from fakedist.rundir.tables import count_rows, read_table


class RunTables(Protocol):
    """The tables of a run, by their names in ``run.schema.TABLES``."""

    def has(self, name: str) -> bool:
        """Whether the run has this table."""
        ...

    def num_rows(self, name: str) -> int:
        """Number of rows of a table."""
        ...

    def table(self, name: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """One table, or some of its columns, whose strings are then categoricals."""
        ...


class StoredTables:
    """The tables of a run directory, read when they are asked for.

    Args:
        directory: The run directory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def has(self, name: str) -> bool:
        """Whether a run directory has such a table. A directory that lacks one of them is damaged."""
        return name in TABLES

    def num_rows(self, name: str) -> int:
        """Number of rows of a table, without reading them.

        Raises:
            RunDirectoryError: It is missing or damaged.
        """
        return count_rows(self._directory, name)

    def table(self, name: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """One table, or some of its columns, whose strings are then categoricals.

        Raises:
            RunDirectoryError: It is missing or damaged.
        """
        frame = read_table(self._directory, name, columns).to_pandas(strings_to_categorical=columns is not None)
        assert isinstance(frame, pd.DataFrame)
        return frame


class MadeTables:
    """Tables that were made from a snapshot.

    Args:
        tables: The tables by name.
    """

    def __init__(self, tables: Mapping[str, pd.DataFrame]) -> None:
        self._tables = tables

    def has(self, name: str) -> bool:
        """Whether a snapshot has anything for this table."""
        return name in self._tables

    def num_rows(self, name: str) -> int:
        """Number of rows of a table.

        Raises:
            RunDirectoryError: A snapshot has nothing for it.
        """
        return len(self.table(name))

    def table(self, name: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """One table, or some of its columns, whose strings are then categoricals.

        Raises:
            RunDirectoryError: A snapshot has nothing for it.
        """
        if name not in self._tables:
            raise RunDirectoryError(
                f"a memory snapshot has no table {name!r}", f"it has {', '.join(sorted(self._tables))}"
            )
        if columns is None:
            return self._tables[name]
        frame = self._tables[name][list(columns)].copy()
        for column in frame.select_dtypes(["object", "string"]).columns:
            frame[column] = frame[column].astype("category")
        return frame


class ReplacedTables:
    """The tables of a run, some of them replaced.

    Args:
        tables: The run's tables.
        replaced: The other tables by name.
    """

    def __init__(self, tables: RunTables, replaced: Mapping[str, pd.DataFrame]) -> None:
        self._tables = tables
        self._replaced = MadeTables(replaced)

    def has(self, name: str) -> bool:
        """Whether the run has this table."""
        return self._tables.has(name)

    def num_rows(self, name: str) -> int:
        """Number of rows of a table."""
        return self._of(name).num_rows(name)

    def table(self, name: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """One table, or some of its columns, whose strings are then categoricals."""
        return self._of(name).table(name, columns)

    def _of(self, name: str) -> RunTables:
        return self._replaced if self._replaced.has(name) else self._tables


class KeptTables:
    """The tables of a run, each of them read once. A caller gets a copy, which it may change.

    Args:
        tables: The run's tables.
    """

    def __init__(self, tables: RunTables) -> None:
        self._tables = tables
        self._kept: dict[tuple[str, tuple[str, ...] | None], pd.DataFrame] = {}

    def has(self, name: str) -> bool:
        """Whether the run has this table."""
        return self._tables.has(name)

    def num_rows(self, name: str) -> int:
        """Number of rows of a table."""
        return self._tables.num_rows(name)

    def table(self, name: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """One table, or some of its columns, whose strings are then categoricals."""
        key = name, None if columns is None else tuple(columns)
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = self._tables.table(name, columns)
        return found.copy()
