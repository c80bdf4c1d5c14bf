"""Charts of memory: over time, at the peak by layer, by layer and category."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go

from fakedist.analysis.compare.common_axis import common_axis, on_axis
from fakedist.report.figures.look import (
    CATEGORY_COLOURS,
    LINE_COLOUR,
    framed,
    label,
    layer_labels,
    shown,
    spoken,
    stacked_rows,
)
from fakedist.results.run import Run
from fakedist.run.schema import CATEGORIES
from fakedist.units import GIB, format_bytes

Integers = npt.NDArray[np.int64]

#: Points of a curve. Of the events between two points, the one with the most memory is drawn, so the peak is exact.
NUM_POINTS = 2_000
#: Rows of a bar chart.
MOST_ROWS = 40
#: Stretches of the axis that are narrower than this share of it have no label.
_LEAST_LABELLED = 0.04


def memory_timeline(run: Run, *, axis: str = "event", num_points: int = NUM_POINTS) -> go.Figure:
    """Allocated bytes over the run by category, reserved bytes, phases and steps, and the peak.

    Args:
        run: A run with memory.
        axis: "event" for the allocator's events in order, or "time" for seconds since the first.
        num_points: Points of each curve.

    Raises:
        ValueError: The axis is neither "event" nor "time", or the run has no memory.
        RunDirectoryError: A table is missing or damaged.
    """
    if axis not in ("event", "time"):
        raise ValueError(f'axis is "event" or "time", not {axis!r}')
    if run.memory is None:
        raise ValueError(f"{run.path} has no memory: it was imported from a tool that does not record it")
    events = run.table("events", ["time_us", "allocated_bytes", "reserved_bytes"])
    allocated = events["allocated_bytes"].to_numpy(np.int64)
    chosen = highest_events(allocated, num_points)
    time_us = events["time_us"].to_numpy(np.int64)
    places = chosen if axis == "event" else (time_us[chosen] - time_us[:1]) / 1e6
    figure = go.Figure()
    for name, held in held_by_category(run, len(events), chosen).items():
        figure.add_scatter(
            x=places,
            y=held / GIB,
            name=spoken(name),
            mode="lines",
            line={"width": 0, "shape": "hv", "color": CATEGORY_COLOURS[name]},
            fillcolor=CATEGORY_COLOURS[name],
            stackgroup="allocated",
            hovertemplate="%{y:.3f} GiB",
        )
    # A peak may be thinner than a pixel of a filled area; a line shows it.
    line = {"width": 1, "color": LINE_COLOUR, "shape": "hv"}
    total = allocated[chosen] / GIB
    figure.add_scatter(x=places, y=total, name="allocated", mode="lines", line=line, hovertemplate="%{y:.3f} GiB")
    reserved = events["reserved_bytes"].to_numpy(np.int64)[chosen]
    line = {"width": 1.2, "dash": "dot", "color": LINE_COLOUR, "shape": "hv"}
    figure.add_scatter(
        x=places, y=reserved / GIB, name="reserved", mode="lines", line=line, hovertemplate="%{y:.3f} GiB"
    )
    if len(chosen):
        _mark_peak(figure, places, allocated[chosen])
        _mark_spans(figure, run, chosen, places)
    unit = "the allocator's events" if axis == "event" else "seconds (wall time of the recording)"
    title = f"Memory: peak {format_bytes(run.peak_allocated_bytes)} allocated"
    figure.update_layout(hovermode="x unified")
    return framed(figure, title, x=unit, y="GiB", height=460)


def compared_timeline(before: Run, after: Run, *, num_points: int = NUM_POINTS) -> go.Figure:
    """Allocated bytes of two runs, the same phase of the same step at the same place.

    Args:
        before: One run.
        after: The other.
        num_points: Points of each curve.

    Raises:
        RunDirectoryError: A table is missing or damaged.
    """
    curves = [run.table("events", ["allocated_bytes"])["allocated_bytes"].to_numpy(np.int64) for run in (before, after)]
    spans = [run.table("spans") if run.has("spans") else pd.DataFrame() for run in (before, after)]
    pieces = common_axis((spans[0], spans[1]), (len(curves[0]), len(curves[1])))
    figure = go.Figure()
    for side, (run, curve, colour) in enumerate(zip((before, after), curves, ("#4573b9", "#d9534f"), strict=True)):
        most = on_axis(curve, pieces, side, num_points)[1]
        figure.add_scatter(
            x=np.arange(num_points) / num_points,
            y=most / GIB,
            name=f"{'AB'[side]}: {shown(run.path.name)}, peak {format_bytes(run.peak_allocated_bytes)}",
            mode="lines",
            line={"width": 1.5, "shape": "hv", "color": colour},
            hovertemplate="%{y:.3f} GiB",
        )
    for piece in pieces:
        figure.add_vline(x=piece.at[0], line={"width": 0.5, "color": "#c0c4cc"})
        if piece.at[1] - piece.at[0] > _LEAST_LABELLED:
            text = shown(f"{piece.phase or 'step'} {piece.step}")
            middle = (piece.at[0] + piece.at[1]) / 2
            figure.add_annotation(x=middle, y=1, yref="paper", yanchor="bottom", text=text, showarrow=False)
    figure.update_layout(hovermode="x unified")
    figure.update_xaxes(showticklabels=False)
    return framed(figure, "Allocated memory of two runs", x="steps and phases of both", y="GiB", height=460)


def peak_by_layer(run: Run, *, kind: str = "icicle") -> go.Figure:
    """The bytes that each layer holds at the peak, inside those of its parents; repeated layers are one box.

    A box has the colour of the category that most of it is.

    Args:
        run: A run with layers.
        kind: "icicle" or "treemap".

    Raises:
        ValueError: The kind is neither.
        RunDirectoryError: A table is missing or damaged.
    """
    if kind not in ("icicle", "treemap"):
        raise ValueError(f'kind is "icicle" or "treemap", not {kind!r}')
    table = run.layers()
    table["id"] = [str(row) for row in range(len(table))]
    table["parent"] = _parents(table["depth"].tolist())
    table = table[table["peak_total_bytes"] > 0]
    columns = [f"peak_{name}_bytes" for name in CATEGORIES]
    most = [CATEGORIES[place] for place in table[columns].to_numpy().argmax(axis=1)]
    names = [str(name) or "outside of modules" for name in table["name"]]
    details = [
        [shown(name), format_bytes(total), f"{repeats:,} layers" if repeats > 1 else "", spoken(category)]
        for name, total, repeats, category in zip(
            names, table["peak_total_bytes"], table["num_repeats"], most, strict=True
        )
    ]
    figure = go.Figure(
        (go.Icicle if kind == "icicle" else go.Treemap)(
            ids=["peak", *table["id"]],
            parents=["", *table["parent"]],
            labels=["peak", *(label(name.rpartition(".")[2]) for name in names)],
            values=[0, *table["peak_own_bytes"]],
            customdata=[["the peak", format_bytes(run.peak_allocated_bytes), "", ""], *details],
            marker={"colors": ["#d9dde4", *(CATEGORY_COLOURS[name] for name in most)]},
            branchvalues="remainder",
            texttemplate="%{label}<br>%{customdata[1]}",
            hovertemplate="%{customdata[0]} %{customdata[2]}<br>%{customdata[1]} at the peak, mostly %{customdata[3]}"
            "<extra></extra>",
        )
    )
    return framed(figure, f"Memory at the peak by layer: {format_bytes(run.peak_allocated_bytes)}", height=560)


def layer_bars(run: Run, *, most: int = MOST_ROWS) -> go.Figure:
    """Bytes at the peak by layer and category, largest layers first; repeated layers are one row.

    Args:
        run: A run with layers.
        most: Rows to draw.

    Raises:
        RunDirectoryError: A table is missing or damaged.
    """
    table = run.layers()
    table = table[table["peak_own_bytes"] > 0].sort_values("peak_total_bytes", ascending=False).head(most)
    names = layer_labels(table["name"])
    figure = go.Figure()
    for category in CATEGORIES:
        held = table[f"peak_{category}_bytes"]
        if held.any():
            figure.add_bar(
                y=names,
                x=held / GIB,
                orientation="h",
                name=spoken(category),
                marker_color=CATEGORY_COLOURS[category],
                customdata=[shown(name) for name in table["name"]],
                hovertemplate="%{customdata}: %{x:.3f} GiB",
            )
    height = stacked_rows(figure, len(table))
    return framed(figure, "Memory at the peak by layer, with children", x="GiB", height=height)


def highest_events(allocated: Integers, num_points: int) -> Integers:
    """The event with the most memory of each of ``num_points`` stretches, and the first and last event."""
    if len(allocated) <= num_points:
        return np.arange(len(allocated))
    edges = np.linspace(0, len(allocated), num_points + 1).astype(np.int64)
    found = [first + int(allocated[first:end].argmax()) for first, end in itertools.pairwise(edges)]
    return np.unique(np.array([0, *found, len(allocated) - 1]))


def held_by_category(run: Run, num_events: int, chosen: Integers) -> dict[str, Integers]:
    """Allocated bytes of each category after the chosen events; only categories that held anything."""
    blocks = run.table("blocks", ["bytes", "category", "alloc_event", "free_event"])
    category = blocks["category"].astype(str).to_numpy() if run.by_category is not None else None
    found = {}
    for name in CATEGORIES if category is not None else ("other",):
        own = blocks if category is None else blocks[category == name]
        if not len(own):
            continue
        change = np.zeros(num_events + 1, np.int64)
        np.add.at(change, own["alloc_event"].to_numpy(), own["bytes"].to_numpy())
        np.subtract.at(change, own["free_event"].to_numpy(), own["bytes"].to_numpy())
        found[name] = np.cumsum(change[:num_events])[chosen]
    return found


def _mark_peak(figure: go.Figure, places: npt.NDArray[np.generic], allocated: Integers) -> None:
    peak = int(allocated.argmax())
    figure.add_scatter(
        x=[places[peak]],
        y=[allocated[peak] / GIB],
        name="peak",
        mode="markers",
        marker={"symbol": "triangle-down", "size": 10, "color": LINE_COLOUR},
        hovertemplate=f"peak: {format_bytes(int(allocated[peak]))}<extra></extra>",
    )


def _mark_spans(figure: go.Figure, run: Run, chosen: Integers, places: npt.NDArray[np.generic]) -> None:
    """Draw a line where each step begins, with its number."""
    if not run.has("spans"):
        return
    spans = run.table("spans", ["first_event", "step"])
    labelled = -np.inf
    width = float(places[-1] - places[0]) or 1.0
    for step, event in spans.groupby("step")["first_event"].min().items():
        at = float(places[min(int(np.searchsorted(chosen, event)), len(chosen) - 1)])
        figure.add_vline(x=at, line={"width": 0.8, "color": "#9aa1ad"})
        if at - labelled > _LEAST_LABELLED * width:
            labelled = at
            text = f"step {step}" if step else "init"
            figure.add_annotation(x=at, y=1, yref="paper", xanchor="left", yanchor="bottom", text=text, showarrow=False)


def _parents(depths: list[int]) -> list[str]:
    """The id of each row's parent: the nearest row above that is less deep. Roots are inside of the whole."""
    above: list[int] = []
    found = []
    for row, depth in enumerate(depths):
        del above[depth:]
        found.append(str(above[-1]) if above else "peak")
        above.append(row)
    return found
