"""Figures of several runs by row: a column for each run, and their change."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_uppercase
from typing import Literal

import numpy as np
import pandas as pd

Unit = Literal["bytes", "us", "number"]
#: Names of the columns of each run's figure and of their change.
COLUMNS: Mapping[Unit, tuple[str, str]] = {
    "bytes": ("{}_bytes", "change_bytes"),
    "us": ("{}_us", "change_us"),
    "number": ("{}", "change"),
}
#: Smaller changes of times are rounding errors of sums.
_NOTHING_US = 0.01
#: Smaller times are written as 0 µs: nothing grew or shrank.
SHOWN_AS_NONE_US = 0.05


@dataclass(frozen=True)
class ChangeTable:
    """Figures of several runs by row, the first run's the base.

    Attributes:
        keys: The columns of ``rows`` that name a row, by their headings.
        rows: These, and the columns of :func:`side_by_side`.
        pairs: Columns of two runs that explain the figures, by their headings: ``num_{}`` for num_a and num_b.
        is_whole: Every row is shown, in this order; otherwise those that differ, those that differ most first.
        remark: A sentence that reads it.
    """

    title: str
    keys: Mapping[str, str]
    rows: pd.DataFrame
    unit: Unit = "bytes"
    pairs: Mapping[str, str] = field(default_factory=dict)
    is_whole: bool = False
    remark: str = ""


def run_names(number: int) -> list[str]:
    """Names of so many runs: A, B, ..., Z, AA, AB, ..."""
    return list(itertools.islice(_letters(), number))


def _letters() -> Iterator[str]:
    for length in itertools.count(1):
        yield from map("".join, itertools.product(ascii_uppercase, repeat=length))


def side_by_side(
    sides: Sequence[pd.DataFrame], keys: Sequence[str], unit: Unit = "bytes", *, is_sorted: bool = True
) -> pd.DataFrame:
    """The rows of every run's table, joined by ``keys`` and sorted by them, with the columns of :func:`with_change`.

    ``sides`` have these and columns whose names say where the run's letter goes: ``{}_us``, ``num_{}``, ``unknown_{}``
    (kernels or calls of unknown duration, so that the time is a lower bound). Of two runs, the figure that one lacks is
    0; of more, NaN. Rates stay NaN, and have no ``what``.
    """
    names = [name.lower() for name in run_names(len(sides))]
    named = [
        side.set_index(list(keys)).rename(columns={column: str(column).format(name) for column in side})
        for name, side in zip(names, sides, strict=True)
    ]
    joined = pd.concat(named, axis=1, sort=False).rename_axis(list(keys))
    rows = (joined.sort_index() if is_sorted else joined).reset_index()
    for column in map(str, rows.columns):
        if column.startswith(("num_", "unknown_")):
            rows[column] = rows[column].astype("float64").fillna(0).astype("int64")
    figure, change = COLUMNS[unit]
    figures = [figure.format(name) for name in names]
    if unit == "number":
        return rows.astype(dict.fromkeys(figures, "float64")).assign(
            **{change: lambda table: table[figures[-1]] - table[figures[0]]}
        )
    rows = with_change(rows, unit, len(sides))
    if "num_b" in rows and len(sides) == 2:
        rows.loc[rows["num_a"] == 0, "what"] = "appeared"
        rows.loc[rows["num_b"] == 0, "what"] = "gone"
        rows.loc[(rows["what"] == "same") & (rows["num_a"] != rows["num_b"]), "what"] = "recounted"
    if "unknown_a" in rows:
        is_unknown = rows[[f"unknown_{name}" for name in names]] > 0
        unlike = is_unknown.any(axis=1) & ~is_unknown.all(axis=1)
        rows.loc[unlike, change] = 0.0
        rows.loc[unlike, "what"] = "not known"
    return rows


def with_change(rows: pd.DataFrame, unit: Literal["bytes", "us"] = "bytes", num_runs: int = 2) -> pd.DataFrame:
    """Add change_bytes or change_us, and what: appeared, gone, grew, shrank or same, by the columns of a and b.

    Of more than two runs the change is the most less the least, and they are the same or differ.
    """
    figure, change = COLUMNS[unit]
    columns = [figure.format(name.lower()) for name in run_names(num_runs)]
    dtype: Literal["int64", "float64"] = "int64" if unit == "bytes" else "float64"
    rows = rows.astype(dict.fromkeys(columns, "float64"))
    values = rows[columns].fillna(0)
    changes = values[columns[1]] - values[columns[0]] if num_runs == 2 else values.max(axis=1) - values.min(axis=1)
    rows[change] = (changes.where(changes.abs() >= _NOTHING_US, 0.0) if unit == "us" else changes).astype(dtype)
    least = SHOWN_AS_NONE_US if unit == "us" else 1
    if num_runs > 2:
        return rows.assign(what=np.where(rows[change] >= least, "differs", "same"))
    rows = rows.fillna(dict.fromkeys(columns, 0)).astype(dict.fromkeys(columns, dtype))
    grown = np.where(rows[change] >= least, "grew", np.where(rows[change] <= -least, "shrank", "same"))
    is_a, is_b = (rows[column] != 0 for column in columns)
    return rows.assign(what=np.where(~is_a & is_b, "appeared", np.where(is_a & ~is_b, "gone", grown)))


def without_empty(rows: pd.DataFrame, unit: Literal["bytes", "us"] = "bytes") -> pd.DataFrame:
    """The rows of which at least one run has something."""
    columns = [column for column in map(str, rows) if column.endswith(f"_{unit}") and not column.startswith("change")]
    return rows[(rows[columns].fillna(0) != 0).any(axis=1)]


def by_effect(changes: pd.DataFrame, unit: Literal["bytes", "us"] = "bytes") -> pd.DataFrame:
    """Rows sorted by size of change, largest first."""
    order = changes[f"change_{unit}"].abs().sort_values(ascending=False, kind="stable").index
    return changes.loc[order].reset_index(drop=True)


def figures_by_name(sides: Sequence[Mapping[str, float]], unit: Unit = "bytes", key: str = "name") -> pd.DataFrame:
    """:func:`side_by_side` of figures by name, in their order."""
    column = COLUMNS[unit][0]
    tables = [pd.DataFrame(list(side.items()), columns=[key, column]) for side in sides]
    return side_by_side(tables, [key], unit, is_sorted=False)
