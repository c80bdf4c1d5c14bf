"""The page of a job's step."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

from fakedist.report.page.job_page import job_page
from fakedist.rundir.notes import Note
from tests.unit.report.text.test_job_sheets import STEP, faster, job_of


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))


def test_the_page_has_the_figures_the_ranks_and_the_lanes_and_needs_no_network() -> None:
    page = job_page(job_of(), {"bandwidth=2x": faster()})
    for part in ("<td>100.0 ms</td>", "<td>81.00 GiB</td>", "rank 4 sets the pace", "<td>bandwidth=2x</td>"):
        assert part in page, part
    parser = Tags()
    parser.feed(page)
    assert not [attributes for _, attributes in parser.tags if attributes.get("src")]
    assert [tag for tag, _ in parser.tags].count("table") == 3  # figures, ranks, what-ifs
    assert any("plotly-graph-div" in (attributes.get("class") or "") for _, attributes in parser.tags)


def test_what_a_run_says_is_text_and_no_markup() -> None:
    hostile = replace(STEP, fabric="<script>alert(1)</script>", notes=[Note("note", "</ul><img src=x>")])
    page = job_page(job_of(hostile))
    assert "<script>alert" not in page
    assert "<img" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
