"""Changes of a step's time: its parts, kernels, layers, and collectives."""

from __future__ import annotations

import pandas as pd

from fakedist.cost_model.breakdown import by_name
from fakedist.results.compare.change_tables import by_effect, figures_by_name, side_by_side, without_empty
from fakedist.results.compare.layer_matching import OUTSIDE, layer_patterns
from fakedist.rundir.plain import to_plain
from fakedist.rundir.schema import COMPUTE_FAMILIES, KINDS
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


def part_changes(*steps: StepTime | None) -> pd.DataFrame:
    """The parts of steps: columns name, a_us, b_us, ..., change_us, what, in the order of ``PARTS``."""
    sides = [{} if step is None else {name: getattr(step, key) for key, name in PARTS.items()} for step in steps]
    return without_empty(figures_by_name(sides, "us"), "us")


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


def rate_changes(*steps: StepTime | None) -> pd.DataFrame:
    """Rates, work and MFU of steps: columns name, a, b, ..., change; NaN where one is not known."""
    return figures_by_name([{} if step is None else rates_of(step) for step in steps], "number")


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


def phase_changes(*steps: StepTime | None) -> pd.DataFrame:
    """Kernel time of steps by phase: columns name, a_us, b_us, ..., change_us, what, in the order of a step."""
    sides = [{} if step is None else {name: step.by_kind.get(name, 0.0) for name in KINDS} for step in steps]
    return without_empty(figures_by_name(sides, "us"), "us")


def family_changes(*steps: StepTime | None) -> pd.DataFrame:
    """Families of kernels of steps, largest change first; 0 if only some have kernels of unknown duration.

    Columns family, num_a, unknown_a (of unknown duration), a_us, num_b, ..., change_us, what.
    """
    sides = [_counted([] if step is None else to_plain(step.by_family), ["family"]) for step in steps]
    return by_effect(side_by_side(sides, ["family"], "us"), "us")


def name_changes(*tables: pd.DataFrame) -> pd.DataFrame:
    """Kernels by name, of any shape and layer: column name, and those of :func:`family_changes`, in its order."""
    keys = ["name", "family"]
    sides = [_counted(by_name(table[table["family"] != "communication"]), keys) for table in tables]
    return by_effect(side_by_side(sides, keys, "us"), "us")


def group_changes(*steps: StepTime | None) -> pd.DataFrame:
    """Exposed communication by group and operation, largest change first; 0 if only some know their calls' durations.

    Columns group, operation, num_a (calls), unknown_a (of unknown duration), a_us (exposed), whole_a_us, num_b, ...,
    change_us, what. Empty unless two steps have communication by group.
    """
    rows = [[] if step is None else to_plain(step.by_group) for step in steps]
    if sum(map(bool, rows)) < 2:
        rows = [[] for _ in steps]
    keys = ["group", "operation"]
    names = {"num_calls": "num_{}", "num_unknown": "unknown_{}", "exposed_us": "{}_us", "time_us": "whole_{}_us"}
    sides = [
        pd.DataFrame(side, columns=[*keys, *names]).rename(columns=names).groupby(keys, sort=False).sum().reset_index()
        for side in rows
    ]
    changes = by_effect(side_by_side(sides, keys, "us"), "us")
    return changes.fillna({column: 0.0 for column in map(str, changes) if column.startswith("whole_")})


def _counted(rows: pd.DataFrame | list[dict[str, object]], keys: list[str]) -> pd.DataFrame:
    """Kernels of a run by ``keys``, for :func:`side_by_side`."""
    names = {"num_kernels": "num_{}", "num_unknown": "unknown_{}", "time_us": "{}_us"}
    return pd.DataFrame(rows, columns=[*keys, *names]).rename(columns=names)


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
