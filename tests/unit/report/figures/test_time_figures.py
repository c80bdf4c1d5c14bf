"""Charts of the timed step: their numbers are the tables'."""

from __future__ import annotations

import numpy as np
import pytest

from fakedist.results.opening import open_run
from fakedist.results.run import Run
from tests.unit.report.handmade import ended_well, timed


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return open_run(timed(tmp_path_factory.mktemp("runs") / "run"))


def test_time_by_layer_adds_up_to_each_layer(run: Run) -> None:
    assert run.time is not None
    total = run.time.layers().set_index("name")["total_us"]
    figure = run.figures.time_by_layer()
    drawn = np.sum([each.x for each in figure.data], axis=0)
    assert dict(zip(figure.data[0].customdata, drawn * 1e3, strict=True))["layers.0-2.mlp"] == pytest.approx(
        total["layers.0-2.mlp"]
    )
    assert {each.name for each in figure.data} >= {"forward", "backward"}


def test_time_by_family_is_that_of_the_table(run: Run) -> None:
    assert run.time is not None
    bars = run.figures.time_by_family().data[0]
    assert sum(bars.y) * 1e3 == pytest.approx(run.time.families()["time_us"].sum())
    assert list(bars.y) == sorted(bars.y, reverse=True)


def test_the_roofline_has_points_below_the_roofs(run: Run) -> None:
    figure = run.figures.roofline()
    points = [each for each in figure.data if each.mode == "markers"]
    roofs = [each for each in figure.data if each.mode == "lines"]
    assert points
    assert roofs
    assert max(max(each.y) for each in points) <= max(max(each.y) for each in roofs)


def test_calls_by_group_count_bytes_or_calls(run: Run) -> None:
    table = run.collectives()
    calls = run.figures.calls(unit="calls")
    assert sum(sum(each.y) for each in calls.data) == table["num_calls"].sum()
    bytes_ = run.figures.calls()
    assert sum(sum(each.y) for each in bytes_.data) * (1 << 30) == table[["bytes_in", "bytes_out"]].max(axis=1).sum()


def test_a_run_without_a_timed_step_says_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    run = open_run(ended_well(tmp_path_factory.mktemp("runs") / "run"))
    with pytest.raises(ValueError, match="no timed step"):
        run.figures.roofline()
