"""Charts of memory: over time, of two runs, at the peak by layer, by layer and category."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from fakedist.analysis.compare.common_axis import Stretch, common_axis, on_axis
from fakedist.analysis.recording import Array
from fakedist.report.figures.look import (
    CATEGORY_COLOURS,
    INK,
    LINE,
    PANEL,
    PHASE_COLOURS,
    SIDE_COLOURS,
    SOFT,
    VEIL,
    byte_unit,
    framed,
    label,
    layer_labels,
    new_figure,
    shown,
    spoken,
    stacked_rows,
)
from fakedist.report.figures.memory_curve import (
    MemoryCurve,
    held_by_colour,
    highest_moves,
    least_between,
    most_reserved,
    read_curve,
)
from fakedist.results.run import Run
from fakedist.run.schema import CATEGORIES
from fakedist.units import GIB, format_bytes

#: Points of a curve. Of the moves between two points, the one with the most memory is drawn, so the peak is exact.
NUM_POINTS = 2_000
#: Rows of a bar chart.
MOST_ROWS = 40
#: Stretches of the axis that are narrower than these shares of it are not drawn, and have no label.
_LEAST_DRAWN, _LEAST_LABELLED = 0.002, 0.04
_AXES = {
    "event": "allocations and frees, in order",
    "time": "seconds since the first allocation (wall time of the recording)",
}


def memory_timeline(run: Run, *, axis: str = "event", num_points: int = NUM_POINTS) -> go.Figure:
    """Allocated bytes over the run by category, reserved bytes, phases and steps, and the peak.

    Args:
        run: A run with memory.
        axis: "event" for allocations and frees in order, or "time" for seconds since the first.
        num_points: Points of each curve.

    Raises:
        ValueError: The axis is neither "event" nor "time", or the run has no memory.
        RunDirectoryError: A table is missing or damaged.
    """
    if axis not in _AXES:
        raise ValueError(f'axis is "event" or "time", not {axis!r}')
    if run.memory is None:
        raise ValueError(f"{run.path} has no memory: it was imported from a tool that does not record it")
    return timeline_of(run, read_curve(run), axis=axis, num_points=num_points)


def timeline_of(run: Run, curve: MemoryCurve, *, axis: str, num_points: int) -> go.Figure:
    """The figure of :func:`memory_timeline`, from memory that has been read.

    A trace's ``meta`` names its part: the number of a colour, "least", "veil", "allocated", "reserved" or "peak". The
    page computes the parts again for what it zooms into.
    """
    chosen = highest_moves(curve.allocated, num_points)
    unit, size = byte_unit(run.peak_allocated_bytes)
    places = _places(curve, chosen, axis)
    least, total = least_between(curve.allocated, chosen) / size, curve.allocated[chosen] / size
    figure = new_figure()
    held = held_by_colour(curve, chosen)
    for code, (name, category) in enumerate(zip(curve.colouring.names, curve.colouring.colours, strict=True)):
        if (curve.colouring.of_block == code).any():
            colour = CATEGORY_COLOURS[category]
            line = {"width": 0, "shape": "hv", "color": colour}
            look = {"line": line, "fillcolor": colour, "stackgroup": "allocated"}
            _add_line(figure, code, label(name), places, held[code] / size, unit=unit, **look)
    thin = {"width": 0, "shape": "hv", "color": VEIL}
    unseen = {"line": thin, "hoverinfo": "skip", "showlegend": False}
    _add_line(figure, "least", "least", places, least, unit=unit, **unseen)
    _add_line(figure, "veil", "between", places, total, unit=unit, fill="tonexty", fillcolor=VEIL, **unseen)
    # A peak may be thinner than a pixel of a filled area; a line shows it.
    line = {"width": 1, "color": INK, "shape": "hv"}
    _add_line(figure, "allocated", "allocated", places, total, unit=unit, line=line)
    line = {"width": 1.2, "dash": "dot", "color": INK, "shape": "hv"}
    reserved = most_reserved(curve, chosen) / size
    # Reserved memory that dwarfs the rest would leave the categories a few pixels.
    dwarfs = float(reserved.max(initial=0)) > 2.5 * float(total.max(initial=0))
    _add_line(
        figure, "reserved", "reserved", places, reserved, unit=unit, line=line, visible="legendonly" if dwarfs else True
    )
    if len(chosen):
        _mark_peak(figure, places, curve.allocated[chosen], size)
        _mark_spans(figure, run, curve, axis)
    figure.update_layout(hovermode="x unified")
    figure.update_yaxes(rangemode="tozero", ticksuffix=f" {unit}")
    title = f"Memory: peak {format_bytes(run.peak_allocated_bytes)} allocated"
    return framed(figure, title, x=_AXES[axis], height=460)


def _add_line(figure: go.Figure, part: object, name: str, x: Array, y: Array, *, unit: str, **look: object) -> None:
    if look.get("hoverinfo") != "skip":
        look["hovertemplate"] = f"%{{y:.3f}} {unit}"
    figure.add_scatter(x=x, y=y, name=name, mode="lines", meta=part, **look)


def _places(curve: MemoryCurve, moves: Array, axis: str) -> Array:
    """Where moves are on the axis."""
    if axis == "event":
        return moves
    time_us = curve.time_us[curve.events[moves]]
    return (time_us - curve.time_us[curve.events[:1]]) / 1e6 if len(moves) else time_us


def compared_timeline(before: Run, after: Run, *, num_points: int = NUM_POINTS) -> go.Figure:
    """Allocated bytes of two runs, the same phase of the same step at the same place.

    If one of them is a snapshot, both histories have the same width.

    Args:
        before: One run.
        after: The other.
        num_points: Points of each curve.

    Raises:
        RunDirectoryError: A table is missing or damaged.
    """
    curves, pieces = curves_on_axis(before, after)
    figure = new_figure()
    unit, size = byte_unit(max(before.peak_allocated_bytes, after.peak_allocated_bytes))
    for side, (name, run, curve) in enumerate(zip("AB", (before, after), curves, strict=True)):
        most = on_axis(curve, pieces, side, num_points)[1]
        colour, peak = SIDE_COLOURS[name], format_bytes(run.peak_allocated_bytes)
        x = np.arange(num_points) / num_points
        line = {"width": 1.5, "shape": "hv", "color": colour}
        _add_line(figure, name, f"{name}: {shown(run.path.name)}, peak {peak}", x, most / size, unit=unit, line=line)
        if len(curve):
            at = int(most.argmax())
            figure.add_scatter(
                x=[x[at]],
                y=[most[at] / size],
                name=f"peak of {name}",
                mode="markers+text",
                text=[f"{name} {peak}"],
                textposition="middle left" if name == "A" else "middle right",
                marker={"size": 8, "color": colour},
                hoverinfo="skip",
                showlegend=False,
            )
    stretches = [
        shape
        for piece in pieces
        for shape in _stretch(
            piece.at, piece.phase, f"step {piece.step} {piece.phase}" if piece.step else piece.phase, 1.0
        )
    ]
    figure.update_layout(hovermode="x unified", shapes=stretches)
    figure.update_xaxes(showticklabels=False)
    figure.update_yaxes(rangemode="tozero", ticksuffix=f" {unit}")
    x_title = "steps and phases of both" if have_steps(before, after) else "events of each, from first to last"
    return framed(figure, "Allocated memory of two runs", x=x_title, height=460)


def have_steps(before: Run, after: Run) -> bool:
    """Whether both runs know their steps. A snapshot does not."""
    return before.has("spans") and after.has("spans")


def curves_on_axis(before: Run, after: Run) -> tuple[list[Array], list[Stretch]]:
    """Allocated bytes after each event of two runs, and their common axis: one piece if one of them has no steps."""
    runs = (before, after)
    curves = [run.table("events", ["allocated_bytes"])["allocated_bytes"].to_numpy(np.int64) for run in runs]
    spans = [run.table("spans") if have_steps(before, after) else pd.DataFrame() for run in runs]
    return curves, common_axis((spans[0], spans[1]), (len(curves[0]), len(curves[1])))


def peak_by_layer(run: Run, *, kind: str = "icicle") -> go.Figure:
    """The bytes that each layer holds at the peak, inside those of its parents; repeated layers are one box.

    A layer's own bytes are boxes of their own, one for each category, in its colour.

    Args:
        run: A run with layers.
        kind: "icicle" or "treemap".

    Raises:
        ValueError: The kind is neither.
        RunDirectoryError: A table is missing or damaged.
    """
    if kind not in ("icicle", "treemap"):
        raise ValueError(f'kind is "icicle" or "treemap", not {kind!r}')
    boxes = _peak_boxes(run)
    figure = new_figure(
        (go.Icicle if kind == "icicle" else go.Treemap)(
            ids=boxes["id"],
            parents=boxes["parent"],
            labels=boxes["label"],
            values=boxes["own_bytes"],
            customdata=boxes[["name", "text", "repeats", "share"]],
            marker={"colors": boxes["colour"], "line": {"width": 1, "color": PANEL}},
            branchvalues="remainder",
            texttemplate="%{label}<br>%{customdata[1]}",
            hovertemplate="%{customdata[0]}<br>%{customdata[1]}, %{customdata[3]} of the peak"
            "%{customdata[2]}<extra></extra>",
            tiling={"pad": 2} if kind == "treemap" else {"orientation": "v"},
            **({"leaf": {"opacity": 1}} if kind == "icicle" else {}),
        )
    )
    return framed(figure, f"Memory at the peak by layer: {format_bytes(run.peak_allocated_bytes)}", height=560)


def _peak_boxes(run: Run) -> pd.DataFrame:
    """The boxes of :func:`peak_by_layer`: the whole, layers, and below each layer its own bytes by category."""
    peak = run.peak_allocated_bytes
    table = run.layers()
    parents = _parents(table["depth"].tolist())
    own = _own_bytes(table[[f"peak_{name}_bytes" for name in CATEGORIES]].to_numpy("i8"), parents)
    rows: list[tuple[object, ...]] = [("peak", "", "the peak", "the peak", 0, peak, "", SOFT)]
    for at, row in enumerate(table.to_dict("records")):
        if not row["peak_total_bytes"]:
            continue
        name, repeats = str(row["name"]) or "outside of modules", int(row["num_repeats"])
        several = f"<br>{repeats:,} layers" if repeats > 1 else ""
        short = name.rpartition(".")[2] + (f" x{repeats:,}" if repeats > 1 else "")
        rows.append((str(at), parents[at], short, name, 0, row["peak_total_bytes"], several, SOFT))
        for category, held in zip(CATEGORIES, own[at].tolist(), strict=True):
            if held:
                text, colour = f"{name}: {spoken(category)}", CATEGORY_COLOURS[category]
                rows.append((f"{at}/{category}", str(at), spoken(category), text, held, held, several, colour))
    found = pd.DataFrame(rows, columns=["id", "parent", "short", "name", "own_bytes", "bytes", "repeats", "colour"])
    found["label"] = [label(each) for each in found["short"]]
    found["name"] = [shown(each) for each in found["name"]]
    found["text"] = [format_bytes(each) for each in found["bytes"]]
    found["share"] = [f"{each / peak:.1%}" if peak else "" for each in found["bytes"]]
    return found


def _own_bytes(with_children: Array, parents: list[str]) -> Array:
    """Bytes of layers alone, of rows that include their children's."""
    own = with_children.copy()
    for row, parent in enumerate(parents):
        if parent != "peak":
            own[int(parent)] -= with_children[row]
    return own


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
    figure = new_figure()
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


def _mark_peak(figure: go.Figure, places: Array, allocated: Array, size: int) -> None:
    peak = int(allocated.argmax())
    text = f"peak {format_bytes(int(allocated[peak]))}"
    figure.add_scatter(
        x=[places[peak]],
        y=[allocated[peak] / size],
        name="peak",
        mode="markers",
        meta="peak",
        marker={"size": 9, "color": INK},
        hovertemplate=f"{text}<extra></extra>",
        cliponaxis=False,
        showlegend=False,
    )
    named = {"x": places[peak], "y": allocated[peak] / size, "showarrow": False, "xanchor": "left", "xshift": 9}
    figure.add_annotation(text=f"<b>{text}</b>", **named)


def _mark_spans(figure: go.Figure, run: Run, curve: MemoryCurve, axis: str) -> None:
    """Colour the background by phase, and name the phases above it."""
    if not run.has("spans"):
        return
    spans = run.table("spans")
    first = np.minimum(curve.move_at(spans["first_event"].to_numpy()), curve.num_moves - 1)
    places = _places(curve, np.append(first, curve.num_moves - 1), axis)
    width = float(places[-1] - _places(curve, np.zeros(1, "i8"), axis)[0]) or 1.0
    shapes = []
    for row, (step, phase) in enumerate(zip(spans["step"].tolist(), spans["phase"].astype(str), strict=True)):
        at = (float(places[row]), float(places[row + 1]))
        if at[1] - at[0] > _LEAST_DRAWN * width:
            shapes += _stretch(at, phase, f"step {step} {phase}" if step else phase, width)
    figure.update_layout(shapes=shapes)


def _stretch(at: tuple[float, float], phase: str, text: str, width: float) -> list[dict[str, object]]:
    """The shapes that colour a stretch of the x axis, and name it if it is wide enough."""
    colour = PHASE_COLOURS.get(phase, LINE)
    both: dict[str, object] = {"type": "rect", "x0": at[0], "x1": at[1], "yref": "paper", "layer": "below"}
    both |= {"fillcolor": colour, "line": {"width": 0}}
    title: dict[str, object] = {"y0": 1, "y1": 1.06}
    if at[1] - at[0] > _LEAST_LABELLED * width:
        title["label"] = {"text": shown(text), "textposition": "middle left", "font": {"size": 12}}
    return [both | {"y0": 0, "y1": 1, "opacity": 0.35}, both | title]


def _parents(depths: list[int]) -> list[str]:
    """The id of each row's parent: the nearest row above that is less deep. Roots are inside of the whole."""
    above: list[int] = []
    found = []
    for row, depth in enumerate(depths):
        del above[depth:]
        found.append(str(above[-1]) if above else "peak")
        above.append(row)
    return found
