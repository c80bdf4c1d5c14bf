import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakedist.report.figures.look import PHASE_COLOURS
from fakedist.report.figures.time_figures import kernel_lanes
from fakedist.results.opening import open_run
from fakedist.results.run import Run
from tests.unit.analysis.recorded import GPU, HandMade
from tests.unit.cost_model.times_by_hand import H100, NAN, kernel, record
from tests.unit.report.handmade import built, ended_well, overlapping, ranged, timed


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


def test_the_roofline_leaves_out_what_is_not_known(tmp_path: Path) -> None:
    made = HandMade()
    made.gpu = dataclasses.replace(GPU, peaks=H100)
    rows = [
        kernel(0, 10, name="both", flops=1e9, moved_bytes=1e7),
        kernel(10, 90, name="both", flops=9e9, moved_bytes=9e7),
    ]
    rows += [kernel(100, 5, name="no bytes", flops=1e9), kernel(110, 5, "copy", name="no flops", moved_bytes=1e6)]
    rows.append(kernel(120, NAN, "communication"))
    made.others.append(record(*rows))
    made.ended()
    directory = built(made, tmp_path / "run")
    (points,) = (each for each in open_run(directory).figures.roofline().data if each.mode == "markers")
    assert [each[0] for each in points.customdata] == ["both"]
    assert list(points.x) == [100]
    assert list(points.y) == [pytest.approx(1e10 / 100e-6)]


def test_kernels_are_bars_in_the_lane_of_their_stream(run: Run) -> None:
    figure = run.figures.kernels()
    table = run.table("kernels")
    families = {each.meta: each for each in figure.data}
    assert len(families["gemm"].x) == (table["family"] == "gemm").sum()
    assert sum(families["gemm"].x) * 1e3 == pytest.approx(table[table["family"] == "gemm"]["duration_us"].sum())
    titles = dict(zip(figure.layout.yaxis.tickvals, figure.layout.yaxis.ticktext, strict=True))
    assert {titles[row] for row in families["communication"].y} == {"default_pg all_reduce, tp all_gather_into_tensor"}
    assert {titles[row] for row in families["gemm"].y} == {"stream 0"}
    assert all("duration not known" in text for text in families["communication"].hovertext)
    assert list(families["phase"].marker.color) == [PHASE_COLOURS[name] for name in _phases(families["phase"])]


def test_every_family_has_a_trace_however_few_bars_there_are(run: Run) -> None:
    drawn = {each.meta for each in kernel_lanes(run, most=2).data}
    assert drawn >= set(run.table("kernels")["family"])


def test_collectives_are_faded_while_something_computes(tmp_path: Path) -> None:
    figure = open_run(overlapping(tmp_path / "run")).figures.kernels()
    traces = {each.meta: each for each in figure.data}
    hidden = traces["hidden"]
    assert (hidden.base[0], hidden.x[0]) == pytest.approx((0.02, 0.04))
    assert (len(hidden.x), hidden.y[0]) == (1, traces["communication"].y[0])
    assert "<br>hidden 40.0 µs, exposed 60.0 µs<br>" in traces["communication"].hovertext[0]


def test_ranges_have_lanes_of_their_own_and_their_names_are_text(tmp_path: Path) -> None:
    run = open_run(ranged(tmp_path / "run"))
    figure = run.figures.kernels()
    titles = dict(zip(figure.layout.yaxis.tickvals, figure.layout.yaxis.ticktext, strict=True))
    (ranges,) = (each for each in figure.data if each.meta == "ranges")
    assert [titles.get(row) for row in ranges.y] == ["ranges", None]
    assert [titles[max(ranges.y) + number] for number in (1, 2)] == ["host", "stream 0"]
    (host,) = (each for each in figure.data if each.meta == "host")
    assert host.base[0] == 0, "the host begins the step"
    assert host.hovertext[0].startswith("aten.mm.default<br>forward, 7.0 µs")
    table = run.table("ranges")
    assert list(ranges.x) == pytest.approx(((table["gpu_end_us"] - table["gpu_begin_us"]) / 1e3).tolist())
    assert [text.partition("<br>")[0] for text in ranges.hovertext] == ["&lt;b&gt;outer&lt;/b&gt;", "inner"]


def _phases(bars: Any) -> list[str]:
    return [text.partition("<br>")[0] for text in bars.hovertext]


def test_calls_over_time_are_as_tall_as_their_bytes(run: Run) -> None:
    figure = run.figures.calls_over_time()
    assert [each.text for each in figure.layout.annotations] == [
        "tp · all_gather_into_tensor",
        "default_pg · all_reduce",
    ]
    lines = {each.name: each for each in figure.data}
    (tallest,) = {max(lines["default_pg · all_reduce"].y[:2]) - min(lines["default_pg · all_reduce"].y[:2])}
    assert tallest == pytest.approx(0.64)  # the largest of all calls


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
