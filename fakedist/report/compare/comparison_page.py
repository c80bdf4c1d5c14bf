"""A comparison as one page: both timelines and both timed steps on one axis, and every table of changes."""

from __future__ import annotations

from pathlib import Path

from fakedist.analysis.compare.common_axis import Stretch, on_axis
from fakedist.report.compare.change_sheets import comparison_sheets
from fakedist.report.compare.compared import Compared
from fakedist.report.compare.comparison import format_change, format_relative
from fakedist.report.compare.time_bars import time_context
from fakedist.report.figures.look import STYLE_NAMES
from fakedist.report.figures.memory_figures import compared_timeline, curves_on_axis, have_steps
from fakedist.report.page.pack import Pack
from fakedist.report.page.page_figures import figure_object
from fakedist.report.page.run_page import template_text
from fakedist.report.text.facts import run_facts, run_title
from fakedist.report.writing import replace_text
from fakedist.results.run import Run
from fakedist.units import format_bytes

_NUM_COLUMNS = 8_000  # enough to zoom into one of several steps


def write_comparison_page(comparison: Compared, path: Path) -> None:
    """Write the page. An existing file is replaced atomically.

    Raises:
        RunDirectoryError: A table is missing or damaged.
        JobError: The file cannot be written.
    """
    replace_text(path, comparison_page(comparison))


def comparison_page(comparison: Compared, *, plotly_file: str = "") -> str:
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
        "look_first": comparison.look_first,
        "has_steps": have_steps(comparison.a, comparison.b),
        "sheets": sheets,
        "numbers": _numbers(comparison).text(),
    }
    return template_text("compare.html.j2", "compare", context, plotly_file)


def _side(name: str, run: Run, peak: int) -> dict[str, object]:
    summary = run.summary
    return {
        "name": name,
        "peak": format_bytes(peak),
        "when": f"step {summary.peak_step}, {summary.peak_phase}" if summary.peak_phase else "",
        "facts": _facts(run),
    }


def _facts(run: Run) -> list[tuple[str, str, bool]]:
    """Names and texts, and whether each is code."""
    summary = run.summary
    if summary.rank is None:
        return [(name, text, name == "file") for name, text in run_facts(run)]
    return [
        ("run", str(run.path), True),
        ("job", run_title(run), True),
        ("rank", f"{summary.rank:,} of {summary.world_size:,}", False),
        ("device", f"{summary.device}: {summary.gpu}, torch {summary.torch}", False),
    ]


def _numbers(comparison: Compared) -> Pack:
    runs = (comparison.a, comparison.b)
    curves, pieces = curves_on_axis(*runs)
    pack = Pack()
    for side, (name, curve) in enumerate(zip("ab", curves, strict=True)):
        pack.add(f"{name}_most", on_axis(curve, pieces, side, _NUM_COLUMNS)[1])
    figure = compared_timeline(*runs, num_points=_NUM_COLUMNS)
    pack.meta |= {"figures": {"compared": figure_object(figure)}, "style": STYLE_NAMES}
    pack.meta["has_steps"] = have_steps(*runs)
    pack.meta["pieces"] = [_piece(piece) for piece in pieces]
    return pack


def _piece(piece: Stretch) -> dict[str, object]:
    return {"step": piece.step, "phase": piece.phase, "from": round(piece.at[0], 6), "to": round(piece.at[1], 6)}
