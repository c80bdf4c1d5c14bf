"""The rank's communication with other ranks: calls and bytes by group and operation."""

from __future__ import annotations

import pandas as pd

from fakedist.analysis.recording import Recording
from fakedist.rank_list import format_rank_list, parse_rank_list
from fakedist.run.rows import CallRow, ScopeRow
from fakedist.run.schema import TABLES


def call_table(recording: Recording) -> pd.DataFrame:
    """The table ``calls``: one row per call, in order."""
    calls = pd.DataFrame(recording.calls, columns=CallRow._fields)
    scopes = pd.DataFrame(recording.scopes, columns=ScopeRow._fields)
    found = calls.merge(scopes, on="scope", how="left")
    found["phase"] = found["phase"].fillna("other")
    found[["step", "layer"]] = found[["step", "layer"]].fillna(0).astype("int32")
    return found[[column.name for column in TABLES["calls"].columns]]


def group_table(recording: Recording) -> pd.DataFrame:
    """The table ``groups``: one row per process group, in order of creation."""
    rows = [
        (row.name, row.description, row.backend, len(row.members), row.group_rank, format_rank_list(row.members))
        for row in sorted(recording.groups)
    ]
    return pd.DataFrame(rows, columns=["name", "description", "backend", "size", "group_rank", "ranks"])


def collective_table(calls: pd.DataFrame) -> pd.DataFrame:
    """The table ``collectives``: one row per group and operation, most bytes first."""
    groups = calls.groupby(["group", "operation"], sort=False)
    table = groups.agg(
        num_calls=("op", "size"), bytes_in=("bytes_in", "sum"), bytes_out=("bytes_out", "sum")
    ).reset_index()
    order = table[["bytes_in", "bytes_out"]].max(axis=1).sort_values(ascending=False, kind="stable").index
    return table.loc[order].reset_index(drop=True)


def ranks_of(text: str) -> tuple[int, ...]:
    """Ranks from their text in the table ``groups``, which is empty if the ranks are not known."""
    return parse_rank_list(text) if text else ()
