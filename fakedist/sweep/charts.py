"""The charts of a sweep's page: memory against speed, points over the axes, and maps of two of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

import plotly.graph_objects as go

from fakedist.report.content.report_blocks import Drawing
from fakedist.report.figures.look import (
    CATEGORY_COLOURS,
    GROUP_COLOURS,
    INK,
    MUTED,
    STYLE_NAMES,
    framed,
    new_figure,
    shown,
)
from fakedist.report.page.assets import figure_object
from fakedist.sweep.point_rows import Row, Status
from fakedist.sweep.ranking import memory_text, speed_text
from fakedist.sweep.space import Scalar, text_of
from fakedist.sweep.sweep_directory import Sweep, report_of
from fakedist.units import GIB

Figure: TypeAlias = go.Figure

#: From slow to fast; on a dark page, where dark is faint, the style sheet has others.
_SCALE = ("#c9d6f2", "#9db7ea", "#6c97dd", "#4573b9", "#2a4f8f", "#163362")
_STATUS_COLOURS = {
    Status.FITS: GROUP_COLOURS[2],
    Status.MAY_NOT_FIT: CATEGORY_COLOURS["activation"],
    Status.DOES_NOT_FIT: CATEGORY_COLOURS["gradient"],
}
#: Without a step.
_PALE = "#b3bac7"
_STYLES = {**STYLE_NAMES, _PALE: "s-none", **{colour: f"s-{at}" for at, colour in enumerate(_SCALE)}}
#: Pairs of axes that have a map; more would fill the page.
_MOST_MAPS = 15


def parallel_axes(sweep: Sweep) -> Figure:
    """Every point as a line over the axes and its speed, coloured by speed. A line in grey has no step.

    ``customdata`` has the report of each point.
    """
    names = sweep.varied_axes[::-1]
    speeds = _speeds(sweep)
    most, least = max(speeds.values(), default=1.0), min(speeds.values(), default=0.0)
    figure = new_figure()
    for colour, rows in _bins(sweep.rows, speeds, least, most):
        xs: list[float | None] = []
        ys: list[float | None] = []
        texts: list[str] = []
        links: list[str] = []
        for row in rows:
            heights = [_height(dict(row.values).get(name), sweep.about.axes[name]) for name in names]
            if row.id in speeds:
                heights.append((speeds[row.id] - least) / ((most - least) or 1.0))
            xs += [*range(len(heights)), None]
            ys += [*heights, None]
            texts += [_hover(row, sweep)] * (len(heights) + 1)
            links += [_link(row, sweep)] * (len(heights) + 1)
        figure.add_scatter(
            x=xs,
            y=ys,
            mode="lines+markers",
            line={"color": colour, "width": 1.5},
            marker={"color": colour, "size": 6},
            text=texts,
            customdata=links,
            hovertemplate="%{text}<extra></extra>",
            showlegend=False,
        )
    axes = ((at, sweep.about.axes[name]) for at, name in enumerate(names))
    labels = [_label(at, _height(value, values), text_of(value)) for at, values in axes for value in values]
    speed_labels = (_label(len(names), at, speed_text(least + at * (most - least))) for at in (0.0, 0.5, 1.0))
    figure.update_layout(annotations=[*labels, *speed_labels])
    ticks = {"tickvals": [*range(len(names) + 1)], "ticktext": [*map(shown, names), sweep.ranking.unit]}
    figure.update_xaxes(**ticks, range=[-0.3, len(names) + 0.4], zeroline=False)
    figure.update_yaxes(visible=False, range=[-0.06, 1.06])
    return framed(figure, "Points over all axes", height=440)


#: The most points that have their names next to them; of more points, only those that no other beats.
_MOST_NAMED = 12


def memory_against_speed(sweep: Sweep) -> Figure:
    """Memory against speed by status, the front as a line, the GPU's memory, and the fastest point's interval."""
    speeds = _speeds(sweep)
    figure = new_figure()
    timed = [row for row in sweep.rows if row.id in speeds and row.fullest is not None]
    named = [row.id for row in timed if len(timed) <= _MOST_NAMED or row.id in sweep.ranking.front][:_MOST_NAMED]
    capacities = {row.fullest.capacity_bytes for row in timed if row.fullest is not None}
    widest = max(capacities, default=0) / GIB
    for status, colour in _STATUS_COLOURS.items():
        rows = [row for row in timed if row.status is status]
        if rows:
            figure.add_scatter(
                x=[_gib(row) for row in rows],
                y=[speeds[row.id] for row in rows],
                mode="markers+text",
                name=str(status),
                marker={"color": colour, "size": 9},
                text=[shown(row.label) if row.id in named else "" for row in rows],
                textposition=[f"middle {'left' if 2 * _gib(row) > widest else 'right'}" for row in rows],
                textfont={"size": 11},
                cliponaxis=False,
                hovertext=[_hover(row, sweep) for row in rows],
                customdata=[_link(row, sweep) for row in rows],
                hovertemplate="%{hovertext}<extra></extra>",
            )
    front = sorted((row for row in timed if row.id in sweep.ranking.front), key=_gib)
    if front:
        figure.add_scatter(
            x=[_gib(row) for row in front],
            y=[speeds[row.id] for row in front],
            mode="lines",
            name="no other point beats these",
            line={"color": INK, "width": 1.5, "dash": "dot", "shape": "hv"},
            hoverinfo="skip",
        )
    for capacity in sorted(capacities):
        text = {"annotation_text": f"memory of the GPU, {capacity / GIB:.1f} GiB", "annotation_position": "bottom left"}
        figure.add_vline(x=capacity / GIB, line={"color": MUTED, "width": 1}, **text, annotation_textangle=-90)
    best = sweep.ranking.best
    if best is not None and best.speed.low < best.speed.high:
        band = {"y0": best.speed.low, "y1": best.speed.high, "fillcolor": _PALE, "opacity": 0.2}
        figure.add_hrect(**band, line_width=0, layer="below")
    return framed(figure, "Memory against speed", x="GiB, NCCL and CUDA context included", y=sweep.ranking.unit)


def two_axes(sweep: Sweep, x: str, y: str) -> Figure:
    """The fastest point that fits for each pair of values of two axes, as a map."""
    speeds = _speeds(sweep)
    best: dict[tuple[str, str], Row] = {}
    for row in sweep.rows:
        if row.status is not Status.FITS or row.id not in speeds:
            continue
        values = dict(row.values)
        cell = (text_of(values[x]), text_of(values[y]))
        if cell not in best or speeds[row.id] > speeds[best[cell].id]:
            best[cell] = row
    xs, ys = ([text_of(value) for value in sweep.about.axes[name]] for name in (x, y))
    cells = list(best.items())
    figure = new_figure()
    figure.add_scatter(
        x=[cell[0] for cell, _ in cells],
        y=[cell[1] for cell, _ in cells],
        mode="markers+text",
        marker={
            "symbol": "square",
            "size": 46,
            "color": [speeds[row.id] for _, row in cells],
            "colorscale": [[at / (len(_SCALE) - 1), colour] for at, colour in enumerate(_SCALE)],
        },
        text=[speed_text(speeds[row.id]) for _, row in cells],
        textposition="bottom center",
        hovertext=[_hover(row, sweep) for _, row in cells],
        customdata=[_link(row, sweep) for _, row in cells],
        hovertemplate="%{hovertext}<extra></extra>",
        showlegend=False,
        cliponaxis=False,
    )
    figure.update_xaxes(type="category", categoryorder="array", categoryarray=xs, range=[-0.6, len(xs) - 0.4])
    figure.update_yaxes(type="category", categoryorder="array", categoryarray=ys, range=[-0.6, len(ys) - 0.4])
    return framed(figure, f"{x} and {y}", x=shown(x), y=shown(y), height=140 + 90 * len(ys))


def maps(sweep: Sweep) -> dict[str, Figure]:
    """A map of each pair of axes, by "x, y"; those that matter most first."""
    pairs = itertools.combinations(sweep.varied_axes, 2)
    return {f"{x}, {y}": two_axes(sweep, x, y) for x, y in itertools.islice(pairs, _MOST_MAPS)}


def _speeds(sweep: Sweep) -> dict[str, float]:
    return {row_id: speed.value for row_id, speed in sweep.ranking.speeds.items()}


def _bins(rows: Sequence[Row], speeds: dict[str, float], least: float, most: float) -> list[tuple[str, list[Row]]]:
    bins: dict[str, list[Row]] = {colour: [] for colour in (_PALE, *_SCALE)}
    for row in rows:
        if row.id not in speeds:
            bins[_PALE].append(row)
            continue
        fraction = (speeds[row.id] - least) / ((most - least) or 1.0)
        bins[_SCALE[min(int(fraction * len(_SCALE)), len(_SCALE) - 1)]].append(row)
    return [(colour, own) for colour, own in bins.items() if own]


def _height(value: Scalar | None, values: Sequence[Scalar]) -> float:
    if value is None or len(values) < 2:
        return 0.5
    return [text_of(other) for other in values].index(text_of(value)) / (len(values) - 1)


def _label(x: float, y: float, text: str) -> dict[str, object]:
    place = {"x": x, "y": y, "xanchor": "left", "xshift": 7, "yanchor": "bottom"}
    return place | {"text": shown(text), "showarrow": False, "font": {"size": 11}}


def _gib(row: Row) -> float:
    return 0.0 if row.fullest is None else row.fullest.total_bytes / GIB


def _hover(row: Row, sweep: Sweep) -> str:
    lines = [shown(row.label), str(row.status) + (f": {shown(row.reason)}" if row.reason else "")]
    if (speed := sweep.ranking.speeds.get(row.id)) is not None:
        interval = f" ({speed_text(speed.low)} to {speed_text(speed.high)})" if speed.low < speed.high else ""
        lines.append(f"{speed_text(speed.value)} {sweep.ranking.unit}{interval}")
    if row.fullest is not None:
        lines.append(memory_text(row.fullest))
    return "<br>".join(lines)


def _link(row: Row, sweep: Sweep) -> str:
    return report_of(sweep.path, row.run_directory)


def draw_front(sweep: Sweep) -> Drawing:
    """Memory against speed."""
    return Drawing({"front": figure_object(memory_against_speed(sweep))}, {"style": _STYLES}, {})


def draw_parallel(sweep: Sweep) -> Drawing:
    """Every point over the axes."""
    return Drawing({"parallel": figure_object(parallel_axes(sweep))}, {"style": _STYLES}, {})


def draw_maps(sweep: Sweep) -> Drawing:
    """A map of each pair of axes."""
    drawn = {name: figure_object(figure) for name, figure in maps(sweep).items()}
    return Drawing({}, {"style": _STYLES, "maps": drawn}, {"names": list(drawn)})
