"""The switches of advised changes in a real browser. Skipped where Chromium or Playwright is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fakedist.report.page.drawings import find_switches
from fakedist.results.opening import open_run
from fakedist.results.verdict import span_text
from fakedist.units import format_bytes
from tests.page.browser import Reader, drawn
from tests.unit.report.page.test_drawings import CAPACITY

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

_SETTLED = 250  # ms; the curve is drawn again when it has settled


def switch(page: Any, title: str) -> Any:
    return page.get_by_role("switch", name=f"with this change: {title}")


LOSS, CHECKPOINT = (
    "compute the loss in 8 chunks, for the most with the output layer in the chunks",
    "checkpoint layers.0-3 (Block)",
)


def test_switches_move_the_verdict_the_bar_and_the_timeline(reader: Reader, advised: Path) -> None:
    page = reader.open(advised)
    card, recorded = page.locator("#verdict"), page.locator("#verdict").inner_html()
    phases = page.locator("#phases").inner_text()
    peak = page.locator("[data-figure=peak_allocated]")
    drawn(page, "#timeline")
    evidence, found = find_switches(open_run(advised.parent))
    changes = {row.advice.title: row.change for row in found}
    assert evidence is not None

    def left(*titles: str) -> tuple[int, int]:
        least, most = evidence.saved([change for title in titles if (change := changes[title])])
        return evidence.peak - most, evidence.peak - least

    def expected(*titles: str) -> str:
        return span_text(*left(*titles))

    switch(page, CHECKPOINT).check()
    assert peak.inner_text() == expected(CHECKPOINT) != format_bytes(evidence.peak)
    switch(page, LOSS).press("Space")
    assert peak.inner_text() == expected(CHECKPOINT, LOSS) != expected(CHECKPOINT)
    assert card.locator(".pill").inner_text() == "fits"
    assert "with 2 changes: needs" in card.inner_text()
    widths = card.locator(".track i").evaluate_all("all => all.map((each) => parseFloat(each.style.width))")
    assert sum(widths[:-1]) == pytest.approx(100 * left(CHECKPOINT, LOSS)[0] / CAPACITY, abs=0.01)
    most = format_bytes(left(CHECKPOINT, LOSS)[1])
    assert page.locator("#phases tr.peak td").nth(2).inner_text() == most
    assert page.locator("#phases tr.peak td").nth(3).inner_text() == "-"  # what is reserved is not known
    held = page.locator("#categories td:nth-child(2)").evaluate_all("all => all.map((cell) => +cell.dataset.value)")
    assert sum(held) == pytest.approx(left(CHECKPOINT, LOSS)[1], abs=len(held))
    assert "without the 2 changes" in page.locator("#h-layers").inner_text()
    page.wait_for_timeout(_SETTLED)
    assert f"with the changes at most {most}" in page.locator("#timeline").inner_text()
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert card.inner_html() == recorded  # paper has what the run itself showed
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.emulate_media(media="screen")
    assert peak.inner_text() == expected(CHECKPOINT, LOSS)
    page.get_by_role("button", name="all off").click()
    assert card.inner_html() == recorded
    assert "without" not in page.locator("#h-layers").inner_text()
    assert page.locator("#phases").inner_text() == phases
    assert page.locator("#timeline li.after").is_hidden()


def test_switches_hide_the_callers_of_the_refusal(reader: Reader, advised: Path, tmp_path: Path) -> None:
    text, mark = advised.read_text(), '<div class="gauge"'
    assert mark in text
    (tmp_path / "report.html").write_text(text.replace(mark, f'<p data-figure="called_by">called by me</p>{mark}', 1))
    page = reader.open(tmp_path / "report.html")
    called_by = page.locator("#verdict [data-figure=called_by]")
    switch(page, LOSS).press("Space")
    assert called_by.inner_text() == ""
    page.get_by_role("button", name="all off").click()
    assert called_by.inner_text() == "called by me"


def test_switches_move_the_rates_of_the_step(reader: Reader, advised: Path, tmp_path: Path) -> None:
    text, mark = advised.read_text(), '<div class="gauge"'
    rates = '<p data-figure="tokens/s">1,000<small>per GPU</small></p><p data-figure="MFU">40.0%</p>'
    (tmp_path / "report.html").write_text(text.replace(mark, f"{rates}{mark}", 1))
    page = reader.open(tmp_path / "report.html")
    set_room = """([step, price]) => { const { replay } = fakedist.switches; replay.room.stepUs = step;
        for (const each of replay.switches) each.priceUs = price; }"""
    page.evaluate(set_room, [1000, [0, 250]])
    switch(page, CHECKPOINT).check()
    rate, mfu = page.locator('[data-figure="tokens/s"]'), page.locator("[data-figure=MFU]")
    assert "800 to 1,000" in rate.inner_text()
    assert "32.0% to 40.0%" in mfu.inner_text()
    page.evaluate(set_room, [1000, None])
    switch(page, LOSS).check()
    assert rate.inner_text().startswith("1,000")
    assert "without the changes: the price of" in rate.inner_text()
    page.get_by_role("button", name="all off").click()
    assert rate.inner_text() == "1,000per GPU"


def test_every_combination_of_switches_is_pythons(reader: Reader, advised: Path) -> None:
    page = reader.open(advised)
    evidence, found = find_switches(open_run(advised.parent))
    assert evidence is not None
    ways = [[at for at in range(len(found)) if mask >> at & 1] for mask in range(1 << len(found))]
    replayed = """(ways) => ways.map((on) => fakedist.switches.replay.run(on))
        .map(({ least, most }) => [least.bytes, most.bytes])"""
    bytes_ = page.evaluate(replayed, ways)
    chosen = [[change for at in way if (change := found[at].change)] for way in ways]
    ends = [[evidence.peak - gives for gives in evidence.saved(changes)[::-1]] for changes in chosen]
    assert bytes_ == ends
