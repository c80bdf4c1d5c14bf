"""The page of a comparison: the terminal's numbers, nothing fetched, text that stays text."""

from pathlib import Path

import pytest

from fakedist.cli import main
from fakedist.report.content.change_sheets import comparison_sheets
from fakedist.report.content.comparison import comparison_report
from fakedist.report.render.html import report_page
from fakedist.results.comparison import Comparison
from tests.unit.analysis.recorded import MIB
from tests.unit.report.reading import read_page
from tests.unit.report.two_runs import run_of


def typed(text: str) -> str:
    """A text of the page as the terminal writes it."""
    return text.replace("\u2212", "-").replace("\u2192", "->")


def test_the_page_says_what_the_terminal_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run_of(tmp_path / "a"), run_of(tmp_path / "b", activation=12 * MIB, mlp="ffn", line=212)]
    assert main(["compare", *map(str, runs), "--format", "html", "-o", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'page.html'}\n"
    text = (tmp_path / "page.html").read_text()
    comparison = Comparison(*runs)
    read = read_page(text)
    assert read.figures["why"] == read.title == comparison.why
    for sheet in comparison_sheets(comparison, all_rows=True):
        assert f"<h3>{sheet.title}</h3>".replace("'", "&#39;") in text
        for line in zip(*(column.cells for column in sheet.columns), strict=True):
            cells = [cell for cell in line if cell]
            shown = [[typed(cell) for cell in row if cell] for rows in read.tables.values() for row in rows]
            assert cells in shown, sheet.title


def test_nothing_is_fetched_only_our_script_may_run_and_names_are_text(tmp_path: Path) -> None:
    hostile = "<img src=x onerror=alert(1)>{{ 7 * 7 }}"
    b = run_of(tmp_path / "b", mlp=hostile, activation=MIB, arguments=("--loss-parallel",))
    text = report_page(comparison_report(Comparison(run_of(tmp_path / "a"), b)))
    read = read_page(text)
    assert all(address.startswith(("#", "data:")) for address in read.fetched)
    assert read.handlers == []
    assert len(read.scripts) == 3
    assert "default-src 'none'; script-src 'sha256-" in text
    assert "<img" not in text
    assert "&lt;img" in text
    assert read.title.startswith("--loss-parallel: \u221221.00 MiB at the peak: activations of ")


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    run_of(tmp_path / "a")
    (tmp_path / "page.html").write_text("old")
    output = ["--format", "html", "-o", str(tmp_path / "page.html")]
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "none"), *output]) == 1
    assert (tmp_path / "page.html").read_text() == "old"
