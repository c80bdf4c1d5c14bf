"""The rank's communication with other ranks: calls and bytes by group and operation."""

from __future__ import annotations

import itertools
from typing import Any

import pandas as pd

from fakedist.analysis.recording import Recording


def call_table(recording: Recording) -> pd.DataFrame:
    """The table ``calls``: one row per call, in order."""
    columns = ["sequence", "operation", "group", "bytes_in", "bytes_out", "dtype", "asynchronous", "stream", "op"]
    calls = pd.DataFrame(recording.rows["collectives"], columns=[*columns, "scope", "peer"])
    scopes = pd.DataFrame(recording.rows["scopes"], columns=["scope", "step", "phase", "layer", "recompute"])
    found = calls.merge(scopes, on="scope", how="left")
    found["phase"] = found["phase"].fillna("other")
    found[["step", "layer"]] = found[["step", "layer"]].fillna(0).astype("int32")
    return found[[*columns, "step", "phase", "layer", "peer"]]


def group_table(recording: Recording) -> pd.DataFrame:
    """The table ``groups``: one row per process group, in order of creation."""
    rows = [
        (name, description, backend, num_ranks(ranks), group_rank, ranks_text(ranks))
        for _, name, description, ranks, group_rank, backend in sorted(recording.rows["groups"])
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


def num_ranks(ranks: Any) -> int:
    """Number of ranks in a recorded group, given as a tuple of ranks or as a range {start, stop, step}."""
    return len(range(ranks["start"], ranks["stop"], ranks["step"])) if isinstance(ranks, dict) else len(ranks)


def ranks_text(ranks: Any) -> str:
    """Ranks as text: 0,3,5 or 0-56:8 (every eighth from 0 to 56)."""
    listed = range(ranks["start"], ranks["stop"], ranks["step"]) if isinstance(ranks, dict) else ranks
    if len(listed) < 3:
        return ",".join(map(str, listed))
    step = listed[1] - listed[0]
    if all(after - before == step for before, after in itertools.pairwise(listed)):
        return f"{listed[0]}-{listed[-1]}" + ("" if step == 1 else f":{step}")
    return ",".join(map(str, listed))


def ranks_of(text: str) -> list[int]:
    """Ranks from their text in the table ``groups``: "0,3,5", "0-7" or "0-56:8" (every eighth from 0 to 56)."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        bounds, _, step = part.partition(":")
        first, _, last = bounds.partition("-")
        found += range(int(first), int(last or first) + 1, int(step or 1))
    return found
