"""A comparison as one page: both timelines and both timed steps on one axis, and every table of changes."""

from __future__ import annotations

from pathlib import Path

from fakedist.analysis.compare.common_axis import Stretch, common_axis, on_axis
from fakedist.report.compare.change_sheets import comparison_sheets
from fakedist.report.compare.comparison import Comparison, format_change, format_relative
from fakedist.report.compare.time_bars import time_context
from fakedist.report.figures.look import STYLE_NAMES
from fakedist.report.figures.memory_figures import compared_timeline
from fakedist.report.page.pack import Pack
from fakedist.report.page.page_figures import figure_object
from fakedist.report.page.run_page import template_text
from fakedist.report.text.facts import run_title
from fakedist.report.writing import replace_text
from fakedist.results.run import Run
from fakedist.units import format_bytes

_NUM_COLUMNS = 8_000  # enough to zoom into one of several steps


def write_comparison_page(comparison: Comparison, path: Path) -> None:
    """Write the page. An existing file is replaced atomically.

    Raises:
        RunDirectoryError: A table is missing or damaged.
        JobError: The file cannot be written.
    """
    replace_text(path, comparison_page(comparison))


def comparison_page(comparison: Comparison, *, plotly_file: str = "") -> str:
    """The page as text.

    Args:
        comparison: The comparison.
        plotly_file: Name of a file next to the page that has plotly.js; empty to have it in the page.
    """
    peaks = [summary.peak_allocated_bytes for summary in comparison.summaries]
    sheets = comparison_sheets(comparison, all_rows=True)
    context: dict[str, object] = {
        "changed": comparison.changed,
        "why": comparison.why,
        "time": time_context(comparison.time) if comparison.time else None,
        "change": format_change(peaks[1] - peaks[0]),
        "relative": format_relative(peaks[1] - peaks[0], peaks[0]),
        "is_worse": peaks[1] > peaks[0],
        "sides": [_side("A", comparison.a, peaks[0]), _side("B", comparison.b, peaks[1])],
        "warnings": comparison.warnings,
        "sheets": sheets,
        "numbers": _numbers(comparison).text(),
    }
    return template_text("compare.html.j2", "compare", context, plotly_file)


def _side(name: str, run: Run, peak: int) -> dict[str, object]:
    summary = run.summary
    return {
        "name": name,
        "path": str(run.path),
        "job": run_title(run),
        "rank": f"{summary.rank:,} of {summary.world_size:,}",
        "device": f"{summary.device}: {summary.gpu}, torch {summary.torch}",
        "peak": format_bytes(peak),
        "when": f"step {summary.peak_step}, {summary.peak_phase}",
    }


def _numbers(comparison: Comparison) -> Pack:
    runs = (comparison.a, comparison.b)
    curves = [run.table("events", ["allocated_bytes"])["allocated_bytes"].to_numpy() for run in runs]
    spans = [run.table("spans") for run in runs]
    pieces = common_axis((spans[0], spans[1]), (len(curves[0]), len(curves[1])))
    pack = Pack()
    for side, (name, curve) in enumerate(zip("ab", curves, strict=True)):
        pack.add(f"{name}_most", on_axis(curve, pieces, side, _NUM_COLUMNS)[1])
    figure = compared_timeline(*runs, num_points=_NUM_COLUMNS)
    pack.meta |= {"figures": {"compared": figure_object(figure)}, "style": STYLE_NAMES}
    pack.meta["pieces"] = [_piece(piece) for piece in pieces]
    return pack


def _piece(piece: Stretch) -> dict[str, object]:
    return {"step": piece.step, "phase": piece.phase, "from": round(piece.at[0], 6), "to": round(piece.at[1], 6)}
