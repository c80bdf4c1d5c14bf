"""Indices that no kernel computed are spread evenly, and seen to be a router's where they send tokens to experts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from math import comb
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fakedist.gpu.values.host import Host
from fakedist.gpu.values.means import spread
from fakedist.gpu.values.operators import Operator
from fakedist.gpu.values.routing import Routing, RunningLayer, experts_of_mask, spread_over_experts
from fakedist.options.expert_loads import RouterLoadError
from fakedist.router_load import RouterLoad, RouterPass
from fakedist.rundir.sources import ROUTED
from tests.support.idle_device import IdleDevice

ATEN = torch.ops.aten
choose = Routing(Host(0)).choose


@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_topk_picks_distinct_ones_and_all_equally_often(dim: int) -> None:
    source = torch.randn(64, 32)
    num_choices = source.shape[dim]
    indices = torch.topk(source, 4, dim=dim).indices
    chosen = choose(Operator(ATEN.topk.default), (source, 4, dim), {}, indices)
    assert chosen.shape == indices.shape
    assert torch.bincount(chosen.flatten(), minlength=num_choices).unique().numel() == 1
    rows = chosen.movedim(dim, -1)
    assert all(len(set(row.tolist())) == 4 for row in rows.reshape(-1, 4))


def test_argmax_names_a_valid_index_in_every_row_and_of_everything_the_first() -> None:
    source = torch.randn(6, 4)
    chosen = choose(Operator(ATEN.argmax.default), (source, 1), {}, source.argmax(1))
    assert chosen.tolist() == [0, 1, 2, 3, 0, 1]
    assert choose(Operator(ATEN.argmax.default), (source,), {}, source.argmax()).item() == 0


def test_a_sort_has_every_index_once_also_with_its_dimension_by_keyword() -> None:
    source = torch.randn(3, 5, 2)
    chosen = choose(Operator(ATEN.sort.default), (source, 1), {}, source.sort(1).indices)
    assert chosen.sort(1).values.unique(dim=0).shape[0] == 1
    assert chosen[2, :, 1].tolist() == [0, 1, 2, 3, 4]
    stable = choose(Operator(ATEN.sort.stable), (source,), {"stable": True, "dim": 1}, source.sort(1).indices)
    assert torch.equal(stable, chosen)


@pytest.mark.parametrize(
    ("shape", "mean", "total"), [((64, 32), 4 / 32, 256), ((32, 64), 4 / 32, 256), ((9, 5), 1 / 3, 15)]
)
def test_a_mask_has_its_share_in_every_row_and_column(shape: tuple[int, int], mean: float, total: int) -> None:
    mask = spread(torch.Size(shape), mean)
    assert int(mask.sum()) == total
    for counts in (mask.sum(0), mask.sum(1)):
        assert int(counts.max() - counts.min()) <= (mean == 1 / 3)


def logits(num_choices: int = 8) -> Tensor:
    return torch.empty(64, num_choices)


def top(num_choices: int = 8) -> Tensor:
    return logits(num_choices).topk(2)[1]


def labels() -> Tensor:
    return torch.zeros(64, dtype=torch.int64)


def up_to_an_end() -> Tensor:
    mask = torch.arange(8) <= logits().argmax(1)[:, None]
    return torch.ones(64, 8)[mask]


ROUTERS: dict[str, Callable[[], Any]] = {
    "Mixtral": lambda: torch.greater(one_hot(top(), 8).permute(2, 1, 0).sum((-1, -2)), 0).nonzero(),
    "Megatron": lambda: torch.zeros(64, 8).int().scatter(1, top(), 1).bool().sum(0),
    "DeepSeek": lambda: top().view(-1).argsort() // 2,
    "masks": lambda: torch.ones(64, 8)[(top() == 3).any(-1)],
    "torchtitan": lambda: torch.histc(top().view(-1).float(), 8, 0, 8),
    "counted": lambda: torch.bincount(top().view(-1), minlength=8),
    "compared": lambda: (top().unsqueeze(-1) == torch.arange(8)).sum(1).nonzero(),
    "Switch": lambda: one_hot(logits().argmax(1), 8).cumsum(0),
    "put": lambda: torch.zeros(64, 8).index_put_((top()[:, 0], labels()), torch.ones(1)),
    "GShard": lambda: torch.zeros(64, 8).scatter(1, top(), 1.0).t().mm(torch.ones(64, 4)),
    "as few as may be": lambda: torch.bincount(top(2048).view(-1)),
}
METRICS: dict[str, Callable[[], Any]] = {
    "top-5 accuracy": lambda: top(1000).t().eq(labels()[None]).reshape(-1).float().sum(),
    "accuracy": lambda: (logits().argmax(1) == labels()).float().mean(),
    "Dice": lambda: (one_hot(logits().argmax(1), 8) * one_hot(labels(), 8)).sum(0),
    "confusion": lambda: torch.bincount(logits().max(1)[1] * 8 + labels(), minlength=64),
    "reciprocal rank": lambda: (top(1000) == labels()[:, None]).cumsum(1).sum(),
    "anchors": lambda: torch.zeros(64, 8400).scatter_add_(1, top(8400), torch.ones(64, 2)),
    "too many": lambda: torch.bincount(top(2049).view(-1)),
    "nucleus": lambda: torch.zeros(64, 9).scatter(1, logits(9).sort(descending=True)[1], torch.ones(64, 9)),
    "up to an end": up_to_an_end,
    "what is put": lambda: torch.zeros(64).long().index_put_((labels(),), logits().argmax(1)),
    "a loss's target": lambda: torch.zeros(64, 8).scatter_(-1, top(), 1.0).mul(2).sum(),
    "a filter": lambda: torch.zeros(64, 8).scatter_(1, top(), torch.ones(64, 2)).softmax(-1).multinomial(1),
    "of all": lambda: torch.bincount(logits().argmax()[None]),
}


@pytest.mark.parametrize("name", [*ROUTERS, *METRICS])
def test_a_router_sends_tokens_to_experts_and_a_metric_compares(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    device = IdleDevice(monkeypatch)
    with device.on():
        (ROUTERS | METRICS)[name]()
        assert (ROUTED in device.made_up()) is (name in ROUTERS)
        (ROUTERS | METRICS)[name]()
    assert ROUTED not in device.made_up()  # a line is reported once


@pytest.mark.parametrize(
    ("module", "function", "num_experts", "mean"),
    [
        ("transformer_engine.pytorch.router", "forward", 8, 0.25),
        ("transformer_engine.pytorch.router", "forward", 9, None),
        ("transformer_engine.pytorch.router", "backward", 8, None),
        ("transformer_engine.pytorch.module", "forward", 8, None),
    ],
)
def test_a_mask_that_a_fused_router_writes_has_its_mean(
    monkeypatch: pytest.MonkeyPatch, module: str, function: str, num_experts: int, mean: float | None
) -> None:
    device, names = IdleDevice(monkeypatch), {"__name__": module}
    exec(f"def {function}(topk, logits, make):\n    return make()", names)
    forward: Any = names[function]
    with device.on():
        mask = forward(2, logits(num_experts), lambda: torch.empty(64, 8, dtype=torch.bool))
    assert device.host.means.of(mask) == mean


def test_a_token_has_experts_on_as_many_ranks_as_random_choices() -> None:
    chosen = spread_over_experts(torch.Size([4096, 8]), 256)
    assert torch.bincount(chosen.flatten()).tolist() == [128] * 256
    assert all(len(set(row)) == 8 for row in chosen.tolist())
    ranks = sum(len(set(row)) for row in (chosen // 32).tolist()) / 4096
    assert ranks == pytest.approx(8 * (1 - comb(224, 8) / comb(256, 8)), rel=0.02)


def test_a_row_has_no_expert_twice_where_experts_are_no_multiple() -> None:
    chosen = spread_over_experts(torch.Size([300, 4]), 6)
    assert all(len(set(row)) == 4 for row in chosen.tolist())
    assert torch.bincount(chosen.flatten()).tolist() == [200] * 6


@pytest.mark.parametrize(("mean", "picked", "counted"), [(0.25, 512, False), (None, 1, True)])
def test_a_mask_of_which_nothing_is_known_is_counted(
    monkeypatch: pytest.MonkeyPatch, mean: float | None, picked: int, counted: bool
) -> None:
    device = IdleDevice(monkeypatch)
    with device.on():
        mask = torch.empty(2048, 2048, dtype=torch.bool)
    if mean is not None:
        device.host.means.know(mask, mean)
    assert device.routes(mask, 2048).shape == (2048, picked)
    assert ("how many experts a token has" in device.made_up()) is counted


class Layer:
    """Where a router runs, as the recorder says."""

    def __init__(self) -> None:
        self.now = RunningLayer(0, in_backward=False, step=1)

    def __call__(self) -> RunningLayer:
        return self.now


LOAD = RouterLoad("zipf:1", seed=3)
CALL = RouterPass(layer=0, number=0, step=0, tokens=64, num_experts=8, top_k=2)


@pytest.fixture
def layer() -> Layer:
    return Layer()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, layer: Layer) -> IdleDevice:
    device = IdleDevice(monkeypatch)
    device.route_by(LOAD, 2, layer)
    return device


def counted(router: Callable[[], Tensor] = top) -> Tensor:
    return torch.bincount(router().view(-1), minlength=8)


def test_what_a_script_counts_by_any_means_is_what_the_load_sends(device: IdleDevice) -> None:
    with device.on():
        values, picked = logits().softmax(-1).topk(2)
        mask = torch.zeros(64, 8).scatter(1, picked, 1).bool()
        found = [mask.sum(0), one_hot(picked, 8).sum((0, 1))]
        read = [device.read(counts).long().tolist() for counts in found]
    assert read == [LOAD.counts(CALL, 2).tolist()] * 2
    assert values.shape == (64, 2)


def test_a_backward_repeats_the_choices_of_its_step_in_their_order(device: IdleDevice, layer: Layer) -> None:
    with device.on():
        forward = [device.read(counted()).tolist() for _ in range(3)]
        layer.now = layer.now._replace(in_backward=True)
        again = [device.read(counted()).tolist() for _ in range(3)]
        layer.now = RunningLayer(0, in_backward=False, step=2)
        after = device.read(counted()).tolist()
    assert again == forward
    assert forward == [LOAD.counts(CALL._replace(number=number), 2).tolist() for number in range(3)]
    assert after == LOAD.counts(CALL._replace(number=3, step=1), 2).tolist()


def test_a_capacity_keeps_tokens_that_the_router_sent(device: IdleDevice) -> None:
    with device.on():
        mask = torch.zeros(64, 8).scatter(1, top(), 1).bool()
        kept = torch.zeros(64, 8).scatter(0, logits().topk(12, dim=0)[1], 1).bool()
        found = device.read((mask & kept).sum(0)).tolist()
    assert found == LOAD.counts(CALL, 2).clip(max=12).tolist()
    assert max(LOAD.counts(CALL, 2)) > 12


def test_tokens_pick_experts_of_groups_that_the_script_masks(device: IdleDevice) -> None:
    with device.on():
        scores = torch.empty(64, 32)
        groups = scores.view(64, 8, 4).topk(2, dim=-1)[0].sum(-1).topk(4, dim=-1, sorted=False)[1]
        allowed = torch.zeros(64, 8).scatter(1, groups, 1).unsqueeze(-1).expand(64, 8, 4).reshape(64, 32).bool()
        picked = scores.masked_fill(~allowed, float("-inf")).topk(8)[1]
        mask = torch.zeros(64, 32).scatter(1, picked, 1).bool()
        mask.sum(0)
        chosen = device.read(mask)
        allowed = device.read(allowed)
    facts = device.router_facts()
    assert facts is not None
    assert (facts.num_layers, facts.num_experts, facts.top_k, facts.tokens) == (1, 32, 8, 64)
    assert bool((chosen <= allowed).all())
    assert chosen.sum(1).tolist() == [8] * 64


def test_groups_of_a_batch_of_sequences_are_found(device: IdleDevice) -> None:
    with device.on():
        scores = torch.empty(4, 16, 32)
        groups = scores.view(4, 16, 8, 4).topk(2, dim=-1)[0].sum(-1).topk(4, dim=-1, sorted=False)[1]
        allowed = torch.zeros(4, 16, 8).scatter(-1, groups, 1).unsqueeze(-1).expand(4, 16, 8, 4).reshape(4, 16, 32)
        picked = scores.masked_fill(~allowed.bool(), float("-inf")).topk(8)[1]
        chosen = device.read(torch.zeros(4, 16, 32).scatter(-1, picked, 1).bool())
        allowed = device.read(allowed.bool())
    assert bool((chosen <= allowed).all())
    assert chosen.sum(-1).unique().tolist() == [8]


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let lines of this file be the script's, not the idle device's."""

    def own_line() -> tuple[str, int]:
        frame = sys._getframe()
        while frame.f_code.co_filename != __file__ or frame.f_code.co_name == "own_line":
            assert frame.f_back is not None
            frame = frame.f_back
        return __file__, frame.f_lineno

    monkeypatch.setattr("fakedist.gpu.values.routing.script_line", own_line)


def gshard() -> tuple[Tensor, Tensor]:
    """DeepSpeed 0.19.8, deepspeed/moe/sharded_moe.py, top2gating: the masks of both choices."""
    scores = logits()
    gates = scores.softmax(dim=1)
    mask1 = one_hot(torch.argmax(gates, dim=1), num_classes=8)
    logits_except1 = scores.masked_fill(mask1.bool(), float("-inf"))
    mask2 = one_hot(torch.argmax(logits_except1, dim=1), num_classes=8)
    torch.cumsum(mask1, dim=0)
    return mask1, mask2


@pytest.mark.usefixtures("lines")
def test_a_second_argmax_picks_other_experts_than_the_first(device: IdleDevice) -> None:
    both = CALL._replace(in_turn=True)
    for number in range(2):
        with device.on():
            mask1, mask2 = gshard()
            counts = torch.sum(mask1 + mask2, dim=0)
            theirs, most = device.of_ranks(counts, [2, 5]), device.of_ranks(counts.max(), [2, 5])
            first, second, counted = device.read(mask1), device.read(mask2), device.read(counts)
        assert not bool((first & second).any())
        of = both._replace(number=number)
        assert counted.tolist() == LOAD.counts(of, 2).tolist()
        assert theirs is not None
        assert most is not None
        assert theirs[1].tolist() == LOAD.counts(of, 5).tolist()
        assert int(most[1]) == LOAD.counts(of, 5).max()
    facts = device.router_facts()
    assert facts is not None
    assert facts.top_k == 2
    assert [RouterPass(*row[1:]) for row in device.router_passes()] == [both, both._replace(number=1)]


@pytest.mark.usefixtures("lines")
def test_the_argmax_of_the_next_layer_is_no_second_choice(device: IdleDevice, layer: Layer) -> None:
    with device.on():
        for number in range(2):
            layer.now = layer.now._replace(layer=number)
            one_hot(logits().argmax(1), 8).cumsum(0)
    facts = device.router_facts()
    assert facts is not None
    assert (facts.num_layers, facts.top_k) == (2, 1)


@pytest.mark.usefixtures("lines")
def test_two_even_choices_are_of_two_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    device = IdleDevice(monkeypatch)
    with device.on():
        first, second = map(device.read, gshard())
    assert not bool((first & second).any())
    assert first.sum(0).tolist() == second.sum(0).tolist() == [8] * 8


@pytest.mark.usefixtures("lines")
def test_the_largest_of_the_scores_that_were_picked_among_is_no_second_choice(device: IdleDevice) -> None:
    """Transformers' Switch router: argmax, and then max of the same probabilities."""
    with device.on():
        probabilities = logits().softmax(-1)
        mask = one_hot(probabilities.argmax(-1), 8)
        mask.cumsum(0)
        probabilities.max(dim=-1)[0].unsqueeze(-1)
        counts = device.read(mask.sum(0)).tolist()
        probabilities.argmax(-1)
    assert counts == LOAD.counts(CALL._replace(top_k=1), 2).tolist()
    facts = device.router_facts()
    assert facts is not None
    assert facts.top_k == 1


def sinkhorn(cost: Tensor, tol: float = 0.0001) -> Tensor:
    """Megatron-core 0.16.1, megatron/core/transformer/moe/moe_utils.py."""
    cost = torch.exp(cost)
    d0 = torch.ones(cost.size(0), device=cost.device, dtype=cost.dtype)
    d1 = torch.ones(cost.size(1), device=cost.device, dtype=cost.dtype)
    eps = 0.00000001
    error: float | Tensor = 1e9
    d1_old = d1
    while error > tol:
        d0 = (1 / d0.size(0)) * 1 / (torch.sum(d1 * cost, 1) + eps)
        d1 = (1 / d1.size(0)) * 1 / (torch.sum(d0.unsqueeze(1) * cost, 0) + eps)
        error = torch.mean(torch.abs(d1_old - d1))
        d1_old = d1
    return d1 * cost * d0.unsqueeze(1)


def test_tokens_that_sinkhorn_routes_follow_the_load(device: IdleDevice) -> None:
    with device.on():
        scores = logits()
        indices = torch.topk(sinkhorn(scores), k=2, dim=1)[1]
        routed = torch.zeros_like(scores).int().scatter(1, indices, 1).bool()
        assert device.read(routed.sum(0)).tolist() == LOAD.counts(CALL, 2).tolist()


@pytest.mark.parametrize("is_transposed", [True, False])
def test_experts_that_pick_tokens_have_no_load_to_draw(device: IdleDevice, is_transposed: bool) -> None:
    """Expert choice (arXiv:2202.09368): each expert takes the tokens that suit it best, and all as many."""
    with device.on():
        scores = logits().softmax(-1)
        tokens = scores.t().topk(12)[1] if is_transposed else scores.topk(12, dim=0)[1].t()
        taken = device.read(torch.zeros(8, 64).scatter(1, tokens, 1))
        assert torch.ones(64, 4)[tokens.reshape(-1)].shape == (96, 4)
    assert taken.sum(1).tolist() == [12] * 8
    assert device.router_facts() is None


@pytest.mark.usefixtures("lines")
def test_a_single_choice_is_compared_with_the_top_k_of_a_file(
    monkeypatch: pytest.MonkeyPatch, device: IdleDevice, layer: Layer, tmp_path: Path
) -> None:
    path = tmp_path / "counts.jsonl"
    path.write_text(json.dumps({"layer": 0, "step": 1, "tokens": 16, "top_k": 2, "counts": [4] * 8}))
    device.route_by(RouterLoad(str(path)), 0, layer)

    def picked() -> None:
        logits().argmax(1)

    with device.on():
        picked()
        with pytest.raises(RouterLoadError, match="is for top-2 in layer 0, and the job picks top-1"):
            picked()
    other = IdleDevice(monkeypatch)
    other.route_by(RouterLoad(str(path)), 0, layer)
    with other.on():
        for _ in range(3):
            gshard()


@pytest.mark.parametrize("seen", ["counts", "by rank", "at most", "mask", "experts", "most"])
def test_other_ranks_send_what_their_own_routers_choose(device: IdleDevice, seen: str) -> None:
    def found(experts: Tensor) -> Tensor:
        counts = torch.bincount(experts.view(-1), minlength=8)
        by_name = {"counts": counts, "by rank": counts.view(4, 2).sum(1), "at most": counts.clamp(max=9)}
        by_name |= {"mask": torch.zeros(64, 8).scatter(1, experts, 1).bool(), "experts": experts, "most": counts.max()}
        return by_name[seen]

    with device.on():
        theirs = device.of_ranks(found(top()), [2, 3, 9, 0])
        assert device.of_ranks(torch.arange(8), [2, 3, 9, 0]) is None
    expected = [found(torch.from_numpy(LOAD.experts(CALL, rank))) for rank in (2, 3, 9, 0)]
    assert theirs is not None
    assert [values.tolist() for values in theirs] == [values.tolist() for values in expected]


def test_a_file_with_more_layers_than_the_rank_is_refused_once_a_step_has_ended(
    device: IdleDevice, layer: Layer, tmp_path: Path
) -> None:
    line = {"step": 1, "tokens": 8, "top_k": 2, "counts": [2] * 8}
    path = tmp_path / "counts.jsonl"
    path.write_text("".join(json.dumps({"layer": number, **line}) + "\n" for number in range(2)))
    device.route_by(RouterLoad(str(path)), 0, layer)
    with device.on():
        top()
        layer.now = RunningLayer(0, in_backward=False, step=2)
        with pytest.raises(RouterLoadError, match="has 2 layers of experts, and the rank runs 1"):
            top()


def test_a_mask_says_the_experts_of_tokens() -> None:
    mask = torch.tensor([[False, True, False, True], [True, False, False, False], [False] * 4])
    assert experts_of_mask(mask).tolist() == [[1, 3], [0, -1], [-1, -1]]
    assert experts_of_mask(mask[:0]).shape == (0, 0)
