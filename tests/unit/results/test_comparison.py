"""Two runs and their timed steps side by side.

Figures that add up, the one line that says why, what cannot be compared, and every way of printing them.
"""

import json
from dataclasses import fields, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from fakedist.cli import main
from fakedist.report.content.change_sheets import time_change_sheets
from fakedist.report.content.comparison import (
    comparison_object,
    comparison_report,
    group_pairs,
    layers_with_most,
    time_pairs,
)
from fakedist.report.render.html import report_page
from fakedist.report.render.markdown import report_markdown
from fakedist.report.render.terminal import render
from fakedist.results.compare.changed_times import collective_changes, group_changes
from fakedist.results.comparison import Comparison, StepComparison
from fakedist.rundir.directory import load_manifest, write_manifest
from fakedist.rundir.outcome import BEYOND_CAPACITY
from fakedist.rundir.step_time import GroupTime, RankThroughput, SampleThroughput, StepTime
from fakedist.rundir.summary import CollectiveTotal
from tests.unit.analysis.recorded import KIB, MIB, HandMade
from tests.unit.report.handmade import built
from tests.unit.report.two_runs import run_of

WHERE = "in its kernels, gemm of layers.*."


def both(tmp_path: Path, a: dict[str, Any], b: dict[str, Any]) -> Comparison:
    return Comparison(run_of(tmp_path / "a", **{"gemm_us": 100, **a}), run_of(tmp_path / "b", **{"gemm_us": 100, **b}))


def times(tmp_path: Path, a: dict[str, Any], b: dict[str, Any]) -> StepComparison:
    found = both(tmp_path, a, b).time
    assert found is not None
    return found


def shown(comparison: Comparison) -> str:
    stream = StringIO()
    render(comparison_report(comparison), Console(file=stream, width=120))
    return stream.getvalue()


@pytest.mark.parametrize("b", [{"gemm_us": 130}, {"num_layers": 5}, {"mlp": "ffn", "gemm_us": 90}, {"num_layers": 1}])
def test_changes_add_up_to_that_of_all_kernels_however_they_are_told(tmp_path: Path, b: dict[str, Any]) -> None:
    time = times(tmp_path, {}, b)
    change = (b.get("gemm_us", 100) + 5) * b.get("num_layers", 3) - 105 * 3
    assert time.parts.set_index("name").loc["all kernels", "change_us"] == pytest.approx(change)
    for table in (time.phases, time.families, time.layers, time.names):
        assert table["change_us"].sum() == pytest.approx(change)
    if "mlp" in b:  # a layer under another name is the same layer
        assert set(time.layers["what"]) == {"same", "shrank"}


def test_changes_that_are_noise_are_left_out_and_counted(tmp_path: Path) -> None:
    comparison = both(tmp_path, {"gemm_us": 1e4, "mlp": "mlp"}, {"gemm_us": 1e4 + 0.5, "activation": 12 << 20})
    assert comparison.time is not None
    told = "left out below: 4 rows that differ by less than 3.0 µs, 0.01% of the shortest step; --all-rows shows them"
    assert told in " ".join(shown(comparison).split())
    assert "grew" not in shown(comparison).partition("Time of the step")[2]
    assert told in " ".join(report_page(comparison_report(comparison)).split())
    everything = time_change_sheets(comparison.time, all_rows=True)
    assert [len(sheet.columns[0].cells) for sheet in everything[1:]] == [1, 1, 1, 1]
    assert not any("left out" in remark for sheet in everything for remark in sheet.remarks)


def test_a_change_that_is_written_as_nothing_is_none(tmp_path: Path) -> None:
    time = times(tmp_path, {}, {"gemm_us": 100.01})
    for table in (time.phases, time.families, time.layers, time.names):
        assert set(table["what"]) == {"same"}


def test_the_headline_is_of_the_step_if_only_that_changed(tmp_path: Path) -> None:
    comparison = both(tmp_path, {}, {"gemm_us": 140})
    assert comparison.headlines[0][1].startswith("step +120 µs (+36.4%), estimated")
    assert shown(comparison).splitlines()[1] == "the peak is the same, 73.00 MiB"
    assert "<title>step +120 µs" in report_page(comparison_report(comparison)).replace("&#43;", "+")
    with_memory = both(tmp_path / "more", {}, {"gemm_us": 140, "activation": 12 << 20})
    assert with_memory.headlines[0][1].startswith("+12.00 MiB at the peak")


@pytest.mark.parametrize(
    ("b", "told"),
    [
        ({"gemm_us": 140}, f"step +120 µs (+36.4%), estimated: +120 µs {WHERE}mlp, +120 µs"),
        ({"gemm_us": 90}, f"step -30.0 µs (-9.1%), estimated: -30.0 µs {WHERE}mlp, -30.0 µs"),
        ({"gemm_us": 140, "mlp": "ffn"}, f"step +120 µs (+36.4%), estimated: +120 µs {WHERE}ffn, +120 µs"),
        ({}, "the step takes the same time, 330 µs, estimated"),
    ],
)
def test_one_line_says_why(tmp_path: Path, b: dict[str, Any], told: str) -> None:
    comparison = both(tmp_path, {}, b)
    assert comparison.time is not None
    assert comparison.time.why == told
    assert told in shown(comparison)
    found = json.loads(json.dumps(comparison_object(comparison), allow_nan=False))["time"]
    assert found["names"][0]["name"] == "big_gemm"
    assert not b or found["layers"][0]["path"] == f"layers.*.{b.get('mlp', 'mlp')}"
    assert told in report_markdown(comparison_report(comparison)).replace("\\", "")
    assert told in report_page(comparison_report(comparison)).replace("&#43;", "+").replace("\u2212", "-")


def test_measured_and_estimated_are_never_compared_without_a_word(tmp_path: Path) -> None:
    comparison = both(tmp_path, {}, {"source": "measured"})
    (warning,) = comparison.warnings
    assert warning.startswith("the times of A are estimated, those of B measured")
    text = shown(comparison)
    assert warning in " ".join(text.split())
    assert "Time of the step, A estimated, B measured" in text
    assert comparison.differences["times"] == ["estimated (model)", "measured (cupti)"]
    assert comparison_object(comparison)["time"]["sources"] == ["estimated", "measured"]


def test_what_one_run_does_not_know_is_no_change(tmp_path: Path) -> None:
    time = times(tmp_path, {}, {"source": "measured"})
    communication = time.families.set_index("family").loc["communication"]
    assert (communication["change_us"], communication["what"]) == (0, "not known")
    comparison = Comparison(tmp_path / "a", tmp_path / "b")
    (row,) = [line.split() for line in shown(comparison).splitlines() if line.startswith("communication")]
    assert row[:5] == ["communication", "1", "not", "known", "2.0"]


def test_where_one_run_has_no_times_there_is_nothing_to_compare_and_it_is_told(tmp_path: Path) -> None:
    comparison = both(tmp_path, {}, {"gemm_us": 0})
    assert comparison.time is None
    assert comparison_object(comparison)["time"] is None
    assert comparison.differences["times"] == ["estimated (model)", "none"]
    assert "Time of the step" not in shown(comparison)


@pytest.mark.parametrize("num_layers", [3, 40])
def test_bars_of_the_page_are_all_kernels_and_none_is_wider_than_the_axis(tmp_path: Path, num_layers: int) -> None:
    time = times(tmp_path, {"num_layers": num_layers}, {"num_layers": num_layers, "gemm_us": 130, "mlp": "ffn"})
    for chart in time_pairs(time):
        sums = [0.0, 0.0]
        for row in chart["rows"]:
            for at, side in enumerate(row["sides"]):
                sums[at] += sum(float(part["width"][:-1]) for part in side["parts"])
        assert sums[0] / sums[1] == pytest.approx(105 / 135, rel=1e-4)
        widest = max(sum(float(part["width"][:-1]) for part in side["parts"]) for side in chart["rows"][0]["sides"])
        assert widest == pytest.approx(100, abs=0.01)


def test_layers_that_take_little_are_one_row_of_the_page(tmp_path: Path) -> None:
    parts = pd.DataFrame(
        [(f"part{at}", "gemm", 100.0 - at, 200.0 - at) for at in range(20)],
        columns=["path", "category", "a_us", "b_us"],
    )
    kept, names = layers_with_most(parts)
    assert names[-1] == "6 more"
    assert len(names) == 15
    assert kept["b_us"].sum() == parts["b_us"].sum()
    assert set(kept["path"]) == set(names)


def test_the_one_line_blames_communication_where_that_changed_more(tmp_path: Path) -> None:
    row = GroupTime("dp", 8, 2, "all_gather", 10, 0, 1e9, time_us=100.0, hidden_us=70.0, exposed_us=30.0)
    time = times(tmp_path, {}, {"gemm_us": 101})
    after = [replace(row, exposed_us=55.0), replace(row, group="tp", exposed_us=4.0)]
    time.times = {"A": replace(time.times["A"], by_group=[row]), "B": replace(time.times["B"], by_group=after)}
    assert time.why == "step +3.0 µs (+0.9%), estimated: +29.0 µs of exposed communication, all_gather on dp, +25.0 µs"
    (sheet,) = [each for each in time_change_sheets(time, all_rows=True) if each.title.startswith("Exposed")]
    assert [list(column.cells) for column in sheet.columns[:2]] == [["dp", "tp"], ["all_gather", "all_gather"]]
    groups = group_pairs(time)
    assert [row["name"] for row in groups] == ["all_gather on dp", "all_gather on tp"]
    assert [part["text"] for part in groups[0]["sides"][0]["parts"]] == ["30.0 µs", "70.0 µs"], "exposed, hidden"
    assert (groups[0]["change"], groups[1]["sides"][0]["parts"]) == ("+25.0 µs", [])
    (tmp_path / "again").mkdir()
    again = times(tmp_path / "again", {}, {"gemm_us": 140})
    again.times = {"A": replace(again.times["A"], by_group=[row]), "B": replace(again.times["B"], by_group=after)}
    assert again.why.startswith("step +120 µs (+36.4%), estimated: +120 µs in its kernels")


def test_steps_of_unlike_work_are_compared_by_their_rate_first(tmp_path: Path) -> None:
    comparison = both(tmp_path, {"gemm_us": 200}, {"gemm_us": 100})
    time = comparison.time
    assert time is not None
    before, after = time.times.values()
    time.times["A"] = replace(
        before, throughput=RankThroughput(4096, "4,096 on this rank", 1000.0), step_flops_utilisation=0.43
    )
    time.times["B"] = replace(
        after, throughput=RankThroughput(2048, "2,048 on this rank", 880.0), step_flops_utilisation=0.38
    )
    first = "tokens/s per GPU 1,000 -> 880 (-12.0%), with 4,096 -> 2,048 tokens a step; step -300"
    assert time.why.startswith(first)
    text = shown(comparison)
    assert first in " ".join(text.split())
    assert "Work of the step" in text
    assert [row.split() for row in text.splitlines() if "tokens a step" in row][-1][-3:] == ["4,096", "2,048", "-50.0%"]
    rows = json.loads(json.dumps(comparison_object(comparison)))["time"]["rates"]
    assert rows[0] == {"name": "tokens/s per GPU", "a": 1000.0, "b": 880.0, "change": -120.0}


def test_a_rate_that_one_run_lacks_has_a_dash_and_no_change(tmp_path: Path) -> None:
    comparison = both(tmp_path, {"gemm_us": 200}, {"gemm_us": 100})
    time = comparison.time
    assert time is not None
    time.times["A"] = replace(time.times["A"], sample_throughput=SampleThroughput(8, "3x224x224", 25.5))
    assert time.why.startswith("step -300")
    assert [row.split()[-2:] for row in shown(comparison).splitlines() if "samples/s per GPU" in row] == [["25.5", "-"]]
    rates = comparison_object(comparison)["time"]["rates"]  # type: ignore[index]
    assert rates[0] == {"name": "samples/s per GPU", "a": 25.5, "b": None, "change": None}


ROW = GroupTime("dp", 8, 2, "all_gather", 10, 0, 1e9, time_us=100.0, hidden_us=70.0, exposed_us=30.0)


def step(*rows: GroupTime) -> StepTime:
    figures: dict[str, Any] = {field.name: 0 for field in fields(StepTime) if field.default is field.default_factory}
    return StepTime(**figures | {"step_us": 1000.0, "by_group": list(rows)})


def test_exposed_communication_is_compared_by_group_and_operation_largest_change_first() -> None:
    reduce = replace(ROW, operation="reduce_scatter", exposed_us=5.0)
    found = group_changes(
        step(ROW, reduce), step(replace(ROW, exposed_us=50.0, num_calls=12, time_us=90.0), replace(ROW, group="tp"))
    )
    assert found[["group", "operation", "change_us", "what"]].to_numpy().tolist() == [
        ["tp", "all_gather", 30.0, "appeared"],
        ["dp", "all_gather", 20.0, "grew"],
        ["dp", "reduce_scatter", -5.0, "gone"],
    ]
    assert found[["whole_a_us", "whole_b_us", "num_a", "num_b"]].to_numpy().tolist() == [
        [0.0, 100.0, 0, 10],
        [100.0, 90.0, 10, 12],
        [100.0, 0.0, 10, 0],
    ]


def test_groups_of_one_name_count_together_and_only_what_both_steps_know_is_compared() -> None:
    found = group_changes(step(ROW, ROW), step(ROW))
    assert found["change_us"].tolist() == [-30.0]
    assert len(group_changes(step(ROW), step())) == 0
    found = group_changes(step(ROW), step(replace(ROW, num_unknown=1, exposed_us=9.0)))
    assert found[["change_us", "what"]].to_numpy().tolist() == [[0.0, "not known"]]
    assert found["a_us"].tolist() == pytest.approx([30.0])


def test_of_collectives_that_change_as_much_those_with_more_calls_come_first() -> None:
    after = [CollectiveTotal(name, 8, "all_reduce", calls, *bytes_) for name, calls, bytes_ in (
        ("few", 2, (5, 5)), ("many", 9, (5, 5)), ("large", 1, (50, 50)))]  # fmt: skip
    assert collective_changes([], after)["group"].tolist() == ["large", "many", "few"]


HELD = "activations of layers.*."


def compared(tmp_path: Path, a: dict[str, Any], b: dict[str, Any]) -> Comparison:
    return Comparison(run_of(tmp_path / "a", **a), run_of(tmp_path / "b", **b))


@pytest.mark.parametrize(
    "b",
    [
        *({"activation": 12 * MIB}, {"activation": 3 * MIB + 512}, {"num_layers": 2}, {"mlp": "feed_forward"}),
        {"num_layers": 5, "mlp": "ffn", "activation": 700 * KIB},
    ],
)
def test_changes_add_up_to_that_of_the_peak_however_they_are_told(tmp_path: Path, b: dict[str, Any]) -> None:
    comparison = compared(tmp_path, {}, b)
    peaks = [run.peak_allocated_bytes for run in comparison.runs.values()]
    assert peaks[0] == 3 * 24 * MIB + MIB
    change = peaks[1] - peaks[0]
    for table in (comparison.categories, comparison.parts, comparison.layers, comparison.blocks):
        assert table["change_bytes"].sum() == change
    assert comparison.figures["change_bytes"].iloc[0] == change
    assert (comparison.layers["b_bytes"] - comparison.layers["a_bytes"]).equals(comparison.layers["change_bytes"])


@pytest.mark.parametrize(
    ("b", "told"),
    [
        ({"activation": 12 * MIB, "line": 212}, f"{HELD}mlp, +12.00 MiB, first seen at model.py:212 (forward)"),
        ({"activation": 12 * MIB, "mlp": "ffn"}, f"{HELD}ffn, +12.00 MiB, first seen at model.py:12 (forward)"),
        ({"activation": 2 * MIB}, f"{HELD}mlp, -18.00 MiB, last seen at model.py:12 (forward)"),
        ({"num_layers": 2}, "parameters of layers.2.mlp, -16.00 MiB, last seen in mm.default (init)"),
        ({"line": 99}, ""),
    ],
)
def test_the_reason_is_one_line(tmp_path: Path, b: dict[str, Any], told: str) -> None:
    comparison = compared(tmp_path, {}, b)
    change = comparison.figures["change_bytes"].iloc[0] / MIB
    assert comparison.why == (f"{change:+.2f} MiB at the peak: {told}" if told else "the peak is the same, 73.00 MiB")
    assert (comparison.blocks.empty, comparison.layers.empty) == (not told, not told)  # lines that moved are the same


def test_what_was_renamed_is_told_and_not_counted_as_gone(tmp_path: Path) -> None:
    comparison = compared(tmp_path, {}, {"mlp": "feed_forward", "activation": 9 * MIB})
    assert comparison.renamed == [{"was": "layers.*.mlp", "name": "layers.*.feed_forward", "how": "renamed"}]
    (row,) = comparison.layers.to_dict("records")
    found = [row[name] for name in ("name", "was", "num_layers", "what")]
    assert found == ["layers.*.feed_forward", "layers.*.mlp", 3, "grew"]


def test_phases_most_and_collectives(tmp_path: Path) -> None:
    comparison = compared(tmp_path, {}, {"activation": 10 * MIB})
    forward = comparison.phases.set_index(["step", "phase"]).loc[(2, "forward")]
    assert (forward["a_bytes"], forward["b_bytes"], forward["what"]) == (72 * MIB, 78 * MIB, "grew")
    assert list(comparison.phases["step"]) == sorted(comparison.phases["step"])
    most = comparison.most.set_index("name")["change_bytes"]
    assert most["layers.*.mlp"] == 2 * MIB
    assert most["layers"] == 6 * MIB
    (row,) = comparison.collectives.to_dict("records")
    assert (row["group"], row["operation"], row["change_bytes"], row["what"]) == ("tp", "all_reduce", 4 * MIB, "grew")


def test_what_was_not_the_same_is_said(tmp_path: Path) -> None:
    comparison = compared(tmp_path, {}, {"rank": 3, "arguments": ("--tp", "8"), "world_size": 64})
    manifest = load_manifest(tmp_path / "b")
    assert manifest.summary is not None
    write_manifest(tmp_path / "b", replace(manifest, summary=replace(manifest.summary, torch="2.99.0")))
    comparison = Comparison(tmp_path / "a", tmp_path / "b")
    assert comparison_object(comparison)["differences"] == [
        {"name": "world size", "a": "8", "b": "64"},
        {"name": "rank", "a": "1", "b": "3"},
        {"name": "arguments", "a": "", "b": "--tp 8"},
        {"name": "torch", "a": "2.15.0", "b": "2.99.0"},
    ]


def test_the_headline_names_what_was_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    changed = {"arguments": ("--tp", "8", "--loss-parallel"), "activation": 12 * MIB}
    comparison = compared(tmp_path, {"arguments": ("--tp", "8")}, changed)
    assert comparison.changes == [["--loss-parallel"]]
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out.startswith(f"--loss-parallel: {comparison.why}")
    assert report_markdown(comparison_report(comparison)).startswith("**--loss-parallel: +12.00 MiB at the peak")
    assert comparison_object(comparison)["changes"] == ["--loss-parallel"]


def test_a_run_that_was_killed_half_way_is_told_before_its_figures(tmp_path: Path) -> None:
    comparison = compared(tmp_path, {}, {"ended": "killed"})
    assert comparison.warnings == ["B ended after 2 steps, killed: its figures end there"]
    console = Console(width=120, record=True, quiet=False)
    with console.capture() as shown:
        render(comparison_report(comparison), console)
    assert shown.get().index("B ended") < shown.get().index("Memory, measured")


def test_a_run_that_went_on_beyond_the_gpu_has_all_of_its_figures(tmp_path: Path) -> None:
    comparison = compared(tmp_path, {}, {"ended": "out_of_memory"})
    manifest = load_manifest(tmp_path / "b")
    assert manifest.summary is not None
    went_on = replace(manifest.summary, exit=BEYOND_CAPACITY)
    write_manifest(tmp_path / "b", replace(manifest, summary=went_on))
    assert comparison.warnings == ["B ended after 2 steps, out of memory: its figures end there"]
    assert Comparison(tmp_path / "a", tmp_path / "b").warnings == [
        "B does not fit the GPU: it went on beyond the GPU's memory, so its figures are complete"
    ]


def test_every_way_of_printing_starts_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    comparison = compared(tmp_path, {}, {"activation": 12 * MIB})
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(["compare", *paths]) == 0
    text = capsys.readouterr().out
    assert text.startswith(comparison.why)
    assert "layers.*.mlp x3" in text
    assert main(["compare", *paths, "--format", "markdown"]) == 0
    markdown = capsys.readouterr().out
    assert markdown == report_markdown(comparison_report(comparison))
    assert markdown.startswith("**+12.00 MiB at the peak: activations of layers.\\*.mlp")
    assert r"layers.\*.mlp x3" in markdown
    assert main(["compare", *paths, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(json.dumps(comparison_object(comparison), allow_nan=False))
    assert found["why"] == comparison.why


def test_a_run_that_never_used_the_gpu_is_compared_too(tmp_path: Path) -> None:
    nothing = HandMade()
    nothing.ended("exception", 1, "ValueError: x")
    comparison = Comparison(built(nothing, tmp_path / "a", "exception"), run_of(tmp_path / "b"))
    assert comparison.why.endswith("parameters of layers.*.mlp, +48.00 MiB, first seen in mm.default (init)")
    assert list(comparison.phases["what"].unique()) == ["appeared"]
    assert comparison.warnings[0].startswith("A ended after 0 steps, exception (ValueError: x)")
    assert "+73.00 MiB" in report_markdown(comparison_report(comparison))


def test_what_is_no_run_directory_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(run_of(tmp_path / "a")), str(tmp_path / "b")]) == 1
    assert capsys.readouterr().err.splitlines()[0].endswith("b does not exist")
