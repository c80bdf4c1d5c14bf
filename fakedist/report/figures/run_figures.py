"""``run.figures``: the charts of a run."""

from __future__ import annotations

import plotly.graph_objects as go

from fakedist.report.figures import call_figures, kernel_figures, memory_figures, segment_figure, time_figures
from fakedist.results.run import Run


class RunFigures:
    """The charts of a run, as plotly figures.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def timeline(self, *, axis: str = "event") -> go.Figure:
        """Memory over the run by category. ``axis`` is "event" or "time"."""
        return memory_figures.memory_timeline(self._run, axis=axis)

    def compared_with(self, other: Run) -> go.Figure:
        """Allocated memory of this run and another, on one axis of steps and phases."""
        return memory_figures.compared_timeline(self._run, other)

    def peak_by_layer(self, *, kind: str = "icicle") -> go.Figure:
        """Memory at the peak by layer, nested. ``kind`` is "icicle" or "treemap"."""
        return memory_figures.peak_by_layer(self._run, kind=kind)

    def layers(self) -> go.Figure:
        """Memory at the peak by layer and category, as bars."""
        return memory_figures.layer_bars(self._run)

    def segments(self, *, moment: str = "peak_reserved") -> go.Figure:
        """The allocator's segments, blocks and holes. ``moment`` is "peak_reserved" or "peak_allocated"."""
        return segment_figure.segment_map(self._run, moment=moment)

    def time_by_layer(self) -> go.Figure:
        """Kernel time by layer, as bars."""
        return time_figures.time_by_layer(self._run)

    def time_by_family(self) -> go.Figure:
        """Kernel time by family of kernels."""
        return time_figures.time_by_family(self._run)

    def roofline(self) -> go.Figure:
        """Kernels below the GPU's limits."""
        return time_figures.roofline(self._run)

    def kernels(self) -> go.Figure:
        """The kernels of the timed step by stream over time."""
        return kernel_figures.kernel_lanes(self._run)

    def calls_over_time(self) -> go.Figure:
        """Collective calls by group and operation, over allocations and frees as in :meth:`timeline`."""
        return call_figures.calls_over_time(self._run)

    def calls(self, *, unit: str = "bytes") -> go.Figure:
        """Collective calls by group and operation. ``unit`` is "bytes" or "calls"."""
        return call_figures.calls_by_group(self._run, unit=unit)
