"""Looks numbers up in columns of a trace."""

from __future__ import annotations

import numpy as np

from fakedist.analysis.traces.intervals import Ints


def find_rows(keys: Ints, asked: Ints) -> Ints:
    """For each number, its first row of ``keys``; -1 if it is missing."""
    if not len(keys):
        return np.full(len(asked), -1, np.int64)
    order = np.argsort(keys, kind="stable")
    place = np.minimum(np.searchsorted(keys[order], asked), len(keys) - 1)
    return np.where(keys[order[place]] == asked, order[place], -1)


def taken(column: Ints, rows: Ints) -> Ints:
    """The given rows of a column; -1 for row -1."""
    return np.where(rows >= 0, column[rows], -1) if len(column) else np.full(len(rows), -1, np.int64)
