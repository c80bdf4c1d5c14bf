"""Charts of memory: their numbers are the run's, and names are text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fakedist
from fakedist.report.figures.memory_figures import highest_events, layer_bars
from fakedist.results.opening import open_run
from fakedist.results.run import Run
from fakedist.run.schema import CATEGORIES
from fakedist.units import GIB
from tests.unit.report.handmade import ended_well


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return open_run(ended_well(tmp_path_factory.mktemp("runs") / "run"))


def test_the_categories_of_the_timeline_add_up_to_what_is_allocated(run: Run) -> None:
    curves = {each.name: np.asarray(each.y) for each in run.figures.timeline().data}
    names = {name.replace("_", " ") for name in CATEGORIES} & set(curves)
    assert len(names) > 1
    assert sum(curves[name] for name in names) == pytest.approx(curves["allocated"])
    assert (curves["reserved"] >= curves["allocated"]).all()


@pytest.mark.parametrize("axis", ["event", "time"])
def test_the_timeline_shows_the_peak(run: Run, axis: str) -> None:
    figure = run.figures.timeline(axis=axis)
    peak = next(each for each in figure.data if each.name == "peak")
    assert peak.y[0] * GIB == run.peak_allocated_bytes
    assert {each.text for each in figure.layout.annotations} >= {"init"}


def test_a_peak_between_two_points_is_drawn() -> None:
    allocated = np.full(100_000, 5)
    allocated[77_777] = 9
    chosen = highest_events(allocated, 100)
    assert 77_777 in chosen
    assert len(chosen) <= 102
    assert {0, 99_999} <= set(chosen.tolist())


@pytest.mark.parametrize("kind", ["icicle", "treemap"])
def test_the_boxes_of_the_peak_add_up_to_it(run: Run, kind: str) -> None:
    boxes = run.figures.peak_by_layer(kind=kind).data[0]
    assert sum(boxes.values) == run.peak_allocated_bytes
    assert set(boxes.parents[1:]) <= set(boxes.ids)
    assert [row[2] for row in boxes.customdata if row[0] == "layers.0-2.mlp"] == ["3 layers"]


def test_bars_of_layers_show_the_bytes_of_each_category(run: Run) -> None:
    figure = run.figures.layers()
    parameters = next(each for each in figure.data if each.name == "parameter")
    held = dict(zip(parameters.customdata, parameters.x, strict=True))
    assert held["layers.0-2.mlp"] * GIB == 48 << 20


def test_two_runs_are_drawn_on_one_axis(run: Run) -> None:
    figure = run.figures.compared_with(run)
    assert [max(each.y) * GIB for each in figure.data] == [run.peak_allocated_bytes] * 2
    assert list(figure.data[0].y) == list(figure.data[1].y)


def test_names_of_layers_are_text(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = run.layers().assign(name='<a href="javascript:alert(1)">x</a>')
    monkeypatch.setattr(run, "layers", lambda: evil)
    assert "<a" not in layer_bars(run).to_json()
    assert "<a" not in run.figures.peak_by_layer().to_json()


@pytest.mark.parametrize(
    ("chart", "wrong"),
    [("timeline", {"axis": "steps"}), ("peak_by_layer", {"kind": "sunburst"}), ("calls", {"unit": "x"})],
)
def test_a_wrong_choice_names_the_right_ones(run: Run, chart: str, wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=" or "):
        getattr(run.figures, chart)(**wrong)


def test_a_snapshot_has_a_timeline_without_categories(run: Run) -> None:
    snapshot = fakedist.open(run.path / "memory_snapshot.pickle")
    assert {each.name for each in snapshot.figures.timeline().data} == {"other", "allocated", "reserved", "peak"}


def test_a_chart_is_saved_like_any_plotly_figure(run: Run, tmp_path: Path) -> None:
    run.figures.timeline().write_html(tmp_path / "timeline.html", include_plotlyjs="cdn")
    assert "Memory: peak" in (tmp_path / "timeline.html").read_text()
