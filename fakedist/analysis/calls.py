"""The rank's communication with other ranks: calls and bytes by group and operation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pandas as pd

from fakedist.analysis.recording import Recording
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
        (row.name, row.description, row.backend, len(row.members), row.group_rank, ranks_text(row.members))
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


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as text: 0,3,5 or 0-56:8 (every eighth from 0 to 56)."""
    if len(ranks) < 3:
        return ",".join(map(str, ranks))
    step = ranks[1] - ranks[0]
    if all(after - before == step for before, after in itertools.pairwise(ranks)):
        return f"{ranks[0]}-{ranks[-1]}" + ("" if step == 1 else f":{step}")
    return ",".join(map(str, ranks))


def ranks_of(text: str) -> list[int]:
    """Ranks from their text in the table ``groups``: "0,3,5", "0-7" or "0-56:8" (every eighth from 0 to 56)."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        bounds, _, step = part.partition(":")
        first, _, last = bounds.partition("-")
        found += range(int(first), int(last or first) + 1, int(step or 1))
    return found
