"""How a step's time changed: its parts, families of kernels, layers, kernels by name."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fakedist.analysis.compare.changed_memory import OUTSIDE
from fakedist.analysis.times.family_times import by_name
from fakedist.analysis.times.kernel_kinds import COMPUTE_FAMILIES
from fakedist.run.plain import to_plain
from fakedist.run.schema import KINDS
from fakedist.run.step_time import StepTime

#: Parts of a step and their display names.
_PARTS = {
    "step_us": "step",
    "busy_us": "computes",
    "communication_us": "only communicates",
    "launch_gap_us": "host late",
    "wait_us": "waits",
    "kernel_us": "all kernels",
    "generation_us": "generation",
}
#: Smaller changes are rounding errors of sums.
_NOTHING_US = 0.01


def part_changes(a: StepTime, b: StepTime) -> pd.DataFrame:
    """The parts of two steps: columns name, a_us, b_us, change_us, what, in the order of ``_PARTS``."""
    pairs = [(name, getattr(a, key), getattr(b, key)) for key, name in _PARTS.items()]
    return with_change(pd.DataFrame([row for row in pairs if row[1] or row[2]], columns=["name", "a_us", "b_us"]))


def phase_changes(a: StepTime, b: StepTime) -> pd.DataFrame:
    """Kernel time of two steps by phase: columns name, a_us, b_us, change_us, what, in the order of a step."""
    kinds = [(name, a.by_kind.get(name, 0.0), b.by_kind.get(name, 0.0)) for name in KINDS]
    return with_change(pd.DataFrame([row for row in kinds if row[1] or row[2]], columns=["name", "a_us", "b_us"]))


def family_changes(a: StepTime, b: StepTime) -> pd.DataFrame:
    """Families of kernels of two steps, largest change first.

    Returns:
        Columns family, num_a, num_b, unknown_a, unknown_b (kernels of unknown duration), a_us, b_us, change_us, what.
        The change is 0 if only one of the runs has kernels of unknown duration.
    """
    sides = [
        pd.DataFrame(to_plain(each.by_family), columns=["family", "num_kernels", "num_unknown", "time_us"])
        for each in (a, b)
    ]
    return _joined(sides, ["family"])


def name_changes(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """Kernels of two tables ``kernel_names`` by name, whatever their shape and layer, largest change first.

    Returns:
        Column name, and the columns of :func:`family_changes`.
    """
    return _joined([by_name(each[each["family"] != "communication"]) for each in (a, b)], ["name", "family"])


def group_changes(a: StepTime, b: StepTime) -> pd.DataFrame:
    """Exposed communication of two steps by group and operation, largest change first.

    Returns:
        Columns group, operation, num_a, num_b (calls), unknown_a, unknown_b (those of unknown duration), whole_a_us,
        whole_b_us (all of their time), a_us, b_us (the exposed part), change_us, what. No rows unless both steps have
        their communication by group. The change is 0 if only one of them has calls of unknown duration.
    """
    keys = ["group", "operation"]
    names = {"num_calls": "num_kernels", "num_unknown": "num_unknown", "exposed_us": "time_us", "time_us": "whole_us"}
    both = bool(a.by_group and b.by_group)
    sides = [
        pd.DataFrame(to_plain(each.by_group if both else []), columns=[*keys, *names])
        .rename(columns=names)
        .groupby(keys, sort=False, as_index=False)
        .sum()
        for each in (a, b)
    ]
    found = _joined(sides, keys)
    for side, each in zip("ab", sides, strict=True):
        whole = each.set_index(keys)["whole_us"]
        found[f"whole_{side}_us"] = whole.reindex(pd.MultiIndex.from_frame(found[keys])).fillna(0.0).to_numpy("f8")
    return found


def layer_parts(times: pd.DataFrame, paths: dict[int, str]) -> pd.DataFrame:
    """Own time of layers by family: columns path, category (the family), us. It adds up to the time of all kernels.

    Args:
        times: The table ``layer_times``.
        paths: Each layer's name in a comparison. Repeated layers share a name.
    """
    path = pd.Series([paths.get(row, "") or OUTSIDE for row in range(len(times))], index=times.index, dtype=object)
    frames = [
        pd.DataFrame({"path": path, "category": family, "us": times[f"family_{family}_us"]})
        for family in COMPUTE_FAMILIES
    ]
    sums = pd.concat(frames).groupby(["path", "category"], sort=True)["us"].sum().reset_index()
    return sums[sums["us"] != 0].reset_index(drop=True)


def layer_changes(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """Changes between two results of :func:`layer_parts`, largest first. They add up to the change of all kernels.

    Returns:
        Columns path, name (equal to path), category, a_us, b_us, change_us, what.
    """
    found = a.merge(b, on=["path", "category"], how="outer", suffixes=("_a", "_b")).fillna({"us_a": 0.0, "us_b": 0.0})
    found = found.rename(columns={"us_a": "a_us", "us_b": "b_us"}).assign(name=found["path"])
    return by_effect(with_change(found[["path", "name", "category", "a_us", "b_us"]]))


def with_change(found: pd.DataFrame) -> pd.DataFrame:
    """Add change_us, and what: appeared, gone, grew, shrank, same."""
    found = found.astype({"a_us": "float64", "b_us": "float64"})
    change = found["b_us"] - found["a_us"]
    found["change_us"] = change.where(change.abs() >= _NOTHING_US, 0.0)
    grown = np.where(found["change_us"] > 0, "grew", np.where(found["change_us"] < 0, "shrank", "same"))
    new, gone = (found["a_us"] == 0) & (found["b_us"] > 0), (found["b_us"] == 0) & (found["a_us"] > 0)
    found["what"] = np.where(new, "appeared", np.where(gone, "gone", grown))
    return found


def by_effect(found: pd.DataFrame) -> pd.DataFrame:
    """Rows sorted by size of change, largest first."""
    order = found["change_us"].abs().sort_values(ascending=False, kind="stable").index
    return found.loc[order].reset_index(drop=True)


def _joined(sides: list[pd.DataFrame], keys: list[str]) -> pd.DataFrame:
    columns = {"num_kernels": "num_{}", "num_unknown": "unknown_{}", "time_us": "{}_us"}
    renamed = [
        each[[*keys, *columns]].rename(columns={name: text.format(side) for name, text in columns.items()})
        for side, each in zip("ab", sides, strict=True)
    ]
    found = renamed[0].merge(renamed[1], on=keys, how="outer", sort=False)
    counts = ["num_a", "num_b", "unknown_a", "unknown_b"]
    found[counts] = found[counts].fillna(0).astype("int64")
    found[["a_us", "b_us"]] = found[["a_us", "b_us"]].fillna(0.0)
    found = with_change(found)
    found.loc[found["num_a"] == 0, "what"] = "appeared"
    found.loc[found["num_b"] == 0, "what"] = "gone"
    found.loc[(found["what"] == "same") & (found["num_a"] != found["num_b"]), "what"] = "recounted"
    unknown = (found["unknown_a"] > 0) != (found["unknown_b"] > 0)
    found.loc[unknown, "change_us"] = 0.0
    found.loc[unknown, "what"] = "not known"
    return by_effect(found)
