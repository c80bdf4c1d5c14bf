"""The critical path of a step by layer and group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import pandas as pd

from fakedist.analysis.layer_table import fold_layers
from fakedist.analysis.recording import Array
from fakedist.analysis.topology import read_groups
from fakedist.run.step_time import PathPart
from fakedist.time.critical_path import IDLE, ON_GPU, ON_HOST, CriticalPath

_Kind = Literal["kernels", "collectives", "host", "idle"]


def path_parts(path: CriticalPath, tables: Mapping[str, pd.DataFrame]) -> list[PathPart]:
    """The parts of a critical path, the longest first. They add up to the step.

    Args:
        path: The path.
        tables: The tables ``launches``, ``layers``, ``calls`` and ``groups``.
    """
    launches = tables["launches"]
    call = launches["call"].to_numpy("i8")[path.row] if len(launches) else path.row
    layer = launches["layer"].to_numpy("i8")[path.row] if len(launches) else path.row
    is_call = (path.what == ON_GPU) & (call >= 0)
    found = _of_layers("kernels", layer, path.us, (path.what == ON_GPU) & ~is_call, tables["layers"])
    found += _of_layers("host", layer, path.us, path.what == ON_HOST, tables["layers"])
    found += _of_groups(call, path.us, is_call, tables)
    if (idle := path.what == IDLE).any():
        found.append(PathPart("idle", "", "", "", 0, 0, float(path.us[idle].sum())))
    return sorted(found, key=lambda part: -part.time_us)


def _of_layers(kind: _Kind, layer: Array, us: Array, chosen: Array, layers: pd.DataFrame) -> list[PathPart]:
    num = len(layers)
    sums, counts = np.bincount(layer[chosen], us[chosen], num), np.bincount(layer[chosen], minlength=num)
    found = []
    for fold in fold_layers(layers):
        rows = list(fold.layers)
        if counts[rows].any():
            amount, number = float(sums[rows].sum()), int(counts[rows].sum())
            found.append(PathPart(kind, fold.name, "", "", len(rows), number, amount))
    return found


def _of_groups(call: Array, us: Array, chosen: Array, tables: Mapping[str, pd.DataFrame]) -> list[PathPart]:
    if not chosen.any():
        return []
    labels = [group.label for group in read_groups(tables["groups"])]
    made = tables["calls"].set_index("sequence").loc[call[chosen], ["group", "operation"]]
    rows = pd.DataFrame({"group": made["group"].to_numpy(), "operation": made["operation"].astype(str).to_numpy()})
    sums = rows.assign(us=us[chosen]).groupby(["group", "operation"])["us"].agg(["sum", "count"])
    return [
        PathPart("collectives", "", labels[int(group)], str(operation), 0, int(count), float(amount))
        for (group, operation), amount, count in zip(sums.index, sums["sum"], sums["count"], strict=True)
    ]
