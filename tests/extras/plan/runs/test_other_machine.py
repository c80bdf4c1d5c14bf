"""Plans for another machine are what a recording for that machine shows."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import ProfileOnce, RunFakedist
from tests.support.runs import ROOT, Profiled

SCRIPT = ROOT / "examples" / "llama_fsdp2.py"
JOB = ("--model", "debug", "--tp", "1", "--seq-len", "2048", "--steps", "2")


def recorded(profile_once: ProfileOnce, gpu: str, world_size: int, *arguments: str) -> Profiled:
    options = ("--json", "--steps", "2", "--gpu", gpu)
    return profile_once(SCRIPT, *JOB, *arguments, world_size=world_size, options=options)


def planned(run_fakedist: RunFakedist, run: Profiled, *options: str) -> dict[str, Any]:
    finished = run_fakedist("plan", run.path, *options, "--json")
    assert finished.code == 0, finished.stderr
    return finished.json()


def test_more_gpus_of_another_model_are_as_a_recording_for_them(
    profile_once: ProfileOnce, run_fakedist: RunFakedist
) -> None:
    here = recorded(profile_once, "h100", 8)
    there = recorded(profile_once, "b200", 32).summary
    plan = planned(run_fakedist, here, "--gpu", "b200", "--gpus", "32")
    (rank,) = plan["ranks"]
    assert plan["sharded"] == "parameters, gradients and optimizer states"
    assert rank["need"]["low_bytes"] == pytest.approx(there["peak_allocated_bytes"], rel=0.01)
    assert rank["need"]["high_bytes"] >= there["peak_reserved_bytes"]
    assert here.summary["peak_allocated_bytes"] > 1.01 * there["peak_allocated_bytes"], "shards are smaller there"
    outside = there["estimated_outside"]
    assert rank["outside_low_bytes"] <= outside["low_bytes"]
    assert outside["high_bytes"] <= rank["outside_high_bytes"]
    assert plan["tokens"] == [8 * 2048, 32 * 2048]
    kernels = there["time"]["busy_us"]
    assert plan["there"]["value"] >= 0.9 * kernels


def test_the_step_without_recomputation_is_that_of_a_recording_without(
    profile_once: ProfileOnce, run_fakedist: RunFakedist
) -> None:
    again, without = (recorded(profile_once, "h100", 8, "--checkpoint", how) for how in ("full", "none"))
    plan = planned(run_fakedist, again, "--gpu", "h100")
    dropped = next(row for row in plan["alternatives"] if row["title"] == "without recomputation")
    assert dropped["need"]["low_bytes"] == pytest.approx(without.summary["peak_allocated_bytes"], rel=0.02)
    assert dropped["need"]["low_bytes"] <= without.summary["peak_reserved_bytes"] <= dropped["need"]["high_bytes"]
    assert plan["here"]["value"] > dropped["step"]["value"]


def test_wrong_usages_are_one_line(profile_once: ProfileOnce, run_fakedist: RunFakedist) -> None:
    run = recorded(profile_once, "h100", 8)
    for arguments, message in (
        ([run.path], "name the machine: --gpu MODEL, --gpus N or --fabric NAME"),
        ([run.path, "--gpu", "b20"], "fakedist does not know the GPU 'b20'"),
        ([run.path, "--gpu", "b200", "--steps", "3"], "--steps is for a script, and RUN is recorded"),
        (
            [run.path / "none", "--gpu", "b200"],
            f"{run.path}/none is not a run directory; a script needs --fit SIZE before it",
        ),
    ):
        finished = run_fakedist("plan", *arguments)
        assert finished.code == 2
        assert finished.stderr.splitlines()[0] == f"fakedist: error: {message}"
