from __future__ import annotations

import json
import re
from pathlib import Path

import plotly.graph_objects as go
import pytest

from fakedist.sweep.opened import Sweep, open_sweep
from fakedist.sweep.page import SweepFollower, maps, memory_against_speed, parallel_axes, sweep_page, write_sweep_page
from fakedist.sweep.point_rows import Status
from fakedist.sweep.sweep_directory import JOURNAL_NAME, SweepJournal, write_about
from tests.unit.sweep.rows_by_hand import row
from tests.unit.sweep.test_sheets import ROWS, sweep

HOSTILE = "</script><script>alert(1)</script><b>"


@pytest.fixture
def kept(tmp_path: Path) -> Sweep:
    """A sweep of which the first point's run was kept, with its report."""
    report = tmp_path / ROWS[0].run_directory / "report.html"
    report.parent.mkdir(parents=True)
    report.touch()
    return sweep(*ROWS, path=tmp_path)


def test_the_page_has_the_answer_every_point_and_the_reports(kept: Sweep) -> None:
    page = sweep_page(kept)
    assert "fastest that fits with 5% headroom: tp2 recompute=moe_act" in page
    assert page.count(">open</a>") == 1
    assert "tp=3 recompute=full" in page
    assert "68.10 GiB" in page
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert "default-src 'none'" in policy.replace("&#39;", "'")
    assert "unsafe-eval" not in policy
    assert not re.search(r'(?:src|href)="(?:https?:)?//', page)


def test_text_of_a_sweep_file_stays_text() -> None:
    page = sweep_page(sweep(row(100, kind=HOSTILE), row(200, kind="b"), row(kind="c", status=Status.INVALID)))
    assert HOSTILE not in page
    assert "&lt;/script&gt;" in page
    figure = parallel_axes(sweep(row(100, kind=HOSTILE), row(200, kind="b")))
    assert HOSTILE not in str(figure.to_json())


def traces(figure: go.Figure) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(figure.to_json())["data"]
    return found


def test_the_front_is_a_line_from_least_memory_to_most_speed(kept: Sweep) -> None:
    *points, front = traces(memory_against_speed(kept))
    assert [trace["name"] for trace in points] == ["fits"]
    assert front["x"] == pytest.approx([60.0, 68.1])
    assert front["y"] == [1700, 1702]
    assert points[0]["customdata"] == [f"{ROWS[0].run_directory}/report.html", "", ""]


def test_a_band_shows_what_is_about_as_fast_as_the_fastest(kept: Sweep) -> None:
    best = kept.ranking.best
    assert best is not None
    memory, band = json.loads(memory_against_speed(kept).to_json())["layout"]["shapes"]
    assert memory["x0"] == memory["x1"] == 80.0
    assert (band["y0"], band["y1"]) == (best.speed.low, best.speed.high)


def test_every_point_is_a_line_over_the_axes(kept: Sweep) -> None:
    figure = parallel_axes(kept)
    lines = sum(list(trace["x"]).count(None) for trace in traces(figure))  # type: ignore[call-overload]
    assert lines == len(ROWS)


def test_a_map_shows_the_fastest_point_that_fits_for_each_pair() -> None:
    rows = [row(speed, tp=tp, pp=1, mbs=mbs) for speed, tp, mbs in ((100, 1, 1), (300, 1, 2), (200, 2, 1))]
    rows.append(row(900, tp=2, pp=1, mbs=2, status=Status.DOES_NOT_FIT))
    found = maps(sweep(*rows))
    (trace,) = traces(found["tp, mbs"] if "tp, mbs" in found else found["mbs, tp"])
    shown = dict(zip(zip(trace["x"], trace["y"], strict=True), trace["text"], strict=True))  # type: ignore[call-overload]
    assert sorted(shown.values()) == ["100", "200", "300"]


def test_a_sweep_without_any_step_has_a_page() -> None:
    page = sweep_page(sweep(ROWS[3]))
    assert "no point fits with 5% headroom" in page
    assert 'id="front"' not in page


def test_a_sweep_is_followed_from_its_journal_until_its_page_is_written(tmp_path: Path) -> None:
    whole = sweep(*ROWS, path=tmp_path)
    write_about(tmp_path, whole.about)
    journal = SweepJournal(tmp_path / JOURNAL_NAME)
    follower = SweepFollower(tmp_path)
    assert dict(follower.state()["rows"])["ranks running"] == "0"  # type: ignore[call-overload]
    for number, entry in enumerate(ROWS, 1):
        journal.add_row(entry)
        state = follower.state()
        assert dict(state["rows"])["points"].startswith(f"{number} done")  # type: ignore[call-overload]
        assert len(state["table"]) + len(state["others"]) == number  # type: ignore[arg-type]
        assert not state["done"]
    journal.close()
    write_sweep_page(whole)
    assert follower.state()["done"]
    assert follower.report() == sweep_page(open_sweep(tmp_path))
