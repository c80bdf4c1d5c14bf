"""A sweep as one HTML file: the answer, the charts and every point. It needs no network."""

from __future__ import annotations

from fakedist.report.figures.look import STYLE_NAMES
from fakedist.report.page.pack import Pack
from fakedist.report.page.page_figures import figure_object
from fakedist.report.page.run_page import template_text
from fakedist.sweep.axes import text_of
from fakedist.sweep.directory import PAGE_NAME, replace_file, report_of
from fakedist.sweep.figures import maps, memory_against_speed, parallel_axes, varied_axes
from fakedist.sweep.opened import Sweep
from fakedist.sweep.records import Row
from fakedist.sweep.sheets import EFFECTS_TITLE, TITLE, columns_of, effects_of, reasons, shown_rows
from fakedist.sweep.wording import answer, counts_text


def write_sweep_page(sweep: Sweep) -> None:
    """Write the page into the sweep's directory."""
    replace_file(sweep.path / PAGE_NAME, sweep_page(sweep))


def sweep_page(sweep: Sweep) -> str:
    """The page's text."""
    pack = Pack()
    figures: dict[str, object] = {"parallel": figure_object(parallel_axes(sweep))} if varied_axes(sweep) else {}
    if sweep.ranking.speeds:
        figures["front"] = figure_object(memory_against_speed(sweep))
    found = maps(sweep) if sweep.ranking.speeds else {}
    pack.meta |= {"figures": figures, "style": STYLE_NAMES}
    pack.meta["maps"] = {name: figure_object(figure) for name, figure in found.items()}
    rows = shown_rows(sweep)
    links = [report_of(sweep.path, row.run_directory) for row in rows]
    sentences = list(answer(sweep.ranking))
    context: dict[str, object] = {
        "title": sentences[0],
        "sentences": sentences[1:],
        "counts": counts_text(sweep.ranking),
        "facts": [
            ("command", sweep.about.program),
            ("ranks", sweep.about.ranks),
            ("directory", str(sweep.path)),
        ],
        "figures": sorted(figures),
        "maps": list(found),
        "points_title": TITLE,
        "columns": columns_of(sweep, rows),
        "links": links,
        "effects_title": EFFECTS_TITLE,
        "effects": effects_of(sweep.ranking.effects),
        "others": [_other(row) for row in sweep.rows if row.fullest is None],
        "reasons": list(reasons(sweep.rows)),
        "numbers": pack.text(),
    }
    return template_text("sweep.html.j2", "sweep", context, "")


def _other(row: Row) -> dict[str, str]:
    """A point that did not run to the end."""
    values = " ".join(f"{name}={text_of(value)}" for name, value in row.values)
    return {"point": values, "status": str(row.status), "reason": row.reason, "line": row.line}
