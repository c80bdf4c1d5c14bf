"""Where the time of the timed step goes, as one object: the ``time`` of ``--json``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import pandas as pd

from fakedist.analysis.layer_table import fold_layers, unfolded
from fakedist.analysis.times.busy import Busy, find_busy
from fakedist.analysis.times.family_times import family_table, name_table
from fakedist.analysis.times.kernel_kinds import generation_us, timed
from fakedist.analysis.times.layer_times import fold_times, layer_time_table
from fakedist.analysis.times.range_times import by_range, range_table
from fakedist.run.schema import BOUNDS, KINDS
from fakedist.run.step_time import FamilyTime, KernelSource, KernelTime, LayerTime, Peaks, StepTime

Row = TypeVar("Row")

NUM_TOP = 20
#: The peak rate that utilisation refers to: by convention dense bf16, whatever dtype the job uses.
PEAK_DTYPE = "bf16"


@dataclass(frozen=True)
class Times:
    """The times of a step, from its kernels.

    Attributes:
        layers: The table ``layer_times``.
        names: The table ``kernel_names``.
        ranges: The table ``ranges``.
        summary: Where the time goes; None without kernels.
    """

    layers: pd.DataFrame
    names: pd.DataFrame
    ranges: pd.DataFrame
    summary: StepTime | None


def find_times(
    kernels: pd.DataFrame,
    layers: pd.DataFrame,
    source: KernelSource | None,
    peaks: Peaks | None,
    *,
    ranges: pd.DataFrame,
) -> Times:
    """Compute every table and figure about a step's time.

    Args:
        kernels: The table ``kernels``.
        layers: The table ``layers``.
        source: Where the kernels come from; None without kernels.
        peaks: The GPU's peak rates; None if they are unknown.
        ranges: The script's ranges: the result of :func:`fakedist.analysis.times.range_times.recorded_ranges`.
    """
    ready = timed(kernels)
    busy = find_busy(ready, 0.0 if source is None else source.step_us)
    times = layer_time_table(ready, layers, busy.of_kernel_us)
    names, inside = name_table(ready, layers), range_table(ranges, ready)
    if not len(kernels) or source is None:
        return Times(times.iloc[:0], names, inside, None)
    families, top, by_layer = _tables(ready, times, layers, names)
    found = replace(_step_time(ready, busy, source, peaks), by_family=families, top_kernels=top, layers=by_layer)
    return Times(times, names, inside, replace(found, ranges=by_range(inside)))


def _step_time(kernels: pd.DataFrame, busy: Busy, source: KernelSource, peaks: Peaks | None) -> StepTime:
    compute = kernels[kernels["is_compute"]]
    known_us, flops = compute["known_us"].to_numpy(), np.nan_to_num(compute["flops"].to_numpy("f8"))
    kind = compute["kind"].to_numpy()
    model_flops = float(flops[kind != KINDS.index("recompute")].sum())
    bound = compute["bound"].astype(str).to_numpy()
    peak = peaks.flops.get(PEAK_DTYPE) if peaks else None
    return StepTime(
        generation_us=generation_us(kernels),
        step_us=busy.step_us,
        step_low_us=source.step_low_us,
        step_high_us=source.step_high_us,
        busy_us=busy.busy_us,
        communication_us=busy.communication_us,
        launch_gap_us=busy.launch_gap_us,
        wait_us=busy.wait_us,
        num_kernels=len(compute),
        num_unknown_kernels=int((~compute["is_known"]).sum()),
        kernel_us=float(known_us.sum()),
        by_kind={name: float(known_us[kind == at].sum()) for at, name in enumerate(KINDS)},
        by_bound={name: float(known_us[bound == name].sum()) for name in BOUNDS if name and (bound == name).any()},
        num_calls=int(kernels["is_call"].sum()),
        num_unknown_calls=int((kernels["is_call"] & ~kernels["is_known"]).sum()),
        flops=float(flops.sum()),
        model_flops=model_flops,
        num_lacking_flops=int(compute["lacks_flops"].sum()),
        moved_bytes=float(np.nan_to_num(compute["moved_bytes"].to_numpy("f8")).sum()),
        peaks=peaks,
        model_flops_utilisation=model_flops / (busy.busy_us * 1e-6 * peak) if peak and busy.busy_us else None,
    )


def _tables(
    kernels: pd.DataFrame, times: pd.DataFrame, layers: pd.DataFrame, names: pd.DataFrame
) -> tuple[list[FamilyTime], list[KernelTime], list[LayerTime]]:
    compute = kernels["is_compute"]
    families = family_table(kernels)
    whole = float(kernels["known_us"][compute].sum())
    is_compute = families["family"] != "communication"
    families["share"] = np.where(is_compute, families["time_us"] / (whole or 1.0), np.nan)
    top = names[names["family"] != "communication"].head(NUM_TOP)
    return rows_of(FamilyTime, families), rows_of(KernelTime, top), folded_layer_times(times, layers)


def folded_layer_times(times: pd.DataFrame, layers: pd.DataFrame, *, fold: bool = True) -> list[LayerTime]:
    """Layers that ran any kernel or collective. Repeated layers fold into one row unless ``fold`` is False."""
    found = fold_times(times, layers, fold_layers(layers) if fold else unfolded(layers))
    return rows_of(LayerTime, found[(found["num_kernels"] > 0) | (found["num_calls"] > 0)])


def rows_of(kind: type[Row], table: pd.DataFrame) -> list[Row]:
    """The rows of a table as records. Unknown values become None, because JSON has no NaN."""
    return [
        kind(**{str(name): None if value != value else value for name, value in row.items()})
        for row in table.to_dict("records")
    ]
