"""The breakdown of time: every question's answer on kernels whose sums are known by hand."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fakedist.analysis.launches import kernel_table, recorded_ranges
from fakedist.analysis.memory_tables import fold_layers
from fakedist.cost_model.breakdown import (
    break_down,
    by_name,
    by_range,
    find_busy,
    generation_us,
    range_lanes,
    range_table,
    timed,
)
from fakedist.cost_model.estimated import StepTimes
from fakedist.cost_model.step_axis import range_events
from fakedist.rundir.encoding import columns_of
from fakedist.rundir.launch_records import RangeRow
from fakedist.rundir.plain import to_plain
from fakedist.rundir.schema import KINDS
from fakedist.rundir.table_rows import TABLES
from fakedist.rundir.trace_records import KernelsRecord
from tests.unit.analysis.recorded import HandMade
from tests.unit.cost_model.times_by_hand import H100, NAN, SOURCE, kernel, model, record, table

UP, DOWN = 4, 5  # rows of model(): layers.0.up and layers.0.down; further blocks every three rows


def times(*kernels: dict[str, Any], step_us: float = 0.0, **more: Any) -> StepTimes:
    source = dataclasses.replace(SOURCE, step_us=step_us)
    tables = {"layers": model(), "ranges": recorded_ranges(None)}
    made, summary = break_down(table(*kernels), tables, fold_layers(model()), source, more.get("peaks", H100))
    return StepTimes(made, summary, source)


def summary(*kernels: dict[str, Any], **more: Any) -> dict[str, Any]:
    found = times(*kernels, **more).summary
    assert found is not None
    plain: dict[str, Any] = to_plain(found)
    return plain


def a_step() -> list[dict[str, Any]]:
    """Forward, recomputation and backward of three blocks, an all-gather next to them, an optimizer."""
    rows = []
    for block in range(3):
        at = block * 100.0
        for number, layer in enumerate((UP + 3 * block, DOWN + 3 * block)):
            more: dict[str, Any] = {"layer": layer, "flops": 1e9}
            rows.append(kernel(at + 10 * number, 10 + block, **more))
            rows.append(kernel(at + 300 + 10 * number, 10, phase="backward", recompute=True, **more))
            rows.append(kernel(at + 600 + 10 * number, 20, phase="backward", **more))
        rows.append(kernel(at, 50, "communication", stream=7, layer=UP - 1 + 3 * block, call=block))
    rows.append(kernel(1000, 40, "optimizer", phase="optimizer"))
    rows.append(kernel(1040, NAN, "communication", stream=7, call=3, phase="optimizer"))
    return rows


def test_every_kernel_is_in_one_layer_and_one_kind_and_all_add_up() -> None:
    found = times(*a_step())
    assert found.summary is not None
    whole = sum(row["duration_us"] for row in a_step() if row["family"] != "communication")
    assert found.summary.kernel_us == pytest.approx(whole) == found.tables["layer_times"]["own_us"].sum()
    assert sum(found.summary.by_kind.values()) == pytest.approx(whole)
    compute = [row for row in found.summary.by_family if row.family != "communication"]
    assert sum(row.time_us for row in compute) == pytest.approx(whole)
    assert sum(row.share or 0.0 for row in compute) == pytest.approx(1)
    families = [column for column in found.tables["layer_times"].columns if column.startswith("family_")]
    assert found.tables["layer_times"][families].to_numpy().sum() == pytest.approx(whole)
    kinds = found.tables["layer_times"][[f"{kind}_us" for kind in KINDS]].to_numpy().sum(axis=1)
    assert kinds.tolist() == pytest.approx(found.tables["layer_times"]["own_us"].tolist())
    roots = [row for row in found.summary.layers if row.name in ("", "(Net)")]
    assert sum(row.total_us for row in roots) == pytest.approx(whole)
    assert found.summary.num_kernels == 19 == sum(row.num_kernels for row in roots)
    assert found.tables["kernel_names"][found.tables["kernel_names"]["family"] != "communication"][
        "time_us"
    ].sum() == pytest.approx(whole)


def test_recomputation_and_phases_without_a_column_are_apart() -> None:
    own = times(*a_step()).tables["layer_times"].loc[UP]
    assert [own[f"{kind}_us"] for kind in KINDS] == [0, 10, 10, 20, 0, 0]
    found = summary(kernel(0, 3, phase="init"), kernel(3, 4, phase="other"))
    assert found["by_kind"] == dict.fromkeys(KINDS, 0) | {"other": 7}


def test_repeated_layers_are_one_row_with_the_least_the_median_and_the_most_of_one() -> None:
    rows = {row["name"]: row for row in summary(*a_step())["layers"]}
    blocks = rows["layers.0-2"]
    assert (blocks["num_repeats"], blocks["own_us"], blocks["num_kernels"]) == (3, 0, 18)
    assert (blocks["least_us"], blocks["median_us"], blocks["largest_us"]) == (80, 82, 84)
    assert blocks["total_us"] == 246 == 66 + blocks["recompute_us"] + blocks["backward_us"]
    assert rows["layers.0-2.up"]["total_us"] == rows["layers.0-2.up"]["own_us"] == 123
    assert "layers.0.up" not in rows


def test_communication_is_never_compute_and_its_kernels_are_one_call() -> None:
    found = summary(*a_step())
    assert (found["num_calls"], found["num_unknown_calls"]) == (4, 1)
    assert all(row["family"] != "communication" for row in found["top_kernels"])
    own = times(*a_step()).tables["layer_times"]
    assert own.loc[UP - 1, ["own_us", "num_kernels", "communication_us", "num_calls"]].tolist() == [0, 0, 50, 1]
    assert own.loc[0, ["num_calls", "num_unknown_calls", "communication_us"]].tolist() == [1, 1, 0]
    communication = next(row for row in found["by_family"] if row["family"] == "communication")
    assert (communication["time_us"], communication["num_unknown"], communication["share"]) == (150, 1, None)
    copies = [kernel(at, 5, "communication", stream=7, call=3) for at in (0, 5, 10)]
    found = summary(kernel(0, 1), *copies, kernel(20, NAN, "communication", call=-1))
    assert (found["num_calls"], found["num_unknown_calls"]) == (2, 1)


def test_streams_that_overlap_are_busy_once() -> None:
    found = summary(kernel(0, 100), kernel(50, 100, stream=9), kernel(200, 10), step_us=300)
    assert (found["kernel_us"], found["busy_us"]) == (210, 160)
    assert summary(kernel(0, 100), kernel(10, 5, stream=9), kernel(20, 5, stream=9))["busy_us"] == 100
    ready = timed(table(kernel(0, 10), kernel(50, NAN, "communication", launch_us=60), kernel(90, 10)))
    busy = find_busy(ready, 100)
    assert (busy.busy_us, busy.communication_us, busy.wait_us) == (20, 0, 80)


def test_the_parts_of_a_step_add_up_to_it() -> None:
    found = summary(
        kernel(10, 20, launch_us=5),  # the GPU waits 10 for the host
        kernel(30, 40, "communication", stream=7, launch_us=6),
        kernel(50, 10, launch_us=8),  # hides 10 of the communication
        kernel(75, 5, launch_us=9),  # launched long ago: it waited for something else
        kernel(90, 5, launch_us=85),  # launched when the GPU had been idle for 5
        step_us=100,
    )
    parts = [found[f"{name}_us"] for name in ("busy", "communication", "launch_gap", "wait")]
    assert parts == [40, 30, 10 + 10 + 5, 5]
    assert sum(parts) == found["step_us"] == 100


def test_a_wait_for_the_host_belongs_to_the_layer_whose_kernel_came_late() -> None:
    rows = [kernel(10, 5, launch_us=8, layer=UP), kernel(30, 5, launch_us=20, layer=DOWN), kernel(50, 5, launch_us=1)]
    own = times(*rows).tables["layer_times"]
    assert own["launch_gap_us"].tolist() == [0, 0, 0, 0, 10, 15, 0, 0, 0, 0, 0, 0]
    folded = {row["name"]: row for row in summary(*rows)["layers"]}
    assert folded["layers.0-2"]["launch_gap_us"] == 25
    found = summary(kernel(10, 5), kernel(30, 5), step_us=50)
    assert (found["launch_gap_us"], found["wait_us"]) == (0, 40)
    assert summary(kernel(0, 100), step_us=50)["step_us"] == 100


def test_flops_that_are_not_known_are_counted_and_never_taken_for_none() -> None:
    found = summary(
        kernel(0, 100, flops=2e9, moved_bytes=1e6),
        kernel(100, 100),
        kernel(200, 50, "elementwise", moved_bytes=3e6),
        kernel(250, 50, flops=1e9, phase="backward", recompute=True),
    )
    assert (found["flops"], found["model_flops"], found["num_lacking_flops"]) == (3e9, 2e9, 1)
    gemm = next(row for row in found["by_family"] if row["family"] == "gemm")
    assert (gemm["flops"], gemm["flops_us"], gemm["time_us"]) == (3e9, 150, 250)
    assert (gemm["moved_bytes"], gemm["moved_us"]) == (1e6, 100)
    assert found["model_flops_utilisation"] == pytest.approx(2e9 / (300e-6 * 989.4e12))
    assert summary(kernel(0, 1, flops=1e9), peaks=None)["model_flops_utilisation"] is None


def test_names_are_sorted_by_time_and_tell_what_limits_most_of_it() -> None:
    rows = [kernel(0, 10, name="a", bound="memory", layer=UP), kernel(10, 30, name="a", bound="compute", layer=UP)]
    rows += [kernel(40, 12, name="a", bound="memory", layer=UP), kernel(60, 60, "norm", name="b", bound="memory")]
    names = times(*rows).tables["kernel_names"]
    assert list(names.columns) == TABLES["kernel_names"].names
    assert names["name"].tolist() == ["b", "a"]
    a = names.iloc[1]
    assert (a["num_kernels"], a["time_us"], a["num_layers"], a["bound"]) == (3, 52, 1, "compute")
    assert (a["least_us"], a["median_us"], a["largest_us"]) == (10, 12, 30)
    assert summary(*rows)["by_bound"] == {"compute": 30, "memory": 82}


def test_names_are_apart_by_shape_else_grid_by_layer_and_by_family_and_add_up() -> None:
    rows = [kernel(0, 10, name="a", grid="1,2,3"), kernel(10, 20, name="a", grid="4,1,1")]
    rows += [kernel(40, 40, name="a", grid="4,1,1", layer=UP), kernel(90, 1, name="a", shape="8 x 8 x 8 TN")]
    found = times(*rows).tables["kernel_names"]
    assert list(found[["shape", "layer", "time_us"]].itertuples(index=False, name=None)) == [
        ("grid 4,1,1", "layers.0-2.up", 40),
        ("grid 4,1,1", "", 20),
        ("grid 1,2,3", "", 10),
        ("8 x 8 x 8 TN", "", 1),
    ]
    (whole,) = by_name(found).itertuples(index=False)
    assert (whole.name, whole.num_kernels, whole.time_us) == ("a", 4, 71)
    rows = [kernel(0, 10, name="a", low_us=8, high_us=13), kernel(10, 20, name="a", low_us=17, high_us=26)]
    (both,) = times(*rows).tables["kernel_names"].itertuples(index=False)
    assert (both.low_us, both.high_us) == (25, 39)
    measured = times(kernel(0, 10)).tables["kernel_names"].iloc[0]
    assert measured["low_us"] != measured["low_us"]
    names = times(
        kernel(0, 1, name="copy_kernel", family="copy"), kernel(1, 1, "communication", name="copy_kernel")
    ).tables["kernel_names"]
    assert sorted(names["family"]) == ["communication", "copy"]


def test_a_step_without_a_kernel_has_no_times_and_an_unknown_family_is_an_error() -> None:
    found = times()
    assert (found.summary, len(found.tables["layer_times"]), len(found.tables["kernel_names"])) == (None, 0, 0)
    assert list(found.tables["layer_times"].columns) == TABLES["layer_times"].names
    with pytest.raises(ValueError, match="not in tuple"):
        times(kernel(0, 1, "surprise"))
    json.dumps(summary(*a_step(), kernel(1100, NAN, "other")), allow_nan=False)


GEMM : dict[str, Any] = {"name": "sm90_gemm", "family": "gemm", "stream": 7, "start_us": 20.5, "duration_us": 100.0} | {
    "launch_us": 3.0, "grid": "8,4,1", "block": "384,1,1", "operation": "aten.mm.default", "op": 12, "step": 2,
    "phase": "backward", "recompute": True, "layer": 3, "call": -1, "flops": 1e9, "moved_bytes": 4096.0,
    "bound": "compute",
}  # fmt: skip


def test_the_journals_columns_are_the_tables_but_those_of_an_estimate() -> None:
    columns = TABLES["kernels"].names
    traced = [name for name in columns_of(KernelsRecord) if name != "path_us"]
    assert columns == [*traced, "low_us", "high_us", "shape", "basis", "launch", "path_us"]


def test_rows_come_back_as_they_were_given_in_the_order_of_their_start(tmp_path: Path) -> None:
    made = HandMade()
    made.others.append(record(GEMM, kernel(1.0, 2.0, "copy", name="Memcpy", operation="")))
    recording = made.read(tmp_path)
    assert recording.kernel_source == SOURCE
    copy, gemm = kernel_table(recording).to_dict("records")
    assert {name: gemm[name] for name in GEMM} == GEMM
    assert (copy["name"], copy["operation"], copy["op"], copy["layer"], copy["call"]) == ("Memcpy", "", -1, 0, -1)
    assert copy["flops"] != copy["flops"]  # NaN: not known
    assert (gemm["low_us"] != gemm["low_us"], gemm["shape"]) == (True, "")  # it was not estimated here


def test_a_generation_lasts_from_its_first_kernel_to_the_end_of_its_last_with_sampling_and_waits() -> None:
    kernels = table(
        kernel(0.0, 5.0, phase="forward"),
        kernel(10.0, 5.0, phase="generation"),
        kernel(20.0, 3.0, phase="other"),  # sampling
        kernel(30.0, 5.0, phase="generation"),
        kernel(36.0, 4.0, phase="other"),  # a reward
        kernel(50.0, 5.0, phase="forward"),
        kernel(60.0, 5.0, phase="generation"),
        kernel(70.0, NAN, phase="generation"),
        kernel(80.0, 5.0, phase="backward"),
    )
    assert generation_us(timed(kernels)) == (35.0 - 10.0) + (70.0 - 60.0)
    assert generation_us(timed(kernels[kernels["phase"] != "generation"])) == 0.0


def ranges(*rows: tuple[str, int, int, int, int]) -> pd.DataFrame:
    """The table ``ranges`` over five launches: rows 0, 1, 3 and 4 are kernels, 5 is a collective."""
    kernels = [
        kernel(10, 5, launch=0, launch_us=1.0),
        kernel(15, 50, launch=1, launch_us=2.0),
        kernel(12, 8, launch=3, launch_us=4.0, stream=7),  # begins earlier, on another stream
        kernel(70, NAN, "other", launch=4, launch_us=6.0),
        kernel(80, NAN, "communication", launch=5, launch_us=7.0, call=3),
    ]
    recorded = pd.DataFrame([RangeRow(*row) for row in rows], columns=RangeRow._fields)
    return range_table(recorded, timed(table(*kernels)))


def test_a_range_has_the_kernels_that_were_launched_in_it() -> None:
    found = ranges(("step", 0, 0, 0, 6), ("two", 0, 1, 1, 4))
    assert list(found.columns) == TABLES["ranges"].names
    step, two = found.itertuples(index=False)
    assert (step.num_kernels, step.num_unknown, step.kernel_us, step.num_calls) == (4, 1, 63, 1)
    assert (two.num_kernels, two.kernel_us, two.num_calls) == (2, 58, 0)
    assert (two.begin_us, two.end_us, two.gpu_begin_us, two.gpu_end_us) == (2, 4, 12, 65)
    (found,) = ranges(("mark", 0, 0, 2, 2)).itertuples(index=False)
    assert (found.num_kernels, found.kernel_us) == (0, 0)
    assert found.begin_us != found.begin_us


def test_ranges_of_one_name_are_summed_most_time_first() -> None:
    small, large = by_range(ranges(("a", 0, 1, 0, 1), ("b", 0, 0, 1, 2), ("a", 0, 2, 3, 4)))[::-1]
    assert (large.name, large.kernel_us) == ("b", 50)
    assert (small.name, small.num_ranges, small.depth, small.num_kernels, small.kernel_us) == ("a", 2, 1, 2, 13)
    assert small.gpu_us == pytest.approx(13)


def test_ranges_that_overlap_on_the_gpu_are_below_each_other() -> None:
    found = range_lanes(ranges(("in", 0, 1, 0, 1), ("out", 0, 0, 0, 2), ("late", 0, 0, 3, 4), ("none", 0, 0, 2, 2)), 9)
    assert [(row.name, row.lane, row.start_us, row.end_us) for row in found.itertuples()] == [
        ("out", 0, 10, 65),
        ("in", 1, 10, 15),
        ("late", 2, 12, 20),
    ]
    after = range_lanes(ranges(("one", 0, 0, 0, 1), ("two", 0, 0, 1, 2)), 9)
    assert after["lane"].tolist() == [0, 0]
    assert range_lanes(ranges(("in", 0, 1, 0, 1), ("out", 0, 0, 0, 2)), 1)["name"].tolist() == ["out"]


def test_the_trace_has_a_track_of_them_by_thread_and_names_are_text() -> None:
    found = ranges(('</script>"', 0, 0, 0, 2), ("other thread", 1, 0, 1, 4), ("empty", 0, 0, 2, 2))
    events = [json.loads(line) for line in range_events(found)]
    slices = {event["name"]: event for event in events if event["ph"] == "X"}
    assert set(slices) == {'</script>"', "other thread"}
    assert (slices["other thread"]["ts"], slices["other thread"]["dur"]) == (2, 2)
    assert len({event["tid"] for event in slices.values()}) == 2
