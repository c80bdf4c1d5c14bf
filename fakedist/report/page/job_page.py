"""The step of a whole job as one HTML file: its figures, the table of ranks and the lanes. It needs no network."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from types import MappingProxyType

from fakedist.report.figures.time_figures import stage_lanes
from fakedist.report.page.assets import plotly_text
from fakedist.report.text.job_sheets import (
    TITLE,
    job_columns,
    job_facts,
    job_figures,
    job_remarks,
    job_what_if_sheets,
    table_title,
)
from fakedist.report.text.sheet import Sheet
from fakedist.results.job_time import JobTime

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; color: #171a21; }
table { border-collapse: collapse; } th, td { padding: 0.2rem 0.8rem; text-align: right; }
th { color: #5a6272; font-weight: 500; } tr { border-bottom: 1px solid #e2e5eb; } dt { color: #5a6272; }
li { color: #5a6272; } td.said { text-align: left; color: #5a6272; }
"""


def job_page(job: JobTime, changed: Mapping[str, JobTime] = MappingProxyType({})) -> str:
    """The file's text."""
    facts = [f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in job_facts(job)]
    figures = [
        f"<tr><th>{escape(name)}</th><td>{escape(figure)}</td><td class=said>{escape(more)}</td></tr>"
        for name, figure, more in job_figures(job.summary)
    ]
    sheets = [Sheet(table_title(job.summary), job_columns(job.summary), job_remarks(job.summary))]
    tables = [_table(sheet) for sheet in [*sheets, *job_what_if_sheets(job, changed)]]
    lanes = stage_lanes(job.summary, job.lanes).to_html(
        full_html=False, include_plotlyjs=False, config={"displaylogo": False}
    )
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(TITLE)}</title><style>{_STYLE}</style>',
        f"<script>{plotly_text().decode()}</script></head><body>",
        f"<dl>{''.join(facts)}</dl><h1>{escape(TITLE)}</h1><table>{''.join(figures)}</table>",
        *tables,
        f"{lanes}</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _table(sheet: Sheet) -> str:
    head = "".join(f"<th>{escape(column.name)}</th>" for column in sheet.columns)
    rows = zip(*(column.cells for column in sheet.columns), strict=True)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    remarks = "".join(f"<li>{escape(text)}</li>" for text in sheet.remarks)
    return f"<h2>{escape(sheet.title)}</h2><table><tr>{head}</tr>{body}</table><ul>{remarks}</ul>"
