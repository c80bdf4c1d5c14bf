"""Played draws and steps have the peaks and the times of recordings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fakedist.results.opening import open_run
from tests.conftest import Finished, ProfileOnce, RunFakedist
from tests.integration.test_estimates import run_job
from tests.integration.test_router_load import JOB, OPTIONS, profiled

__all__ = ["profiled"]  # a fixture


@pytest.fixture(scope="module")
def played(profiled: tuple[Path, Finished], run_fakedist: RunFakedist) -> dict[str, Any]:
    run = profiled[0] / "rank0"
    finished = run_fakedist("play", run, "--change", run, "--seed", "3", "--draws", "30", "--json")
    assert finished.code == 0, finished.stderr
    return finished.json()


def test_a_draw_played_has_the_peaks_of_its_own_recording(
    profiled: tuple[Path, Finished], played: dict[str, Any]
) -> None:
    recorded = profiled[1].json()["ranks"][1]
    draw = played["draws"][0]
    assert draw["seed"] == 3
    assert draw["rank"] == recorded["rank"] != 0, "played from the recording of rank 0"
    for name in ("peak_allocated_bytes", "peak_reserved_bytes"):
        assert draw[name] == recorded[name]
    assert played["draws"][1]["peak_allocated_bytes"] != draw["peak_allocated_bytes"]


def test_the_step_of_a_draw_is_that_of_its_own_recording(
    profiled: tuple[Path, Finished], played: dict[str, Any]
) -> None:
    steps = [draw["step_us"] for draw in played["draws"]]
    assert played["even"]["step_us"] < min(steps) < 0.9 * max(steps)
    hot = open_run(profiled[0] / f"rank{played['draws'][0]['rank']}").summary.time
    assert hot is not None
    own = open_run(profiled[0] / "rank0").summary.time
    assert own is not None
    priced = [steps[0], hot.step_us, own.step_us]  # the first draw is between two that were priced
    assert priced == pytest.approx([own.step_us] * 3, rel=0.03), "every rank waits for the busiest one of each call"
    assert all(draw["step_low_us"] < draw["step_us"] < draw["step_high_us"] for draw in played["draws"])


def test_each_rank_of_the_recorded_draw_is_played(
    profiled: tuple[Path, Finished], run_fakedist: RunFakedist, tmp_path: Path
) -> None:
    finished = run_fakedist("play", profiled[0] / "rank0", "--ranks", "--json")
    assert finished.code == 0, finished.stderr
    ranks = finished.json()["ranks"]
    facts = open_run(profiled[0] / "rank0").summary.router_load
    assert facts is not None
    assert [(row["rank"], row["tokens"]) for row in ranks] == list(enumerate(facts.received))
    for recorded in profiled[1].json()["ranks"]:
        for name in ("peak_allocated_bytes", "peak_reserved_bytes"):
            assert ranks[recorded["rank"]][name] == recorded[name]
    step = open_run(profiled[0] / "rank0").summary.time
    assert step is not None
    assert ranks[0]["step_us"] == pytest.approx(step.step_us), "it is the draw that was recorded"
    refused = run_fakedist("play", profiled[0] / "rank0", "--ranks", "--change", profiled[0] / "rank0")
    assert (refused.code, "--ranks takes no --change" in refused.stderr) == (2, True)


def test_a_recorded_change_is_played_with_the_worst_draws(
    profiled: tuple[Path, Finished], played: dict[str, Any], run_fakedist: RunFakedist
) -> None:
    same = played["remedies"][0]  # it is the run itself
    drawn = sorted((draw["peak_allocated_bytes"] for draw in played["draws"]), reverse=True)
    assert (same["name"], same["peaks"], same["dropped"]) == ("rank0", drawn[: len(same["peaks"])], 0)
    other = profiled[0] / f"rank{played['draws'][0]['rank']}"
    refused = run_fakedist("play", profiled[0] / "rank0", "--change", other)
    assert (refused.code, "were not called as those of" in refused.stderr) == (2, True), refused.stderr


def test_a_capacity_caps_what_experts_need(played: dict[str, Any]) -> None:
    worst = max(draw["peak_allocated_bytes"] for draw in played["draws"])
    _, tight, wide = played["remedies"]
    assert played["even"]["peak_allocated_bytes"] < max(tight["peaks"]) < max(wide["peaks"]) < worst
    assert 0 < wide["dropped"] < tight["dropped"] < 0.5


def test_draws_that_the_gpu_has_no_memory_for_are_counted(
    profiled: tuple[Path, Finished], played: dict[str, Any], run_fakedist: RunFakedist, tmp_path: Path
) -> None:
    outside = open_run(profiled[0] / "rank0").summary.estimated_outside
    assert outside is not None
    memory = -(-outside.low_bytes >> 20) + 190
    options = ("--rank", "0", "--router-load", "zipf:1", "--seed", "3", "--gpu-memory", f"{memory}MiB")
    assert run_fakedist("profile", *OPTIONS, *options, "-o", "run", JOB, cwd=tmp_path).code == 0
    less = run_fakedist("play", tmp_path / "run", "--seed", "3", "--draws", "30", "--json").json()
    assert less["room_bytes"] == (memory << 20) - outside.low_bytes
    for draw, before in zip(less["draws"], played["draws"], strict=True):
        is_tight = before["peak_reserved_bytes"] > less["room_bytes"]  # cached blocks go, and others are split less
        near = before["peak_allocated_bytes"] * (0.01 if is_tight else 0)
        assert abs(draw["peak_allocated_bytes"] - before["peak_allocated_bytes"]) <= near, "whether it fits or not"
        if before["peak_allocated_bytes"] > less["room_bytes"]:
            assert not draw["fits"]
        if not is_tight:
            assert draw["fits"]
    assert 0 < less["out_of_memory"]["low"] < less["out_of_memory"]["part"] < less["out_of_memory"]["high"] < 1


def test_expandable_segments_are_played(run_fakedist: RunFakedist, tmp_path: Path) -> None:
    grows = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    options = ("--rank", "0", "--router-load", "zipf:1", "-o", "run")
    assert run_fakedist("profile", *OPTIONS, *options, JOB, cwd=tmp_path, env=grows).code == 0
    finished = run_fakedist("play", tmp_path / "run", "--draws", "2", "--json")
    assert finished.code == 0, finished.stderr
    first, second = finished.json()["draws"]  # the recorded loads had the recorded peaks, or it would be refused
    assert first["peak_reserved_bytes"] != second["peak_reserved_bytes"]


def test_a_run_with_even_loads_is_not_played(run_fakedist: RunFakedist, tmp_path: Path) -> None:
    assert run_fakedist("profile", *OPTIONS, "-o", "run", JOB, cwd=tmp_path).code == 0
    finished = run_fakedist("play", tmp_path / "run")
    assert (finished.code, "no load of experts to draw again" in finished.stderr) == (2, True), finished.stderr


def test_draws_are_drawn_and_listed(
    profiled: tuple[Path, Finished], played: dict[str, Any], run_fakedist: RunFakedist, tmp_path: Path
) -> None:
    options = ("play", profiled[0] / "rank0", "--seed", "3", "--draws", "4", "--format", "csv")
    rows = run_fakedist(*options, cwd=tmp_path).stdout
    assert rows.splitlines()[0].startswith("seed,rank,share,busiest,peak_allocated_bytes")
    assert [int(row.split(",")[4]) for row in rows.splitlines()[1:]] == [
        draw["peak_allocated_bytes"] for draw in played["draws"][:4]
    ]


def test_steps_are_played_as_they_were_recorded(profile_once: ProfileOnce, run_fakedist: RunFakedist) -> None:
    """The command compares each step's peaks itself, and refuses what differs."""
    early = run_job(profile_once, options=("--steps=9",))
    played = run_fakedist("play", early.directory, "--steps", "30", "--seeds", "2", "--json").json()
    assert ([step["step"] for step in played["recorded_steps"]], played["left_out"]) == ([3, 4], [])
    assert (played["failure"], played["out_of_memory"]["part"]) == (None, 0.0)
    assert played["settings"][0]["peak_reserved_bytes"] == early.summary["peak_reserved_bytes"]


def test_a_sweep_has_the_share_of_draws_that_fit(
    profiled: tuple[Path, Finished], run_fakedist: RunFakedist, tmp_path: Path
) -> None:
    outside = open_run(profiled[0] / "rank0").summary.estimated_outside
    assert outside is not None
    sizes = [(outside.low_bytes >> 20) + more for more in (180, 400)]  # the hottest ranks take 150 to 254 MiB
    finished = run_fakedist(
        *("sweep", "--world-size", "4", "--steps", "2", "--rank", "0", "--gpu", "h100-80g", "--router-load", "zipf:1"),
        *("--axis", f"mib={sizes[0]},{sizes[1]}", "--gpu-memory", "{mib}MiB", "--share", "fitting_draws"),
        *("--json", "-o", tmp_path / "sweep", JOB),
    )
    shares = [row["ranks"][0]["shares"]["fitting_draws"] for row in finished.json()["points"]]
    assert 0.2 < shares[0] < 0.9
    assert shares[1] == 1
    shown = run_fakedist("sweep", tmp_path / "sweep").stdout
    assert f"{shares[0]:.1%}" in shown
