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


def test_draws_are_drawn_and_listed(
    profiled: tuple[Path, Finished], played: dict[str, Any], run_fakedist: RunFakedist, tmp_path: Path
) -> None:
    options = ("play", profiled[0] / "rank0", "--seed", "3", "--draws", "4", "--format", "csv")
    rows = run_fakedist(*options, cwd=tmp_path).stdout
    assert rows.splitlines()[0].startswith("seed,rank,share,busiest,peak_allocated_bytes")
    assert [int(row.split(",")[4]) for row in rows.splitlines()[1:]] == [
        draw["peak_allocated_bytes"] for draw in played["draws"][:4]
    ]
