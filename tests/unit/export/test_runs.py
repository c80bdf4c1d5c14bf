from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fakedist.cli import main
from fakedist.errors import JobError
from fakedist.export.chakra import TracedGroup, message_classes
from fakedist.export.runs import _Groups, export_chakra
from fakedist.results.opening import open_run
from tests.unit.export.test_chakra import attributes, read
from tests.unit.results.test_repricing import priced_run
from tests.unit.results.test_what_ifs import run  # noqa: F401


def test_the_command_writes_a_trace_and_its_groups_and_says_what_to_type(
    run: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
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


def test_json_has_what_was_written(
    run: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["export", str(run), "-o", str(tmp_path), "--format", "chakra", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["groups"] == {"1": "default_pg", "2": "tp"}
    (trace,) = found["traces"]
    assert (trace["num_nodes"], Path(trace["file"]).exists()) == ({"kernels": 2, "collectives": 3}, True)


def test_existing_files_are_kept_unless_forced(
    run: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["export", str(run), "-o", str(tmp_path), "--format", "chakra", "--name", "job"]
    (tmp_path / "job.groups.json").write_text("mine")
    assert main(arguments) == 2
    assert "job.groups.json exists" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["job.groups.json"]
    assert main([*arguments, "--force"]) == 0


def test_a_place_that_is_no_directory_a_rank_given_twice_and_a_run_without_launches_are_errors(
    run: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
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
    run: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message_classes.cache_clear()
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    assert main(["export", str(run), "-o", str(tmp_path), "--format", "chakra"]) == 1
    assert "pip install 'fakedist[chakra]'" in capsys.readouterr().err


def test_runs_of_two_jobs_are_refused(run: Path, tmp_path: Path) -> None:  # noqa: F811
    first, other = open_run(run), open_run(run)
    other.summary = replace(other.summary, rank=2, world_size=16)
    with pytest.raises(JobError, match=r"these are not ranks of one job: .* has 8 ranks, .* has 16"):
        export_chakra([first, other], tmp_path)


def test_a_group_has_one_number_on_all_of_its_ranks(run: Path) -> None:  # noqa: F811
    class Other:
        """A rank that made two groups of the same ranks, and one of which it knows nothing."""

        def table(self, name: str) -> object:
            import pandas as pd

            rows = [("9", "", "0-1"), ("10", "again", "0-1"), ("11", "", "0-7"), ("12", "", "")]
            return pd.DataFrame(rows, columns=["name", "description", "ranks"])

    numbering = _Groups()
    first = numbering.of_run(open_run(run))
    assert [(each.number, each.name) for each in first] == [(1, "default_pg"), (2, "tp")]
    found = numbering.of_run(Other())  # type: ignore[arg-type]
    assert [each.number for each in found] == [2, 3, 1, 0]
    assert found[3] == TracedGroup(0, "12", ())
    assert numbering.names == {1: "default_pg", 2: "tp", 3: "again"}
