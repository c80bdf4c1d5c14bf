"""Reports as one self-contained page. Its charts are templates, by their names."""

from __future__ import annotations

from fakedist.report.content.report_blocks import Chart, Drawing, Report, Verdict
from fakedist.report.figures.look import STYLE_NAMES
from fakedist.report.page.drawings import Pack
from fakedist.report.page.run_page import template_text


def report_page(report: Report) -> str:
    """A report as a page."""
    charts = [block.data() for block in report.blocks if isinstance(block, Chart)]
    drawings = [chart for chart in charts if isinstance(chart, Drawing)]
    pack = Pack()
    pack.meta |= {"style": STYLE_NAMES, "run": report.title}
    pack.meta["figures"] = {name: figure for drawing in drawings for name, figure in drawing.figures.items()}
    for drawing in drawings:
        pack.meta |= drawing.meta
    labels = [label for block in report.blocks if (label := getattr(block, "label", ""))]
    context: dict[str, object] = {
        "title": report.title,
        "heading": next((block.text for block in report.blocks if isinstance(block, Verdict)), report.title),
        "labels": labels,
        "blocks": [(type(block).__name__, block) for block in report.blocks],
        "charts": charts,
        "numbers": pack.text(),
    }
    return template_text("report.html.j2", "job", context)
