from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fakedist.cli import main
from fakedist.errors import JobError
from fakedist.extras.chakra.chakra import export_chakra, message_classes
from fakedist.results.opening import open_run
from fakedist.rundir.tables import read_table, write_table
from tests.extras.chakra.test_chakra import attributes, read
from tests.unit.results import test_what_ifs
from tests.unit.results.test_repricing import priced_run

run = test_what_ifs.run


def test_the_command_writes_a_trace_and_its_groups_and_says_what_to_type(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "made" / "here"
    assert main(["export", str(run), "-o", str(target), "--format", "chakra", "--name", "job"]) == 0
    out, err = capsys.readouterr()
    assert f"{target}/job.1.et: 5 nodes: 2 kernels, 3 collectives" in out
    assert f"--workload-configuration={target}/job --comm-group-configuration={target}/job.groups.json" in out
    assert "ASTRA-sim reads a trace of each of the 8 ranks: 7 are missing" in err
    assert json.loads((target / "job.groups.json").read_text()) == {"1": list(range(8)), "2": [0, 1]}
    nodes = read(target / "job.1.et")[1]
    calls = [attributes(node) for node in nodes if node.type == 7]
    assert [call["pg_name"] for call in calls] == ["1", "2", "2"]
    kernels = open_run(run).priced_for().table("kernels").sort_values("launch")
    assert [node.duration_micros for node in nodes] == kernels["duration_us"].round().astype(int).tolist()


def test_existing_files_are_kept_unless_forced(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["export", str(run), "-o", str(tmp_path), "--format", "chakra", "--name", "job"]
    (tmp_path / "job.groups.json").write_text("mine")
    assert main(arguments) == 2
    assert "job.groups.json exists" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["job.groups.json"]
    assert main([*arguments, "--force", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["groups"] == {"1": "default_pg", "2": "tp"}
    (trace,) = found["traces"]
    assert (trace["num_nodes"], Path(trace["file"]).exists()) == ({"kernels": 2, "collectives": 3}, True)


def test_a_place_that_is_no_directory_a_rank_given_twice_and_a_run_without_launches_are_errors(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["export", str(run), "-o", str(tmp_path / "file"), "--format", "chakra"]) == 2
    assert main(["export", str(run), str(run), "-o", str(tmp_path), "--format", "chakra"]) == 2
    assert "are both rank 1" in capsys.readouterr().err
    priced_run(tmp_path / "empty")
    assert main(["export", str(tmp_path / "empty"), "-o", str(tmp_path / "out"), "--format", "chakra"]) == 1
    assert "has no launches to price" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_without_protobuf_it_says_what_to_install(
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message_classes.cache_clear()
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    assert main(["export", str(run), "-o", str(tmp_path), "--format", "chakra"]) == 1
    assert "pip install 'fakedist[chakra]'" in capsys.readouterr().err


def test_runs_of_two_jobs_are_refused(run: Path, tmp_path: Path) -> None:
    first, other = open_run(run), open_run(run)
    other.summary = replace(other.summary, rank=2, world_size=16)
    with pytest.raises(JobError, match=r"these are not ranks of one job: .* has 8 ranks, .* has 16"):
        export_chakra([first, other], tmp_path)


def test_a_group_has_one_number_on_all_of_its_ranks(run: Path, tmp_path: Path) -> None:
    """The second rank made two groups of the same ranks, in another order, and one of which it knows nothing."""
    shutil.copytree(run, tmp_path / "other")
    known = read_table(run, "groups").to_pylist()[0]
    names = [("9", "", "0-1"), ("10", "again", "0-1"), ("11", "", "0-7"), ("12", "", "")]
    rows = [
        known | {"group": at, "name": name, "description": about, "ranks": ranks}
        for at, (name, about, ranks) in enumerate(names)
    ]
    write_table(tmp_path / "other", "groups", {column: [row[column] for row in rows] for column in known})
    other = open_run(tmp_path / "other")
    other.summary = replace(other.summary, rank=2)
    found = export_chakra([other, open_run(run)], tmp_path / "out")
    assert found.names == {1: "default_pg", 2: "tp", 3: "again"}
    assert json.loads(found.groups.read_text()) == {"1": list(range(8)), "2": [0, 1], "3": [0, 1]}
    nodes = {trace.path.suffixes[-2]: read(trace.path)[1] for trace in found.traces}
    numbers = {
        rank: [attributes(node).get("pg_name") for node in made if node.type == 7] for rank, made in nodes.items()
    }
    assert numbers == {".1": ["1", "2", "2"], ".2": ["2", "3", "3"]}
