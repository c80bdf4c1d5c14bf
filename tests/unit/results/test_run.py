import json
from pathlib import Path

import pytest

import fakedist
from fakedist.cli import main
from fakedist.errors import JobError
from fakedist.rundir.directory import SNAPSHOT_NAME
from tests.unit.analysis.recorded import MIB
from tests.unit.report.handmade import ended_well, timed
from tests.unit.report.reading import page, read_page


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> fakedist.Run:
    return fakedist.open(ended_well(tmp_path_factory.mktemp("run") / "run"))


def test_the_tables_of_a_run_fit_its_summary(run: fakedist.Run) -> None:
    peak = run.memory.peak()
    assert list(peak.columns) == ["bytes", "category", "layer", "step", "phase", "operation", "line"]
    assert int(peak["bytes"].sum()) == run.peak_allocated_bytes
    assert peak.iloc[0][["bytes", "category", "layer"]].tolist() == [96 * MIB, "parameter", "embed"]
    assert "/job/model.py:12 (forward)" in set(peak["line"])
    assert int(run.memory.by_category()["bytes"].sum()) == run.peak_allocated_bytes
    timeline = run.memory.timeline()
    top = timeline.loc[timeline["allocated_bytes"].idxmax()]
    assert top["allocated_bytes"] == run.peak_allocated_bytes
    assert (top["step"], top["phase"]) == (run.summary.peak_step, run.summary.peak_phase)
    assert len(run.memory.by_phase()) == len(run.summary.by_phase)
    folded = run.layers().set_index("name")
    assert folded.loc["layers.0-2.mlp", ["num_repeats", "peak_parameter_bytes"]].tolist() == [3, 48 * MIB]
    assert "layers.1.mlp" in set(run.layers(fold=False)["name"])
    assert run.collectives()["num_calls"].tolist() == [1234, 1]
    assert (run.time, run.summary.time) == (None, None)


def test_a_run_says_what_it_is(run: fakedist.Run) -> None:
    assert repr(run).splitlines()[1:-1] == [
        *("  rank: 1 of 8", "  device: virtual: NVIDIA H100 80GB HBM3", "  outcome: stopped, 2 steps"),
        *("  peak_allocated: 202.49 MiB", "  peak_reserved: 1.00 GiB"),
    ]
    assert "verdict: fits (2 steps recorded; validation and saving did not run), headroom 79.00 GiB" in repr(run)
    hostile = fakedist.open(run.path)
    hostile.device = "<script>"
    assert "&lt;script&gt;" in hostile._repr_html_()
    assert "<script>" not in hostile._repr_html_()


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


def test_a_snapshot_has_the_memory_of_its_run_and_no_part_that_needs_steps(run: fakedist.Run) -> None:
    snapshot = fakedist.open(run.path / SNAPSHOT_NAME)
    assert (snapshot.by_category, snapshot.time, snapshot.device) == (None, None, "cuda:0")
    with pytest.raises(fakedist.RunDirectoryError, match="no table 'phases'"):
        snapshot.table("phases")
    with pytest.raises(fakedist.RunDirectoryError, match="no table 'phases'"):
        snapshot.memory.by_phase()
    assert snapshot.peak_allocated_bytes == run.peak_allocated_bytes
    assert snapshot.summary.peak_reserved_bytes == run.summary.peak_reserved_bytes
    columns = ["bytes", "alloc_event", "free_event", "at_peak"]
    assert snapshot.table("blocks")[columns].equals(run.table("blocks")[columns])
    assert len(snapshot.memory.peak()) == len(run.memory.peak())
    assert len(snapshot.memory.timeline()) == len(run.memory.timeline())
    assert repr(snapshot.memory).count("\n") == 2  # no phase, no categories
    assert "202.49 MiB" in snapshot._repr_html_()


def test_a_snapshot_is_shown_in_every_format(run: fakedist.Run, capsys: pytest.CaptureFixture[str]) -> None:
    for form, wanted in (("text", "202.49 MiB"), ("markdown", "allocated: 202.49 MiB"), ("csv", "name,")):
        assert main(["report", str(run.path / SNAPSHOT_NAME), "--format", form]) == 0
        assert wanted in capsys.readouterr().out
    assert main(["report", str(run.path / SNAPSHOT_NAME), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["peak_phase"], found["by_phase"], found["layers"], found["rank"]) == ("", [], [], None)


def test_a_snapshots_page_has_the_memory_half_and_no_word_of_the_rest(run: fakedist.Run) -> None:
    found = read_page(page(fakedist.open(run.path / SNAPSHOT_NAME)))
    assert found.figures["peak_allocated"] == "202.49 MiB"
    assert set(found.tables) >= {"lines", "blocks"}
    assert not {"layer-table", "calls", "phases", "categories"} & set(found.tables)
    assert any(row and row[0].endswith("model.py:12 (forward)") for row in found.tables["lines"])


def test_a_hostile_snapshot_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.pickle").write_bytes(b"cos\nsystem\n(S'touch made'\ntR.")
    assert main(["report", str(tmp_path / "x.pickle")]) == 1
    assert "tries to run os.system" in capsys.readouterr().err


def test_a_table_that_no_run_has_is_refused_with_those_there_are(run: fakedist.Run) -> None:
    with pytest.raises(JobError, match="no table is called 'memory'") as refused:
        run.table("memory")
    assert refused.value.hint.startswith("tables are asleep, blocks, ")
