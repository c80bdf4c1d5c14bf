from pathlib import Path

import pytest

import fakedist
from tests.unit.analysis.recorded import MIB
from tests.unit.report.handmade import ended_well, timed


@pytest.fixture
def run(tmp_path: Path) -> fakedist.Run:
    return fakedist.open(ended_well(tmp_path / "run"))


def test_the_blocks_of_the_peak_add_up_to_it(run: fakedist.Run) -> None:
    peak = run.memory.peak()
    assert list(peak.columns) == ["bytes", "category", "layer", "step", "phase", "operation", "line"]
    assert int(peak["bytes"].sum()) == run.peak_allocated_bytes
    assert peak.iloc[0][["bytes", "category", "layer"]].tolist() == [96 * MIB, "parameter", "embed"]
    assert "/job/model.py:12 (forward)" in set(peak["line"])
    assert int(run.memory.by_category()["bytes"].sum()) == run.peak_allocated_bytes


def test_layers_fold_or_stay_apart(run: fakedist.Run) -> None:
    folded = run.layers().set_index("name")
    assert folded.loc["layers.0-2.mlp", "num_repeats"] == 3
    assert folded.loc["layers.0-2.mlp", "peak_parameter_bytes"] == 48 * MIB
    assert "layers.1.mlp" in set(run.layers(fold=False)["name"])


def test_the_timeline_has_the_peak_where_the_summary_has_it(run: fakedist.Run) -> None:
    timeline = run.memory.timeline()
    top = timeline.loc[timeline["allocated_bytes"].idxmax()]
    assert top["allocated_bytes"] == run.peak_allocated_bytes
    assert (top["step"], top["phase"]) == (run.summary.peak_step, run.summary.peak_phase)
    assert len(run.memory.by_phase()) == len(run.summary.by_phase)


def test_collectives_are_a_table(run: fakedist.Run) -> None:
    assert run.collectives()["num_calls"].tolist() == [1234, 1]


def test_a_run_says_what_it_is(run: fakedist.Run) -> None:
    assert "rank: 1 of 8" in repr(run)
    assert "peak_allocated: 202.49 MiB" in repr(run)
    assert "headroom: 79.00 GiB" in repr(run)
    run.device = "<script>"
    assert "&lt;script&gt;" in run._repr_html_()
    assert "<script>" not in run._repr_html_()


def test_memory_and_time_say_what_they_hold(run: fakedist.Run, tmp_path: Path) -> None:
    assert repr(run.memory).splitlines() == [
        "RunMemory",
        "  peak_allocated: 202.49 MiB, step 1, backward",
        "  peak_reserved: 1.00 GiB",
        "  parameter: 144.00 MiB",
        "  gradient: 32.00 MiB",
        "  activation: 26.00 MiB",
        "  communication: 500.00 KiB",
    ]
    assert repr(fakedist.open(timed(tmp_path / "timed")).time).splitlines() == [
        "RunTime",
        "  step: 3, 1.00 ms, estimated",
        "  without: 2 of 2 collectives",
        "  gemm: 549 µs",
        "  elementwise: 36.0 µs",
        "  optimizer: 20.0 µs",
    ]
    snapshot = fakedist.open(run.path / "memory_snapshot.pickle")
    assert repr(snapshot.memory).count("\n") == 2  # no phase, no categories


def test_a_snapshot_has_no_part_that_needs_steps(run: fakedist.Run) -> None:
    snapshot = fakedist.open(run.path / "memory_snapshot.pickle")
    assert (snapshot.by_category, snapshot.time, snapshot.device) == (None, None, "cuda:0")
    with pytest.raises(fakedist.RunDirectoryError, match="no table 'phases'"):
        snapshot.table("phases")
    assert snapshot.memory is not None
    with pytest.raises(fakedist.RunDirectoryError, match="no table 'phases'"):
        snapshot.memory.by_phase()


def test_a_run_without_a_timed_step_has_no_time(run: fakedist.Run) -> None:
    assert run.time is None
    assert run.summary.time is None


def test_a_snapshot_opens_too(run: fakedist.Run) -> None:
    snapshot = fakedist.open(run.path / "memory_snapshot.pickle")
    assert snapshot.peak_allocated_bytes == run.peak_allocated_bytes
    assert len(snapshot.memory.peak()) == len(run.memory.peak())
    assert len(snapshot.memory.timeline()) == len(run.memory.timeline())
    assert "202.49 MiB" in snapshot._repr_html_()
