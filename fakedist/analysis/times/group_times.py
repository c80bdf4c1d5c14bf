"""What the collectives of the timed step take, by group and operation, and how much of it the step waits for."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fakedist.analysis.recording import Array
from fakedist.analysis.topology import read_groups
from fakedist.run.step_time import GroupTime
from fakedist.time.communication import Communication
from fakedist.time.exposure import exposed_us


def group_times(
    kernels: pd.DataFrame, calls: pd.DataFrame, groups: pd.DataFrame, communication: Communication
) -> list[GroupTime]:
    """The step's communication by group and operation, most exposed first.

    Args:
        kernels: The result of :func:`fakedist.analysis.times.kernel_kinds.timed`.
        calls: The table ``calls``.
        groups: The table ``groups``.
        communication: What the calls take.
    """
    own = kernels[kernels["is_call"] & kernels["call"].isin(calls["sequence"])]
    if not len(own):
        return []
    found = calls.set_index("sequence").loc[own["call"].to_numpy("i8"), ["operation", "group"]]
    of_call = communication.calls.reindex(own["call"].to_numpy("i8"))
    rows = pd.DataFrame(
        {
            "group": found["group"].to_numpy(),
            "operation": found["operation"].to_numpy(),
            "num_nodes": of_call["num_nodes"].to_numpy(),
            "moved_bytes": of_call["moved_bytes"].to_numpy("f8"),
            "num_unknown": ~own["is_known"].to_numpy(bool),
            "time_us": own["known_us"].to_numpy("f8"),
            "exposed_us": exposed_calls_us(own, kernels[kernels["is_compute"]]),
        }
    )
    labels = [(group.label, group.size) for group in read_groups(groups)]
    made = []
    for (group, operation), part in rows.groupby(["group", "operation"], observed=True):
        label, size = labels[int(str(group))]
        exposed, whole = float(part["exposed_us"].sum()), float(part["time_us"].sum())
        made.append(
            GroupTime(
                group=label,
                group_size=size,
                num_nodes=int(part["num_nodes"].max()),
                operation=str(operation),
                num_calls=len(part),
                num_unknown=int(part["num_unknown"].sum()),
                moved_bytes=float(part["moved_bytes"].sum()),
                time_us=whole,
                hidden_us=max(whole - exposed, 0.0),
                exposed_us=exposed,
            )
        )
    return sorted(made, key=lambda row: (-row.exposed_us, -row.time_us, row.group, row.operation))


def exposed_calls_us(calls: pd.DataFrame, compute: pd.DataFrame) -> Array:
    """How long nothing computes while each call runs, in microseconds. Where calls overlap, the first one counts."""
    start = calls["start_us"].to_numpy("f8")
    end = start + calls["known_us"].to_numpy("f8")
    order = np.lexsort((end, start))
    reached = np.concatenate([[-np.inf], np.maximum.accumulate(end[order])[:-1]])
    begin = np.empty(len(start))
    begin[order] = np.minimum(np.maximum(start[order], reached), end[order])
    busy = compute["start_us"].to_numpy("f8")
    return exposed_us(begin, end, busy, busy + compute["known_us"].to_numpy("f8"))
