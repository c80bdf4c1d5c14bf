"""Two runs side by side: figures that add up, the one line that says why, and every way of printing them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fakedist.cli import main
from fakedist.report.content.comparison import comparison_object, comparison_report
from fakedist.report.render.markdown import report_markdown
from fakedist.report.render.terminal import render
from fakedist.results.comparison import Comparison
from fakedist.rundir.directory import load_manifest, write_manifest
from fakedist.rundir.outcome import BEYOND_CAPACITY
from tests.unit.analysis.recorded import KIB, MIB, HandMade
from tests.unit.report.handmade import built
from tests.unit.report.two_runs import run_of

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
