"""Pages of several runs in a real browser: a job, a comparison, a sweep. Skipped without Chromium."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fakedist.report.content.comparison import comparison_report
from fakedist.report.content.job import runs_report
from fakedist.report.render.html import report_page
from fakedist.results.comparison import Comparison
from fakedist.sweep.point_rows import Status
from fakedist.sweep.sheets import sweep_report
from fakedist.sweep.sweep_directory import PAGE_NAME
from tests.page.browser import Reader, drawn, serious_faults
from tests.unit.report.content.test_job import placed
from tests.unit.report.two_runs import run_of
from tests.unit.sweep.rows_by_hand import row
from tests.unit.sweep.test_sheets import sweep

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

PAGES = ("job", "several", "sweep")
_MOST_BYTES = 2_500_000
WINNER = "fakedist profile --world-size=64 --rank=0 train.py --tp 2"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages, by name."""
    folder = tmp_path_factory.mktemp("pages")
    pages = {name: folder / name / "report.html" for name in PAGES}
    for rank in (0, 4):
        run_of(folder / "job" / f"rank{rank}", gemm_us=100, activation=(8 + rank) << 20, rank=rank)
        (folder / "job" / f"rank{rank}" / "report.html").write_text("<title>a rank</title>")
    pages["job"].write_text(report_page(runs_report(placed(folder / "job"), folder=folder / "job")))
    sides = [run_of(folder / name, gemm_us=100 + 20 * at, activation=(8 + at) << 20) for at, name in enumerate("abcd")]
    (folder / "several").mkdir()
    pages["several"].write_text(report_page(comparison_report(Comparison(*sides))), encoding="utf-8")
    (folder / "sweep").mkdir()
    points = [row(1000 + 10 * at, 50 + at, tp=2**at, pp=2 ** (at % 3)) for at in range(6)]
    points[5] = replace(points[5], command=WINNER, world_size=64)
    points.append(row(100, 90, tp=64, pp=1, status=Status.DOES_NOT_FIT))
    swept = sweep(*points, path=folder / "sweep")
    (swept.path / PAGE_NAME).write_text(report_page(sweep_report(swept, folder=swept.path)))
    return pages


def test_the_lanes_of_a_job_are_drawn_and_zoomed(reader: Reader, written: dict[str, Path]) -> None:
    page = reader.open(written["job"])
    chart = drawn(page, "#stages")
    assert page.evaluate("fakedist.lanes.view") == [0, 100]
    chart.press("+")
    assert page.evaluate("fakedist.lanes.view") == [25, 75]
    page.get_by_role("button", name="whole step").click()
    assert page.evaluate("fakedist.lanes.view") == [0, 100]
    for style in page.locator("#stages .legend .chip").all():
        assert style.evaluate("node => getComputedStyle(node).backgroundColor") != "rgba(0, 0, 0, 0)"


def test_a_rank_of_a_job_leads_to_its_page(reader: Reader, written: dict[str, Path]) -> None:
    page = reader.open(written["job"])
    page.locator("#ranks-table a").nth(1).click()
    page.wait_for_url("**/rank4/report.html")


def test_bars_are_as_long_as_their_bytes(reader: Reader, written: dict[str, Path]) -> None:
    page = reader.open(written["several"])
    bars = page.evaluate(
        """() => [...document.querySelectorAll('#memory .track')].map((track) =>
        [...track.querySelectorAll('[class^=k-]')].reduce((sum, { style }) => sum + parseFloat(style.width), 0))"""
    )
    assert bars[3] / bars[0] == pytest.approx((73 + 9) / 73, rel=0.02)


def test_columns_sort_by_their_figures_and_are_saved(reader: Reader, written: dict[str, Path]) -> None:
    page = reader.open(written["sweep"])
    heading = page.locator("#points-table th", has_text="memory")
    heading.locator("button").click()
    cells = page.locator("#points-table tbody tr td:nth-child(5)").all_inner_texts()
    assert cells == sorted(cells, key=lambda text: -float(text.split()[0]))
    panel = page.locator(".panel", has=page.locator("#points-table"))
    with page.expect_download() as saving:
        panel.get_by_role("button", name="CSV").click()
    assert pd.read_csv(saving.value.path())["memory (bytes)"].max() == 90 << 30


def test_the_winners_command_is_copied(reader: Reader, written: dict[str, Path]) -> None:
    page = reader.open(written["sweep"])
    assert page.locator("#its-command").inner_text() == WINNER
    page.locator("button.copy").first.click()
    page.locator("button.copy", has_text="copied").wait_for()


@pytest.mark.parametrize("width", [390, 1280])
def test_long_and_turned_values_of_an_axis_stay_within_the_page(reader: Reader, tmp_path: Path, width: int) -> None:
    points = [
        row(1000 + at, 50, kind=kind) for at, kind in enumerate(("L" * 300, "\u202egnp.exe", "</script><img src=x>"))
    ]
    (tmp_path / PAGE_NAME).write_text(report_page(sweep_report(sweep(*points, path=tmp_path), folder=tmp_path)))
    assert reader.width_on(tmp_path / "report.html", width) <= width
    text = reader.page.locator("main").inner_text()
    assert "\\u202egnp.exe" in text
    assert "\u202e" not in text
    assert reader.page.locator("img").count() == 0
    assert reader.told == []


@pytest.mark.parametrize(("name", "has_axis"), [("job", True), ("several", False), ("sweep", False)])
def test_keys_are_listed_and_only_those_that_the_page_has(
    reader: Reader, written: dict[str, Path], name: str, has_axis: bool
) -> None:
    page = reader.open(written[name])
    page.keyboard.press("?")
    keys = page.locator("dialog#keys")
    assert keys.is_visible()
    assert ("zoom in" in keys.inner_text()) == has_axis
    assert "peak" not in keys.inner_text()
    page.keyboard.press("Escape")
    assert not keys.is_visible()


@pytest.mark.parametrize("name", PAGES)
def test_every_page_is_small_fits_any_screen_and_says_nothing(
    reader: Reader, written: dict[str, Path], name: str
) -> None:
    assert written[name].stat().st_size < _MOST_BYTES
    for width in (390, 1440):
        assert reader.width_on(written[name], width) <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_no_serious_fault(reader: Reader, written: dict[str, Path], name: str, scheme: Any) -> None:
    told = serious_faults(reader.open(written[name]), scheme)
    if told is None:
        pytest.skip("no axe-core: pip install 'fakedist[browser]'")
    assert told == []
