"""Opens an Nsight Systems report exported to SQLite, checks it, and reads it column by column."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from fakedist.analysis.traces.intervals import Ints
from fakedist.bounded import UnreadableError, open_file
from fakedist.errors import ReportError

_MAGIC = b"SQLite format 3\0"
_CHUNK_ROWS = 100_000
#: SQLite's steps: a row of ten columns takes some 30, and more than 20 bytes. Queries read each table a few times.
_LEAST_STEPS, _STEPS_A_BYTE, _STEPS_A_CALL = 10_000_000, 100, 100_000
#: The most bytes of one value: the name of a kernel has thousands.
_LONGEST_VALUE = 16 << 20
_EXPORT = "nsys export --type sqlite REPORT.nsys-rep   exports it again"


class Database:
    """An export open for reading, made by any version of nsys.

    Args:
        called: The path that error messages name.
        connection: The open connection.
    """

    def __init__(self, called: Path, connection: sqlite3.Connection) -> None:
        self.called = called
        self._connection = connection
        names = connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')").fetchall()
        self.tables = {str(name) for (name,) in names}

    def columns(self, table: str) -> set[str]:
        """Names of a table's columns; empty if the table does not exist."""
        return {str(row[1]) for row in self._connection.execute(f'PRAGMA table_info("{table}")')}

    def rows(self, query: str) -> list[tuple[Any, ...]]:  # as sqlite3 types them: a query decides
        """All rows of a short result."""
        return self._connection.execute(query).fetchall()

    def chunks(self, query: str) -> Iterator[list[tuple[Any, ...]]]:
        """The rows of a long result, in chunks."""
        cursor = self._connection.execute(query)
        while rows := cursor.fetchmany(_CHUNK_ROWS):
            yield rows

    def integers(self, table: str, names: Sequence[str], where: str = "") -> dict[str, Ints]:
        """Integer columns; -1 if a row has no value, or the table has no such column."""
        known = self.columns(table)
        if not known:
            return {name: np.zeros(0, np.int64) for name in names}
        chosen = ", ".join(f'COALESCE("{name}", -1)' if name in known else "-1" for name in names)
        parts = [
            np.fromiter(chain.from_iterable(rows), np.int64, len(rows) * len(names)).reshape(-1, len(names))
            for rows in self.chunks(f'SELECT {chosen} FROM "{table}" {where}')
        ]
        found = np.concatenate(parts) if parts else np.zeros((0, len(names)), np.int64)
        return {name: np.ascontiguousarray(found[:, place]) for place, name in enumerate(names)}

    def strings(self, ids: Ints) -> dict[int, str]:
        """Texts of ``StringIds``."""
        wanted = set(ids.tolist())
        found = {}
        for rows in self.chunks("SELECT id, value FROM StringIds"):
            found.update({number: str(value) for number, value in rows if number in wanted})
        return found

    def pairs(self, *tables: str) -> dict[str, str]:
        """Names and values of the first of these tables that exists. Older versions use other table names."""
        for table in tables:
            if {"name", "value"} <= self.columns(table):
                return {str(name): str(value) for name, value in self.rows(f'SELECT name, value FROM "{table}"')}
        return {}


@contextmanager
def open_database(path: Path, called: Path | None = None) -> Iterator[Database]:
    """Open an export.

    Args:
        path: The file.
        called: The path that error messages name: the report that the file was exported from.

    Raises:
        ReportError: The file is missing, is not SQLite or not nsys's, or is incomplete. Reading can raise it too.
    """
    size = _check(path)
    try:
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        bound = _bound(connection, size)
        try:
            database = Database(called or path, connection)
            if "StringIds" not in database.tables or not database.pairs("META_DATA_EXPORT", "EXPORT_META_DATA"):
                what = "it holds no tables" if not database.tables else "it has no StringIds or no META_DATA_EXPORT"
                raise ReportError(f"{database.called} is not a complete nsys export: {what}", _EXPORT)
            yield database
        finally:
            connection.close()
    except (sqlite3.Error, sqlite3.Warning, UnicodeDecodeError) as error:
        cause = f"reading it does not end: {bound.most:,} steps" if bound.is_over else error
        raise ReportError(f"{called or path} cannot be read: {cause}", _EXPORT) from error


class _Bound:
    """Counts what SQLite does, and stops a query that no table of this size takes: a view can go on without end.

    Args:
        most: The most steps of SQLite's virtual machine.

    Attributes:
        is_over: Whether it stopped a query.
    """

    def __init__(self, most: int) -> None:
        self.most, self.is_over = most, False
        self._num_calls = 0

    def __call__(self) -> bool:
        self._num_calls += 1
        self.is_over = self._num_calls * _STEPS_A_CALL > self.most
        return self.is_over


def _bound(connection: sqlite3.Connection, size: int) -> _Bound:
    """Bound the steps of all queries, and the bytes of one value."""
    found = _Bound(_LEAST_STEPS + _STEPS_A_BYTE * size)
    connection.set_progress_handler(found, _STEPS_A_CALL)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
    return found


def _check(path: Path) -> int:
    """Check what SQLite itself would not notice, or would report in its own words. Returns the file's bytes."""
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(100)
    except UnreadableError as error:
        raise ReportError(f"{path} is no Nsight report: {error}", "fakedist nsys REPORT.nsys-rep") from None
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror}", "fakedist nsys REPORT.nsys-rep") from error
    if not size:
        raise ReportError(f"{path} is empty", _EXPORT)
    if not head.startswith(_MAGIC):
        raise ReportError(
            f"{path} is not an SQLite file", "give a file that `nsys export --type sqlite` or `nsys profile` wrote"
        )
    page_bytes = int.from_bytes(head[16:18], "big")  # sqlite.org/fileformat.html: 1 means 65,536
    pages = int.from_bytes(head[28:32], "big")
    if size < pages * (65536 if page_bytes == 1 else page_bytes):
        raise ReportError(f"{path} is cut off: the export or a copy of it was interrupted", _EXPORT)
    if any(path.with_name(path.name + ending).exists() for ending in ("-journal", "-wal")):
        raise ReportError(f"{path} is still being written, or its export was interrupted", _EXPORT)
    return size
