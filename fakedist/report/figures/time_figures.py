"""Charts of the timed step: by layer, by family, the roofline, each kernel, and the ranks of a job side by side.

Those of a run raise ValueError if no step was timed, and RunDirectoryError if a table is missing or damaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from fakedist.analysis.recording import Array
from fakedist.cost_model.breakdown import range_lanes, timed
from fakedist.cost_model.host_times import host_bars, thread_titles
from fakedist.cost_model.step_axis import (
    bars,
    call_texts,
    hidden_parts,
    hidden_us,
    kind_runs,
    layer_runs,
    longest_runs,
    stream_titles,
)
from fakedist.report.content.wording import short_kernel
from fakedist.report.figures.look import (
    FAMILY_COLOURS,
    HIDDEN,
    INK,
    KIND_COLOURS,
    MUTED,
    ON_COLOUR,
    PHASE_COLOURS,
    RANGE,
    SOFT,
    WAITING,
    framed,
    layer_labels,
    new_figure,
    shown,
    spoken,
    stacked_rows,
)
from fakedist.results.run import Run, RunTime
from fakedist.rundir.job_time import JobStep, StageTime
from fakedist.rundir.schema import FAMILIES, KINDS
from fakedist.rundir.step_time import Peaks
from fakedist.units import format_flops, format_us

MOST_ROWS = 40
MOST_KERNELS = 300
#: Roofs whose rates differ by a smaller factor would have their names on each other.
_LEAST_APART = 1.3


def time_by_layer(run: Run, *, most: int = MOST_ROWS) -> go.Figure:
    """Kernel time by layer and purpose, longest first; repeated layers are one row."""
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
    """Kernel time by family."""
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
    """Draw the memory's bandwidth up to the highest peak, and each type's peak, named at its end."""
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
            anchor = {"x": 1, "xref": "paper", "y": float(np.log10(flops)), "xanchor": "right", "yanchor": "bottom"}
            figure.add_annotation(text=text, showarrow=False, font={"size": 12, "color": INK}, **anchor)


def has_roofline(run: Run) -> bool:
    """True if some kernel's FLOPs, bytes and time are known."""
    return run.time is not None and len(_known_kernels(run.time)) > 0


def _known_kernels(time: RunTime) -> pd.DataFrame:
    names = time.names()
    known = names[(names["flops"] > 0) & (names["moved_bytes"] > 0) & (names["flops_us"] > 0)]
    return known[known["family"] != "communication"]


def time_of(run: Run) -> RunTime:
    """The times of a run."""
    if run.time is None:
        raise ValueError(f"{run.path} has no timed step: profile it without --no-kernels")
    return run.time


#: Bars of a figure; half as many layers above them. The page has more, and draws those that it zooms into.
MOST_BARS = 2_000
#: Levels of the tree of layers.
MOST_DEPTH = 6
#: Ranges that lie in each other, or overlap on the GPU; deeper ones are left out.
MOST_RANGE_LANES = 6
_RESOLUTION = 4_000  # parts of the step: what is shorter cannot be seen
_COLUMNS = (
    *("name", "family", "stream", "start_us", "duration_us", "operation", "phase", "recompute", "layer", "call"),
    *("flops", "moved_bytes", "bound", "shape", "grid", "path_us"),
)
_ROW_HEIGHT = 22


def read_kernels(run: Run) -> pd.DataFrame:
    """The table ``kernels`` in the form that the charts need."""
    return timed(run.table("kernels", _COLUMNS))


def kernel_lanes(run: Run, *, most: int = MOST_BARS) -> go.Figure:
    """The kernels of the timed step by stream over time, below the phases and layers of the stream that computes most.

    The script's own ranges (NVTX, ``record_function``) lie between them, from their first kernel to their last, and
    the host with what it launches for, and its waits for the GPU.
    Collectives are faded where something computes at the same time. Above about ``most`` bars, neighbours share one.
    """
    time_of(run)  # an error without one
    return lanes_of(run, read_kernels(run), most=most)


def lanes_of(run: Run, kernels: pd.DataFrame, *, most: int) -> go.Figure:
    """The figure of :func:`kernel_lanes`, from the result of :func:`read_kernels`."""
    time = time_of(run)
    layers = run.table("layers", ["name", "parent"])
    runs = layer_runs(kernels, layers["parent"].to_numpy())
    depth = int(min(runs["depth"].max() + 1, MOST_DEPTH)) if len(runs) else 0
    figure = new_figure()
    phases = kind_runs(kernels)
    _add_kinds(figure, "phase", phases, np.zeros(len(phases)), [KINDS[kind] for kind in phases["kind"].astype(int)])
    runs = longest_runs(runs[runs["depth"] < depth], most // 2)
    names = layers["name"].astype(str).to_numpy()[runs["layer"].to_numpy("i8")]
    _add_kinds(figure, "layers", runs, 1 + runs["depth"].to_numpy("f8"), names.tolist())
    ranges = drawn_ranges(run, most // 2)
    num_lanes = int(ranges["lane"].max() + 1) if len(ranges) else 0
    if num_lanes:
        _add_ranges(figure, ranges, first_row=1 + depth)
    host = drawn_host(run, most)
    first_host = 1 + depth + num_lanes
    if len(host):
        _add_host(figure, host, names=layers["name"].astype(str).tolist(), first_row=first_host)
    threads = thread_titles(host["stream"].to_numpy("u8"))
    first_row = first_host + len(threads)
    _add_bars(figure, run, kernels, first_row=first_row, most=most)
    _add_hidden(figure, kernels, first_row=first_row)
    titles = {0: "phase"} | ({1: "layers"} if depth else {}) | ({1 + depth: "ranges"} if num_lanes else {})
    titles |= {first_host + at: title for at, title in enumerate(threads.values())}
    streams = lane_titles(run, kernels)
    titles |= {first_row + at: shown(title) for at, title in enumerate(streams)}
    num_rows = first_row + len(streams)
    figure.update_layout(barmode="overlay", bargap=0, hovermode="closest", dragmode="zoom")
    figure.update_xaxes(range=[0, (time.summary().step_us or 1.0) / 1e3], ticksuffix=" ms")
    figure.update_yaxes(
        range=[num_rows - 0.5, -0.5], tickvals=list(titles), ticktext=list(titles.values()), fixedrange=True,
        showgrid=False, zeroline=False,
    )  # fmt: skip
    title = f"Kernels of step {time.step} by stream ({time.source})"
    return framed(figure, title, x="time in the step", height=110 + _ROW_HEIGHT * num_rows)


def drawn_ranges(run: Run, most: int) -> pd.DataFrame:
    """The script's ranges as bars: the result of :func:`range_lanes` without lanes that are too deep."""
    lanes = range_lanes(time_of(run).ranges(), most)
    kept: pd.DataFrame = lanes[lanes["lane"] < MOST_RANGE_LANES]
    return kept


def _add_ranges(figure: go.Figure, ranges: pd.DataFrame, *, first_row: int) -> None:
    start = ranges["start_us"].to_numpy("f8")
    figure.add_bar(
        **_places(start, ranges["end_us"].to_numpy("f8") - start, first_row + ranges["lane"].to_numpy("f8")),
        meta="ranges",
        name="your ranges",
        marker={"color": RANGE, "line": {"width": 0}},
        hovertext=[
            f"{shown(row['name'])}<br>{format_us(row['end_us'] - row['start_us'])} on the GPU, "
            f"{row['num_kernels']:,} kernels of {format_us(row['kernel_us'])}"
            for row in ranges.to_dict("records")
        ],
        hovertemplate="%{hovertext}<extra></extra>",
        textfont={"size": 11.5},
    )


def drawn_host(run: Run, most: int) -> pd.DataFrame:
    """At most about ``most`` bars of the host: the columns of ``host_bars`` for the longest part of each.

    Further columns end_us, num_parts (that neighbours of one layer and phase merged into the bar).
    """
    tables = {name: run.table(name) for name in ("host", "launches", "work")}
    done = host_bars(tables["host"], tables["launches"], tables["work"])
    drawn = bars(done, most)
    rows = done.iloc[drawn["first"].to_numpy("i8")].reset_index(drop=True)
    return rows.assign(start_us=drawn["start_us"], end_us=drawn["end_us"], num_parts=drawn["num_kernels"])


def host_lanes(rows: pd.DataFrame) -> Array:
    """The lane of each bar of the host: one for each thread, the main one first."""
    lanes: Array = np.unique(rows["stream"].to_numpy("u8"), return_inverse=True)[1]
    return lanes


def host_text(name: str, num_parts: int) -> str:
    """The words for a bar of the host."""
    return f"{num_parts:,} operations, the longest {name}" if num_parts > 1 else name


def _add_host(figure: go.Figure, rows: pd.DataFrame, *, names: list[str], first_row: int) -> None:
    start, end = rows["start_us"].to_numpy("f8"), rows["end_us"].to_numpy("f8")
    kinds = [KINDS[kind] for kind in rows["kind"].tolist()]
    texts = map(host_text, rows["name"].tolist(), rows["num_parts"].tolist())
    layers = [names[layer] or "(outside of modules)" for layer in rows["layer"].tolist()]
    figure.add_bar(
        **_places(start, end - start, first_row + host_lanes(rows).astype("f8")),
        meta="host",
        name="host",
        marker={
            "color": [
                PHASE_COLOURS[kind] if is_own else WAITING
                for kind, is_own in zip(kinds, rows["is_compute"].tolist(), strict=True)
            ],
            "line": {"width": 0},
        },
        hovertext=[
            f"{shown(text)}<br>{kind}, {format_us(us)}<br>{shown(layer)}"
            for text, kind, us, layer in zip(texts, kinds, end - start, layers, strict=True)
        ],
        hovertemplate="%{hovertext}<extra></extra>",
        showlegend=False,
        textfont={"size": 11.5},
    )


def _add_hidden(figure: go.Figure, kernels: pd.DataFrame, *, first_row: int) -> None:
    calls = kernels[~kernels["is_compute"] & kernels["is_known"]]
    if not len(calls):
        return
    end = float((kernels["start_us"] + kernels["known_us"]).max())
    parts = hidden_parts(kernels, end / _RESOLUTION)
    streams = np.unique(kernels["stream"].to_numpy("u8"))
    start = parts["start_us"].to_numpy("f8")
    row = first_row + np.searchsorted(streams, parts["stream"].to_numpy("u8"))
    figure.add_bar(
        **_places(start, parts["end_us"].to_numpy("f8") - start, row),
        meta="hidden",
        name="communication while something computes",
        marker={"color": HIDDEN, "line": {"width": 0}},
        hoverinfo="skip",
        textfont={"size": 11.5, "color": INK},
    )


def _add_kinds(figure: go.Figure, part: str, rows: pd.DataFrame, y: Array, names: list[str]) -> None:
    kinds = [KINDS[kind] for kind in rows["kind"].astype(int)]
    length = rows["end_us"].to_numpy("f8") - rows["start_us"].to_numpy("f8")
    figure.add_bar(
        **_places(rows["start_us"].to_numpy("f8"), length, y),
        meta=part,
        name=part,
        marker={"color": [PHASE_COLOURS[kind] for kind in kinds], "line": {"width": 0}},
        hovertext=[
            f"{shown(name)}<br>{kind}, {format_us(us)}" for name, kind, us in zip(names, kinds, length, strict=True)
        ],
        hovertemplate="%{hovertext}<extra></extra>",
        showlegend=False,
        textfont={"size": 11.5},
    )


def _add_bars(figure: go.Figure, run: Run, kernels: pd.DataFrame, *, first_row: int, most: int) -> None:
    drawn = bars(kernels, most)
    rows = kernels.iloc[drawn["first"].to_numpy("i8")]
    codes, labels = bar_labels(run, rows)
    stream = np.unique(drawn["stream"].to_numpy("u8"), return_inverse=True)[1]
    layers = run.table("layers", ["name"])["name"].astype(str).to_numpy()[rows["layer"].to_numpy("i8")]
    start = drawn["start_us"].to_numpy("f8")
    length = (drawn["end_us"] - drawn["start_us"]).to_numpy("f8")
    families = rows["family"].to_numpy("i8")
    communication = FAMILIES.index("communication")
    known, num_kernels = drawn["known"].tolist(), drawn["num_kernels"].tolist()
    hidden = hidden_us(drawn, kernels)
    for at in sorted(kernels["family"].unique().tolist()):  # the page draws families that no bar here stands for
        family = FAMILIES[at]
        own = np.flatnonzero(families == at)
        figure.add_bar(
            **_places(start[own], length[own], first_row + stream[own]),
            meta=family,
            name=family,
            marker={"color": FAMILY_COLOURS[family], "line": {"width": 0}},
            hovertext=[
                f"{shown(labels[codes[row]])}<br>"
                f"{format_us(length[row]) if known[row] else 'duration not known'}"
                f"{_several(num_kernels[row])}"
                f"{_exposed(length[row], hidden[row]) if at == communication and known[row] else ''}"
                f"<br>{shown(layers[row] or '(outside of modules)')}"
                for row in own.tolist()
            ],
            hovertemplate="%{hovertext}<extra></extra>",
            showlegend=len(own) > 0,
            textfont={"size": 11.5, "color": ON_COLOUR},
        )
    figure.update_layout(plot_bgcolor=SOFT)


def _several(num: int) -> str:
    return f", of {num:,} kernels the longest" if num > 1 else ""


def _exposed(long_us: float, hidden_us: float) -> str:
    return f"<br>hidden {format_us(hidden_us)}, exposed {format_us(max(long_us - hidden_us, 0.0))}"


def _places(start_us: Array, length_us: Array, row: Array) -> dict[str, object]:
    return {"base": start_us / 1e3, "x": length_us / 1e3, "y": row, "width": 0.84, "orientation": "h"}


def lane_titles(run: Run, kernels: pd.DataFrame) -> list[str]:
    """The title of each stream's lane, in the order of the streams."""
    return stream_titles(kernels, _calls_of(run, kernels))


def _calls_of(run: Run, rows: pd.DataFrame) -> dict[int, str]:
    if not (rows["call"] >= 0).any():
        return {}
    return call_texts(run.table("calls", ["sequence", "operation", "group"]), run.table("groups"))


def bar_labels(run: Run, rows: pd.DataFrame) -> tuple[Array, list[str]]:
    """For each bar, the index of its label: the kernel's name, or the name of the collective it is a copy for."""
    text = rows["name"].astype(str).map(lambda name: short_kernel(name, 120))
    if calls := _calls_of(run, rows):
        text = rows["call"].map(calls).fillna(text)
    codes, labels = pd.factorize(text)
    return codes, [str(label) for label in labels]


_COLOURS = KIND_COLOURS | {
    "communication": FAMILY_COLOURS["communication"],
    "bubble": SOFT,
    "weights": FAMILY_COLOURS["norm"],
}
#: Drawn first, so that what computes covers it.
_ORDER = ("bubble", "communication", "other", "optimizer", "recompute", "weights", "backward", "forward", "generation")


Figure: TypeAlias = go.Figure


def stage_lanes(step: JobStep, lanes: pd.DataFrame) -> Figure:
    """The job's step by rank: forward, backward, optimizer, communication and bubble over time (``JobTime.lanes``)."""
    labels = {stage.rank: stage_label(stage) for stage in step.stages}
    rows = lanes.assign(label=lanes["rank"].map(labels), text=lanes["lane"])
    return activity_lanes(rows, list(labels.values()), f"The job's step by rank, {format_us(step.step_us)} (estimated)")


def activity_lanes(rows: pd.DataFrame, labels: Sequence[str], title: str) -> Figure:
    """Stretches of time: columns ``label`` (one of ``labels``, from the top), ``lane``, ``start_us``, ``end_us``.

    ``text`` says what a stretch is when it is pointed at. Lanes have the names and colours of a job's step.
    """
    figure = new_figure()
    for lane in _ORDER:
        own = rows[rows["lane"] == lane]
        if not len(own):
            continue
        lasts = own["end_us"] - own["start_us"]
        figure.add_bar(
            y=list(own["label"]),
            x=lasts / 1e3,
            base=own["start_us"] / 1e3,
            orientation="h",
            name=lane,
            marker={"color": _COLOURS[lane], "line": {"width": 0}},
            customdata=[[text, format_us(us)] for text, us in zip(own["text"], lasts, strict=True)],
            hovertemplate="%{customdata[1]} from %{base:.3f} ms<extra>%{y}: %{customdata[0]}</extra>",
        )
    figure.update_layout(barmode="overlay", bargap=0.25)
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=list(labels))
    framed(figure, title, x="ms", height=200 + 34 * max(len(labels), 2))
    legend = {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "traceorder": "reversed"}
    return figure.update_layout(legend=legend, margin={"t": 90})


def lane_names(lanes: pd.DataFrame) -> list[str]:
    """The lanes that there is something of, in the order of a step."""
    seen = set(lanes["lane"])
    return [lane for lane in reversed(_ORDER) if lane in seen]


def stage_label(stage: StageTime) -> str:
    """The name of a rank, with its stage if that is known."""
    return f"rank {stage.rank}" if stage.stage is None else f"stage {stage.stage}, rank {stage.rank}"
