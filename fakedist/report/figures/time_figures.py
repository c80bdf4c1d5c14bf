"""Charts of the timed step: by layer, by family of kernels, the roofline."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from fakedist.report.figures.look import (
    FAMILY_COLOURS,
    INK,
    KIND_COLOURS,
    MUTED,
    framed,
    layer_labels,
    new_figure,
    shown,
    spoken,
    stacked_rows,
)
from fakedist.results.run import Run
from fakedist.results.run_time import RunTime
from fakedist.run.schema import KINDS
from fakedist.run.step_time import Peaks
from fakedist.units import format_flops, format_us

MOST_ROWS = 40
MOST_KERNELS = 300
#: Roofs whose rates differ by a smaller factor would have their names on each other.
_LEAST_APART = 1.3


def time_by_layer(run: Run, *, most: int = MOST_ROWS) -> go.Figure:
    """Kernel time by layer and what it is for, longest first; repeated layers are one row.

    Args:
        run: A run with a timed step.
        most: Rows to draw.

    Raises:
        ValueError: No step was timed.
        RunDirectoryError: A table is missing or damaged.
    """
    time = time_of(run)
    table = time.layers()
    table = table[table["own_us"] > 0].sort_values("total_us", ascending=False).head(most)
    names = layer_labels(table["name"])
    figure = new_figure()
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
    time = time_of(run)
    table = time.families().sort_values("time_us", ascending=False)
    figure = new_figure(
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
    time = time_of(run)
    known = _known_kernels(time).head(MOST_KERNELS)
    if not len(known):
        raise ValueError("no kernel has known FLOPs, bytes and time, so there is nothing to draw a roofline of")
    intensity = (known["flops"] / known["moved_bytes"]).to_numpy()
    rate = (known["flops"] / (known["flops_us"] * 1e-6)).to_numpy()
    largest = float(known["time_us"].max())
    figure = new_figure()
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
        _add_roofs(figure, peaks, (intensity.min(), intensity.max()))
    figure.update_xaxes(type="log", dtick=1, tickformat="~s")
    figure.update_yaxes(type="log", dtick=1, tickformat="~s")
    figure.update_layout(legend={"orientation": "h", "y": -0.16, "itemsizing": "constant"})
    return framed(figure, f"Roofline ({time.source})", x="FLOPs per byte", y="FLOP/s", height=460)


def _add_roofs(figure: go.Figure, peaks: Peaks, reached: tuple[float, float]) -> None:
    """Draw the GPU's limits: its memory's bandwidth up to the highest peak, and each type's peak, named at its end."""
    highest = max(peaks.flops.values())
    ridge = highest / peaks.bytes_per_s
    left, right = min(ridge / 30, reached[0] / 2), max(ridge * 10, reached[1] * 2)
    line = {"width": 1.5, "color": INK}
    hidden = {"mode": "lines", "hoverinfo": "skip", "showlegend": False}
    figure.add_scatter(x=[left, ridge, right], y=[left * peaks.bytes_per_s, highest, highest], line=line, **hidden)
    by_rate: dict[float, list[str]] = {}
    for dtype, flops in peaks.flops.items():
        by_rate.setdefault(flops, []).append(dtype)
    labelled = float("inf")
    for flops, dtypes in sorted(by_rate.items(), reverse=True):
        if flops < highest:
            line = {"width": 1, "color": MUTED, "dash": "dash"}
            figure.add_scatter(x=[flops / peaks.bytes_per_s, right], y=[flops, flops], line=line, **hidden)
        if labelled / flops > _LEAST_APART:
            labelled = flops
            text = f"{shown(', '.join(dtypes))}: {format_flops(flops)}/s"
            place = {"x": 1, "xref": "paper", "y": float(np.log10(flops)), "xanchor": "right", "yanchor": "bottom"}
            figure.add_annotation(text=text, showarrow=False, font={"size": 12, "color": INK}, **place)


def has_roofline(run: Run) -> bool:
    """Whether a roofline has anything to show: kernels with known FLOPs, bytes and time."""
    return run.time is not None and len(_known_kernels(run.time)) > 0


def _known_kernels(time: RunTime) -> pd.DataFrame:
    names = time.names()
    known = names[(names["flops"] > 0) & (names["moved_bytes"] > 0) & (names["flops_us"] > 0)]
    return known[known["family"] != "communication"]


def time_of(run: Run) -> RunTime:
    """The times of a run.

    Raises:
        ValueError: No step was timed.
    """
    if run.time is None:
        raise ValueError(f"{run.path} has no timed step: profile it without --no-kernels")
    return run.time
