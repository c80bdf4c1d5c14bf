"""Time by layer, own and with children, from forward to optimizer. Repeated layers fold into one row."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fakedist.analysis.layer_table import Fold, with_children
from fakedist.analysis.recording import Array
from fakedist.analysis.times.kernel_kinds import COMPUTE_FAMILIES
from fakedist.run.schema import BOUNDS, FAMILIES, KINDS

_KIND_COLUMNS = [f"{kind}_us" for kind in KINDS]
_BOUND_COLUMNS = [f"bound_{name}_us" for name in BOUNDS if name]
_SUMMED = [*_KIND_COLUMNS, *_BOUND_COLUMNS, "num_kernels", "flops", "moved_bytes", "num_lacking_flops", "launch_gap_us"]
_CALLS = ["num_calls", "num_unknown_calls", "communication_us"]


def layer_time_table(kernels: pd.DataFrame, layers: pd.DataFrame, gap_us: Array) -> pd.DataFrame:
    """The table ``layer_times``: one row for each row of ``layers``. Every kernel counts in exactly one.

    Args:
        kernels: The result of :func:`fakedist.analysis.times.kernel_kinds.timed`.
        layers: The table ``layers``.
        gap_us: For each kernel, the time that the GPU waited for its launch.
    """
    num, layer = len(layers), kernels["layer"].to_numpy("i8")
    compute = kernels["is_compute"].to_numpy(bool)
    known_us = kernels["known_us"].to_numpy()

    def summed(chosen: Array, weights: Array | None = None) -> Array:
        values = None if weights is None else weights[chosen]
        return np.bincount(layer[chosen], values, num)

    table = pd.DataFrame({"name": layers["name"].astype(str)})
    table["num_kernels"] = summed(compute).astype("i8")
    kind, family = kernels["kind"].to_numpy(), kernels["family"].to_numpy()
    for at, column in enumerate(_KIND_COLUMNS):
        table[column] = summed(compute & (kind == at), known_us)
    table["own_us"] = table[_KIND_COLUMNS].sum(axis=1)
    table["total_us"] = with_children(layers, table["own_us"].to_numpy())
    for name in COMPUTE_FAMILIES:
        table[f"family_{name}_us"] = summed(family == FAMILIES.index(name), known_us)
    bound = kernels["bound"].astype(str).to_numpy()
    for name in filter(None, BOUNDS):
        table[f"bound_{name}_us"] = summed(compute & (bound == name), known_us)
    for column in ("flops", "moved_bytes"):
        table[column] = summed(compute, np.nan_to_num(kernels[column].to_numpy("f8")))
    table["num_lacking_flops"] = summed(kernels["lacks_flops"].to_numpy(bool)).astype("i8")
    table["launch_gap_us"] = summed(np.ones(len(kernels), bool), gap_us)
    is_call = kernels["is_call"].to_numpy(bool)
    table["num_calls"] = summed(is_call).astype("i8")
    table["num_unknown_calls"] = summed(is_call & ~kernels["is_known"].to_numpy(bool)).astype("i8")
    table["communication_us"] = summed(~compute, known_us)
    return table


def fold_times(times: pd.DataFrame, layers: pd.DataFrame, folds: list[Fold]) -> pd.DataFrame:
    """Times of folds: one row per fold, in their order.

    Columns: name, class_name, depth, num_repeats; sums over the repeats with children: forward_us, recompute_us,
    backward_us, optimizer_us, other_us, total_us, bound_compute_us, bound_memory_us, bound_launch_us, num_kernels,
    flops, moved_bytes, num_lacking_flops, launch_gap_us, num_calls, num_unknown_calls, communication_us; own_us without
    children; least_us, median_us, largest_us: total of one repeat, with children.

    Args:
        times: The table ``layer_times``.
        layers: The table ``layers``.
        folds: The result of :func:`fakedist.analysis.layer_table.fold_layers` or ``unfolded``.
    """
    totals = {name: with_children(layers, times[name].to_numpy()) for name in (*_SUMMED, *_CALLS)}
    own, whole = times["own_us"].to_numpy(), times["total_us"].to_numpy()
    rows = []
    for fold in folds:
        repeats = list(fold.layers)
        each = np.sort(whole[repeats])
        rows.append(
            {
                "name": fold.name,
                "class_name": fold.class_name,
                "depth": fold.depth,
                "num_repeats": len(repeats),
                **{name: values[repeats].sum().item() for name, values in totals.items()},
                "total_us": float(each.sum()),
                "own_us": float(own[repeats].sum()),
                "least_us": float(each[0]),
                "median_us": float(each[len(each) // 2]),
                "largest_us": float(each[-1]),
            }
        )
    return pd.DataFrame(rows)
