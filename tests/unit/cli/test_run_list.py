"""`fakedist runs`: what it lists, and what it deletes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fakedist.cli.entry import main
from fakedist.rundir.directory import UNNAMED_NAME
from fakedist.sweep.sweep_directory import JOURNAL_NAME, About, SweepJournal, write_about
from tests.unit.report.two_runs import run_of
from tests.unit.sweep.rows_by_hand import row


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path(".fakedist/train-ranks0-1of8").mkdir(parents=True)
    (run_of(Path(".fakedist/train-rank0of8")) / UNNAMED_NAME).touch()
    run_of(Path(".fakedist/train-ranks0-1of8/rank0"))
    run_of(Path(".fakedist/train-ranks0-1of8/rank1"), ended="exception")
    Path(".fakedist/train-ranks0-1of8", UNNAMED_NAME).touch()
    run_of(Path(".fakedist/mine"))
    run_of(Path("fakedist-train-rank0of8"))
    return tmp_path


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, object]]:
    assert main(["runs", "--json", *arguments]) == 0
    return {run["path"]: run for run in json.loads(capsys.readouterr().out)["runs"]}


def test_runs_are_listed_with_job_verdict_and_size_wherever_they_lie(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("swept").mkdir()
    about = About(command=[], program="jobs/train.py", axes={"tp": [1]}, ranks="0", headroom=0.05, points=None)
    write_about(Path("swept"), about)
    journal = SweepJournal(Path("swept", JOURNAL_NAME))
    journal.add_row(row(1000.0, tp=1))
    journal.close()
    runs = listed(capsys)
    assert runs.keys() == {
        ".fakedist/train-rank0of8",
        ".fakedist/train-ranks0-1of8",
        ".fakedist/mine",
        "fakedist-train-rank0of8",
        "swept",
    }
    single = runs[".fakedist/train-rank0of8"]
    assert (single["job"], single["verdict"]) == ("train.py, rank 1 of 8", "fits")
    files = [path for path in Path(".fakedist/train-rank0of8").rglob("*") if path.is_file()]
    assert single["size_bytes"] == sum(path.stat().st_size for path in files) > 0
    assert runs[".fakedist/train-ranks0-1of8"]["verdict"] == "1 fits, 1 fits so far, exception"
    assert (runs["swept"]["job"], runs["swept"]["verdict"]) == ("sweep of train.py", "1 of 1 points fit")


def test_prune_lists_first_and_deletes_with_yes_what_nobody_named(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", "--prune"]) == 0
    text = capsys.readouterr().out
    assert "to delete 2 directories" in text
    assert "stays: named with -o" in text
    assert "stays: not in .fakedist" in text
    assert Path(".fakedist/train-rank0of8/run.json").exists()
    listed(capsys, "--prune", "--yes")
    assert {path.name for path in Path(".fakedist").iterdir()} == {"mine"}
    assert Path("fakedist-train-rank0of8/run.json").exists()
    assert main(["runs", "--yes"]) == 2
    assert "--yes is for --prune" in capsys.readouterr().err


def test_an_output_option_keeps_what_it_names(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--world-size=8", "--rank=0", "-o", ".fakedist/train-rank0of8", "none.py"]) == 2
    capsys.readouterr()
    assert listed(capsys)[".fakedist/train-rank0of8"]["kept"] == "named with -o"


def test_a_run_is_taken_by_its_name_alone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "mine", "train-rank0of8"]) == 0
    assert str(here / ".fakedist/mine") in capsys.readouterr().out
    assert main(["report", "other"]) == 1
    assert "other does not exist" in capsys.readouterr().err


def test_where_nothing_ran_it_says_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 0
    assert "no runs here: fakedist profile makes one" in capsys.readouterr().out
