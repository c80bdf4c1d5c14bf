"""Charts of memory: over time, of two runs, at the peak by layer and category, and segment by segment.

Reading a table that is missing or damaged raises RunDirectoryError.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from fakedist.analysis.recording import Array
from fakedist.report.figures.look import (
    CATEGORY_COLOURS,
    FREE,
    INK,
    LINE,
    PANEL,
    PHASE_COLOURS,
    SIDE_COLOURS,
    SOFT,
    VEIL,
    WAITING,
    byte_unit,
    framed,
    label,
    layer_labels,
    new_figure,
    shown,
    spoken,
    stacked_rows,
)
from fakedist.results.compare.layer_matching import Stretch, common_axis, on_axis
from fakedist.results.run import Run
from fakedist.results.verdict import short_line
from fakedist.rundir.schema import CATEGORIES, SEGMENT_STATES
from fakedist.units import GIB, MIB, format_bytes

BLOCK_COLUMNS = (
    *("bytes", "alloc_event", "free_event", "category", "layer", "operation", "stack", "step", "phase", "at_peak"),
)


@dataclass(frozen=True)
class Colouring:
    """The timeline's colours: each block's index into ``names``, and the category whose colour each name has."""

    of_block: Array
    names: tuple[str, ...]
    colours: tuple[str, ...]


@dataclass(frozen=True)
class MemoryCurve:
    """Memory held after each move. A move is an allocation or a free, numbered in order.

    Attributes:
        blocks: Columns BLOCK_COLUMNS of the table ``blocks``.
        events: For each move, its row in the table ``events``.
        of_event: For each row of ``events``, the last move up to it; -1 before the first.
        made: For each block, the move that allocates it.
        freed: For each block, the move that frees it; of one that is never freed, the number of moves.
        reserved: Bytes that the allocator has taken from the GPU at each row of ``events``.
        time_us: Time of recording of each row of ``events``.
    """

    blocks: pd.DataFrame
    lines: list[str]
    colouring: Colouring
    events: Array
    of_event: Array
    made: Array
    freed: Array
    allocated: Array
    reserved: Array
    time_us: Array

    @property
    def num_moves(self) -> int:
        """Number of allocations and frees."""
        return len(self.events)

    def move_at(self, events: Array) -> Array:
        """For each row of ``events``, the first move that is not before it."""
        return np.concatenate([[-1], self.of_event])[events] + 1


def read_curve(run: Run) -> MemoryCurve:
    """Read a run's memory."""
    blocks = run.table("blocks", BLOCK_COLUMNS)
    lines = [short_line(line, run.manifest.cwd) for line in run.table("stacks")["line"].astype(str)]
    table = run.table("events", ["allocated_bytes", "reserved_bytes", "time_us"])
    num = len(table)
    made, freed = blocks["alloc_event"].to_numpy(), blocks["free_event"].to_numpy()
    is_move = np.zeros(num + 1, bool)
    is_move[made] = True
    is_move[freed] = True
    is_move[num] = False  # for blocks that were never freed
    events = np.flatnonzero(is_move[:num])
    of_event = np.cumsum(is_move[:num]) - 1
    return MemoryCurve(
        blocks=blocks,
        lines=lines,
        colouring=by_largest_lines(blocks, lines) if run.by_category is None else by_category(blocks),
        events=events,
        of_event=of_event,
        made=of_event[made],
        freed=np.append(of_event, len(events))[freed],
        allocated=table["allocated_bytes"].to_numpy("i8")[events],
        reserved=table["reserved_bytes"].to_numpy("i8"),
        time_us=table["time_us"].to_numpy("i8"),
    )


def by_category(blocks: pd.DataFrame) -> Colouring:
    """Colour blocks by category."""
    values = blocks["category"]
    indices = np.array([CATEGORIES.index(str(name)) for name in values.cat.categories], "i8")
    codes = indices[values.cat.codes.to_numpy()] if len(indices) else np.zeros(0, "i8")
    return Colouring(codes, tuple(name.replace("_", " ") for name in CATEGORIES), CATEGORIES)


def by_largest_lines(blocks: pd.DataFrame, lines: list[str]) -> Colouring:
    """Colour blocks by the lines that hold most at the peak, for runs without categories."""
    line = pd.Series([*lines, ""]).iloc[blocks["stack"].to_numpy()].reset_index(drop=True)
    held = blocks["bytes"].reset_index(drop=True)[blocks["at_peak"].to_numpy()].groupby(line).sum()
    most = held.sort_values(ascending=False, kind="stable").index.drop("", errors="ignore")[: len(CATEGORIES) - 1]
    names = [*map(str, most), "everything else"]
    indices = {name: at for at, name in enumerate(most)}
    return Colouring(line.map(indices).fillna(len(names) - 1).to_numpy("i8"), tuple(names), CATEGORIES[: len(names)])


def highest_moves(allocated: Array, num_points: int) -> Array:
    """The move with the most memory of each of ``num_points`` stretches, and the first and last move."""
    if len(allocated) <= num_points:
        return np.arange(len(allocated))
    first = np.linspace(0, len(allocated), num_points + 1).astype("i8")[:-1]
    most = np.maximum.reduceat(allocated, first)
    reached = np.flatnonzero(allocated == np.repeat(most, np.diff(first, append=len(allocated))))
    highest = reached[np.searchsorted(reached, first)]
    return np.unique(np.concatenate([[0], highest, [len(allocated) - 1]]))


def least_between(allocated: Array, chosen: Array) -> Array:
    """The least that is held from each chosen move up to the next."""
    return np.minimum.reduceat(allocated, chosen) if len(chosen) else allocated[:0]


def held_by_colour(curve: MemoryCurve, chosen: Array) -> Array:
    """Bytes after each chosen move: one row per name of the colouring, one column per chosen move."""
    num = len(curve.colouring.names)
    width = len(chosen) + 1
    size = curve.blocks["bytes"].to_numpy("i8")
    row = curve.colouring.of_block * width
    change = np.zeros(num * width, "i8")
    np.add.at(change, row + np.searchsorted(chosen, curve.made), size)
    np.subtract.at(change, row + np.searchsorted(chosen, curve.freed), size)
    held: Array = np.cumsum(change.reshape(num, width), axis=1)[:, :-1]
    return held


def most_reserved(curve: MemoryCurve, chosen: Array) -> Array:
    """The most that is reserved from each chosen move up to the next."""
    if not len(chosen):
        return curve.reserved[:0]
    return np.maximum.reduceat(curve.reserved, np.concatenate([[0], curve.events[chosen[1:]]]))


#: Points of a curve. Of the moves between two points, the one with the most memory is drawn, so the peak is exact.
NUM_POINTS = 2_000
#: Rows of a bar chart.
MOST_ROWS = 40
#: Stretches of the axis that are narrower than these shares of it are not drawn, and have no label.
_LEAST_DRAWN, _LEAST_LABELLED = 0.002, 0.04
_BAND = 0.06  # the height of a row of names above the plot, as a share of the plot's
_AXES = {
    "event": "allocations and frees, in order",
    "time": "seconds since the first allocation (wall time of the recording)",
}


def memory_timeline(run: Run, *, axis: str = "event", num_points: int = NUM_POINTS) -> go.Figure:
    """Allocated bytes over the run by category, reserved bytes, phases and steps, and the peak.

    The axis is "event" (allocations and frees in order) or "time" (seconds since the first).

    Raises:
        ValueError: The axis is neither, or the run has no memory.
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
    positions = _positions(curve, chosen, axis)
    least = least_between(curve.allocated, chosen) / size
    total = curve.allocated[chosen] / size
    figure = new_figure()
    held = held_by_colour(curve, chosen)
    for code, (name, category) in enumerate(zip(curve.colouring.names, curve.colouring.colours, strict=True)):
        if (curve.colouring.of_block == code).any():
            colour = CATEGORY_COLOURS[category]
            line = {"width": 0, "shape": "hv", "color": colour}
            look = {"line": line, "fillcolor": colour, "stackgroup": "allocated"}
            _add_line(figure, code, label(name), positions, held[code] / size, unit=unit, **look)
    thin = {"width": 0, "shape": "hv", "color": VEIL}
    unseen = {"line": thin, "hoverinfo": "skip", "showlegend": False}
    _add_line(figure, "least", "least", positions, least, unit=unit, **unseen)
    _add_line(figure, "veil", "between", positions, total, unit=unit, fill="tonexty", fillcolor=VEIL, **unseen)
    # A peak may be thinner than a pixel of a filled area; a line shows it.
    line = {"width": 1, "color": INK, "shape": "hv"}
    _add_line(figure, "allocated", "allocated", positions, total, unit=unit, line=line)
    line = {"width": 1.2, "dash": "dot", "color": INK, "shape": "hv"}
    reserved = most_reserved(curve, chosen) / size
    # Reserved memory that dwarfs the rest would leave the categories a few pixels.
    dwarfs = float(reserved.max(initial=0)) > 2.5 * float(total.max(initial=0))
    _add_line(
        figure,
        "reserved",
        "reserved",
        positions,
        reserved,
        unit=unit,
        line=line,
        visible="legendonly" if dwarfs else True,
    )
    if len(chosen):
        _mark_peak(figure, positions, curve.allocated[chosen], size)
        _mark_spans(figure, run, curve, axis)
    figure.update_layout(hovermode="x unified")
    figure.update_yaxes(rangemode="tozero", ticksuffix=f" {unit}")
    title = f"Memory: peak {format_bytes(run.peak_allocated_bytes)} allocated"
    return framed(figure, title, x=_AXES[axis], height=460)


def _add_line(figure: go.Figure, part: object, name: str, x: Array, y: Array, *, unit: str, **look: object) -> None:
    if look.get("hoverinfo") != "skip":
        look["hovertemplate"] = f"%{{y:.3f}} {unit}"
    figure.add_scatter(x=x, y=y, name=name, mode="lines", meta=part, **look)


def named_bands(run: Run, curve: MemoryCurve) -> pd.DataFrame:
    """The phases that the script named, as they began: columns phase, begin and end (moves), and depth.

    The depth is how many other phases one is within. Phases without a move are left out.
    """
    table = run.table("named_phases") if run.has("named_phases") else pd.DataFrame(columns=["phase"])
    if not len(table):
        return pd.DataFrame(columns=["phase", "begin", "end", "depth"])
    begin, end = (curve.move_at(table[name].to_numpy()) for name in ("first_event", "end_event"))
    return _nested(pd.DataFrame({"phase": table["phase"].astype(str), "begin": begin, "end": end}))


def _nested(bands: pd.DataFrame) -> pd.DataFrame:
    """Stretches in order of their begin, with their depth, of stretches in the order of their end."""
    begin, end = bands["begin"], bands["end"]
    ends_later = bands[begin < end].iloc[::-1]  # of phases that begin together, the outer one ended last
    bands = ends_later.sort_values("begin", kind="stable", ignore_index=True)
    open_ends: list[int] = []
    depths = []
    for first, last in zip(bands["begin"].tolist(), bands["end"].tolist(), strict=True):
        open_ends = [other for other in open_ends if other > first]
        depths.append(len(open_ends))
        open_ends.append(last)
    return bands.assign(depth=depths)


def _positions(curve: MemoryCurve, moves: Array, axis: str) -> Array:
    if axis == "event":
        return moves
    time_us = curve.time_us[curve.events[moves]]
    return (time_us - curve.time_us[curve.events[:1]]) / 1e6 if len(moves) else time_us


_PARTS = {
    "allocator": ("the allocator's segments", "parameter"),
    "KV cache": ("vLLM's KV cache", "gradient"),
    "outside": ("outside of the allocator", "communication"),
}
#: Colours of other processes, which repeat.
_OTHER_COLOURS = ("optimizer_state", "activation", "temporary", "workspace", "other")


def shows_device(run: Run) -> bool:
    """True if the use of the device says more than the timeline: by other processes, or in the script's phases."""
    if not run.has("device_use") or not run.num_rows("device_use"):
        return False
    return bool(run.num_rows("named_phases") or (run.table("device_use", ["part"])["part"] == "all").any())


def device_timeline(run: Run) -> go.Figure:
    """Memory of the virtual GPU in use after each change, by this process and by each other, with the peak.

    Raises:
        ValueError: The run has no virtual GPU, or used no memory of it.
    """
    table = run.table("device_use") if run.has("device_use") else pd.DataFrame()
    if not len(table):
        raise ValueError(f"{run.path} does not have what was in use of a virtual GPU")
    by_change = table.astype({"process": str, "part": str}).pivot_table(
        "bytes", "change", ["process", "part"], aggfunc="sum", fill_value=0, sort=False
    )
    changes = by_change.index.to_numpy("i8")
    positions = np.append(changes, changes[-1] + 1)  # what is in use at the end is as wide as one change
    held = by_change.to_numpy("i8")[[*range(len(changes)), -1]]
    total = held.sum(axis=1)
    unit, size = byte_unit(float(total.max()))
    figure = new_figure()
    processes, parts = (by_change.columns.get_level_values(level).tolist() for level in ("process", "part"))
    for at, (process, part) in enumerate(zip(processes, parts, strict=True)):
        name, colour = _PARTS.get(part, ("", _OTHER_COLOURS[(at - processes.count("")) % len(_OTHER_COLOURS)]))
        name = f"{shown(process) or 'this process'}: {name}" if name else shown(process)
        if held[:, at].any():
            line = {"width": 0, "shape": "hv", "color": CATEGORY_COLOURS[colour]}
            look = {"line": line, "fillcolor": CATEGORY_COLOURS[colour], "stackgroup": "used"}
            _add_line(figure, at, name, positions, held[:, at] / size, unit=unit, **look)
    bands = _device_bands(run)
    line = {"width": 1, "color": INK, "shape": "hv"}
    phases = [f"· {shown(phase)}" if phase else "" for phase in _innermost(bands, positions)]
    figure.add_scatter(
        x=positions,
        y=total / size,
        name="in use",
        mode="lines",
        meta="used",
        line=line,
        text=phases,
        hovertemplate=f"%{{y:.3f}} {unit} %{{text}}",
    )
    _mark_peak(figure, positions, total, size)
    top = 1 - _BAND * (int(bands["depth"].max()) + 1 if len(bands) else 0)
    stretches = _named_stretches(bands, float(np.ptp(positions)), floor=top)
    figure.update_layout(hovermode="x unified", shapes=stretches, legend={"orientation": "h", "y": -0.2})
    figure.update_yaxes(rangemode="tozero", ticksuffix=f" {unit}", domain=[0, top])
    title = f"In use of the GPU: peak {format_bytes(int(total.max()))}"
    return framed(figure, title, x="changes of what is in use, in order", height=380)


def _device_bands(run: Run) -> pd.DataFrame:
    """The script's phases, as :func:`named_bands`, with changes of what is in use. Those without one are left out."""
    table = run.table("named_phases", ["phase", "first_change", "end_change"])
    known = table[table["first_change"].notna()].rename(columns={"first_change": "begin", "end_change": "end"})
    return _nested(known.astype({"phase": str}))


def _innermost(bands: pd.DataFrame, positions: Array) -> list[str]:
    """For each position the phase in it that is within the others there; empty outside of phases."""
    names = [""] * len(positions)
    for band in bands.to_dict("records"):  # outer ones first
        inside = slice(*np.searchsorted(positions, (band["begin"], band["end"])).tolist())
        names[inside] = [band["phase"]] * len(names[inside])
    return names


def compared_timeline(before: Run, after: Run, *, num_points: int = NUM_POINTS) -> go.Figure:
    """Allocated bytes of two runs, the same phase of the same step at the same place.

    If one of them is a snapshot, both histories have the same width.
    """
    curves, pieces = curves_on_axis(before, after)
    figure = new_figure()
    unit, size = byte_unit(max(before.peak_allocated_bytes, after.peak_allocated_bytes))
    for side, (name, run, curve) in enumerate(zip("AB", (before, after), curves, strict=True)):
        most = on_axis(curve, pieces, side, num_points)[1]
        peak = format_bytes(run.peak_allocated_bytes)
        _add_line(
            figure,
            name,
            f"{name}: {shown(run.path.name)}, peak {peak}",
            np.arange(num_points) / num_points,
            most / size,
            unit=unit,
            line={"width": 1.5, "shape": "hv", "color": SIDE_COLOURS[name]},
        )
        if len(curve):
            at = most.argmax() / num_points
            figure.add_scatter(
                x=[at],
                y=[most.max() / size],
                name=f"peak of {name}",
                mode="markers",
                marker={"size": 8, "color": SIDE_COLOURS[name]},
                hoverinfo="skip",
                showlegend=False,
            )
            figure.add_annotation(
                x=at,
                y=most.max() / size,
                text=f"{name} {peak}",
                showarrow=False,
                xanchor="right" if at > 0.5 else "left",  # so that a narrow screen has all of it
                xshift=-7 if at > 0.5 else 7,
                yanchor="bottom"
                if (name == "A") == (before.peak_allocated_bytes >= after.peak_allocated_bytes)
                else "top",
            )
    figure.update_layout(
        hovermode="x unified",
        xaxis_showticklabels=False,
        shapes=[
            shape
            for piece in pieces
            for shape in _stretch(
                piece.at, piece.phase, f"step {piece.step} {piece.phase}" if piece.step else piece.phase, 1.0
            )
        ],
    )
    figure.update_yaxes(rangemode="tozero", ticksuffix=f" {unit}")
    x = "steps and phases of both" if have_steps(before, after) else "events of each, from first to last"
    return framed(figure, "Allocated memory of two runs", x=x, height=460)


def have_steps(before: Run, after: Run) -> bool:
    """True if both runs know their steps. A snapshot does not."""
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

    Raises:
        ValueError: The kind is neither "icicle" nor "treemap".
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
    """The whole, layers, and below each layer its own bytes by category."""
    peak = run.peak_allocated_bytes
    table = run.layers()
    parents = _parents(table["depth"].tolist())
    own = _own_bytes(table[[f"peak_{name}_bytes" for name in CATEGORIES]].to_numpy("i8"), parents)
    rows: list[tuple[object, ...]] = [("peak", "", "the peak", "the peak", 0, peak, "", SOFT)]
    for at, row in enumerate(table.to_dict("records")):
        if not row["peak_total_bytes"]:
            continue
        name = str(row["name"]) or "outside of modules"
        repeats = int(row["num_repeats"])
        several = f"<br>{repeats:,} layers" if repeats > 1 else ""
        short = name.rpartition(".")[2] + (f" x{repeats:,}" if repeats > 1 else "")
        rows.append((str(at), parents[at], short, name, 0, row["peak_total_bytes"], several, SOFT))
        for category, held in zip(CATEGORIES, own[at].tolist(), strict=True):
            if held:
                text = f"{name}: {spoken(category)}"
                colour = CATEGORY_COLOURS[category]
                rows.append((f"{at}/{category}", str(at), spoken(category), text, held, held, several, colour))
    boxes = pd.DataFrame(rows, columns=["id", "parent", "short", "name", "own_bytes", "bytes", "repeats", "colour"])
    return boxes.assign(
        label=[label(box) for box in boxes["short"]],
        name=[shown(box) for box in boxes["name"]],
        text=[format_bytes(box) for box in boxes["bytes"]],
        share=[f"{box / peak:.1%}" if peak else "" for box in boxes["bytes"]],
    )


def _own_bytes(with_children: Array, parents: list[str]) -> Array:
    own = with_children.copy()
    for row, parent in enumerate(parents):
        if parent != "peak":
            own[int(parent)] -= with_children[row]
    return own


def layer_bars(run: Run, *, most: int = MOST_ROWS) -> go.Figure:
    """Bytes at the peak by layer and category, largest layers first; repeated layers are one row."""
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


def _mark_peak(figure: go.Figure, positions: Array, allocated: Array, size: int) -> None:
    peak = int(allocated.argmax())
    text = f"peak {format_bytes(int(allocated[peak]))}"
    figure.add_scatter(
        x=[positions[peak]],
        y=[allocated[peak] / size],
        name="peak",
        mode="markers",
        meta="peak",
        marker={"size": 9, "color": INK},
        hovertemplate=f"{text}<extra></extra>",
        cliponaxis=False,
        showlegend=False,
    )
    named = {"x": positions[peak], "y": allocated[peak] / size, "showarrow": False, "xanchor": "left", "xshift": 9}
    figure.add_annotation(text=f"<b>{text}</b>", **named)


def _mark_spans(figure: go.Figure, run: Run, curve: MemoryCurve, axis: str) -> None:
    if not run.has("spans"):
        return
    spans = run.table("spans")
    first = np.minimum(curve.move_at(spans["first_event"].to_numpy()), curve.num_moves - 1)
    positions = _positions(curve, np.append(first, curve.num_moves - 1), axis)
    width = float(positions[-1] - _positions(curve, np.zeros(1, "i8"), axis)[0]) or 1.0
    shapes = []
    for row, (step, phase) in enumerate(zip(spans["step"].tolist(), spans["phase"].astype(str), strict=True)):
        at = (float(positions[row]), float(positions[row + 1]))
        if at[1] - at[0] > _LEAST_DRAWN * width:
            shapes += _stretch(at, phase, f"step {step} {phase}" if step else phase, width)
    bands = named_bands(run, curve)
    ends = (np.minimum(bands[name].to_numpy("i8"), curve.num_moves - 1) for name in ("begin", "end"))
    begins, ends_at = (_positions(curve, moves, axis) for moves in ends)
    drawn = bands.assign(begin=begins.astype("f8"), end=ends_at.astype("f8"))
    figure.update_layout(shapes=shapes + _named_stretches(drawn, width, floor=1 + _BAND))


def _named_stretches(bands: pd.DataFrame, width: float, *, floor: float) -> list[dict[str, object]]:
    """Names of phases in rows by their depth, the lowest at ``floor``; ``begin`` and ``end`` are positions."""
    shapes = []
    for band in bands.to_dict("records"):
        at = (float(band["begin"]), float(band["end"]))
        if at[1] - at[0] > _LEAST_DRAWN * width:
            level = floor + _BAND * band["depth"]
            line = {"width": 1, "color": PANEL}  # between neighbours
            named = _stretch(at, "", band["phase"], width)[1]
            shapes.append(named | {"y0": level, "y1": level + _BAND, "line": line})
    return shapes


def _stretch(at: tuple[float, float], phase: str, text: str, width: float) -> list[dict[str, object]]:
    colour = PHASE_COLOURS.get(phase, LINE)
    both: dict[str, object] = {"type": "rect", "x0": at[0], "x1": at[1], "yref": "paper", "layer": "below"}
    both |= {"fillcolor": colour, "line": {"width": 0}}
    title: dict[str, object] = {"y0": 1, "y1": 1 + _BAND}
    if at[1] - at[0] > _LEAST_LABELLED * width:
        title["label"] = {"text": shown(text), "textposition": "middle left", "font": {"size": 12}}
    return [both | {"y0": 0, "y1": 1, "opacity": 0.35}, both | title]


def _parents(depths: list[int]) -> list[str]:
    above: list[int] = []
    parents = []
    for row, depth in enumerate(depths):
        del above[depth:]
        parents.append(str(above[-1]) if above else "peak")
        above.append(row)
    return parents


#: Blocks that are narrower than this part of the longest row are drawn together with their neighbours.
_NARROWEST = 1 / 400  # two or three pixels
_WAITING = "freed, another stream still uses it"
_ROW_HEIGHT = 22
_BELOW = 56  # pixels from the plot to its legend


def segment_map(run: Run, *, moment: str = "peak_reserved", most: int = MOST_ROWS) -> go.Figure:
    """Segments with the most free memory first; each row is a segment from its first byte to its last.

    Raises:
        ValueError: The moment is neither "peak_reserved" nor "peak_allocated", or the run has no memory.
    """
    if run.memory is None:
        raise ValueError(f"{run.path} has no memory: it was imported from a tool that does not record it")
    segments = run.memory.segments(moment)
    rows = segments.head(most)
    num_others = max(len(segments) - most, 0)
    figure = new_figure()
    _add_segments(figure, rows)
    blocks = run.memory.segment_blocks(moment)
    bars = drawn_blocks(blocks[blocks["segment"] < most], int(rows["bytes"].max()) if len(rows) else 0)
    for name in (*CATEGORIES, _WAITING):
        own = bars[bars["kind"] == name]
        if len(own):
            _add_blocks(figure, own, name, is_described=run.by_category is not None)
    height = _ROW_HEIGHT * max(len(rows), 1)
    figure.update_layout(barmode="overlay", bargap=0.25, legend={"orientation": "h", "y": -_BELOW / height})
    labels = [format_bytes(bytes_) for bytes_ in rows["free_bytes"].tolist()]
    figure.update_yaxes(tickvals=list(range(len(rows))), ticktext=labels, autorange="reversed", automargin=True)
    reserved, allocated = int(segments["bytes"].sum()), int(segments["allocated_bytes"].sum())
    title = f"Segments at the {moment.removeprefix('peak_')} peak: {format_bytes(reserved - allocated)} of "
    title += f"{format_bytes(reserved)} not allocated"
    if num_others:
        title += f"; {num_others:,} segments with less free memory are not drawn"
    return framed(figure, title, x="MiB from the segment's begin", y="free", height=160 + height)


def has_segments(run: Run) -> bool:
    """True if segments at known addresses have free memory, so that their chart shows something."""
    if run.memory is None or not any(moment.unused for moment in run.summary.reserved):
        return False
    return bool(run.table("segments", ["address"])["address"].any())


def drawn_blocks(blocks: pd.DataFrame, longest: int) -> pd.DataFrame:
    """The bars of ``run.memory.segment_blocks()``: one for each block, or one for narrow neighbours, which it counts.

    Columns segment, start, end, bytes, num_blocks, kind (category, or what says that it waits), and layer, phase, step,
    operation, line of the largest block in each bar.
    """
    pixel = max(int(longest * _NARROWEST), 1)
    kind = blocks["category"].astype(str).where(~blocks["is_waiting"], _WAITING)
    table = blocks.assign(start=blocks["offset_bytes"], end=blocks["offset_bytes"] + blocks["bytes"], kind=kind)
    is_narrow = (table["bytes"] < pixel).to_numpy()
    table["place"] = np.where(is_narrow, table["start"] // pixel, -1 - np.arange(len(table)))
    bars = table.groupby(["segment", "place"], sort=False)
    shown = table.sort_values("bytes", ascending=False, kind="stable").groupby(["segment", "place"]).head(1)
    shown = shown.set_index(["segment", "place"])
    sums = bars.agg(start=("start", "min"), end=("end", "max"), bytes=("bytes", "sum"), num_blocks=("bytes", "size"))
    return sums.join(shown[["kind", "layer", "phase", "step", "operation", "line"]]).reset_index()


def _add_segments(figure: go.Figure, rows: pd.DataFrame) -> None:
    details = [
        [
            f"0x{row['address']:x}",
            format_bytes(row["bytes"]),
            format_bytes(row["free_bytes"]),
            f"{row['num_holes']:,}",
            format_bytes(row["largest_hole_bytes"]),
            f"{row['stream']:#x}" if row["stream"] else "default",
            f"private pool {row['private_pool']}" if row["private_pool"] else f"{row['pool']} pool",
            SEGMENT_STATES[row["state"]],
        ]
        for row in rows.to_dict("records")
    ]
    figure.add_bar(
        y=list(range(len(rows))),
        x=rows["bytes"] / MIB,
        orientation="h",
        name="free",
        marker_color=FREE,
        customdata=details,
        hovertemplate="segment %{customdata[0]}, %{customdata[1]}, %{customdata[6]}, stream %{customdata[5]}<br>"
        "%{customdata[2]} free in %{customdata[3]} holes, the largest %{customdata[4]}<br>%{customdata[7]}"
        "<extra></extra>",
    )


def _add_blocks(figure: go.Figure, bars: pd.DataFrame, name: str, *, is_described: bool) -> None:
    details = [
        [
            format_bytes(row["bytes"]),
            f"{row['num_blocks']:,} blocks, the largest: " if row["num_blocks"] > 1 else "",
            shown(f"{row['layer'] or 'outside of modules'}, step {row['step']}, {row['phase']}")
            if is_described
            else "",
            shown(row["operation"]),
            shown(row["line"]),
        ]
        for row in bars.to_dict("records")
    ]
    figure.add_bar(
        y=bars["segment"],
        base=bars["start"] / MIB,
        x=(bars["end"] - bars["start"]) / MIB,
        orientation="h",
        name=spoken(name),
        marker_color=CATEGORY_COLOURS.get(name, WAITING),
        marker_line_width=0,
        customdata=details,
        hovertemplate="%{customdata[0]}: %{customdata[1]}%{customdata[2]}<br>%{customdata[3]} %{customdata[4]}"
        "<extra>" + spoken(name) + "</extra>",
    )
