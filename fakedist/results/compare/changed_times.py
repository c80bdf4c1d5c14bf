"""Changes of a step's time: its parts, kernels, layers, and collectives."""

from __future__ import annotations

import math

import pandas as pd

from fakedist.cost_model.breakdown import COMPUTE_FAMILIES, by_name
from fakedist.results.compare.changed_memory import by_effect, with_change
from fakedist.results.compare.layer_matching import OUTSIDE, layer_patterns
from fakedist.rundir.plain import to_plain
from fakedist.rundir.schema import KINDS
from fakedist.rundir.step_time import StepTime
from fakedist.rundir.summary import CollectiveTotal

#: Parts of a step and their display names.
PARTS = {
    "step_us": "step",
    "busy_us": "computes",
    "communication_us": "only communicates",
    "launch_gap_us": "host late",
    "wait_us": "waits",
    "kernel_us": "all kernels",
    "generation_us": "generation",
}


def part_changes(a: StepTime, b: StepTime) -> pd.DataFrame:
    """The parts of two steps: columns name, a_us, b_us, change_us, what, in the order of ``PARTS``."""
    pairs = [(name, getattr(a, key), getattr(b, key)) for key, name in PARTS.items()]
    return with_change(pd.DataFrame([row for row in pairs if row[1] or row[2]], columns=["name", "a_us", "b_us"]), "us")


def rates_of(step: StepTime) -> dict[str, float]:
    """The rate, the work and the MFU of a step by display name, as far as they are known."""
    rates: dict[str, float] = {}
    if done := step.throughput:
        rates |= {"tokens/s per GPU": done.tokens_per_s_per_gpu, "tokens a step": float(done.tokens_per_step)}
    elif read := step.sample_throughput:
        rates |= {"samples/s per GPU": read.samples_per_s_per_gpu, "samples a step": float(read.samples_per_step)}
    if step.step_flops_utilisation is not None and step.model_flops:
        rates["MFU, %"] = 100 * step.step_flops_utilisation
    return rates


def rate_changes(a: StepTime, b: StepTime) -> pd.DataFrame:
    """Rates, work and MFU of two steps: columns name, a, b, change; NaN where one is not known."""
    sides = rates_of(a), rates_of(b)
    names = dict.fromkeys([*sides[0], *sides[1]])
    rows = [(name, *(side.get(name, math.nan) for side in sides)) for name in names]
    rates = pd.DataFrame(rows, columns=["name", "a", "b"]).astype({"a": "f8", "b": "f8"})
    return rates.assign(change=rates["b"] - rates["a"])


def unlike_work(a: StepTime, b: StepTime) -> tuple[str, str] | None:
    """The names of the rate and of the work in two steps whose work differs, so that their lengths do not compare.

    None if it is the same, or is not known of both.
    """
    sides = rates_of(a), rates_of(b)
    for kind in ("tokens", "samples"):
        rate, work = f"{kind}/s per GPU", f"{kind} a step"
        if all(work in side for side in sides) and sides[0][work] != sides[1][work]:
            return rate, work
    return None


def phase_changes(a: StepTime, b: StepTime) -> pd.DataFrame:
    """Kernel time of two steps by phase: columns name, a_us, b_us, change_us, what, in the order of a step."""
    kinds = [(name, a.by_kind.get(name, 0.0), b.by_kind.get(name, 0.0)) for name in KINDS]
    return with_change(pd.DataFrame([row for row in kinds if row[1] or row[2]], columns=["name", "a_us", "b_us"]), "us")


def family_changes(a: StepTime, b: StepTime) -> pd.DataFrame:
    """Families of kernels of two steps, largest change first; 0 if only one has kernels of unknown duration.

    Columns family, num_a, num_b, unknown_a, unknown_b (of unknown duration), a_us, b_us, change_us, what.
    """
    sides = [
        pd.DataFrame(to_plain(step.by_family), columns=["family", "num_kernels", "num_unknown", "time_us"])
        for step in (a, b)
    ]
    return _joined(sides, ["family"])


def name_changes(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """Kernels by name, of any shape and layer: column name, and those of :func:`family_changes`, in its order."""
    return _joined([by_name(table[table["family"] != "communication"]) for table in (a, b)], ["name", "family"])


def group_changes(a: StepTime, b: StepTime) -> pd.DataFrame:
    """Exposed communication by group and operation, largest change first; 0 if only one has calls of unknown duration.

    Columns group, operation, num_a, num_b (calls), unknown_a, unknown_b (of unknown duration), whole_a_us, whole_b_us,
    a_us, b_us (exposed), change_us, what. Empty unless both steps have communication by group.
    """
    keys = ["group", "operation"]
    names = {"num_calls": "num_kernels", "num_unknown": "num_unknown", "exposed_us": "time_us", "time_us": "whole_us"}
    both = bool(a.by_group and b.by_group)
    sides = [
        pd.DataFrame(to_plain(step.by_group if both else []), columns=[*keys, *names])
        .rename(columns=names)
        .groupby(keys, sort=False, as_index=False)
        .sum()
        for step in (a, b)
    ]
    changes = _joined(sides, keys)
    for side, table in zip("ab", sides, strict=True):
        whole = table.set_index(keys)["whole_us"]
        changes[f"whole_{side}_us"] = whole.reindex(pd.MultiIndex.from_frame(changes[keys])).fillna(0.0).to_numpy("f8")
    return changes


def layer_parts(times: pd.DataFrame, paths: dict[int, str]) -> pd.DataFrame:
    """Own time of layers: columns path (shared by repeats), category (the family), us. It adds up to all kernels'."""
    path = pd.Series([paths.get(row, "") or OUTSIDE for row in range(len(times))], index=times.index, dtype=object)
    frames = [
        pd.DataFrame({"path": path, "category": family, "us": times[f"family_{family}_us"]})
        for family in COMPUTE_FAMILIES
    ]
    sums = pd.concat(frames).groupby(["path", "category"], sort=True)["us"].sum().reset_index()
    return sums[sums["us"] != 0].reset_index(drop=True)


def pattern_times(layers: pd.DataFrame, times: pd.DataFrame) -> pd.DataFrame:
    """Own time in the timed step, from ``layer_times``: columns path (repeats as ``*``), category (the family), us."""
    return layer_parts(times, dict(enumerate(layer_patterns(layers))))


def layer_changes(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """Changes between two :func:`layer_parts`, largest first. They add up to the change of all kernels.

    Columns path, name (equal to path), category, a_us, b_us, change_us, what.
    """
    both = a.merge(b, on=["path", "category"], how="outer", suffixes=("_a", "_b")).fillna({"us_a": 0.0, "us_b": 0.0})
    both = both.rename(columns={"us_a": "a_us", "us_b": "b_us"}).assign(name=both["path"])
    return by_effect(with_change(both[["path", "name", "category", "a_us", "b_us"]], "us"), "us")


def _joined(sides: list[pd.DataFrame], keys: list[str]) -> pd.DataFrame:
    columns = {"num_kernels": "num_{}", "num_unknown": "unknown_{}", "time_us": "{}_us"}
    renamed = [
        table[[*keys, *columns]].rename(columns={name: text.format(side) for name, text in columns.items()})
        for side, table in zip("ab", sides, strict=True)
    ]
    both = renamed[0].merge(renamed[1], on=keys, how="outer", sort=False)
    counts = ["num_a", "num_b", "unknown_a", "unknown_b"]
    both[counts] = both[counts].fillna(0).astype("int64")
    both[["a_us", "b_us"]] = both[["a_us", "b_us"]].fillna(0.0)
    both = with_change(both, "us")
    both.loc[both["num_a"] == 0, "what"] = "appeared"
    both.loc[both["num_b"] == 0, "what"] = "gone"
    both.loc[(both["what"] == "same") & (both["num_a"] != both["num_b"]), "what"] = "recounted"
    unknown = (both["unknown_a"] > 0) != (both["unknown_b"] > 0)
    both.loc[unknown, "change_us"] = 0.0
    both.loc[unknown, "what"] = "not known"
    return by_effect(both, "us")


_FIGURES = ("num_calls", "bytes_in", "bytes_out")
_NUMBERS = ("group_size", *_FIGURES)


def collective_changes(a: list[CollectiveTotal], b: list[CollectiveTotal]) -> pd.DataFrame:
    """Changes of calls and bytes between summaries' ``collectives``, largest first, without equal rows.

    Columns group, operation; group_size, num_calls, bytes_in, bytes_out, each with the prefixes a_ and b_; change_bytes
    (in plus out); what. Groups with the same description count as one.
    """
    keys = ["group", "operation"]
    sides = []
    for side, rows in (("a", a), ("b", b)):
        table = pd.DataFrame(to_plain(rows), columns=[*keys, *_NUMBERS]).astype(dict.fromkeys(_NUMBERS, "int64"))
        sums = table.groupby(keys, sort=False).agg(
            group_size=("group_size", "max"), **{n: (n, "sum") for n in _FIGURES}
        )
        sides.append(sums.add_prefix(f"{side}_"))
    both = sides[0].join(sides[1], how="outer")
    missing_a, missing_b = both["a_num_calls"].isna(), both["b_num_calls"].isna()
    both = both.fillna(0).astype("int64")
    carried = [both[f"{side}_bytes_in"] + both[f"{side}_bytes_out"] for side in "ab"]
    both["change_bytes"] = carried[1] - carried[0]
    both["what"] = "same"
    both.loc[both["change_bytes"] > 0, "what"] = "grew"
    both.loc[both["change_bytes"] < 0, "what"] = "shrank"
    equal = (both["change_bytes"] == 0) & (both["a_num_calls"] == both["b_num_calls"])
    regrouped = equal & (both["a_group_size"] != both["b_group_size"])
    both.loc[regrouped, "what"] = "regrouped"
    both.loc[missing_a, "what"], both.loc[missing_b, "what"] = "appeared", "gone"
    both = both[(both["what"] != "same") | ~equal].reset_index()
    order = pd.DataFrame({"bytes": -both["change_bytes"].abs(), "calls": -both["b_num_calls"]})
    return both.loc[order.sort_values(["bytes", "calls"], kind="stable").index].reset_index(drop=True)
