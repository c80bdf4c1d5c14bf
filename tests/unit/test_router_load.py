"""Loads of experts: every rank's draws are known to all, add up, and a file that does not fit the job is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fakedist.options.expert_loads import RouterLoadError, lines_of, parse_router_load
from fakedist.router_load import RouterLoad, RouterPass

LOADS = ["even", "zipf:0.7", "zipf:0", "lognormal:0.5", *(f"W{number}" for number in range(8))]
CALL = RouterPass(layer=3, number=2, step=0, tokens=1024, num_experts=32, top_k=4)


def write(path: Path, *lines: dict[str, object]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def line(**changes: object) -> dict[str, object]:
    return {"layer": 0, "step": 1, "tokens": 6, "top_k": 2, "counts": [6, 4, 2, 0], **changes}


@pytest.mark.parametrize("text", LOADS)
def test_tokens_pick_as_many_different_experts_as_the_counts_say(text: str) -> None:
    load = RouterLoad(text, seed=7)
    experts, counts = load.experts(CALL, 5), load.counts(CALL, 5)
    assert counts.sum() == 1024 * 4
    assert np.bincount(experts.ravel(), minlength=32).tolist() == counts.tolist()
    assert all(len(set(row)) == 4 for row in experts.tolist())


@pytest.mark.parametrize("top_k", [4, 8])
def test_tokens_pick_experts_of_the_groups_that_they_picked(top_k: int) -> None:
    call = CALL._replace(top_k=top_k, groups=8, top_groups=4)
    load = RouterLoad("zipf:0.7")
    experts = load.experts(call, 1)
    assert np.bincount(experts.ravel(), minlength=32).tolist() == load.counts(call, 1).tolist()
    assert all(len(set(row)) == top_k for row in experts.tolist())
    picked = [set(row) for row in load.groups(call._replace(top_k=1), 1).tolist()]
    assert [{expert // 4 for expert in row} for row in experts.tolist()] == picked


def test_what_a_rank_receives_is_what_all_ranks_send_it() -> None:
    load, ranks = RouterLoad("lognormal:1", seed=1), [4, 5, 6, 7]
    sent = [load.counts(CALL, rank) for rank in ranks]
    assert load.received(CALL, ranks).tolist() == np.sum(sent, axis=0).reshape(4, 8).sum(axis=1).tolist()
    assert len({tuple(counts) for counts in sent}) == 4


def test_a_layers_hot_experts_stay_hot_and_its_draws_differ() -> None:
    load = RouterLoad("zipf:1")
    hottest = [load.counts(CALL._replace(number=number), rank).argmax() for number in range(4) for rank in range(4)]
    assert len(set(hottest)) == 1
    again = load.counts(CALL._replace(number=3), 0)
    assert again.tolist() != load.counts(CALL, 0).tolist()
    assert {RouterLoad("zipf:1", seed).counts(CALL, 0).argmax() for seed in range(8)} != set(hottest)


@pytest.mark.parametrize(
    ("text", "step", "most", "coldest"),
    [
        ("W0", 0, 1, 1),  # the benchmark's README: 1.000
        ("W1", 0, 3.25, 0.25),  # 3.312 there, of 512 tokens
        ("W2", 0, 3.25, 0.25),
        ("W3", 0, 1.75, 0.25),
        ("W4", 0, 1, 1),
        ("W5", 0, 2, 0),
        ("W6", 3, 3.25, 0.25),
        ("W7", 2, 1, 1),
        ("W7", 3, 2.5, 0.5),
    ],
)
def test_the_shares_of_a_workload_are_the_benchmarks(text: str, step: int, most: float, coldest: float) -> None:
    shares = 8 * RouterLoad(text).shares(CALL._replace(num_experts=8, top_k=2, step=step))
    assert (shares.max(), shares.min()) == pytest.approx((most, coldest))
    hot = np.flatnonzero(shares == shares.max()).tolist()
    assert hot == {"W1": [0, 1], "W2": [0, 1], "W3": [0, 2, 4, 6], "W5": [4, 5, 6, 7], "W6": [2, 3]}.get(text, hot)


def test_a_token_picks_the_hottest_expert_only_once() -> None:
    call = CALL._replace(num_experts=8, top_k=2)
    assert RouterLoad("zipf:8").shares(call).max() == pytest.approx(0.5)
    assert RouterLoad("zipf:8").counts(call, 0).max() <= 1024


def test_a_file_gives_the_shares_of_each_layer_and_step(tmp_path: Path) -> None:
    other = line(layer=5, counts=[3, 3, 3, 3])
    path = write(tmp_path / "counts.jsonl", line(), other, line(step=2, counts=[0, 2, 4, 6]), line(layer=5, step=2))
    load, call = RouterLoad(path), RouterPass(0, 0, 0, 600, 4, 2)
    assert (12 * load.shares(call)).tolist() == pytest.approx([6, 4, 2, 0])
    assert (12 * load.shares(call._replace(step=3))).tolist() == pytest.approx([0, 2, 4, 6])
    assert (12 * load.shares(call._replace(layer=1))).tolist() == pytest.approx([3, 3, 3, 3])
    assert load.layers_in_file() == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": 2}, "has 1 layers of experts, and the rank runs 3 or more"),
        ({"num_experts": 8}, "counts 4 experts in layer 0, and the job has 8"),
        ({"top_k": 3}, "is for top-2 in layer 0, and the job picks top-3"),
    ],
)
def test_a_file_for_another_job_is_refused_with_both_numbers(
    tmp_path: Path, change: dict[str, int], message: str
) -> None:
    load = RouterLoad(write(tmp_path / "counts.jsonl", line()))
    with pytest.raises(RouterLoadError, match=message):
        load.counts(RouterPass(0, 0, 0, 600, 4, 2)._replace(**change), 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps(line(counts=[6, 4, 2, 1])), "counts 13 choices in line 1 of .*, not 6 tokens x top-2 = 12"),
        (json.dumps(line(counts=[7, 3, 2, 0])), "sends 7 of 6 tokens to one expert"),
        (json.dumps(line(counts=[6, 4, 2.5, -0.5])), "not a whole number from 0"),
        ('{"layer": 0}', "needs layer, step, tokens, top_k and counts in line 1 of"),
        ("[1, 2]", "needs layer"),
        ("nonsense", "needs layer"),
        ("", "is empty"),
    ],
)
def test_a_file_whose_counts_do_not_add_up_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "counts.jsonl"
    path.write_text(text)
    with pytest.raises(RouterLoadError, match=message):
        lines_of(str(path))


@pytest.mark.parametrize("text", ["hot", "zipf", "zipf:", "zipf:x", "zipf:nan", "lognormal:11", "W8", ""])
def test_a_text_that_is_no_load_is_refused(text: str) -> None:
    with pytest.raises(RouterLoadError):
        parse_router_load(text)


@pytest.mark.parametrize("text", ["zipf:1.5", "zipf:3", "W5"])
def test_two_choices_in_turn_are_of_two_experts_and_the_first_do_not_change(text: str) -> None:
    load, both = RouterLoad(text, 4), CALL._replace(top_k=2, in_turn=True)
    for rank in range(3):
        experts = load.experts(both, rank)
        assert (experts[:, 0] != experts[:, 1]).all()
        assert (experts[:, 0] == load.experts(CALL._replace(top_k=1), rank)[:, 0]).all()
        assert np.bincount(experts.ravel(), minlength=32).tolist() == load.counts(both, rank).tolist()
    assert load.counts(both, 0).tolist() != load.counts(both, 1).tolist()
