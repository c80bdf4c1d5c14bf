"""The breakdown of time, in every form that is not a page: DataFrames, JSON, CSV, Markdown.

The host's tables, and the verdict on a host that waits for the GPU.
"""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fakedist.cost_model.accuracy import HELD_HOST_STEPS, HELD_STEPS
from fakedist.errors import RunDirectoryError
from fakedist.report.content.run import run_object, run_report
from fakedist.report.content.time import gain_sheet, host_sheets, priced_report, table_rows
from fakedist.report.content.wording import accuracy_text, collector_text, short_kernel, step_remark, unknown_time
from fakedist.report.render.markdown import report_markdown
from fakedist.report.render.terminal import render
from fakedist.results.building import build_tables
from fakedist.results.opening import open_run
from fakedist.results.run import Run
from fakedist.results.verdict import limit_text, main_bound, step_text
from fakedist.rundir.directory import TABLES_NAME
from fakedist.rundir.plain import to_plain
from fakedist.rundir.step_time import (
    ClockSteadiness,
    FamilyAccuracy,
    HostPart,
    HostTime,
    HostWait,
    LateLaunches,
    PathPart,
    StepLimit,
    StepTime,
    TimeGain,
)
from tests.unit.report.handmade import measured, ranged, recorded, timed
from tests.unit.results.test_repricing import STEP, new_run_directory, priced_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return open_run(timed(tmp_path_factory.mktemp("runs") / "run"))


def test_a_notebook_gets_tables_that_add_up(run: Run) -> None:
    time = run.time
    whole = time.summary().kernel_us
    assert (time.source, whole) == ("estimated", 605)
    layers = time.layers()
    assert layers[layers["name"].isin(["", "(Transformer)"])]["total_us"].sum() == whole
    assert layers["own_us"].sum() == time.layers(fold=False)["own_us"].sum() == whole
    families = time.families()
    assert families[families["family"] != "communication"]["time_us"].sum() == whole
    assert families["share"].sum() == pytest.approx(1)  # communication has none
    assert time.names().iloc[0]["num_kernels"] == 9
    kernels = time.kernels()
    assert len(kernels) == 21
    assert set(kernels["layer_name"]) == {"", "(Transformer)", "layers.0.mlp", "layers.1.mlp", "layers.2.mlp"}


def test_the_json_object_says_all_of_it(run: Run) -> None:
    found = json.loads(json.dumps(run_object(run.path), allow_nan=False))
    assert found["kernels"]["source"] == "estimated"
    time = found["time"]
    assert [row["family"] for row in time["by_family"]] == ["gemm", "elementwise", "optimizer", "communication"]
    assert time["num_unknown_calls"] == 2
    assert time["top_kernels"][0]["bound"] == "compute"
    assert {row["name"] for row in time["layers"]} >= {"layers.0-2.mlp", "(Transformer)"}


def test_csv_has_the_rows_of_the_report_or_every_kernel(run: Run) -> None:
    folded = table_rows(run, "layer_times")
    assert folded[folded["name"] == "layers.0-2.mlp"]["total_us"].item() == 585
    apart = table_rows(run, "layer_times", all_layers=True)
    assert "layers.1.mlp" in set(apart["name"])
    assert len(table_rows(run, "kernels")) == 21


@pytest.mark.parametrize("make", [timed, measured])
def test_markdown_says_where_every_table_is_from(tmp_path: Path, make: object) -> None:
    text = report_markdown(run_report(make(tmp_path / "run")))  # type: ignore[operator]
    word = "estimated" if make is timed else "measured"
    for title in ("Time by layer", "Time by family of kernels", "Kernels that take the most time"):
        assert f"<summary>{title}, {word}" in text
    assert f"**Time of step 3, {word} by " in text
    assert ("duration is not known" in text) == (make is timed)


@pytest.mark.parametrize(
    ("low_us", "high_us", "text"),
    [
        (None, None, "2.71 s"),
        (2_500_000, 3_000_000, "2.71 s (2.50 to 3.00)"),
        (900_000, 3_000_000, "2.71 s (900.0 ms to 3.00 s)"),
    ],
)
def test_a_step_has_its_interval(run: Run, low_us: float | None, high_us: float | None, text: str) -> None:
    time = replace(run.time.summary(), step_us=2_714_000, step_low_us=low_us, step_high_us=high_us)
    assert step_text(time) == text
    held = f"90 % interval, which held for {HELD_STEPS:.0%} of published steps"
    assert (held in step_remark(time)) == (low_us is not None)
    of_host = replace(
        time, limits=[StepLimit("host", "", 0, 1.0, 1.0, 1.0), StepLimit("kernels", "", 0, 0.5, 0.5, 0.5)]
    )
    limited = f"90 % interval, which held for {HELD_HOST_STEPS:.0%} of published steps that the host limits"
    assert (limited in step_remark(of_host)) == (low_us is not None)


@pytest.mark.parametrize(
    ("source", "where", "text"),
    [
        ("constant", None, "the host was not measured"),
        ("measured", {}, ""),
        ("measured", {"is_recorded": True}, "the host was measured in the recorded step"),
        ("measured", {"is_second_run": True}, "the host was measured in a second run"),
    ],
)
def test_a_step_says_where_its_hosts_time_comes_from_but_for_the_steps_after_it(
    run: Run, source: str, where: dict[str, bool] | None, text: str
) -> None:
    clock = None if where is None else ClockSteadiness(1, 0.0, 0.0, **where)
    host = HostTime(source, "dgx-h100", 1.0, 0.5, 2.0, clock=clock)  # type: ignore[arg-type]
    remark = step_remark(run.time.summary(), replace(run.summary.kernels, host=host))
    assert ("the host was" in remark) == bool(text)
    assert text in remark


def test_the_accuracy_of_the_main_families_is_one_line(run: Run) -> None:
    rows = [FamilyAccuracy("products bf16", "h100-sxm", 0.022, 0.117), FamilyAccuracy("attention", "b200", 0.06, 0.2)]
    source = replace(run.summary.kernels, accuracy=rows[:1])
    line = "how close, median and 95th percentile of the error on H100 SXM, on kernels that were left out: "
    assert accuracy_text(source) == f"{line}products bf16 2.2% and 11.7%"
    told = accuracy_text(replace(source, accuracy=rows))
    assert told.endswith("products bf16 on H100 SXM 2.2% and 11.7%, attention on B200 6.0% and 20.0%")
    assert accuracy_text(replace(source, accuracy=[])) == ""


def test_parts_that_are_not_known_bounds_and_names_of_kernels_are_short() -> None:
    found = [unknown_time(0, 2), unknown_time(1500, 2), unknown_time(0, 0)]
    assert found == ["not known", "1.50 ms + 2 not known", "-"]
    assert (main_bound(1, 3, 0), main_bound(0, 0, 0)) == ("memory 75%", "")
    assert short_kernel("void at::native::(anonymous namespace)::softmax<4>(int)") == "softmax<4>(int)"
    assert short_kernel("k" * 100) == "k" * 43 + "…"


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return priced_run(tmp_path_factory.mktemp("priced") / "run", *STEP)


def text_of(run: Run) -> str:
    text = io.StringIO()
    render(priced_report(run, {}), Console(file=text, width=160))
    return text.getvalue()


def test_a_step_priced_for_another_gpu_has_the_same_facts_in_every_form(launched: Run) -> None:
    assert "priced for NVIDIA H100 80GB HBM3\n" in text_of(launched.priced_for())
    priced = launched.priced_for("b200")
    text = text_of(priced)
    assert "priced for NVIDIA B200, run for NVIDIA H100 80GB HBM3; its memory" in text
    for title in ("Time of step 2, estimated", "Time by layer", "Time by family", "Kernels that take the most time"):
        assert title in text
    markdown = report_markdown(priced_report(priced, {}))
    assert "- GPU: priced for NVIDIA B200, run for" in markdown
    assert "<summary>Time by layer, estimated, with children</summary>" in markdown
    assert priced_report(priced, {}).data() == {
        "run_directory": str(launched.path),
        "kernels": to_plain(priced.summary.kernels),
        "time": to_plain(priced.summary.time),
    }


def test_a_run_without_times_is_an_error(tmp_path: Path) -> None:
    made = recorded()
    made.ended()
    run = made.write(new_run_directory(tmp_path / "run"))
    build_tables(run)
    with pytest.raises(RunDirectoryError, match="has no times"):
        priced_report(open_run(run), {})


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
