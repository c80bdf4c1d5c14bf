"""The allocator's segments at a moment: one row a segment, its blocks by category, and the holes between them."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from fakedist.report.figures.look import CATEGORY_COLOURS, FREE, WAITING, framed, new_figure, shown, spoken
from fakedist.results.run import Run
from fakedist.run.schema import CATEGORIES, SEGMENT_STATES
from fakedist.units import MIB, format_bytes

#: Rows that are drawn, those with the most free memory.
MOST_ROWS = 40
#: Blocks that are narrower than this part of the longest row are drawn together with their neighbours.
_NARROWEST = 1 / 400  # two or three pixels
_WAITING = "freed, another stream still uses it"
_ROW_HEIGHT = 22
_BELOW = 56  # pixels from the plot to its legend


def segment_map(run: Run, *, moment: str = "peak_reserved", most: int = MOST_ROWS) -> go.Figure:
    """Segments with the most free memory first; each row is a segment from its first byte to its last.

    Args:
        run: A run with memory.
        moment: "peak_reserved" or "peak_allocated".
        most: Rows to draw.

    Raises:
        ValueError: There is no such moment, or the run has no memory.
        RunDirectoryError: A table is missing or damaged.
    """
    if run.memory is None:
        raise ValueError(f"{run.path} has no memory: it was imported from a tool that does not record it")
    found = run.memory.segments(moment)
    rows, num_others = found.head(most), max(len(found) - most, 0)
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
    reserved, allocated = int(found["bytes"].sum()), int(found["allocated_bytes"].sum())
    title = f"Segments at the {moment.removeprefix('peak_')} peak: {format_bytes(reserved - allocated)} of "
    title += f"{format_bytes(reserved)} not allocated"
    if num_others:
        title += f"; {num_others:,} segments with less free memory are not drawn"
    return framed(figure, title, x="MiB from the segment's begin", y="free", height=160 + height)


def has_segments(run: Run) -> bool:
    """Whether a chart of segments has anything to show: free memory in them, at known addresses."""
    if run.memory is None or not any(moment.unused for moment in run.summary.reserved):
        return False
    return bool(run.table("segments", ["address"])["address"].any())


def drawn_blocks(blocks: pd.DataFrame, longest: int) -> pd.DataFrame:
    """What is drawn of blocks: one bar each, but narrow neighbours share one, which counts them.

    Args:
        blocks: The result of ``run.memory.segment_blocks()``.
        longest: Bytes of the longest row.

    Returns:
        Columns segment, start, end, bytes, num_blocks, kind (category, or what says that it waits), and layer, phase,
        step, operation, line of the largest block in each bar.
    """
    pixel = max(int(longest * _NARROWEST), 1)
    kind = blocks["category"].astype(str).where(~blocks["is_waiting"], _WAITING)
    table = blocks.assign(start=blocks["offset_bytes"], end=blocks["offset_bytes"] + blocks["bytes"], kind=kind)
    is_narrow = (table["bytes"] < pixel).to_numpy()
    table["place"] = np.where(is_narrow, table["start"] // pixel, -1 - np.arange(len(table)))
    bars = table.groupby(["segment", "place"], sort=False)
    found = table.sort_values("bytes", ascending=False, kind="stable").groupby(["segment", "place"]).head(1)
    found = found.set_index(["segment", "place"])
    sums = bars.agg(start=("start", "min"), end=("end", "max"), bytes=("bytes", "sum"), num_blocks=("bytes", "size"))
    return sums.join(found[["kind", "layer", "phase", "step", "operation", "line"]]).reset_index()


def _add_segments(figure: go.Figure, rows: pd.DataFrame) -> None:
    """The rows themselves; what no block covers is free."""
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
