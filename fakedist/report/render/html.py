"""Reports as one self-contained page. Its charts are templates, by their names."""

from __future__ import annotations

from fakedist.report.content.report_blocks import Chart, Report, Verdict
from fakedist.report.figures.look import STYLE_NAMES
from fakedist.report.page.drawings import Pack
from fakedist.report.page.run_page import template_text


def report_page(report: Report) -> str:
    """A report as a page."""
    pack = Pack()
    pack.meta |= {"style": STYLE_NAMES, "figures": {}, "run": report.title}
    context: dict[str, object] = {
        "title": report.title,
        "heading": next((block.text for block in report.blocks if isinstance(block, Verdict)), report.title),
        "labels": [block.label for block in report.blocks if isinstance(block, Chart) and block.label],
        "blocks": [(type(block).__name__, block) for block in report.blocks],
        "numbers": pack.text(),
    }
    return template_text("report.html.j2", "job", context)
