"""Each block of a report in each format, and text that stays text."""

from __future__ import annotations

import io

import pandas as pd
import pytest
from rich.console import Console

from fakedist.report.content.report_blocks import (
    Advice,
    Block,
    Changes,
    Chapter,
    Chart,
    Details,
    Drawing,
    Fact,
    Facts,
    Items,
    Remark,
    Report,
    Sheet,
    SheetColumn,
    SheetRow,
    Verdict,
    bytes_column,
    first_rows,
    text_column,
    us_column,
)
from fakedist.report.page.run_charts import Bar, BarChart, Part
from fakedist.report.render.html import report_page
from fakedist.report.render.markdown import report_markdown
from fakedist.report.render.terminal import render
from tests.unit.report.reading import read_page

HOSTILE = "</script><img src=x>`|*\x1b[31m"


def report(*blocks: Block) -> Report:
    return Report("subject", blocks, dict, pd.DataFrame)


def printed(*blocks: Block) -> list[str]:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    render(report(*blocks), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_column_has_the_texts_of_its_values_by_their_unit() -> None:
    assert bytes_column("", [1 << 30, None]).cells == ["1.00 GiB", "-"]
    assert us_column("", [1500.0, None]).cells == ["1.50 ms", "-"]
    assert SheetColumn("", values=[1234], unit="").cells == ["1,234"]
    assert SheetColumn("", values=[0.125], unit="%").cells == ["12.5%"]
    assert SheetColumn("", ["a dozen"], values=[12]).cells == ["a dozen"]
    assert SheetColumn("", values=[]).cells == []


def test_a_table_is_cut_but_on_a_page() -> None:
    sheet = Sheet("Rows", [SheetColumn("n", values=range(5))], ["read so"], most=2, rest="3 more", label="Rows")
    assert printed(sheet)[1:] == ["Rows", "n", "0", "1", "  read so", "  3 more"]
    text = report_markdown(report(sheet))
    assert "| 1 |" in text
    assert "| 2 |" not in text
    page = read_page(report_page(report(sheet)))
    assert [row[0] for row in page.tables["rows-table"]] == ["n", "0", "1", "2", "3", "4"]
    assert "3 more" not in page.words
    short = Sheet("Rows", [SheetColumn("n", values=range(2))], most=2, rest="0 more")
    assert short.shortened.remarks == []


def test_details_are_on_a_page_alone() -> None:
    blocks = [
        Facts([Fact("a", "b")], "Detail", is_detail=True),
        Sheet("More", [SheetColumn("n", ["1"])], is_detail=True),
    ]
    assert printed(*blocks) == []
    assert report_markdown(report(*blocks)).strip() == ""
    assert {"Detail", "More"} <= set(read_page(report_page(report(*blocks))).words)


def test_answers_stand_together_and_apart_from_what_is_before() -> None:
    facts = Facts([Fact("run", "/a", "the base")])
    assert printed(Verdict("One."), Verdict("Two."), facts, Verdict("Three.")) == [
        "One.", "Two.", "run     /a (the base)", "", "Three."
    ]  # fmt: skip


def test_code_keeps_its_lines_and_ends_no_fence() -> None:
    block = Items("It failed", ["Traceback", "```"], is_code=True)
    assert printed(block)[1:] == ["It failed", "Traceback", "```"]
    assert report_markdown(report(block)) == "**It failed**\n\n```\nTraceback\n'''\n```\n"


def test_changes_have_what_they_give_their_line_and_their_outcome() -> None:
    advice = Advice("Use expandable segments", "up to 2.00 GiB", "They grow.", "less reserved", "a.py:7", ["then fits"])
    block = Changes("What would help", [advice])
    assert printed(block)[1:] == [
        "What would help",
        "  up to 2.00 GiB less reserved: Use expandable segments (a.py:7)",
        "    then fits",
        "    They grow.",
    ]
    text = "- **up to 2.00 GiB** less reserved: Use expandable segments (a.py:7); then fits; They grow.\n"
    assert report_markdown(report(block)) == f"**What would help**\n\n{text}"
    assert '<span class="gives">up to 2.00 GiB</span>' in report_page(report(block))


def test_a_section_is_an_address_of_a_page_and_is_left_out_where_nothing_follows() -> None:
    blocks = [Chapter("a", "A", "First"), Remark("one"), Chapter("b", "B", "Second"), Details(list), Chapter("c", "C")]
    assert printed(*blocks) == ["  one"]
    page = report_page(report(*blocks))
    assert 'href="#a"' in page
    assert 'href="#b"' not in page
    assert 'href="#c"' not in page


def test_small_rows_are_a_click_away_and_rows_inside_of_others_are_indented() -> None:
    rows = [SheetRow(), SheetRow(is_inner=True), SheetRow(repeats=3), SheetRow(is_small=True)]
    names = text_column("n", ["a", "b", "c", "d"])
    sheet = Sheet("Rows", [names, text_column("x", list("1234"), is_detail=True)], rows=rows, small="1 is small")
    assert printed(sheet)[1:] == ["Rows", "n", "a", "  b", "c x3", "  1 is small"]
    page = report_page(report(sheet))
    assert page.count("data-small hidden") == 1
    assert 'aria-label="x3: show each"' in page
    assert first_rows(sheet, 1).rows == rows[:2]


def test_a_chart_is_drawn_for_a_page_alone() -> None:
    def fails() -> object:
        raise AssertionError

    assert printed(Chart("bars", "Bars", fails)) == []
    assert report_markdown(report(Chart("bars", "Bars", fails))).strip() == ""
    with pytest.raises(AssertionError):
        report_page(report(Chart("bars", "Bars", fails)))
    bars = BarChart([Bar("a", [Part("x", "rest", 1.0), Part("y", "rest", 0.0)], "1 B")], [("x", "rest")], whole=4)
    page = report_page(report(Chart("bars", "Bars", lambda: bars)))
    assert 'style="width:25.000%" title="x 1 B"' in page
    assert 'title="y' not in page
    lanes = Drawing({"lanes": {}}, {"step_ms": 1}, {"names": ["forward"]}, {"a": [1, 2]})
    assert "lane-forward" in report_page(report(Chart("lanes", "Lanes", lambda: lanes)))


@pytest.mark.parametrize(
    "block",
    [
        Verdict(HOSTILE),
        Facts([Fact(HOSTILE, HOSTILE, HOSTILE)]),
        Facts([Fact(HOSTILE, HOSTILE, HOSTILE, is_code=True)], HOSTILE),
        Sheet(HOSTILE, [SheetColumn(HOSTILE, [HOSTILE], is_text=True)], [HOSTILE]),
        Items(HOSTILE, [HOSTILE]),
        Items(HOSTILE, [HOSTILE], is_code=True),
        Remark(HOSTILE, is_warning=True),
        Changes(HOSTILE, [Advice(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, [HOSTILE])]),
        Verdict(HOSTILE, word=HOSTILE, tone="no"),
    ],
)
def test_text_stays_text(block: Block) -> None:
    assert "\x1b" not in "".join(printed(block))
    page = report_page(report(block))
    assert "<img" not in page
    assert "\x1b" not in page
    assert len(read_page(page).scripts) == 3
