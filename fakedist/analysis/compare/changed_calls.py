"""Which collectives appeared, are gone, or carry more or fewer bytes."""

from __future__ import annotations

import pandas as pd

from fakedist.run.plain import to_plain
from fakedist.run.summary import CollectiveTotal

_FIGURES = ("num_calls", "bytes_in", "bytes_out")
_NUMBERS = ("group_size", *_FIGURES)


def collective_changes(a: list[CollectiveTotal], b: list[CollectiveTotal]) -> pd.DataFrame:
    """Calls and bytes by group and operation.

    Args:
        a: ``collectives`` of one summary.
        b: ``collectives`` of the other.

    Returns:
        Columns group, operation; group_size, num_calls, bytes_in, bytes_out, each with the prefixes a_ and b_;
        change_bytes (in plus out); what. Groups with the same description count as one. Equal rows are left out. The
        largest change comes first.
    """
    keys = ["group", "operation"]
    sides = []
    for side, rows in (("a", a), ("b", b)):
        table = pd.DataFrame(to_plain(rows), columns=[*keys, *_NUMBERS]).astype(dict.fromkeys(_NUMBERS, "int64"))
        sums = table.groupby(keys, sort=False).agg(
            group_size=("group_size", "max"), **{n: (n, "sum") for n in _FIGURES}
        )
        sides.append(sums.add_prefix(f"{side}_"))
    found = sides[0].join(sides[1], how="outer")
    missing_a, missing_b = found["a_num_calls"].isna(), found["b_num_calls"].isna()
    found = found.fillna(0).astype("int64")
    carried = [found[f"{side}_bytes_in"] + found[f"{side}_bytes_out"] for side in "ab"]
    found["change_bytes"] = carried[1] - carried[0]
    found["what"] = "same"
    found.loc[found["change_bytes"] > 0, "what"] = "grew"
    found.loc[found["change_bytes"] < 0, "what"] = "shrank"
    equal = (found["change_bytes"] == 0) & (found["a_num_calls"] == found["b_num_calls"])
    regrouped = equal & (found["a_group_size"] != found["b_group_size"])
    found.loc[regrouped, "what"] = "regrouped"
    found.loc[missing_a, "what"], found.loc[missing_b, "what"] = "appeared", "gone"
    found = found[(found["what"] != "same") | ~equal].reset_index()
    order = pd.DataFrame({"bytes": -found["change_bytes"].abs(), "calls": -found["b_num_calls"]})
    return found.loc[order.sort_values(["bytes", "calls"], kind="stable").index].reset_index(drop=True)
