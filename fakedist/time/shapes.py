"""What a piece of work is, in a few words: "8192 x 4096 x 4096 TN", "32 heads, 8192 tokens, 128, causal"."""

from __future__ import annotations

import pandas as pd

_COLUMNS = (
    *("batch", "m", "n", "k", "groups", "layout", "attention", "heads", "queries", "keys", "width"),
    *("value_width", "causal", "window", "library"),
)


def shape_texts(work: pd.DataFrame) -> list[str]:
    """The shape of each row of the table ``work``; empty where it is not known."""
    rows = zip(*(work[name].tolist() for name in _COLUMNS), strict=True)
    return [_shape(dict(zip(_COLUMNS, row, strict=True))) for row in rows]


def _shape(row: dict[str, int | str]) -> str:
    if row["attention"]:
        return _attention(row)
    if not row["m"]:
        return ""
    if not row["n"] and not row["k"]:
        return f"{row['m']} rows"
    if not row["n"]:  # converted to eight bits
        return f"{row['m']} x {row['k']}"
    product = " ".join(filter(None, (f"{row['m']} x {row['n']} x {row['k']}", str(row["layout"]))))
    if row["groups"]:
        return f"{product}, {row['groups']} groups"
    return f"{row['batch']} x ({product})" if row["batch"] not in (0, 1) else product


def _window(row: dict[str, int | str]) -> str:
    if not row["window"]:
        return ""
    return f"{row['window']} keys a query" if row["library"] == "flex" else f"window of {row['window']}"


def _attention(row: dict[str, int | str]) -> str:
    queries, keys = row["queries"], row["keys"]
    tokens = (
        f"{queries} tokens" if queries == keys else f"{queries} queries, {keys} keys" if queries else f"{keys} keys"
    )
    width, value_width = row["width"], row["value_width"]
    parts = [
        f"{row['batch']} sequences" if row["batch"] not in (0, 1) else "",
        f"{row['heads']} heads" if row["heads"] else "",
        tokens,
        "" if not width else f"{width}" if value_width in (0, width) else f"{width} and {value_width}",
        "causal" if row["causal"] else "",
        _window(row),
    ]
    return ", ".join(filter(None, parts))
