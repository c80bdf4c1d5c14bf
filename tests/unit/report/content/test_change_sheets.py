"""More than two runs side by side: a column for each, changes from the first, and what is left out.

The page of a comparison: the terminal's numbers, nothing fetched, text that stays text.
"""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from fakedist.cli import main
from fakedist.report.content.change_sheets import comparison_sheets
from fakedist.report.content.comparison import comparison_report
from fakedist.report.content.report_blocks import Sheet
from fakedist.report.render.html import report_page
from fakedist.report.render.terminal import render
from fakedist.results.compare.change_tables import side_by_side
from fakedist.results.comparison import Comparison
from fakedist.rundir.step_time import RankThroughput
from tests.unit.analysis.recorded import MIB
from tests.unit.report.reading import read_page
from tests.unit.report.two_runs import run_of

HOSTILE = "<img src=x onerror=alert(1)>{{ 7 * 7 }}"


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return [
        run_of(tmp_path / "a", gemm_us=100),
        run_of(tmp_path / "b", gemm_us=100, activation=12 << 20, arguments=("--wide",)),
        run_of(tmp_path / "c", gemm_us=140),
    ]


def sheet(several: Comparison, title: str, **options: bool) -> Sheet:
    options.setdefault("all_rows", False)
    (found,) = [one for one in comparison_sheets(several, **options) if one.title.startswith(title)]
    return found


def rows(found: Sheet) -> list[tuple[str, ...]]:
    return list(zip(*(column.cells for column in found.columns), strict=True))


def test_each_run_has_a_column_with_its_change_from_the_first(paths: list[Path]) -> None:
    several = Comparison(*paths)
    memory = sheet(several, "Memory, measured")
    assert [column.name for column in memory.columns] == ["", "A", "B", "C"]
    assert rows(memory)[0] == ("peak allocated", "73.00 MiB", "85.00 MiB (+12.00 MiB)", "73.00 MiB")
    step = {row[0]: row[1:] for row in rows(sheet(several, "Time of the step"))}
    assert step["step"] == ("330 µs", "330 µs", "450 µs (+120 µs)")
    layers = rows(sheet(several, "By layer at the peak"))
    assert layers == [("layers.*.mlp", "activation", "24.00 MiB", "36.00 MiB (+12.00 MiB)", "24.00 MiB")]


def test_a_line_for_each_run_says_what_was_changed_and_what_it_gave(paths: list[Path]) -> None:
    assert [text for _, text in Comparison(*paths).headlines] == [
        "B --wide: peak +12.00 MiB (+16.4%), step 0 µs (0.0%)",
        "C: peak 0 B (0.0%), step +120 µs (+36.4%)",
    ]


def test_runs_of_unlike_work_have_their_rate_first(paths: list[Path]) -> None:
    several = Comparison(*paths)
    assert several.time is not None
    times = several.time.times
    for name, tokens, rate in (("A", 4096, 1000.0), ("B", 2048, 880.0), ("C", 4096, 990.0)):
        times[name] = replace(times[name], throughput=RankThroughput(tokens, "", rate))
    assert "tokens/s per GPU 1,000 -> 880 (-12.0%), with 4,096 -> 2,048 tokens a step, step" in several.headlines[0][1]
    assert "tokens" not in several.headlines[1][1]
    titles = [one.title.partition(",")[0] for one in comparison_sheets(several, all_rows=False)]
    assert titles.index("Work of the step") < titles.index("Time of the step")
    work = rows(sheet(several, "Work of the step"))
    assert work[:2] == [
        ("tokens/s per GPU", "1,000", "880 (-12.0%)", "990 (-1.0%)"),
        ("tokens a step", "4,096", "2,048 (-50.0%)", "4,096"),
    ]


def test_rows_that_are_the_same_or_noise_are_counted_and_left_out(tmp_path: Path) -> None:
    steps = [run_of(tmp_path / name, gemm_us=gemm_us) for name, gemm_us in (("a", 1e4), ("b", 1e4 + 0.5), ("c", 1e4))]
    several = Comparison(*steps)
    assert several.time is not None
    assert several.time.noise_us == pytest.approx(3.0, rel=0.01)
    assert sheet(several, "Time of the step").remarks == [
        "left out below: 3 rows that differ by less than 3.0 µs, 0.01% of the shortest step; --all-rows shows them"
    ]
    titles = [one.title for one in comparison_sheets(several, all_rows=False)]
    assert not [title for title in titles if "family" in title or "layer" in title]
    shown = rows(sheet(several, "By family of kernels", all_rows=True))
    assert [row[0] for row in shown] == ["gemm"]
    assert shown[0][2].endswith("(+1.5 µs)")


@pytest.mark.parametrize(
    ("figures", "change", "what"),
    [
        ([(1.0, 0), (1.0, 0), (1.0, 0)], 0, "same"),
        ([None, (2.0, 0), (5.0, 0)], 5, "differs"),
        ([(1.0, 0), (3.0, 1), (1.0, 0)], 0, "not known"),
        ([(1.0, 2), (3.0, 1), (4.0, 2)], 3, "differs"),
        ([(1.0, 0), (3.0, 1)], 0, "not known"),
        ([(3.0, 0), (1.0, 0)], -2, "shrank"),
    ],
)
def test_the_change_of_more_than_two_runs_is_their_spread(
    figures: list[tuple[float, int] | None], change: float, what: str
) -> None:
    columns = ["name", "num_{}", "{}_us", "unknown_{}"]
    sides = [pd.DataFrame([] if one is None else [("x", 1, *one)], columns=columns) for one in figures]
    (row,) = side_by_side(sides, ["name"], "us").to_dict("records")
    assert (row["change_us"], row["what"]) == (change, what)


def test_every_format_has_them(paths: list[Path], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = [str(path) for path in paths]
    assert main(["compare", *given]) == 0
    text = capsys.readouterr().out
    assert "B --wide: peak +12.00 MiB" in text
    assert "the base" in text
    assert main(["compare", *given, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in plain["runs"]] == ["A", "B", "C"]
    assert plain["differences"]["arguments"] == ["", "--wide", ""]
    first = plain["tables"][0]["rows"][0]
    assert [figure["value"] for figure in first["figures"]] == [73 << 20, 85 << 20, 73 << 20]
    assert main(["compare", *given, "--format", "markdown"]) == 0
    assert "| peak allocated | 73.00 MiB | 85.00 MiB (+12.00 MiB) | 73.00 MiB |" in capsys.readouterr().out
    assert main(["compare", *given, "--format", "html", "-o", str(tmp_path / "page.html")]) == 0
    assert "+12.00 MiB" in (tmp_path / "page.html").read_text()


def test_one_run_is_too_few(paths: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(paths[0])]) == 2
    assert "it takes two or more to compare" in capsys.readouterr().err


def test_the_page_has_the_tables_of_the_terminal_and_names_are_text(paths: list[Path], tmp_path: Path) -> None:
    several = Comparison(*paths, run_of(tmp_path / "d", mlp=HOSTILE, activation=1 << 20, arguments=(HOSTILE,)))
    text = report_page(comparison_report(several))
    page = read_page(text)
    assert page.handlers == []
    assert "<img" not in text
    assert all(address.startswith(("#", "data:")) for address in page.fetched)
    tables = [rows for name, rows in page.tables.items() if name.startswith("sheet-")]
    for table, found in zip(tables, comparison_sheets(several, all_rows=False), strict=True):
        cells = [[" ".join(cell.replace("\u2212", "-").split()) for cell in row] for row in table]
        assert cells[1:] == [[" ".join(cell.split()) for cell in row] for row in rows(found)], found.title
    assert page.figures["headline-1"].startswith("B --wide: peak +12.00 MiB")


def test_a_run_without_a_step_has_dashes_for_its_times(paths: list[Path], tmp_path: Path) -> None:
    several = Comparison(*[*paths[:2], run_of(tmp_path / "untimed")])
    assert {row[3] for row in rows(sheet(several, "Time of the step"))} == {"-"}
    stream = StringIO()
    render(comparison_report(several), Console(file=stream, width=100))
    assert "C: peak 0 B (0.0%)\n" in stream.getvalue()


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
