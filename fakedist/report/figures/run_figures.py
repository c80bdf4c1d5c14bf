"""``run.figures``: the charts of a run, and those of its calls on process groups.

Reading a table that is missing or damaged raises RunDirectoryError.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from fakedist.analysis.recording import Array
from fakedist.analysis.topology import read_groups
from fakedist.report.figures import memory_figures, time_figures
from fakedist.report.figures.look import GROUP_COLOURS, framed, label, new_figure, shown
from fakedist.report.figures.memory_figures import MemoryCurve, read_curve
from fakedist.results.run import Run
from fakedist.units import GIB, format_bytes

#: Lanes of calls over time: those of the most bytes.
MOST_LANES = 12
#: Calls in a figure. The page has all of them, and draws those that it zooms into.
MOST_CALLS = 2_000


@dataclass(frozen=True)
class Calls:
    """The rank's calls in order.

    Attributes:
        move: For each call, the next allocation or free after it.
        lane: Its lane, or -1.
        bytes: The larger of its bytes in and out.
        lanes: For each lane its group's row, the group's name, and the operation. Most bytes first.
    """

    move: Array
    lane: Array
    bytes: Array
    lanes: list[tuple[int, str, str]]


def read_calls(run: Run, curve: MemoryCurve) -> Calls:
    """Read the calls of a run, each at its place among allocations and frees."""
    calls = run.table("calls", ["op", "operation", "group", "bytes_in", "bytes_out"])
    if not len(calls):
        none = np.zeros(0, "i8")
        return Calls(none, none, none, [])
    size = calls[["bytes_in", "bytes_out"]].max(axis=1).to_numpy("i8")
    op = run.table("events", ["op"])["op"].to_numpy()
    event = np.searchsorted(np.maximum.accumulate(op) if len(op) else op, calls["op"].to_numpy())
    by_lane = calls.assign(bytes=size).groupby(["group", "operation"], observed=True)["bytes"].sum()
    kept = by_lane.sort_values(ascending=False, kind="stable").index[:MOST_LANES]
    indices = {key: at for at, key in enumerate(kept)}
    groups = [group.label for group in read_groups(run.table("groups"))]
    keys = zip(calls["group"].tolist(), calls["operation"], strict=True)
    return Calls(
        move=np.minimum(curve.move_at(event), max(curve.num_moves - 1, 0)),
        lane=np.array([indices.get(key, -1) for key in keys], "i8"),
        bytes=size,
        lanes=[(int(group), groups[group] if group < len(groups) else "", str(name)) for group, name in kept],
    )


def calls_over_time(run: Run) -> go.Figure:
    """Collective calls over the run, one lane for each group and operation.

    A call is a line at the next allocation or free after it, as long as the cube root of its bytes: so calls of 16 KiB
    and of 1 GiB are both visible.
    """
    curve = read_curve(run)
    return calls_of(read_calls(run, curve), curve.num_moves)


def calls_of(calls: Calls, num_moves: int) -> go.Figure:
    """The figure of :func:`calls_over_time`, from calls that have been read. A trace's ``meta`` is its lane."""
    figure = new_figure()
    most = float(calls.bytes.max(initial=1)) or 1.0
    titles = []
    for at, (group, name, operation) in enumerate(calls.lanes):
        own = np.flatnonzero(calls.lane == at)
        largest = np.sort(own[np.argsort(-calls.bytes[own], kind="stable")[: MOST_CALLS // len(calls.lanes)]])
        move = calls.move[largest]
        floor = float(len(calls.lanes) - 1 - at)
        tall = floor + 0.06 + 0.58 * np.cbrt(calls.bytes[largest] / most)
        title = f"{label(name)} · {shown(operation)}"
        figure.add_scatter(
            x=np.column_stack([move, move, move]).ravel(),
            y=np.column_stack([np.full(len(move), floor), tall, np.full(len(move), np.nan)]).ravel(),
            mode="lines",
            name=title,
            meta=at,
            line={"width": 1, "color": GROUP_COLOURS[group % len(GROUP_COLOURS)]},
            text=[format_bytes(size) for size in calls.bytes[largest] for _ in range(3)],
            hovertemplate="%{text}",
            showlegend=False,
        )
        anchor = {"x": 0, "xref": "paper", "xanchor": "left", "y": floor + 0.82, "showarrow": False}
        titles.append(anchor | {"text": title, "font": {"size": 12}})
    figure.update_layout(annotations=titles, hovermode="closest")
    figure.update_xaxes(range=[0, max(num_moves, 1)])
    figure.update_yaxes(range=[0, max(len(calls.lanes), 1)], dtick=1, showticklabels=False, fixedrange=True)
    height = 90 + 34 * len(calls.lanes)
    return framed(figure, "Collective calls over the run", x="allocations and frees, in order", height=height)


def calls_by_group(run: Run, *, unit: str = "bytes") -> go.Figure:
    """Bytes, or numbers, of this rank's calls by group and operation.

    Raises:
        ValueError: The unit is neither "bytes" nor "calls".
    """
    if unit not in ("bytes", "calls"):
        raise ValueError(f'unit is "bytes" or "calls", not {unit!r}')
    table = run.collectives()
    figure = new_figure()
    if len(table):
        table["bytes"] = table[["bytes_in", "bytes_out"]].max(axis=1)
        table["where"] = [
            f"{label(group)} ({size:,} ranks)" for group, size in zip(table["group"], table["group_size"], strict=True)
        ]
        for operation, rows in table.groupby("operation", sort=True):
            figure.add_bar(
                x=rows["where"],
                y=rows["bytes"] / GIB if unit == "bytes" else rows["num_calls"],
                name=shown(operation),
                customdata=rows[["num_calls"]],
                hovertemplate="%{y:,.3f} " + ("GiB in %{customdata[0]:,} calls" if unit == "bytes" else "calls"),
            )
    figure.update_layout(barmode="stack")
    title = "Collective calls by group: " + ("the larger of bytes in and out" if unit == "bytes" else "number")
    return framed(figure, title, y="GiB" if unit == "bytes" else "calls")


class RunFigures:
    """The charts of a run, as plotly figures."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def timeline(self, *, axis: str = "event") -> go.Figure:
        """Memory over the run by category. ``axis`` is "event" or "time"."""
        return memory_figures.memory_timeline(self._run, axis=axis)

    def device(self) -> go.Figure:
        """Memory of the virtual GPU in use over the run: by this process and by each other on the GPU."""
        return memory_figures.device_timeline(self._run)

    def compared_with(self, other: Run) -> go.Figure:
        """Allocated memory of this run and another, on one axis of steps and phases."""
        return memory_figures.compared_timeline(self._run, other)

    def peak_by_layer(self, *, kind: str = "icicle") -> go.Figure:
        """Memory at the peak by layer, nested. ``kind`` is "icicle" or "treemap"."""
        return memory_figures.peak_by_layer(self._run, kind=kind)

    def layers(self) -> go.Figure:
        """Memory at the peak by layer and category, as bars."""
        return memory_figures.layer_bars(self._run)

    def segments(self, *, moment: str = "peak_reserved") -> go.Figure:
        """The allocator's segments, blocks and holes. ``moment`` is "peak_reserved" or "peak_allocated"."""
        return memory_figures.segment_map(self._run, moment=moment)

    def time_by_layer(self) -> go.Figure:
        """Kernel time by layer, as bars."""
        return time_figures.time_by_layer(self._run)

    def time_by_family(self) -> go.Figure:
        """Kernel time by family of kernels."""
        return time_figures.time_by_family(self._run)

    def roofline(self) -> go.Figure:
        """Kernels below the GPU's limits."""
        return time_figures.roofline(self._run)

    def kernels(self) -> go.Figure:
        """The kernels of the timed step by stream over time."""
        return time_figures.kernel_lanes(self._run)

    def calls_over_time(self) -> go.Figure:
        """Collective calls by group and operation, over allocations and frees as in :meth:`timeline`."""
        return calls_over_time(self._run)

    def calls(self, *, unit: str = "bytes") -> go.Figure:
        """Collective calls by group and operation. ``unit`` is "bytes" or "calls"."""
        return calls_by_group(self._run, unit=unit)
