"""The host's tables, and the verdict on a host that waits for the GPU."""

from dataclasses import replace
from pathlib import Path

import pytest

from fakedist.report.content.time import gain_sheet, host_sheets
from fakedist.report.content.wording import collector_text
from fakedist.results.opening import open_run
from fakedist.results.verdict import limit_text
from fakedist.rundir.directory import TABLES_NAME
from fakedist.rundir.step_time import HostPart, HostWait, LateLaunches, PathPart, StepTime, TimeGain
from tests.unit.report.handmade import ranged, timed

ROUTE = HostWait("/job/moe/dispatch.py:412 (route)", False, "read", "aten._to_copy.default", "a", 1, 183, 5e5, 310e3)
ITEM = HostWait("/job/train.py:57 (main)", False, "read", "aten._local_scalar_dense.default", "", 1, 1, 9.0, 2e3)
BEHIND = HostWait("", True, "synchronize", "synchronize (stream)", "", 1, 1, 9.0, 9.0)


@pytest.fixture(scope="module")
def time(tmp_path_factory: pytest.TempPathFactory) -> StepTime:
    made = open_run(timed(tmp_path_factory.mktemp("run") / "run")).summary.time
    assert made is not None
    path = [PathPart("host", "a", "", "", 1, 9, 9e5), PathPart("kernels", "a", "", "", 1, 9, 1e5)]
    late = [LateLaunches("/job/train.py:60 (main)", "a", 3, 40, 400e3)]
    host = [HostPart("forward", 5e5), HostPart("waits for the GPU", 5e5)]
    more = {"host": host, "host_waits": [ROUTE, ITEM, BEHIND], "late_launches": late}
    return replace(made, step_us=1e6, launch_gap_us=400e3, critical_path=path, gains=[], layers=[], **more)


def test_waits_and_late_launches_are_told_with_their_lines_and_layers(time: StepTime) -> None:
    host, waits, late = host_sheets(time, "/job", "estimated")
    assert [list(column.cells) for column in host.columns] == [
        ["forward", "waits for the GPU"],
        ["500.0 ms"] * 2,
        ["50.0%"] * 2,
    ]
    assert [list(cells) for cells in zip(*(column.cells for column in waits.columns), strict=True)] == [
        ["moe/dispatch.py:412 (route)", "183", "500.0 ms", "310.0 ms", "31.0%", "_to_copy", "a"],
        ["train.py:57 (main)", "1", "9.0 µs", "2.00 ms", "0.2%", ".item()", "(outside of modules)"],
    ], "a thousandth of the step and more"
    assert [column.cells[0] for column in late.columns] == [
        "train.py:60 (main)",
        "40",
        "400.0 ms",
        "40.0%",
        "a and 2 more",
    ]


def test_data_loading_is_a_line_of_its_own(time: StepTime) -> None:
    host = host_sheets(replace(time, loading_us=2e5), "/job", "estimated")[0]
    assert [column.cells[-1] for column in host.columns] == ["of these, data loading", "200.0 ms", "20.0%"]
    assert "iterators" in host.remarks[0]


def test_pauses_for_garbage_are_advice_that_the_steps_time_leaves_out(time: StepTime) -> None:
    assert collector_text(replace(time, collector_us=2e4)).startswith(
        "without garbage collection: 20.0 ms a step (2.0%), which its time leaves out; by gc.freeze() "
    )
    assert collector_text(time) == collector_text(replace(time, collector_us=900.0)) == ""
    assert gain_sheet(replace(time, collector_us=2e4)).remarks == [collector_text(replace(time, collector_us=2e4))]


def test_a_gpu_that_hardly_waits_for_the_host_needs_no_tables_of_it(time: StepTime) -> None:
    assert host_sheets(replace(time, launch_gap_us=900.0), "/job", "estimated") == []
    assert host_sheets(replace(time, host=[]), "/job", "estimated") == [], "made by an earlier version"


def test_the_verdict_names_the_line_that_waits_if_waits_make_most_of_the_host_late(time: StepTime) -> None:
    gain = TimeGain("a host that never waits for the GPU", "--what-if no-sync", 700e3)
    assert limit_text(replace(time, gains=[gain])) == (
        "limited by a host that waits for the GPU: 183 times a step at dispatch.py:412 (_to_copy), "
        "310.0 ms of 400.0 ms of idle GPU; a host that never waits for the GPU: -30.0%"
    )
    assert limit_text(replace(time, launch_gap_us=800e3)).startswith("limited by late launches of the host: 90% ")


def test_a_run_without_the_table_of_the_host_has_no_rows_of_it(tmp_path: Path) -> None:
    run = ranged(tmp_path / "run")
    opened = open_run(run)
    assert opened.time is not None
    assert len(opened.table("host")) == opened.num_rows("host") == 2
    assert opened.time.host()["layer_name"].tolist() == ["layers.0.mlp", "layers.1.mlp"]
    (run / TABLES_NAME / "host.parquet").unlink()
    earlier = open_run(run)
    assert earlier.time is not None
    assert len(earlier.table("host")) == earlier.num_rows("host") == 0
    assert len(earlier.time.host()) == len(earlier.time.host_waits()) == len(earlier.time.late_launches()) == 0
    assert earlier.figures.kernels().data
