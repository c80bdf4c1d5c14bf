"""How peak, phases, categories and layers changed."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fakedist.analysis.compare.matching import layer_patterns
from fakedist.analysis.replay import Ints
from fakedist.run.schema import CATEGORIES
from fakedist.run.summary import Summary

OUTSIDE = "(outside of modules)"


def figure_changes(a: Summary, b: Summary) -> pd.DataFrame:
    """The figures of two summaries: columns name, a_bytes, b_bytes, change_bytes."""
    rows = [
        ("peak allocated", a.peak_allocated_bytes, b.peak_allocated_bytes),
        ("peak reserved", a.peak_reserved_bytes, b.peak_reserved_bytes),
        ("capacity", a.capacity_bytes, b.capacity_bytes),
        ("headroom", *(each.capacity_bytes - each.peak_reserved_bytes for each in (a, b))),
    ]
    return with_change(pd.DataFrame(rows, columns=["name", "a_bytes", "b_bytes"]))


def category_changes(a: dict[str, int], b: dict[str, int]) -> pd.DataFrame:
    """Bytes at the peak by category, largest change first. The changes add up to the change of the peak."""
    rows = [(name, a.get(name, 0), b.get(name, 0)) for name in CATEGORIES]
    found = with_change(pd.DataFrame(rows, columns=["category", "a_bytes", "b_bytes"]))
    return by_effect(found[(found["a_bytes"] != 0) | (found["b_bytes"] != 0)])


def phase_changes(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """Peak of each phase of each step: step, phase, a_bytes, b_bytes, change_bytes, what, in the order of b."""
    peaks = [
        {
            (int(step), str(phase)): int(bytes_)
            for step, phase, bytes_ in zip(table["step"], table["phase"], table["peak_allocated_bytes"], strict=True)
        }
        for table in (a, b)
    ]
    places = [*peaks[1], *(place for place in peaks[0] if place not in peaks[1])]
    rows = [(*place, peaks[0].get(place, 0), peaks[1].get(place, 0)) for place in places]
    found = with_change(pd.DataFrame(rows, columns=["step", "phase", "a_bytes", "b_bytes"]))
    sides = [[place in side for place in places] for side in peaks]
    found.loc[[not here for here in sides[0]], "what"] = "appeared"
    found.loc[[not here for here in sides[1]], "what"] = "gone"
    return found


def layer_parts(a: pd.DataFrame, b: pd.DataFrame, matches: pd.DataFrame) -> pd.DataFrame:
    """Own bytes of every layer at the peak in both runs. The changes add up to the change of the peak.

    Args:
        a: The table ``layers`` of one run.
        b: The table ``layers`` of the other.
        matches: The result of :func:`fakedist.analysis.compare.matching.match_layers`.

    Returns:
        One row for each layer and category that is not empty: a, b (rows or -1), how, category, a_bytes, b_bytes, name
        (b's, or a's if the layer is gone), was (a's name), before (a's pattern), path (the pattern in terms of b).
    """
    paths = _paths(a, b, matches)
    frames = []
    for category in CATEGORIES:
        column = f"peak_{category}_bytes"
        sides = {"a_bytes": _taken(a, matches["a"], column), "b_bytes": _taken(b, matches["b"], column)}
        part = matches.assign(**sides, category=category, **paths)
        frames.append(part[(part["a_bytes"] != 0) | (part["b_bytes"] != 0)])
    return with_change(pd.concat(frames, ignore_index=True))


def layer_changes(parts: pd.DataFrame) -> pd.DataFrame:
    """Changes by layer and category, largest first. Repeated layers are one row. They add up to the peak's change.

    Returns:
        Columns name, was (empty if the name stayed the same), category, num_layers (how many changed), a_bytes,
        b_bytes, change_bytes, what (appeared, gone, grew, shrank).
    """
    changed = parts[parts["change_bytes"] != 0]
    only = changed["how"].where(changed["how"].isin(("gone", "appeared")), "both")
    keys = [changed["path"], changed["before"], only.rename("only"), changed["category"]]
    rows = []
    for (path, was, side, category), group in changed.groupby(keys, sort=False):
        alone = len(group) == 1
        rows.append(
            {
                "name": str(group["name"].iloc[0]) if alone else path,
                "was": _former(group, str(was)) if side == "both" else "",
                "category": category,
                "num_layers": len(group),
                "a_bytes": int(group["a_bytes"].sum()),
                "b_bytes": int(group["b_bytes"].sum()),
                "layer_is": side,
            }
        )
    columns = ["name", "was", "category", "num_layers", "a_bytes", "b_bytes", "layer_is"]
    found = with_change(pd.DataFrame(rows, columns=columns))
    is_new_or_gone = found["layer_is"] != "both"
    found["what"] = found["what"].where(~is_new_or_gone, found["layer_is"])
    return by_effect(found.drop(columns="layer_is"))


def most_changes(a: pd.DataFrame, b: pd.DataFrame, matches: pd.DataFrame) -> pd.DataFrame:
    """The most that one layer held in the last step, with children. Repeated layers show the largest of them.

    Returns:
        Columns name, num_a, num_b, a_bytes, b_bytes, change_bytes, what, largest change first.
    """
    sides = {
        "a_bytes": _taken(a, matches["a"], "most_total_bytes"),
        "b_bytes": _taken(b, matches["b"], "most_total_bytes"),
    }
    each = matches.assign(**sides, **_paths(a, b, matches))
    each = each[~((each["a"] == 0) | (each["b"] == 0))].assign(in_a=each["a"] >= 0, in_b=each["b"] >= 0)
    found = each.groupby("path", sort=False).agg(
        num_a=("in_a", "sum"), num_b=("in_b", "sum"), a_bytes=("a_bytes", "max"), b_bytes=("b_bytes", "max")
    )
    found = with_change(found.rename_axis("name").reset_index())
    return by_effect(found[found["change_bytes"] != 0])


def layer_paths(a: pd.DataFrame, b: pd.DataFrame, matches: pd.DataFrame) -> tuple[dict[int, str], dict[int, str]]:
    """Each layer's name in the comparison, for both runs: in terms of b, with numbers as ``*``."""
    paths = _paths(a, b, matches)["path"]
    sides = [
        {layer: path for layer, path in zip(matches[side].tolist(), paths, strict=True) if layer >= 0} for side in "ab"
    ]
    return sides[0], sides[1]


def by_effect(found: pd.DataFrame) -> pd.DataFrame:
    """Rows sorted by size of change, largest first."""
    order = found["change_bytes"].abs().sort_values(ascending=False, kind="stable").index
    return found.loc[order].reset_index(drop=True)


def with_change(found: pd.DataFrame) -> pd.DataFrame:
    """With columns change_bytes, and what: appeared, gone, grew, shrank or same, by a_bytes and b_bytes."""
    found = found.astype({"a_bytes": "int64", "b_bytes": "int64"})
    found["change_bytes"] = found["b_bytes"] - found["a_bytes"]
    grown = np.where(found["change_bytes"] > 0, "grew", np.where(found["change_bytes"] < 0, "shrank", "same"))
    new = (found["a_bytes"] == 0) & (found["b_bytes"] != 0)
    gone = (found["b_bytes"] == 0) & (found["a_bytes"] != 0)
    found["what"] = np.where(new, "appeared", np.where(gone, "gone", grown))
    return found


def _taken(table: pd.DataFrame, rows: pd.Series, column: str) -> Ints:
    values = table[column].to_numpy()
    index = rows.to_numpy()
    return np.where(index >= 0, values[np.maximum(index, 0)], 0).astype("int64")


def _paths(a: pd.DataFrame, b: pd.DataFrame, matches: pd.DataFrame) -> dict[str, list[str]]:
    """Columns name, was, before, path of every match."""
    names_a, names_b = [str(name) for name in a["name"]], [str(name) for name in b["name"]]
    patterns_a, patterns_b = layer_patterns(a), layer_patterns(b)
    parents = a["parent"].tolist()
    to_b = {at: to for at, to in zip(matches["a"].tolist(), matches["b"].tolist(), strict=True) if at >= 0 <= to}

    translated: dict[str, str] = {patterns_a[at]: patterns_b[to] for at, to in to_b.items()}

    def in_terms_of_b(at: int) -> str:
        """A gone layer's pattern: the new name of layers with the same pattern, else its name below its parent's."""
        if patterns_a[at] in translated:
            return translated[patterns_a[at]]
        parent = parents[at]
        if parent <= 0 or names_a[parent].startswith("("):
            return patterns_a[at]
        above = patterns_b[to_b[parent]] if parent in to_b else in_terms_of_b(parent)
        return f"{above}.{patterns_a[at].rpartition('.')[2]}"

    found: dict[str, list[str]] = {"name": [], "was": [], "before": [], "path": []}
    for at, to in zip(matches["a"].tolist(), matches["b"].tolist(), strict=True):
        found["name"].append((names_b[to] if to >= 0 else names_a[at]) or OUTSIDE)
        found["was"].append((names_a[at] if at >= 0 else "") or (OUTSIDE if at == 0 else ""))
        found["before"].append((patterns_a[at] if at >= 0 else "") or (OUTSIDE if at == 0 else ""))
        found["path"].append((patterns_b[to] if to >= 0 else in_terms_of_b(at)) or OUTSIDE)
    return found


def _former(group: pd.DataFrame, was: str) -> str:
    """A row's former name; empty if it is unchanged."""
    if len(group) == 1:
        former = str(group["was"].iloc[0])
        return "" if former == group["name"].iloc[0] else former
    return "" if was == group["path"].iloc[0] else was
