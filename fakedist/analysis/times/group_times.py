"""What the collectives of the timed step take, by group and operation, and how much of it the step waits for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from fakedist.analysis.recording import Array
from fakedist.analysis.topology import read_groups
from fakedist.run.step_time import GroupTime
from fakedist.time.communication import Communication
from fakedist.time.exposure import union

#: A kernel that begins this soon after a call's end waited for it.
_SAME_US = 1e-3


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
        kernels: The result of :func:`fakedist.analysis.times.kernel_kinds.timed`.

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
