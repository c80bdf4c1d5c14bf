"""The page of several ranks of a job: with the step of the whole job, and without one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fakedist.cli import main
from fakedist.report.content.job import RankRow, job_report, runs_report, step_report
from fakedist.report.render.html import report_page
from fakedist.results.job_time import JobRuns, open_job_runs
from fakedist.results.opening import open_run
from fakedist.results.run import Run, RunTables
from fakedist.rundir.notes import Note
from fakedist.rundir.outcome import Ending, Outcome
from tests.unit.report.content.test_job import STEP, faster, placed
from tests.unit.report.reading import read_page
from tests.unit.report.two_runs import run_of

HOSTILE = "<script>alert(1)</script><img src=x>{{ 7 * 7 }}"


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    """A directory with the runs of ranks 0 and 4, of which only the second has a page."""
    run_of(tmp_path / "runs" / "rank0", gemm_us=100, rank=0)
    run_of(tmp_path / "runs" / "rank4", gemm_us=100, activation=12 << 20, rank=4)
    (tmp_path / "runs" / "rank4" / "report.html").touch()
    return tmp_path / "runs"


def job_page(found: JobRuns, folder: Path | None = None) -> str:
    return report_page(runs_report(found, folder=folder))


def test_the_page_has_the_step_the_ranks_and_the_lanes_and_fetches_nothing(ranks: Path) -> None:
    text = job_page(placed(ranks), ranks)
    page = read_page(text)
    said = " ".join(page.words)
    for part in ("ranks 0, 4 of 8", "90 % interval 90.0 ms to 120.0 ms", "rank 4 sets the pace", "MFU 41.7%"):
        assert part in said, part
    heading, first, last = next(rows for name, rows in page.tables.items() if name.startswith("sheet-"))
    assert dict(zip(heading, last, strict=True))["peak reserved"] == "81.00 GiB"
    assert dict(zip(heading, first, strict=True))["computes"] == "80.0 ms"
    job = placed(ranks).job
    assert job is not None
    *_, what_ifs = read_page(report_page(step_report(job, {"bandwidth=2x": faster()}))).tables.values()
    assert what_ifs[1][:2] == ["bandwidth=2x", "96.0 ms"]
    assert {row[0] for row in page.tables["ranks-table"][1:]} == {"0", "4"}
    assert [address for address in page.fetched if not address.startswith(("#", "data:"))] == ["rank4/report.html"]
    assert page.handlers == []
    assert "default-src 'none'; script-src 'sha256-" in text


def test_ranks_that_are_no_whole_pipeline_have_a_page_that_says_so(ranks: Path) -> None:
    found = open_job_runs(ranks)
    assert found.job is None
    page = read_page(job_page(found))
    assert "73.00 MiB to 85.00 MiB" in page.words
    assert f"There is no step of the whole job: {found.why_no_step}." in page.words
    assert [row[3] for row in page.tables["ranks-table"]] == ["peak allocated", "73.00 MiB", "85.00 MiB"]
    assert "step" not in page.fetched


def test_a_rank_without_a_run_is_in_the_table_and_the_notes(ranks: Path) -> None:
    lost = RankRow(9, None, Ending(Outcome.ERROR, 1, f"no room {HOSTILE}"))
    page = read_page(report_page(job_report([lost], 8, placed(ranks))))
    assert page.tables["ranks-table"][-1][:2] == ["9", "error"]
    assert f"Rank 9 did not start: no room {HOSTILE}" in page.words


def test_the_verdict_is_that_of_the_rank_that_fits_least(ranks: Path, tmp_path: Path) -> None:
    fits = read_page(job_page(open_job_runs(ranks))).figures["verdict"]
    assert fits.startswith("Each of these 2 ranks fits; rank 0 has least headroom: ")
    full = open_run(run_of(tmp_path / "full", rank=7))
    full = Run(full.path, full.manifest, replace(full.summary, capacity_bytes=1 << 20), RunTables(full.path))
    text = job_page(JobRuns(None, [*open_job_runs(ranks).runs, full]))
    assert read_page(text).figures["verdict"].startswith("Rank 7 does not fit: it takes ")


def test_text_of_a_run_stays_text(ranks: Path) -> None:
    hostile = replace(STEP, fabric=HOSTILE, notes=[Note("note", f"</ul>{HOSTILE}")])
    text = job_page(placed(ranks, hostile))
    assert "<img" not in text
    assert "<script>alert" not in text
    assert "49" not in re.findall(r"fabric ([^<]*)<", text)[0]
    assert f"</ul>{HOSTILE}" in read_page(text).words


def test_a_directory_of_ranks_is_reported_and_viewed(
    ranks: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    assert main(["report", str(ranks)]) == 0
    printed = capsys.readouterr()
    assert "Ranks of 8: memory measured" in printed.out
    assert "wall" not in printed.out
    assert "There is no step of the whole job: " in printed.out
    assert main(["view", str(ranks)]) == 0
    assert capsys.readouterr().out == f"{(ranks / 'report.html').as_uri()}\n"
    assert "rank4/report.html" in read_page((ranks / "report.html").read_text()).fetched
    for form in ("json", "markdown", "html"):
        assert main(["report", str(ranks), "--format", form]) == 0
        assert "85.00 MiB" in (out := capsys.readouterr().out) or '"peak_allocated_bytes": 89128960' in out
    assert main(["report", str(ranks), "--full"]) == 2
    assert "are for one run" in capsys.readouterr().err


def test_a_page_of_somebody_else_is_not_replaced(
    ranks: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    (ranks / "report.html").write_text("mine")
    assert main(["view", str(ranks)]) == 0
    assert str(ranks) not in capsys.readouterr().out
    assert (ranks / "report.html").read_text() == "mine"
