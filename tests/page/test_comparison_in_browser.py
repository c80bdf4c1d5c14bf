"""The page of a comparison in a real browser: both runs on one axis. Skipped without Chromium or Playwright."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fakedist.report.content.comparison import comparison_report
from fakedist.report.render.html import report_page
from fakedist.results.comparison import Comparison
from tests.page.browser import DESKTOP, Reader, drawn, serious_faults
from tests.unit.report.two_runs import run_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    runs = [run_of(folder / "a", gemm_us=100), run_of(folder / "b", gemm_us=240, activation=12 << 20)]
    (folder / "page.html").write_text(report_page(comparison_report(Comparison(*runs))), encoding="utf-8")
    return folder / "page.html"


def test_the_curves_are_read_with_keys_and_zoomed(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    chart = drawn(page, "#timeline")
    chart.press("ArrowRight")
    assert "A " in page.locator("#timeline .status").inner_text()
    page.get_by_role("button", name="step 2").click()
    assert page.evaluate("fakedist.curves.view[0]") > 0
    chart.press("0")
    assert page.evaluate("fakedist.curves.view") == [0, 1]


def test_both_steps_have_one_axis_and_one_view(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    views = "fakedist.steps.map((step) => step.view)"
    whole = page.evaluate(views)
    assert whole[0] == pytest.approx(whole[1])
    assert whole[0] == pytest.approx([0, 3 * 250])  # the longer step
    first, second = page.locator("#time .status").all()
    for moved in (lambda: drawn(page, "#step-B").press("+"), lambda: button(page, "zoom in").click()):
        moved()
        near = page.evaluate(views)
        assert near[0] == pytest.approx(near[1])
        assert first.inner_text() == second.inner_text()
    assert near[0][1] - near[0][0] == pytest.approx(750 / 4)
    button(page, "whole step").click()
    assert page.evaluate(views)[1] == pytest.approx(whole[0])


def button(page: Any, name: str) -> Any:
    return page.locator("#steps").get_by_role("button", name=name)


def test_bars_are_as_long_as_their_times_whichever_run_they_are_of(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    widths = page.evaluate(
        """() => [...document.querySelectorAll('.pairs')].map((chart) => [...chart.querySelectorAll('.track')].map(
        (track) => [...track.children].reduce((sum, part) => sum + part.getBoundingClientRect().width, 0)))"""
    )
    tracks = page.evaluate(
        "[...document.querySelectorAll('.pairs .track')].map((track) => track.getBoundingClientRect().width)"
    )
    half = len(widths[0])
    assert {round(width) for width in tracks[:half]} == {round(tracks[0])}
    assert {round(width) for width in tracks[half:]} == {round(tracks[half])}
    gemms, norms = (100 * 3, 240 * 3), (15, 15)
    phases, layers = widths
    assert phases[0] / phases[1] == pytest.approx(315 / 735, rel=0.02)
    assert layers[0] / layers[1] == pytest.approx(gemms[0] / gemms[1], rel=0.02)
    assert layers[2] / layers[1] == pytest.approx(norms[0] / gemms[1], rel=0.2)
    assert layers[2] == pytest.approx(layers[3])


@pytest.mark.parametrize("width", [360, 720])
def test_no_screen_is_too_narrow(reader: Reader, written: Path, width: int) -> None:
    assert reader.width_on(written, width) <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(reader: Reader, written: Path, scheme: Any) -> None:
    told = serious_faults(reader.open(written), scheme)
    if told is None:
        pytest.skip("no axe-core: pip install 'fakedist[browser]'")
    assert told == []


@pytest.mark.parametrize("width", [390, 1440])
def test_a_long_name_stays_in_its_column(reader: Reader, written: Path, width: int) -> None:
    page = reader.open(written)
    page.set_viewport_size({"width": width, "height": 800})
    name = page.locator(".pairs .name").first
    widths = name.evaluate(
        "node => { node.textContent = 'all_gather_into_tensor_coalesced on mesh_dp_shard_cp';"
        " return [node.scrollWidth, node.getBoundingClientRect().width] }"
    )
    page.set_viewport_size(DESKTOP)
    assert widths[0] <= widths[1] + 1


def test_a_phone_has_whole_words_and_both_peaks(reader: Reader, written: Path) -> None:
    page = reader.open(written)
    page.set_viewport_size({"width": 390, "height": 800})
    drawn(page, "#timeline")
    words = "[...document.querySelectorAll('tbody th.short span')].filter(node => !/[^\\w]/.test(node.textContent))"
    assert page.evaluate(f"{words}.map(node => node.getClientRects().length)") == [1] * page.evaluate(f"{words}.length")
    plot = page.locator("#timeline .bglayer .bg, #timeline .nsewdrag").first.bounding_box()
    for label in page.locator("#timeline .annotation").all():
        box = label.bounding_box()
        assert plot["x"] <= box["x"] <= plot["x"] + plot["width"] - box["width"]
    assert page.locator("#timeline .annotation").count() == 2
    page.set_viewport_size(DESKTOP)
