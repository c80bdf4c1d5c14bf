"""The journal of a sweep: what is known of its points, one JSON object a line, appended as results come.

A sweep that is killed leaves at most one incomplete line at the end. It is cut off when the sweep goes on.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from fakedist.bounded import UnreadableError, open_file
from fakedist.errors import SweepError
from fakedist.run.plain import PlainValueError, from_plain, to_plain
from fakedist.sweep.records import RankResult, Row

JOURNAL_NAME = "journal.jsonl"
#: The most bytes of a line. A row of a thousand stages has 1 MB.
_MOST_OF_A_LINE = 16 << 20
_DAMAGED = "run the sweep again with --fresh, or into another directory with -o"


@dataclass
class Known:
    """What a journal holds. A later line replaces an earlier one.

    Attributes:
        ranks: How ranks ended, by the key of the run and the rank.
        rows: Rows by their IDs, in the order in which they first came.
    """

    ranks: dict[str, dict[int, RankResult]] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)


class SweepJournal:
    """A journal that is being written.

    Args:
        path: The file. What it holds stays.

    Attributes:
        known: What it holds.

    Raises:
        SweepError: It is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.known, end = _read(path)
        self._file = path.open("ab")
        self._file.truncate(end)

    def add_rank(self, key: str, result: RankResult) -> None:
        """Write down how a rank of a run ended."""
        self._append({"rank": {"key": key, "result": to_plain(result)}})
        self.known.ranks.setdefault(key, {})[result.rank] = result

    def add_row(self, row: Row) -> None:
        """Write down a row. It replaces an earlier one of the same ID."""
        self._append({"row": to_plain(row)})
        self.known.rows[row.id] = row

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, entry: dict[str, object]) -> None:
        """Append a line, or nothing of it.

        Raises:
            OSError: The disk is full.
        """
        start = self._file.seek(0, os.SEEK_END)
        try:
            self._file.write(json.dumps(entry, separators=(",", ":")).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            os.truncate(self._file.name, start)
            error.filename = self._file.name
            raise


def read_known(path: Path) -> Known:
    """What a journal holds.

    Raises:
        SweepError: It is damaged.
    """
    return _read(path)[0]


def _read(path: Path) -> tuple[Known, int]:
    """What a journal holds, and where its last whole line ends."""
    known, end = Known(), 0
    try:
        with open_file(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(_MOST_OF_A_LINE), b""), 1):
                if len(line) == _MOST_OF_A_LINE:
                    raise SweepError(f"{path}, line {number} has more than {_MOST_OF_A_LINE:,} bytes", _DAMAGED)
                if line.endswith(b"\n"):
                    _take_line(known, line, f"{path}, line {number}")
                    end += len(line)
    except FileNotFoundError:
        return known, 0
    except (OSError, UnreadableError) as error:
        told = getattr(error, "strerror", None) or error
        raise SweepError(f"{path} cannot be read: {told}", _DAMAGED) from None
    return known, end


def _take_line(known: Known, line: bytes, where: str) -> None:
    try:
        _take(known, json.loads(line))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, PlainValueError) as error:
        raise SweepError(f"{where} cannot be read: {str(error)[:100]}", _DAMAGED) from None


def _take(known: Known, entry: dict[str, object]) -> None:
    ((kind, value),) = entry.items()
    if kind == "row":
        row = from_plain(Row, value)
        known.rows[row.id] = row
    elif kind == "rank" and isinstance(value, dict):
        result = from_plain(RankResult, value["result"])
        known.ranks.setdefault(str(value["key"]), {})[result.rank] = result
    else:
        raise ValueError(f"{kind} is no kind of entry")
