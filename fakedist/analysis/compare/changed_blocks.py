"""Which blocks at the peak appeared, are gone, grew or shrank, by the place that allocated them."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from fakedist.analysis.compare.changed_memory import OUTSIDE, by_effect

_LINE = re.compile(r"(?P<file>.*):(?P<line>\d+) \((?P<function>.*)\)")


def peak_blocks(
    blocks: pd.DataFrame, stacks: pd.DataFrame, paths: dict[int, str], *, cwd: str, script_folder: str
) -> pd.DataFrame:
    """The blocks of one run that were alive at its peak, in the form that :func:`block_changes` compares.

    Args:
        blocks: The table ``blocks``; columns bytes, alloc_event, operation, phase, layer, category, stack, at_peak.
        stacks: The table ``stacks``; column line.
        paths: Each layer's name in the comparison.
        cwd: The working directory of the job, which lines are relative to.
        script_folder: The directory of its script.

    Returns:
        Columns bytes, alloc_event, operation, phase, category, path, line, and place: file and function of the line,
        which stay the same when lines, the script or the whole checkout move.
    """
    alive = blocks[blocks["at_peak"]]
    stack = alive["stack"].to_numpy()
    cwd, script_folder = (folder.rstrip("/") + "/" for folder in (cwd, script_folder))
    lines = [*stacks["line"].astype(str), ""]  # stack -1 (none) indexes the last
    found = alive[["bytes", "alloc_event"]].copy()
    for name in ("operation", "phase", "category"):
        found[name] = alive[name].astype(str)
    found["path"] = [paths.get(layer, "") or OUTSIDE for layer in alive["layer"].tolist()]
    found["line"] = np.array([line.removeprefix(cwd) for line in lines])[stack]
    places = [_LINE.sub(r"\g<file> (\g<function>)", line) for line in lines]
    found["place"] = np.array([place.removeprefix(script_folder).removeprefix(cwd) for place in places])[stack]
    return found.reset_index(drop=True)


def block_changes(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """Changes of blocks at the peak by layer, category, operation and place, greatest first.

    Args:
        a: :func:`peak_blocks` of one run.
        b: :func:`peak_blocks` of the other.

    Returns:
        Columns path, category, phase, operation, line (the first in b; in a if b has none), num_a, num_b, a_bytes,
        b_bytes, change_bytes, what. The changes add up to the change of the peak.
    """
    keys = ["path", "category", "phase", "operation", "place"]
    sides = []
    for side, table in (("a", a), ("b", b)):
        groups = table.sort_values("alloc_event", kind="stable").groupby(keys, sort=False)
        sums = groups.agg(bytes=("bytes", "sum"), num=("bytes", "size"), line=("line", "first"))
        sides.append(sums.set_axis([f"{side}_bytes", f"num_{side}", f"line_{side}"], axis=1))
    found = sides[0].join(sides[1], how="outer").reset_index()
    numbers = ["a_bytes", "b_bytes", "num_a", "num_b"]
    found[numbers] = found[numbers].fillna(0).astype("int64")
    found["line"] = found["line_b"].where(found["line_b"].notna(), found["line_a"])
    found["change_bytes"] = found["b_bytes"] - found["a_bytes"]
    grown = np.where(found["change_bytes"] > 0, "grew", "shrank")
    found["what"] = np.where(found["num_a"] == 0, "appeared", np.where(found["num_b"] == 0, "gone", grown))
    columns = ["path", "category", "phase", "operation", "line", "num_a", "num_b", "a_bytes", "b_bytes"]
    return by_effect(found[found["change_bytes"] != 0][[*columns, "change_bytes", "what"]])
