"""The routers of torchtitan and DeepSpeed send tokens by --router-load, and draws of their jobs are played."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

from fakedist.results.opening import open_run
from fakedist.router_load import RouterLoad, RouterPass
from tests.conftest import RunFakedist

JOBS = Path(__file__).parent / "jobs"
WORLD_SIZE, EXPERTS, LOAD = 4, 16, "zipf:1"


def _needs(name: str) -> pytest.MarkDecorator:
    is_missing = not any(importlib.metadata.distributions(name=name))
    return pytest.mark.skipif(is_missing, reason=f"{name} is not installed: make frameworks")


def profile(run_fakedist: RunFakedist, path: Path, rank: int, seed: int, job: tuple[str, ...]) -> list[list[int]]:
    """Profile a rank; the counts that the job printed, in order."""
    options = ["--device", "virtual", "--gpu", "h100-80g", "--world-size", str(WORLD_SIZE), "--rank", str(rank)]
    options += ["--steps", "3", "--router-load", LOAD, "--seed", str(seed), "-o", str(path)]
    finished = run_fakedist("profile", *options, JOBS / job[0], *job[1:])
    assert finished.code == 0, finished.stderr
    lines = (finished.stdout + finished.stderr).splitlines()
    counts: list[Any] = [json.loads(line)["counts"] for line in lines if line.startswith('{"counts"')]
    return [row for each in counts for row in (each if isinstance(each[0], list) else [each])]


def sent(top_k: int, tokens: int, **kind: Any) -> list[list[int]]:
    """Tokens that rank 1 sends to each expert in the first step, by layer."""
    calls = [RouterPass(layer, 0, 0, tokens, EXPERTS, top_k, **kind) for layer in range(2)]
    return [RouterLoad(LOAD, 0).counts(call, 1).tolist() for call in calls]


@_needs("torchtitan")
def test_torchtitans_experts_follow_the_load_and_their_draws_are_played_to_the_byte(
    run_fakedist: RunFakedist, tmp_path: Path
) -> None:
    job = ("torchtitan_moe.py",)
    assert profile(run_fakedist, tmp_path / "run", 1, 0, job)[:2] == sent(2, 4096)
    played = run_fakedist("play", tmp_path / "run", "--draws", "4", "--seed", "3", "--json").json()
    for draw in played["draws"][:2]:
        again = tmp_path / str(draw["seed"])
        profile(run_fakedist, again, draw["rank"], draw["seed"], job)
        summary = open_run(again).summary
        assert draw["peak_allocated_bytes"] == summary.peak_allocated_bytes
        assert draw["peak_reserved_bytes"] == summary.peak_reserved_bytes


@_needs("torchtitan")
def test_torchtitans_tokens_pick_groups_of_experts_first(run_fakedist: RunFakedist, tmp_path: Path) -> None:
    counts = profile(run_fakedist, tmp_path / "run", 1, 0, ("torchtitan_moe.py", "4"))
    assert counts[:2] == sent(2, 4096, groups=4, top_groups=2)


@_needs("deepspeed")
@pytest.mark.parametrize(("top_k", "kind"), [(1, {}), (2, {"in_turn": True}), (3, {})])
def test_deepspeeds_gates_follow_the_load(
    run_fakedist: RunFakedist, tmp_path: Path, top_k: int, kind: dict[str, Any]
) -> None:
    counts = profile(run_fakedist, tmp_path / "run", 1, 0, ("deepspeed_moe.py", str(top_k), "drop"))
    assert counts[:2] == sent(top_k, 2048, **kind)


@_needs("deepspeed")
def test_deepspeeds_capacity_is_the_most_of_all_ranks_and_its_draws_are_played(
    run_fakedist: RunFakedist, tmp_path: Path
) -> None:
    job = ("deepspeed_moe.py", "2", "keep")
    profile(run_fakedist, tmp_path / "run", 1, 0, job)
    draw = run_fakedist("play", tmp_path / "run", "--draws", "1", "--seed", "3", "--json").json()["draws"][0]
    profile(run_fakedist, tmp_path / "again", draw["rank"], draw["seed"], job)
    summary = open_run(tmp_path / "again").summary
    assert draw["peak_allocated_bytes"] == summary.peak_allocated_bytes
