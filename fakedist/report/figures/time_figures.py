"""Charts of the timed step: by layer, by family of kernels, the roofline; and the calls on process groups."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from fakedist.report.figures.look import (
    FAMILY_COLOURS,
    KIND_COLOURS,
    framed,
    label,
    layer_labels,
    shown,
    spoken,
    stacked_rows,
)
from fakedist.results.run import Run
from fakedist.results.run_time import RunTime
from fakedist.run.schema import KINDS
from fakedist.units import format_flops, format_us

MOST_ROWS = 40
MOST_KERNELS = 300


def time_by_layer(run: Run, *, most: int = MOST_ROWS) -> go.Figure:
    """Kernel time by layer and what it is for, longest first; repeated layers are one row.

    Args:
        run: A run with a timed step.
        most: Rows to draw.

    Raises:
        ValueError: No step was timed.
        RunDirectoryError: A table is missing or damaged.
    """
    time = _time(run)
    table = time.layers()
    table = table[table["own_us"] > 0].sort_values("total_us", ascending=False).head(most)
    names = layer_labels(table["name"])
    figure = go.Figure()
    for kind in KINDS:
        if table[f"{kind}_us"].any():
            figure.add_bar(
                y=names,
                x=table[f"{kind}_us"] / 1e3,
                orientation="h",
                name=kind,
                marker_color=KIND_COLOURS[kind],
                customdata=[shown(name) for name in table["name"]],
                hovertemplate="%{customdata}: %{x:.3f} ms",
            )
    height = stacked_rows(figure, len(table))
    return framed(figure, f"Kernel time by layer, with children ({time.source})", x="ms", height=height)


def time_by_family(run: Run) -> go.Figure:
    """Kernel time by family.

    Raises:
        ValueError: No step was timed.
    """
    time = _time(run)
    table = time.families().sort_values("time_us", ascending=False)
    figure = go.Figure(
        go.Bar(
            x=[spoken(family) for family in table["family"]],
            y=table["time_us"] / 1e3,
            marker_color=[FAMILY_COLOURS[family] for family in table["family"]],
            customdata=table[["num_kernels", "num_unknown"]],
            hovertemplate="%{y:.3f} ms in %{customdata[0]:,} kernels<br>%{customdata[1]:,} of unknown duration"
            "<extra>%{x}</extra>",
        )
    )
    return framed(figure, f"Kernel time by family ({time.source})", y="ms")


def roofline(run: Run) -> go.Figure:
    """Kernels by name, shape and layer: FLOP/s over FLOPs per byte, below the GPU's limits.

    Raises:
        ValueError: No step was timed, or no kernel's FLOPs and bytes are known.
        RunDirectoryError: A table is missing or damaged.
    """
    time = _time(run)
    names = time.names()
    known = names[(names["flops"] > 0) & (names["moved_bytes"] > 0) & (names["flops_us"] > 0)]
    known = known[known["family"] != "communication"].head(MOST_KERNELS)
    if not len(known):
        raise ValueError("no kernel has known FLOPs, bytes and time, so there is nothing to draw a roofline of")
    intensity = (known["flops"] / known["moved_bytes"]).to_numpy()
    rate = (known["flops"] / (known["flops_us"] * 1e-6)).to_numpy()
    largest = float(known["time_us"].max())
    figure = go.Figure()
    for family in known["family"].astype(str).unique():
        own = (known["family"] == family).to_numpy()
        rows = known[own]
        figure.add_scatter(
            x=intensity[own],
            y=rate[own],
            mode="markers",
            name=family,
            marker={
                "color": FAMILY_COLOURS[family],
                "size": 6 + 28 * np.sqrt(rows["time_us"].to_numpy() / largest),
                "opacity": 0.7,
            },
            customdata=[
                [shown(str(name)[:120]), format_us(us), f"{num:,}", format_flops(flops), shown(shape), shown(layer)]
                for name, us, num, flops, shape, layer in zip(
                    *(rows[key] for key in ("name", "time_us", "num_kernels")),
                    rate[own],
                    *(rows[key] for key in ("shape", "layer")),
                    strict=True,
                )
            ],
            hovertemplate="%{customdata[0]}<br>%{customdata[4]}<br>%{customdata[5]}<br>"
            "%{customdata[1]} in %{customdata[2]} kernels, %{customdata[3]}/s"
            "<extra></extra>",
        )
    peaks = time.summary().peaks
    if peaks is not None:
        ends = np.array([intensity.min() / 2, intensity.max() * 2])
        for dtype, flops in peaks.flops.items():
            ridge = flops / peaks.bytes_per_s
            x = np.unique(np.clip([ends[0], ridge, ends[1]], *ends))
            y = np.minimum(x * peaks.bytes_per_s, flops)
            line = {"width": 1, "color": "#9aa1ad"}
            figure.add_scatter(
                x=x, y=y, mode="lines", line=line, name=f"{dtype} peak, {format_flops(flops)}/s", hoverinfo="name"
            )
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log")
    return framed(figure, f"Roofline ({time.source})", x="FLOPs per byte", y="FLOP/s", height=520)


def calls_by_group(run: Run, *, unit: str = "bytes") -> go.Figure:
    """Bytes, or numbers, of this rank's calls by group and operation.

    Args:
        run: A recorded run.
        unit: "bytes" or "calls".

    Raises:
        ValueError: The unit is neither.
    """
    if unit not in ("bytes", "calls"):
        raise ValueError(f'unit is "bytes" or "calls", not {unit!r}')
    table = run.collectives()
    figure = go.Figure()
    if len(table):
        table["bytes"] = table[["bytes_in", "bytes_out"]].max(axis=1)
        table["where"] = [
            f"{label(group)} ({size:,} ranks)" for group, size in zip(table["group"], table["group_size"], strict=True)
        ]
        for operation, rows in table.groupby("operation", sort=True):
            figure.add_bar(
                x=rows["where"],
                y=rows["bytes"] / (1 << 30) if unit == "bytes" else rows["num_calls"],
                name=shown(operation),
                customdata=rows[["num_calls"]],
                hovertemplate="%{y:,.3f} " + ("GiB in %{customdata[0]:,} calls" if unit == "bytes" else "calls"),
            )
    figure.update_layout(barmode="stack")
    title = "Collective calls by group: " + ("the larger of bytes in and out" if unit == "bytes" else "number")
    return framed(figure, title, y="GiB" if unit == "bytes" else "calls")


def _time(run: Run) -> RunTime:
    if run.time is None:
        raise ValueError(f"{run.path} has no timed step: profile it without --no-kernels")
    return run.time
