"""Where the time of the timed step goes, in one object: what ``--json`` has under ``time``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from fakedist.analysis.layers import fold_layers, unfolded
from fakedist.analysis.times.busy import Busy, find_busy
from fakedist.analysis.times.families import family_table, name_table
from fakedist.analysis.times.kinds import timed
from fakedist.analysis.times.layers import fold_times, layer_time_table
from fakedist.run.schema import BOUNDS, KINDS

NUM_TOP = 20
#: The peak that a utilisation is of, as is the custom: dense bf16, whatever the job computes in.
PEAK_DTYPE = "bf16"


@dataclass(frozen=True)
class Times:
    """What the kernels of a step say.

    Attributes:
        layers: The table ``layer_times``.
        names: The table ``kernel_names``.
        summary: The object ``time``; None without a kernel.
    """

    layers: pd.DataFrame
    names: pd.DataFrame
    summary: dict[str, Any] | None


def find_times(
    kernels: pd.DataFrame, layers: pd.DataFrame, source: dict[str, Any], peaks: dict[str, Any] | None
) -> Times:
    """Answer every question about a step's time.

    Args:
        kernels: The table ``kernels``.
        layers: The table ``layers``.
        source: ``kernels`` of the summary.
        peaks: ``flops`` by dtype and ``bytes_per_s`` of the GPU; None where it is not known.
    """
    ready = timed(kernels)
    busy = find_busy(ready, float(source.get("step_us") or 0.0))
    times = layer_time_table(ready, layers, busy.of_kernel_us)
    names = name_table(ready)
    if not len(kernels):
        return Times(times.iloc[:0], names, None)
    return Times(times, names, _time_object(ready, busy, peaks) | _tables(ready, times, layers, names))


def _time_object(kernels: pd.DataFrame, busy: Busy, peaks: dict[str, Any] | None) -> dict[str, Any]:
    compute = kernels[kernels["is_compute"]]
    known_us, flops = compute["known_us"].to_numpy(), np.nan_to_num(compute["flops"].to_numpy("f8"))
    kind = compute["kind"].to_numpy()
    model_flops = float(flops[kind != KINDS.index("recompute")].sum())
    bound = compute["bound"].astype(str).to_numpy()
    peak = ((peaks or {}).get("flops") or {}).get(PEAK_DTYPE)
    return {
        "step_us": busy.step_us,
        "busy_us": busy.busy_us,
        "communication_us": busy.communication_us,
        "launch_gap_us": busy.launch_gap_us,
        "wait_us": busy.wait_us,
        "num_kernels": len(compute),
        "num_unknown_kernels": int((~compute["is_known"]).sum()),
        "kernel_us": float(known_us.sum()),
        "by_kind": {name: float(known_us[kind == at].sum()) for at, name in enumerate(KINDS)},
        "by_bound": {name: float(known_us[bound == name].sum()) for name in BOUNDS if name and (bound == name).any()},
        "num_calls": int(kernels["is_call"].sum()),
        "num_unknown_calls": int((kernels["is_call"] & ~kernels["is_known"]).sum()),
        "flops": float(flops.sum()),
        "model_flops": model_flops,
        "num_lacking_flops": int(compute["lacks_flops"].sum()),
        "moved_bytes": float(np.nan_to_num(compute["moved_bytes"].to_numpy("f8")).sum()),
        "peaks": peaks,
        "model_flops_utilisation": model_flops / (busy.busy_us * 1e-6 * peak) if peak and busy.busy_us else None,
    }


def _tables(kernels: pd.DataFrame, times: pd.DataFrame, layers: pd.DataFrame, names: pd.DataFrame) -> dict[str, Any]:
    compute = kernels["is_compute"]
    families = family_table(kernels)
    whole = float(kernels["known_us"][compute].sum())
    is_compute = families["family"] != "communication"
    families["share"] = np.where(is_compute, families["time_us"] / (whole or 1.0), np.nan)
    top = names[names["family"] != "communication"].head(NUM_TOP)
    return {
        "by_family": plain(families),
        "top_kernels": plain(top),
        "layers": layer_time_objects(times, layers),
    }


def layer_time_objects(times: pd.DataFrame, layers: pd.DataFrame, *, fold: bool = True) -> list[dict[str, Any]]:
    """Layers that run anything, as ``--json`` shows them; repeated ones folded into one unless told otherwise."""
    found = fold_times(times, layers, fold_layers(layers) if fold else unfolded(layers))
    return plain(found[(found["num_kernels"] > 0) | (found["num_calls"] > 0)])


def plain(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as objects in which what is not known is null: JSON has no NaN."""
    rows: list[dict[str, Any]] = table.to_dict("records")  # type: ignore[assignment]
    return [{key: None if value != value else value for key, value in row.items()} for row in rows]
