"""Indices that no kernel computed are spread evenly, and seen to be a router's where they send tokens to experts."""

from __future__ import annotations

from collections.abc import Callable
from math import comb
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fakedist.gpu.values.means import spread
from fakedist.gpu.values.operators import Operator
from fakedist.gpu.values.routing import choose, spread_over_experts
from fakedist.rundir.sources import ROUTED
from tests.support.idle_device import IdleDevice

ATEN = torch.ops.aten


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
