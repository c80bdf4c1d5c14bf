"""The host's clock of whole runs: bare steps see what the recorded step saw, and leave the recording as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fakedist.analysis.recording import read_recording
from tests.support.runs import Profiled, ProfileOnce

JOB = Path(__file__).parent / "jobs" / "host_clock.py"
RECORDED, BARE = 2, 4


def steps_of(run: Profiled) -> list[Any]:
    return [json.loads(line)[1] for line in run.finished.stderr.splitlines() if line.startswith("[")]


@pytest.fixture(scope="module")
def clocked(profile_once: ProfileOnce) -> Profiled:
    return profile_once(JOB, "100", options=("--json", "--steps", str(RECORDED)))


def test_a_run_has_the_hosts_time_of_each_launch(clocked: Profiled) -> None:
    clock, launches = read_recording(clocked.path).host_clock, clocked.table("launches")
    assert clock is not None
    assert clock.step == RECORDED
    assert 1 <= clock.num_repeats <= 3
    assert len(clock.dispatch_us) == 8 * len(launches)
    is_timed = launches["dispatch_us"].notna()
    assert is_timed.mean() > 0.9
    assert (launches["dispatch_us"][is_timed] >= 0).all()
    assert 0 < launches["dispatch_us"].sum() <= clock.step_us * (1 + clock.spread)
    assert 0 < clock.loading_us < clock.step_us <= clock.wall_us


def test_bare_steps_see_what_the_recorded_step_saw(clocked: Profiled) -> None:
    steps = steps_of(clocked)
    assert RECORDED + 1 <= len(steps) <= RECORDED + BARE
    assert steps[0] != steps[1]
    assert all(step == steps[RECORDED - 1] for step in steps[RECORDED:])


def test_bare_steps_change_nothing_that_is_recorded(clocked: Profiled, profile_once: ProfileOnce) -> None:
    options = ("--json", "--steps", str(RECORDED))
    without = profile_once(JOB, "100", options=options, env={"FAKEDIST_HOST_CLOCK": "0"})
    assert len(steps_of(without)) == RECORDED
    assert without.note("host_not_measured") == ""
    for name in ("blocks", "events", "frames", "stacks", "groups", "calls", "invented", "largest", "segments", "work"):
        bare, table = clocked.table(name), without.table(name)
        times = [column for column in table if column.endswith("_us")]  # on the clock of this machine
        assert bare.drop(columns=times).equals(table.drop(columns=times)), name


def test_a_script_that_ends_by_itself_has_a_note_instead(profile_once: ProfileOnce) -> None:
    run = profile_once(JOB, "2", options=("--json", "--steps", "2"))
    assert "was not measured, and is estimated" in run.note("host_not_measured")
    assert read_recording(run.path).host_clock is None
    assert run.table("launches")["dispatch_us"].isna().all()


def test_a_script_that_ends_in_a_bare_step_was_stopped_all_the_same(profile_once: ProfileOnce) -> None:
    run = profile_once(JOB, "3", options=("--json", "--steps", "2"))
    assert run.finished.code == 0
    assert json.loads((run.path / "run.json").read_text())["exit"]["outcome"] == "stopped"
    assert run.note("host_not_measured").endswith("the script ended before such a step did")
