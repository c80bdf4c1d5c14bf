"""A sweep as one HTML file: the answer, the charts and every point. It needs no network."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias
from urllib.parse import quote

import plotly.graph_objects as go

from fakedist.report.content.report_blocks import Sheet
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
from fakedist.report.page.drawings import Pack
from fakedist.report.page.live import Follower
from fakedist.report.page.run_page import template_text
from fakedist.report.text.wording import MFU_BASIS, command_line
from fakedist.rundir.directory import MANIFEST_NAME
from fakedist.rundir.manifest import load_manifest
from fakedist.rundir.outcome import Outcome
from fakedist.sweep.opened import Sweep, open_sweep
from fakedist.sweep.point_rows import Row, Status
from fakedist.sweep.ranking import answer, counts_text, memory_text, short_label, speed_text
from fakedist.sweep.sheets import (
    EFFECTS_TITLE,
    FAILURES_TITLE,
    MISFITS_TITLE,
    TITLE,
    columns_of,
    effects_of,
    failures,
    misfits,
    point_sheet,
    reasons,
    remarks_of,
    shown_rows,
)
from fakedist.sweep.space import Scalar, text_of
from fakedist.sweep.sweep_directory import JOURNAL_NAME, PAGE_NAME, RUNS_NAME, replace_file, report_of, reports_of
from fakedist.units import GIB, format_bytes, format_us

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


def varied_axes(sweep: Sweep) -> list[str]:
    """The axes with several values, those that matter most first."""
    order = [effect.axis for effect in sweep.ranking.effects]
    names = [name for name, values in sweep.about.axes.items() if len(values) > 1]
    return sorted(names, key=lambda name: order.index(name) if name in order else len(order))


def parallel_axes(sweep: Sweep) -> Figure:
    """Every point as a line over the axes and its speed, coloured by speed. A line in grey has no step.

    ``customdata`` has the report of each point.
    """
    names = varied_axes(sweep)[::-1]
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


def memory_against_speed(sweep: Sweep) -> Figure:
    """Memory against speed by status, the front as a line, the GPU's memory, and the fastest point's interval."""
    speeds = _speeds(sweep)
    figure = new_figure()
    timed = [row for row in sweep.rows if row.id in speeds and row.fullest is not None]
    for status, colour in _STATUS_COLOURS.items():
        rows = [row for row in timed if row.status is status]
        if rows:
            figure.add_scatter(
                x=[_gib(row) for row in rows],
                y=[speeds[row.id] for row in rows],
                mode="markers",
                name=str(status),
                marker={"color": colour, "size": 9},
                text=[_hover(row, sweep) for row in rows],
                customdata=[_link(row, sweep) for row in rows],
                hovertemplate="%{text}<extra></extra>",
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
    capacities = {row.fullest.capacity_bytes for row in timed if row.fullest is not None}
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
    pairs = itertools.combinations(varied_axes(sweep), 2)
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


def write_sweep_page(sweep: Sweep) -> None:
    """Write the page into the sweep's directory."""
    replace_file(sweep.path / PAGE_NAME, sweep_page(sweep, sweep.path))


class SweepFollower(Follower):
    """A sweep while it goes, from its journal and its runs' manifests."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def state(self) -> dict[str, object]:
        """See :meth:`Follower.state`."""
        sweep = open_sweep(self._path)
        total = sweep.about.points
        rows, journal = shown_rows(sweep), self._path / JOURNAL_NAME
        running = list(self._running(sweep))
        failed = [row for row in sweep.rows if row.fullest is None]
        columns = columns_of(sweep, rows)
        return {
            "title": sweep.path.name,
            "rows": [
                ("points", f"{len(sweep.rows):,} done" + ("" if total is None else f" of {len(total):,}")),
                ("counts", counts_text(sweep.ranking)),
                ("ranks running", f"{len(running):,}"),
            ],
            "points": [],
            "columns": [column.name for column in columns],
            "table": [list(cells) for cells in zip(*(column.cells for column in columns), strict=True)],
            "links": [_pages(row, sweep) for row in rows],
            "others": [[row.label, str(row.status), row.reason, row.line] for row in failed],
            "other_links": [_pages(row, sweep) for row in failed],
            "done": journal.is_file() and _written(self._path / PAGE_NAME) >= _written(journal),
        }

    def report(self) -> str:
        """See :meth:`Follower.report`."""
        return sweep_page(open_sweep(self._path), self._path)

    def _running(self, sweep: Sweep) -> Iterator[Path]:
        known = {sweep.path / rank.directory for row in sweep.rows for rank in row.ranks if rank.directory}
        for manifest in (self._path.resolve() / RUNS_NAME).glob(f"*/rank*/{MANIFEST_NAME}"):
            if manifest.parent not in known and load_manifest(manifest.parent).exit.outcome is Outcome.RUNNING:
                yield manifest.parent


def _written(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return -1


def sweep_page(sweep: Sweep, folder: Path | None = None) -> str:
    """The page's text. It links to the points' pages if ``folder``, where it goes, is the sweep's own directory."""
    pack = Pack()
    figures: dict[str, object] = {"parallel": figure_object(parallel_axes(sweep))} if varied_axes(sweep) else {}
    if sweep.ranking.speeds:
        figures["front"] = figure_object(memory_against_speed(sweep))
    drawn = maps(sweep) if sweep.ranking.speeds else {}
    pack.meta |= {"figures": figures, "style": _STYLES, "run": sweep.path.name}
    pack.meta["maps"] = {name: figure_object(figure) for name, figure in drawn.items()}
    rows = shown_rows(sweep)
    is_here = folder is not None and folder.resolve() == sweep.path.resolve()
    sentences = list(answer(sweep.ranking))
    effects = effects_of(sweep.ranking.effects)
    context: dict[str, object] = {
        "title": sentences[0],
        "setting": [text for name, text, _ in _facts(sweep) if name in ("world", "GPU", "fabric")],
        "best": _best(sweep, is_here),
        "sentences": [*sentences[1:], *reasons(sweep.rows)],
        "counts": counts_text(sweep.ranking),
        "facts": _facts(sweep),
        "figures": sorted(figures),
        "maps": list(drawn),
        "unit": sweep.ranking.unit,
        "points": Sheet(TITLE, columns_of(sweep, rows), remarks_of(rows)) if rows else None,
        "links": [_pages(row, sweep) if is_here else [] for row in rows],
        "effects": Sheet(EFFECTS_TITLE, effects) if effects[0].cells else None,
        "unfinished": [
            (id_, title, point_sheet(heading, chosen), [_pages(row, sweep) if is_here else [] for row in chosen])
            for id_, title, heading, chosen in (
                ("misfits", "Does not fit", MISFITS_TITLE, misfits(sweep.rows)),
                ("failures", "Failed", FAILURES_TITLE, failures(sweep.rows)),
            )
            if chosen
        ],
        "numbers": pack.text(),
    }
    return template_text("sweep.html.j2", "sweep", context, "")


def _pages(row: Row, sweep: Sweep) -> list[tuple[str, str]]:
    return [(f"rank {rank}", quote(page)) for rank, page in reports_of(sweep.path, row)]


def _best(sweep: Sweep, is_here: bool) -> dict[str, object] | None:
    """The fastest point that fits: its speed, its memory and its step, and the command that runs it."""
    best, unit = sweep.ranking.best, sweep.ranking.unit
    if best is None:
        return None
    row, speed, step = best.row, best.speed, best.row.step
    low, high = speed_text(speed.low), speed_text(speed.high)
    figures = (
        [] if row.fullest is None else [("memory", memory_text(row.fullest), "measured, NCCL and context estimated")]
    )
    if step is not None:
        known = step.low_us is not None and step.high_us is not None
        interval = f"90 % interval {format_us(step.low_us or 0.0)} to {format_us(step.high_us or 0.0)}" if known else ""
        figures.append(("step", format_us(step.step_us), interval))
        if step.mfu is not None:
            figures.append(("MFU", f"{step.mfu:.1%}", MFU_BASIS))
    tied = len(sweep.ranking.as_fast)
    figures.append(("statistically tied with it", f"{tied:,}", "other point" if tied == 1 else "other points"))
    return {
        "label": short_label(row.values),
        "unit": unit,
        "speed": speed_text(speed.value),
        "interval": f"90 % interval {low} to {high}" if speed.low < speed.high else "its interval is not known",
        "figures": figures,
        "command": command_line(shlex.split(row.command)),
        "pages": _pages(row, sweep) if is_here else [],
    }


_MOST_NAMED = 6


def _facts(sweep: Sweep) -> list[tuple[str, str, bool]]:
    """The sweep's setting and its command: name, text, whether it is code. What no point knows is left out."""
    rows = sweep.rows
    steps = [row.step for row in rows if row.step is not None]
    worlds = sorted({row.world_size for row in rows if row.world_size})
    memory = sorted({rank.capacity_bytes for row in rows for rank in row.ranks if rank.capacity_bytes})
    gpus = list(dict.fromkeys(step.gpu for step in steps))
    sizes = _named([format_bytes(bytes_) for bytes_ in memory])
    facts = [
        ("world", f"{_named([f'{world:,}' for world in worlds])} ranks" if worlds else "", False),
        ("GPU", ", ".join(filter(None, (_named(gpus), sizes and f"{sizes} of memory"))), False),
        ("fabric", _named(list(dict.fromkeys(step.fabric for step in steps))), False),
        ("script", sweep.about.program, True),
        ("ranks of a point", sweep.about.ranks, False),
        ("headroom asked for", f"{sweep.about.headroom:.0%}", False),
        ("command", command_line(sweep.about.command), True),
        ("directory", str(sweep.path), True),
    ]
    return [fact for fact in facts if fact[1]]


def _named(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _MOST_NAMED} more" if len(texts) > _MOST_NAMED else ""
    return ", ".join(texts[:_MOST_NAMED]) + more
