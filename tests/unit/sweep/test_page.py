from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import plotly.graph_objects as go
import pytest

from fakedist.cli import main
from fakedist.report.render.html import report_page
from fakedist.sweep.charts import maps, memory_against_speed, parallel_axes
from fakedist.sweep.point_rows import Status
from fakedist.sweep.sheets import sweep_report
from fakedist.sweep.sweep_directory import JOURNAL_NAME, Sweep, SweepJournal, write_about
from tests.unit.report.reading import read_page
from tests.unit.sweep.rows_by_hand import row
from tests.unit.sweep.test_sheets import ROWS, sweep


def sweep_page(found: Sweep, folder: Path | None = None) -> str:
    return report_page(sweep_report(found, folder=folder))


HOSTILE = "</script><script>alert(1)</script><b>"


@pytest.fixture
def kept(tmp_path: Path) -> Sweep:
    """A sweep of which the first point's run was kept, with its report."""
    report = tmp_path / ROWS[0].run_directory / "report.html"
    report.parent.mkdir(parents=True)
    report.touch()
    return sweep(*ROWS, path=tmp_path)


def test_the_page_has_the_answer_every_point_and_the_reports(kept: Sweep) -> None:
    page = sweep_page(kept, kept.path)
    assert "fastest that fits with 5% headroom: tp2 recompute=moe_act" in page
    assert page.count(">rank 0</a>") == 1
    assert ">rank 0</a>" not in sweep_page(kept, kept.path.parent)
    assert "tp=3 recompute=full" in page
    assert "68.10 GiB" in page
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert "default-src 'none'" in policy.replace("&#39;", "'")
    assert "unsafe-eval" not in policy
    assert not re.search(r'(?:src|href)="(?:https?:)?//', page)


def test_text_of_a_sweep_file_stays_text() -> None:
    page = sweep_page(sweep(row(100, kind=HOSTILE), row(200, kind="b"), row(kind="c", status=Status.INVALID)))
    assert HOSTILE not in page
    assert "&lt;/script&gt;" in page.replace("<wbr>", "")
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
    labels = [(note.x, note.text) for note in figure.layout.annotations]
    *axes, _ = figure.layout.xaxis.ticktext
    assert sorted(axes) == sorted(kept.varied_axes)
    for at, name in enumerate(axes):
        assert [text for x, text in labels if x == at] == [str(value) for value in kept.about.axes[name]]


def test_a_map_shows_the_fastest_point_that_fits_for_each_pair() -> None:
    rows = [row(speed, tp=tp, pp=1, mbs=mbs) for speed, tp, mbs in ((100, 1, 1), (300, 1, 2), (200, 2, 1))]
    rows.append(row(900, tp=2, pp=1, mbs=2, status=Status.DOES_NOT_FIT))
    found = maps(sweep(*rows))
    (trace,) = traces(found["tp, mbs"] if "tp, mbs" in found else found["mbs, tp"])
    shown = dict(zip(zip(trace["x"], trace["y"], strict=True), trace["text"], strict=True))  # type: ignore[call-overload]
    assert sorted(shown.values()) == ["100", "200", "300"]


def test_the_page_has_the_setting_and_the_command_of_the_winner() -> None:
    first, *others = ROWS
    command = "fakedist profile --world-size=512 --rank=0 --env=API_TOKEN=hidden --fabric=p5-efa train.py --tp 2"
    rows = [replace(first, command=command, world_size=512), *(replace(each, world_size=64) for each in others)]
    read = read_page(sweep_page(sweep(*rows)))
    said = " ".join(" ".join(read.words).split())
    for part in ("64, 512 ranks", "NVIDIA H100 80GB HBM3, 80.00 GiB of memory", "dgx-h100-ndr", "1,702"):
        assert part in said, part
    assert "--fabric=p5-efa train.py --tp 2" in said
    assert "hidden" not in said


def test_what_does_not_fit_is_listed_with_the_reason_closest_first() -> None:
    near = replace(row(100, 81, tp=1, status=Status.DOES_NOT_FIT), reason="rank 0 lacks 1.00 GiB")
    far = replace(row(100, 120, tp=2, status=Status.DOES_NOT_FIT), reason="rank 0 lacks 40.00 GiB", layer="head")
    skipped = replace(row(tp=4, status=Status.SKIPPED), reason="tp=2 does not fit")
    read = read_page(sweep_page(sweep(row(50, tp=8), far, skipped, near)))
    assert [each[:3] for each in read.tables["misfits-table"]] == [
        ["point", "", "why"],
        ["tp=1", "does not fit", "rank 0 lacks 1.00 GiB"],
        ["tp=2", "does not fit", "rank 0 lacks 40.00 GiB"],
        ["tp=4", "skipped (monotone)", "tp=2 does not fit"],
    ]
    assert "failures-table" not in read.tables


def test_a_sweep_without_any_step_has_a_page() -> None:
    page = sweep_page(sweep(ROWS[3]))
    assert "no point fits with 5% headroom" in page
    assert 'id="front"' not in page


def test_a_sweeps_directory_is_reported_and_viewed(
    kept: Sweep, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    write_about(kept.path, kept.about)
    journal = SweepJournal(kept.path / JOURNAL_NAME)
    for each in ROWS:
        journal.add_row(each)
    journal.close()
    folder = str(kept.path)
    shown = {}
    for form in ("text", "json", "csv", "markdown", "html"):
        assert main(["report", folder, "--format", form]) == 0
        shown[form] = capsys.readouterr().out
    assert "fastest that fits with 5% headroom: tp2 recompute=moe_act" in shown["text"]
    assert json.loads(shown["json"])["best"] == ROWS[0].id
    assert len(shown["csv"].splitlines()) == 1 + len(ROWS)
    assert "| 1=\\* |" in shown["markdown"]
    assert read_page(shown["html"]).title.startswith("fastest that fits with 5% headroom: tp2 recompute=moe_act, 1,702")
    assert main(["view", folder]) == 0
    assert capsys.readouterr().out == f"{(kept.path.resolve() / 'report.html').as_uri()}\n"
    assert ">rank 0</a>" in (kept.path / "report.html").read_text()
    assert main(["report", folder, "--section", "time"]) == 2
