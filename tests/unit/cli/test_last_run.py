"""The run that a command without a name takes, and the pages that a served page leads to."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from fakedist.cli.output import linked_page, run_or_last
from tests.unit.report.two_runs import run_of


def wrote(path: Path, at: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.utime(path, (at, at))


def test_the_last_of_any_kind_is_taken_and_a_single_run_where_one_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wrote(Path("single/run.json"), 10)
    assert run_or_last(None) == Path("single")
    wrote(Path("ranks/rank0/run.json"), 20)
    assert run_or_last(None) == Path("ranks/rank0")  # one rank alone is a run
    wrote(Path("ranks/rank64/run.json"), 30)
    assert run_or_last(None) == Path("ranks")
    assert run_or_last(None, is_single=True) == Path("ranks/rank64")
    wrote(Path("sweep/sweep.json"), 5)
    assert run_or_last(None) == Path("ranks")
    wrote(Path("sweep/journal.jsonl"), 40)
    assert run_or_last(None) == Path("sweep")
    wrote(Path(".fakedist/train-rank0of8/run.json"), 50)
    assert run_or_last(None) == Path(".fakedist/train-rank0of8")
    for rank in (0, 64):
        wrote(Path(f".fakedist/train-ranks0-64of128/rank{rank}/run.json"), 60)
    assert run_or_last(None) == Path(".fakedist/train-ranks0-64of128")
    monkeypatch.chdir("ranks")
    assert run_or_last(None) == Path("rank64")


def test_a_served_page_leads_to_runs_below_it_and_nowhere_else(tmp_path: Path) -> None:
    job = tmp_path / "job"
    run_of(job / "rank0")
    for name in ("runs/0af/rank4", "runs/0af/other"):
        shutil.copytree(job / "rank0", job / name)
    run_of(tmp_path / "rank9")
    (job / "rank1").symlink_to(tmp_path / "rank9")
    for name in ("rank0", "runs/0af/rank4"):
        assert 'id="verdict"' in (linked_page(job, f"{name}/report.html") or "")
    for address in ("rank1/report.html", "rank2/report.html", "../rank9/report.html", "runs/0af/other/report.html"):
        assert linked_page(job, address) is None
    assert linked_page(job, "rank0/run.json") is None
    (job / "rank0/run.json").write_text("{}")
    assert linked_page(job, "rank0/report.html") is None
