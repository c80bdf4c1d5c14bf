"""A plan for less memory runs, and its recording is what was replayed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ProfileOnce, RunFakedist
from tests.extras.plan.runs.test_other_machine import recorded


def test_the_best_plan_is_recorded_and_needs_what_was_replayed(
    profile_once: ProfileOnce, run_fakedist: RunFakedist, tmp_path: Path
) -> None:
    run = recorded(profile_once, "h100", 8, "--num-layers", "16", "--checkpoint", "none")
    reserved, allocated = (run.summary[f"peak_{name}_bytes"] for name in ("reserved", "allocated"))
    size = f"{allocated + run.summary['estimated_outside']['high_bytes']}B"
    assert reserved > allocated
    finished = run_fakedist(
        "plan", run.path, "--fit", size, "--apply", "checkpoint=--checkpoint full", "--json", cwd=tmp_path
    )
    plans = finished.json()["plans"]
    (ran,) = (plan for plan in plans if plan["changes"][0]["key"] == "checkpoint")
    assert ran["run"], f"the plan was not recorded: {ran}\n{finished.stderr}"
    assert "--checkpoint full" in ran["command"]
    assert ran["need"]["low_bytes"] == pytest.approx(ran["recorded_allocated_bytes"], rel=0.03)
    assert finished.json()["chosen"] is not None
    assert run_fakedist("plan", run.path, "--fit", "80GiB", cwd=tmp_path).stdout.startswith("Fits 80.00 GiB as it is")
