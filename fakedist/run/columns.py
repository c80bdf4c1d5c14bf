"""What a table of the run directory is."""

from __future__ import annotations

import inspect
import re
from dataclasses import KW_ONLY, dataclass


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        name: Its name; ``_bytes`` and ``_us`` are its unit.
        type: Its Parquet type.
        meaning: One sentence.
        words: The only texts that it may hold; empty if it may hold any.
        row_of: The table of which its numbers are rows; empty if they are none. What is read is checked.
        least: The least of those numbers: -1 where it stands for none.
        may_end: Whether it may also be the number of rows there, for what never ended.
        is_earlier: Whether it is a row before its own.
        has_ranks: Whether its texts are lists of ranks, or empty.
    """

    name: str
    type: str
    meaning: str
    _: KW_ONLY
    words: tuple[str, ...] = ()
    row_of: str = ""
    least: int = 0
    may_end: bool = False
    is_earlier: bool = False
    has_ranks: bool = False


@dataclass(frozen=True)
class Table:
    """One file ``tables/<name>.parquet``.

    Attributes:
        row: What a row is, and in which order they are.
        columns: Its columns, in order.
    """

    row: str
    columns: tuple[Column, ...]


def attributes(kind: type) -> dict[str, str]:
    """What each attribute of a class means, on one line: from its docstring."""
    text = (inspect.getdoc(kind) or "").partition("Attributes:\n")[2]
    found: dict[str, str] = {}
    for line in text.splitlines():
        if line and not line.startswith(" "):  # the next section, such as "Raises:"
            break
        if start := re.match(r"    (\w+): (.*)", line):
            last, meaning = start[1], start[2]
            found[last] = meaning
        elif found and line.strip():
            found[last] += " " + line.strip()
    return found
