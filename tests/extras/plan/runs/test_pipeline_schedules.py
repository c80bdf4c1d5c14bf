"""Schedules planned from one recording are what recordings of those schedules show."""

import json
from pathlib import Path

import pytest

from fakedist.results.job_time import time_job
from tests.conftest import ROOT, RunFakedist

SCRIPT = ROOT / "tests" / "integration" / "jobs" / "pipeline_model.py"
#: The host is left out: other work on this machine would make one recording's slower than another's.
HOST = "0.01"


def recorded(run_fakedist: RunFakedist, folder: Path, schedule: str) -> list[Path]:
    """The runs of both ranks of a pipeline of four layers."""
    job = ("--world-size", "4", "--rank", "stages", "--device", "virtual", "--gpu", "h100-80g", "-o", schedule)
    finished = run_fakedist("profile", *job, SCRIPT, schedule, "8", "4", cwd=folder)
    assert finished.code == 0, finished.stderr
    return [folder / schedule / f"rank{rank}" for rank in (0, 1)]


@pytest.mark.nightly
def test_schedules_are_what_their_recordings_show(run_fakedist: RunFakedist, tmp_path: Path) -> None:
    runs = {name: recorded(run_fakedist, tmp_path, name) for name in ("ZBVZeroBubble", "1F1B", "Interleaved1F1B")}
    made = run_fakedist("plan", *runs["ZBVZeroBubble"], "--pipeline", "--host", HOST, "--json").json()
    plans = {plan["schedule"]: plan for plan in made["plans"] if not plan["balanced"]}
    assert all(plan["known"] for plan in plans.values())
    for name, paths in runs.items():
        job = time_job(paths, host=HOST).summary
        assert plans[name]["step_us"] == pytest.approx(job.step_us, rel=0.05), name
        peaks = [stage.peak_allocated_bytes for stage in job.stages]
        assert plans[name]["peak_allocated_bytes"] == pytest.approx(peaks, rel=0.03), name


@pytest.mark.long
def test_a_recording_of_whole_backwards_bounds_the_schedules_that_divide_them(
    run_fakedist: RunFakedist, tmp_path: Path
) -> None:
    runs = recorded(run_fakedist, tmp_path, "1F1B")
    job = time_job(runs, host=HOST).summary
    finished = run_fakedist("plan", tmp_path / "1F1B", "--pipeline", "--host", HOST, "--json")
    plans = {plan["schedule"]: plan for plan in json.loads(finished.stdout)["plans"] if not plan["balanced"]}
    assert {name for name, plan in plans.items() if not plan["known"]} == {
        *("InterleavedZeroBubble", "ZB-H1", "ZBVZeroBubble", "DualPipeV")
    }
    assert plans["1F1B"]["step_us"] == pytest.approx(job.step_us, rel=0.05)
    page = run_fakedist("plan", tmp_path / "1F1B", "--pipeline", "--format", "html")
    assert "Balanced layouts, to type" in page.stdout
    refused = run_fakedist("plan", runs[0], "--pipeline")
    assert "1 is missing" in refused.stderr
