"""What makes a step as long as it is: collectives by group, the critical path by layer, and the widest estimates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import pandas as pd

from fakedist.analysis.layer_table import fold_layers
from fakedist.analysis.recording import Array
from fakedist.analysis.topology import read_groups
from fakedist.cost_model.communication import Communication
from fakedist.cost_model.overlap import union
from fakedist.cost_model.step import PricedStep
from fakedist.cost_model.timeline import IDLE, ON_GPU, ON_HOST, CriticalPath
from fakedist.rundir.step_time import GroupTime, PathPart, UncertainPart

#: A kernel that begins this soon after a call's end waited for it.
_SAME_US = 1e-3


def group_times(
    kernels: pd.DataFrame, calls: pd.DataFrame, groups: pd.DataFrame, communication: Communication
) -> list[GroupTime]:
    """The step's communication by group and operation, most exposed first.

    Args:
        kernels: The result of :func:`fakedist.cost_model.breakdown.timed`.
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
    """How long the step waits for each call, in microseconds: nothing computes, and this is the call it waits for.

    Of several calls that run in a gap between kernels, it is the one whose end lets the next kernel begin: the last to
    end before the gap does. If none of them ends by then, it is the first that began. The parts add up to the time in
    which nothing computes and a call runs.
    """
    start = calls["start_us"].to_numpy("f8")
    end = start + calls["known_us"].to_numpy("f8")
    kernel = compute["start_us"].to_numpy("f8")
    busy_starts, busy_ends = union(kernel, kernel + compute["known_us"].to_numpy("f8"))
    found = np.zeros(len(start))
    for number, begin, until in _exposed(start, end, busy_starts, busy_ends):
        found[number] += until - begin
    return found


def exposed_parts(kernels: pd.DataFrame) -> pd.DataFrame:
    """When the step waits for each call: nothing computes then, and the calls' parts do not overlap.

    Args:
        kernels: The result of :func:`fakedist.cost_model.breakdown.timed`.

    Returns:
        Columns row (of ``kernels``), start_us, end_us, in the order of time.
    """
    rows = np.flatnonzero((kernels["is_call"] & kernels["is_known"]).to_numpy(bool))
    calls, compute = kernels.iloc[rows], kernels[kernels["is_compute"]]
    start, kernel = calls["start_us"].to_numpy("f8"), compute["start_us"].to_numpy("f8")
    busy = union(kernel, kernel + compute["known_us"].to_numpy("f8"))
    parts = list(_exposed(start, start + calls["known_us"].to_numpy("f8"), *busy))
    found = pd.DataFrame(parts, columns=["row", "start_us", "end_us"])
    return found.assign(row=rows[found["row"].to_numpy("i8")])


def _exposed(start: Array, end: Array, busy_starts: Array, busy_ends: Array) -> Iterator[tuple[int, float, float]]:
    """The call that the step waits for, from when and until when, as long as nothing computes.

    Nothing waits for a call without a time: NCCL does nothing in a group of one rank.
    """
    takes_time = np.flatnonzero(end > start).tolist()
    changes = sorted(
        [(float(start[number]), 1, number) for number in takes_time]
        + [(float(end[number]), 0, number) for number in takes_time]
        + [(at, 2, -1) for at in (*busy_starts.tolist(), *busy_ends.tolist())]
    )
    running: set[int] = set()
    before = 0.0
    for at, kind, number in changes:
        if running and at > before:
            place = int(np.searchsorted(busy_starts, before, side="right"))
            if not place or busy_ends[place - 1] <= before:
                gap_end = busy_starts[place] if place < len(busy_starts) else np.inf
                yield _waited_for(running, start, end, float(gap_end)), before, at
        before = at
        if kind == 1:
            running.add(number)
        elif kind == 0:
            running.discard(number)


def _waited_for(running: set[int], start: Array, end: Array, gap_end: float) -> int:
    """Which of the running calls the kernel at the end of a gap waits for."""
    in_time = [number for number in running if end[number] <= gap_end + _SAME_US]
    if in_time:
        return max(in_time, key=lambda number: (end[number], -start[number]))
    return min(running, key=lambda number: (start[number], number))


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


_NUM_PARTS = 3


def call_spreads(
    calls: pd.DataFrame, groups: pd.DataFrame, communication: Communication
) -> dict[tuple[str, str], float]:
    """How much longer than estimated collectives may take, relative to their time, by group and operation.

    Args:
        calls: The table ``calls``.
        groups: The table ``groups``.
        communication: What the calls take.
    """
    labels = [group.label for group in read_groups(groups)]
    own = calls[calls["sequence"].isin(communication.calls.index)]
    prices = communication.calls.loc[own["sequence"].to_numpy("i8"), ["time_us", "high_us"]].set_axis(own.index)
    keys = [own["group"].map(lambda number: labels[int(number)]).astype(str), own["operation"].astype(str)]
    sums = prices.groupby(keys, observed=True).sum()
    found = {}
    for (label, operation), time_us, high_us in zip(sums.index, sums["time_us"], sums["high_us"], strict=True):
        found[str(label), str(operation)] = float(high_us / time_us - 1) if time_us else 0.0
    return found


def uncertain_parts(
    priced: PricedStep, by_group: Sequence[GroupTime], spreads: Mapping[tuple[str, str], float]
) -> list[UncertainPart]:
    """The largest parts of a step's variance.

    Kernels share theirs as the families' errors do. Collectives, whose errors go together, share theirs as what each
    group and operation could add to the exposed time.

    Args:
        priced: The step.
        by_group: Its communication.
        spreads: The result of :func:`call_spreads`.
    """
    interval = priced.interval
    whole = interval.kernels_us**2 + interval.calls_us**2 + interval.host_us**2
    if interval.high_us is None or not whole:
        return []
    found = [UncertainPart("host", "the host", "", 0, interval.host_us, interval.host_us**2 / whole)]
    of_kernels = sum(priced.variances.values())
    for family, variance in priced.variances.items():
        share = variance / of_kernels if of_kernels else 0.0
        part = interval.kernels_us**2 * share
        found.append(UncertainPart("kernels", family, "", 0, part**0.5, part / whole))
    weights = [row.exposed_us * spreads.get((row.group, row.operation), 0.0) for row in by_group]
    for row, weight in zip(by_group, weights, strict=True):
        share = weight / sum(weights) if weight else 0.0
        part = interval.calls_us**2 * share
        half_us = interval.calls_us * share
        found.append(UncertainPart("collectives", row.operation, row.group, row.num_nodes, half_us, part / whole))
    found = [part for part in found if part.half_width_us > 0]
    return sorted(found, key=lambda part: -part.share)[:_NUM_PARTS]
