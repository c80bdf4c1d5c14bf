"""Decisions of the page's sections: their rows, widths of bars, and when a section is left out."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakedist.analysis.layer_table import fold_layers, fold_table
from fakedist.report.page.run_page import page
from fakedist.report.page.sections import (
    advice_section,
    communication_section,
    holders,
    layers_section,
    reserved_section,
    step_figure,
    verdict_section,
)
from fakedist.report.text.memory_sheets import HeldLine
from fakedist.results.building import build_tables
from fakedist.results.opening import open_run
from fakedist.results.run import Run
from tests.unit.analysis.recorded import GIB, MIB, HandMade, wrote_nothing
from tests.unit.report.handmade import built, ended_well, summary_of_nothing, timed


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return open_run(ended_well(tmp_path_factory.mktemp("runs") / "run"))


def test_the_bar_of_the_verdict_is_the_larger_of_the_gpu_and_what_is_reserved(run: Run) -> None:
    held = {"peak_allocated_bytes": 30 * GIB, "by_category": {"parameter": 30 * GIB, "gradient": 0}}
    summary = replace(summary_of_nothing(), peak_reserved_bytes=40 * GIB, **held)  # type: ignore[arg-type]
    found: dict[str, Any] = verdict_section(run, summary)
    assert (found["share"], found["limit"], found["capacity"]) == ("50.0%", "", "80.00 GiB")
    assert [(part["name"], part["width"]) for part in found["parts"]] == [("parameter", "37.500%")]
    assert found["reserved_rest"] == {"text": "10.00 GiB", "width": "12.500%"}
    found = verdict_section(run, replace(summary, capacity_bytes=20 * GIB))
    assert (found["share"], found["limit"], found["parts"][0]["width"]) == ("200.0%", "50.000%", "75.000%")
    found = verdict_section(run, replace(summary, capacity_bytes=0))
    assert (found["share"], found["limit"], found["capacity"]) == ("", "", "")


def test_the_layer_and_the_line_that_hold_most_are_named_with_their_shares() -> None:
    summary = replace(summary_of_nothing(), peak_allocated_bytes=8 * GIB)
    assert holders(summary, None, []) == []
    (line,) = holders(summary, None, [HeldLine("train.py:7 (main)", 2 * GIB, 0, 3, ["activation"], [])])
    assert [line[key] for key in ("name", "text", "share")] == ["train.py:7 (main)", "2.00 GiB", "25.0%"]
    assert line["is_code"]


def test_of_very_many_layers_the_largest_are_shown_and_the_others_counted(tmp_path: Path) -> None:
    made = HandMade()
    for number in range(1_010):
        made.op("forward", 1, made.layer(f"odd{number}", "Linear"))
        made.alloc(number * MIB, 512 * (1 + number))
    found = open_run(built(made, tmp_path / "run"))
    layers = found.table("layers")
    section: dict[str, Any] = layers_section(found.summary, fold_table(layers, fold_layers(layers)), None)
    assert (len(section["rows"]), section["num_more"]) == (1_000, 11)  # one is what is outside of modules
    assert "more, in tables/layers.parquet" in page(found)
    assert section["rows"][0]["label"] == "odd10"
    assert [column["name"] for column in section["columns"]][:3] == ["total", "most", "own"]


def test_sections_without_figures_are_left_out(run: Run, tmp_path: Path) -> None:
    assert step_figure(run.summary) is None
    figure = step_figure(open_run(timed(tmp_path / "timed")).summary)
    assert figure is not None
    assert reserved_section(run) is not None
    assert communication_section(run, run.summary) is not None
    nothing = open_run(built_nothing(tmp_path / "nothing"))
    assert reserved_section(nothing) is None
    assert communication_section(nothing, nothing.summary) is None
    assert advice_section(nothing.summary, "/") == []


def test_groups_say_whether_they_leave_the_node(run: Run) -> None:
    section: dict[str, Any] = communication_section(run, run.summary)
    assert {group["name"]: group["text"] for group in section["groups"]} == {
        "default_pg": "8 ranks within one node; this one is 1",
        "tp": "2 ranks within one node; this one is 1",
    }


def built_nothing(directory: Path) -> Path:
    build_tables(run := wrote_nothing(directory))
    return run
