"""The run's figures as a page carries them: plotly's own JSON, without what the page itself provides."""

from __future__ import annotations

import json

import pandas as pd
import plotly.graph_objects as go

from fakedist.report.figures.call_figures import Calls, calls_of
from fakedist.report.figures.kernel_figures import lanes_of
from fakedist.report.figures.memory_curve import MemoryCurve
from fakedist.report.figures.memory_figures import peak_by_layer, timeline_of
from fakedist.report.figures.segment_figure import has_segments, segment_map
from fakedist.report.figures.time_figures import has_roofline, roofline
from fakedist.results.run import Run

# Charts that zoom compute what they show from the page's numbers, so their figures carry a few points only.
_FEW = 50
_NO_TITLE = 12  # pixels above a chart
#: Rows of the chart of segments: enough to see what fragments, and half a screen.
MOST_SEGMENTS = 16


def run_figures(run: Run) -> dict[str, object]:
    """The figures that need no more than the run's tables, by name; those that the run has nothing for are left out."""
    found: dict[str, object] = {}
    if run.summary.peak_allocated_bytes and run.by_category is not None:
        found["peak"] = figure_object(peak_by_layer(run, kind="treemap"))
    if has_segments(run):
        found["segments"] = figure_object(segment_map(run, most=MOST_SEGMENTS))
    if has_roofline(run):
        found["roofline"] = figure_object(roofline(run))
    return found


def kernels_figure(run: Run, kernels: pd.DataFrame) -> object:
    """The timed step by stream.

    Args:
        run: The run.
        kernels: The result of :func:`fakedist.report.figures.kernel_figures.read_kernels`.
    """
    return figure_object(lanes_of(run, kernels, most=_FEW))


def memory_figures_of(run: Run, curve: MemoryCurve, calls: Calls) -> dict[str, object]:
    """The timeline and the calls below it."""
    found: dict[str, object] = {"timeline": figure_object(timeline_of(run, curve, axis="event", num_points=_FEW))}
    if calls.lanes:
        found["calls"] = figure_object(calls_of(calls, curve.num_moves))
    return found


def figure_object(figure: go.Figure) -> object:
    """A figure as JSON, without its template and title: the page has its own colours and headings."""
    found = json.loads(figure.to_json())
    for name in ("template", "title"):
        found["layout"].pop(name, None)
    found["layout"]["margin"]["t"] = _NO_TITLE
    return found
