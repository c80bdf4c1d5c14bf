"""A rank's received tokens are what the other ranks send, and the hottest rank is found without running all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fakedist.results.opening import open_run
from tests.conftest import Finished, RunFakedist

JOB = Path(__file__).parent / "jobs" / "expert_parallel.py"
OPTIONS = ("--world-size", "4", "--device", "virtual", "--gpu", "h100-80g", "--steps", "2")


@pytest.fixture(scope="module")
def profiled(run_fakedist: RunFakedist, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    folder = tmp_path_factory.mktemp("hottest")
    load = ("--rank", "hottest", "--router-load", "zipf:1", "--seed", "3")
    constant = {"FAKEDIST_HOST_CLOCK": "0"}  # else it hides what the busiest rank takes
    finished = run_fakedist("profile", *OPTIONS, *load, "-o", "runs", "--json", JOB, cwd=folder, env=constant)
    assert finished.code == 0, finished.stderr
    return folder / "runs", finished


def printed(finished: Finished) -> list[dict[str, Any]]:
    return [json.loads(line) for line in finished.stderr.splitlines() if line.startswith('{"rank"')]


def test_ranks_agree_on_what_they_send_each_other(profiled: tuple[Path, Finished]) -> None:
    lines = printed(profiled[1])
    first = [line for line in lines if line["rank"] == 0]
    other = [line for line in lines if line["rank"] != 0]
    assert other[0]["rank"] == profiled[1].json()["ranks"][1]["rank"]
    for mine, theirs in zip(first, other, strict=True):
        assert mine["layer"] == theirs["layer"]
        assert mine["sends"][theirs["rank"]] == theirs["gets"][0]
        assert theirs["sends"][0] == mine["gets"][theirs["rank"]]
        assert sum(mine["sends"]) == sum(theirs["sends"]) == 8192
    layers = [line["layer"] for line in first[:4]]
    assert layers == [0, 1, 1, 0], "the backward repeats both layers"
    assert [line["gets"] for line in first[:2]] == [line["gets"] for line in first[3:1:-1]]
    assert first[0]["gets"] != first[4]["gets"], "each step draws anew"


def test_the_hottest_rank_receives_most_and_needs_most(profiled: tuple[Path, Finished]) -> None:
    folder, finished = profiled
    hot = finished.json()["ranks"][1]["rank"]
    runs = [open_run(folder / f"rank{rank}") for rank in (0, hot)]
    facts = [run.summary.router_load for run in runs]
    assert facts[0] is not None
    assert facts[0] == facts[1], "every rank knows what all receive"
    assert (facts[0].num_layers, facts[0].num_experts, facts[0].top_k, facts[0].tokens) == (2, 16, 2, 4096)
    assert facts[0].hottest_rank() == hot
    own = [line for line in printed(finished) if line["rank"] == hot]
    steps = [own[0], own[1], own[4], own[5]]
    assert facts[0].received[hot] == sum(sum(line["gets"]) for line in steps)
    assert sum(facts[0].received) == 4 * 4 * 8192
    assert runs[1].summary.peak_allocated_bytes > runs[0].summary.peak_allocated_bytes
    assert f"rank {hot} got the most" in next(n.text for n in runs[0].summary.notes if n.code == "experts_load_drawn")


def test_a_load_prices_a_run_again_and_leaves_its_memory(profiled: tuple[Path, Finished]) -> None:
    run = open_run(profiled[0] / "rank0")
    even, hot = run.priced_for(router_load="even"), run.priced_for(router_load="zipf:1.5")
    assert even.summary.time is not None
    assert hot.summary.time is not None
    assert hot.summary.time.communication_us > 1.5 * even.summary.time.communication_us
    assert hot.summary.peak_allocated_bytes == run.summary.peak_allocated_bytes
    note = next(note.text for note in hot.summary.kernels.notes if note.code == "experts_load")  # type: ignore[union-attr]
    assert "memory is still that of the run's own load" in note


def test_a_file_for_another_job_ends_the_run_with_both_numbers(run_fakedist: RunFakedist, tmp_path: Path) -> None:
    line = {"layer": 0, "step": 1, "tokens": 8, "top_k": 2, "counts": [2] * 8}
    (tmp_path / "counts.jsonl").write_text(json.dumps(line))
    finished = run_fakedist("profile", *OPTIONS, "--router-load", "counts.jsonl", JOB, cwd=tmp_path)
    assert "counts 8 experts in layer 0, and the job has 16" in finished.stderr
    assert finished.code != 0
    (tmp_path / "counts.jsonl").write_text(json.dumps({**line, "counts": [2] * 7}))
    finished = run_fakedist("profile", *OPTIONS, "--router-load", "counts.jsonl", JOB, cwd=tmp_path)
    assert (finished.code, "counts 14 choices in line 1" in finished.stderr) == (2, True), finished.stderr


def test_the_hottest_rank_may_be_in_another_group_of_experts(run_fakedist: RunFakedist, tmp_path: Path) -> None:
    options = ("--world-size", "8", *OPTIONS[2:], "--router-load", "zipf:1", "--seed", "3")
    finished = run_fakedist("profile", *options, "--rank", "hottest", "-o", "runs", "--json", JOB, "4", cwd=tmp_path)
    assert finished.code == 0, finished.stderr
    hot = open_run(tmp_path / "runs" / f"rank{finished.json()['ranks'][1]['rank']}").summary
    assert hot.router_load is not None
    assert (hot.rank > 3, hot.router_load.hottest_rank()) == (True, hot.rank)
    own = open_run(tmp_path / "runs" / "rank0").summary.router_load
    assert own is not None
    assert max(own.received) < max(hot.router_load.received)
    assert "of 8 ranks" in finished.stderr
