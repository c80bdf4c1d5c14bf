"""The columns that every table of changes has."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from fakedist.report.compare.comparison import format_change, format_relative
from fakedist.report.text.memory_sheets import Columns, changed_sheet
from fakedist.report.text.sheet import KEY, Sheet, SheetColumn
from fakedist.units import format_bytes


def changed_bytes_sheet(title: str, changes: pd.DataFrame, columns: Columns, all_rows: bool) -> Sheet | None:
    """A table of changes in bytes. :func:`fakedist.report.text.memory_sheets.changed_sheet` documents it."""
    return changed_sheet(title, changes, columns, _in_all, all_rows)


def _in_all(rows: pd.DataFrame) -> str:
    return format_change(int(rows["change_bytes"].sum()))


def num_column(name: str, rows: pd.DataFrame) -> SheetColumn:
    """How many there are, from num_a and num_b: "4", or "4 -> 6" where that changed."""
    pairs = zip(rows["num_a"].tolist(), rows["num_b"].tolist(), strict=True)
    return SheetColumn(name, [f"{a:,}" if a == b else f"{a:,} -> {b:,}" for a, b in pairs], rank=1)


def text_column(name: str, cells: Iterable[object]) -> SheetColumn:
    """A column of text."""
    return SheetColumn(name, [str(cell) for cell in cells], is_text=True)


def size_columns(rows: pd.DataFrame) -> list[SheetColumn]:
    """A, B and the change."""
    found = [
        SheetColumn(name, [_or_dash(bytes_) for bytes_ in rows[f"{name.lower()}_bytes"].tolist()]) for name in "AB"
    ]
    changes = [format_change(bytes_) for bytes_ in rows["change_bytes"].tolist()]
    return [*found, SheetColumn("change", changes, rank=KEY)]


def relative_column(rows: pd.DataFrame) -> SheetColumn:
    """The change in percent."""
    pairs = zip(rows["change_bytes"].tolist(), rows["a_bytes"].tolist(), strict=True)
    return SheetColumn("%", [format_relative(change, of) for change, of in pairs], rank=1)


def what_column(rows: pd.DataFrame) -> SheetColumn:
    """What became of it: grew, appeared, ..."""
    return SheetColumn("", [str(what) for what in rows["what"]], is_text=True, rank=1)


def _or_dash(bytes_: int) -> str:
    return format_bytes(bytes_) if bytes_ else "-"
