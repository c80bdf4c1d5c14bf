"""Calls of a step with their bytes, where they run and at once with what: in a comparison's text, on a run's page."""

import re
from pathlib import Path

import pytest
from rich.console import Console

from fakedist.errors import RunDirectoryError
from fakedist.report.content.change_sheets import calls_at_once
from fakedist.report.content.comparison import comparison_report
from fakedist.report.render.terminal import render
from fakedist.results.comparison import Comparison
from fakedist.results.opening import open_run
from tests.unit.analysis.recorded import MIB, HandMade
from tests.unit.report.handmade import built
from tests.unit.report.reading import page, read_page

SIDE = 77


def run_of(directory: Path, gather_group: int) -> Path:
    """A step that gathers twice and reduce-scatters once, on a stream of its own, of 64 ranks each."""
    made = HandMade()
    root = made.layer("(Net)", "Net")
    made.op("init", 0)
    made.alloc(0, MIB)
    forward = made.op("forward", 1, root)
    made.alloc(2 * MIB, MIB)
    backward = made.op("backward", 1, root)
    made.region(forward, forward)
    made.free(2 * MIB, MIB)
    made.op("optimizer", 1)
    made.step(1)
    ranks = (0, 64)
    made.record("groups", rows=[(0, "0", "default_pg", ranks, 1, 5, "nccl"), (1, "1", "gather", ranks, 1, 5, "nccl")])
    calls = [("all_gather_into_tensor", gather_group, MIB, 64 * MIB, True, 0, forward, (1, "forward"))] * 2
    calls += [("reduce_scatter_tensor", 0, 64 * MIB, MIB, False, SIDE, backward, (1, "backward"))]
    rows = [
        (number, name, group, read, written, "bfloat16", waits, stream, op, made.scopes[*when, root, False], -1, 0, 0)
        for number, (name, group, read, written, waits, stream, op, when) in enumerate(calls)
    ]
    made.record("calls", rows=rows)
    made.ended()
    return built(made, directory)


@pytest.mark.parametrize("width", [80, 160])
def test_a_comparison_shows_calls_bytes_streams_and_overlap_of_both_at_any_width(tmp_path: Path, width: int) -> None:
    console = Console(width=width, record=True, quiet=False)
    with console.capture() as shown:
        comparison = Comparison(run_of(tmp_path / "a", 0), run_of(tmp_path / "b", 1))
        render(comparison_report(comparison), console)
    lines = shown.get().split("What can run at once in a step, simulated\n")[1].splitlines()
    assert lines[0].split() == ["group", "operation", "calls", "bytes", "stream", "at", "once", "with"]
    told = [line.split()[:6] for line in lines[1:] if line.startswith(("A ", "B "))]
    assert told == [
        ["A", "default_pg", "all_gather", "2", "130.00", "MiB"],
        ["A", "default_pg", "reduce_scatter", "1", "65.00", "MiB"],
        ["B", "gather", "all_gather", "2", "130.00", "MiB"],
        ["B", "default_pg", "reduce_scatter", "1", "65.00", "MiB"],
    ]
    assert "columns not shown" not in " ".join(lines)
    if width > 100:
        assert [re.split(r"\s{2,}", line)[-2:] for line in lines[1:5]] == [
            ["its group's", "compute"],
            ["side 1", "compute"],
            ["its group's", "compute, default_pg reduce_scatter"],
            ["side 1", "compute, gather all_gather"],
        ]


def test_the_page_shows_where_the_calls_of_a_step_run_and_at_once_with_what(tmp_path: Path) -> None:
    shown = read_page(page(open_run(run_of(tmp_path / "run", 1))))
    assert shown.tables["streams"] == [
        ["group", "operation", "calls", "bytes in", "bytes out", "stream", "at once with"],
        ["gather", "all_gather", "2", "2.00 MiB", "128.00 MiB", "its group's", "compute, default_pg reduce_scatter"],
        ["default_pg", "reduce_scatter", "1", "64.00 MiB", "1.00 MiB", "side 1", "compute, gather all_gather"],
    ]


def test_a_run_that_lacks_a_table_is_damaged(tmp_path: Path) -> None:
    new, damaged = run_of(tmp_path / "a", 0), run_of(tmp_path / "b", 1)
    (damaged / "tables/spans.parquet").unlink()
    for read in (lambda: page(open_run(damaged)), lambda: calls_at_once(Comparison(new, damaged))):
        with pytest.raises(RunDirectoryError, match="b has no table spans"):
            read()
