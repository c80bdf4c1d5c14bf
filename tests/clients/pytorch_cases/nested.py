"""Nested tensors in the jagged layout."""

from __future__ import annotations

from typing import Any

import torch
from cases import Rank, case, raises, same
from torch import nn
from torch.nn import functional

LENGTHS = (3, 5, 2)


def pieces(rank: Rank, width: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(length, width).to(rank.device) for length in LENGTHS]


def jagged(rank: Rank, **how: Any) -> torch.Tensor:
    return torch.nested.nested_tensor(pieces(rank), layout=torch.jagged, **how)


@case("test_nestedtensor.py: test_jagged_layout_construction_nested_tensor", "lengths, offsets and values")
def made(rank: Rank) -> None:
    nested = jagged(rank)
    assert nested.is_nested
    assert nested.layout == torch.jagged
    assert nested.offsets().tolist() == [0, 3, 8, 10]
    same(nested.values(), torch.cat(pieces(rank)))


@case("test_nestedtensor.py: test_unbind", "its parts are what it was made of")
def parts(rank: Rank) -> None:
    for found, wanted in zip(jagged(rank).unbind(), pieces(rank), strict=True):
        same(found, wanted)


@case("test_nestedtensor.py: test_nested_tensor_from_jagged", "values and offsets make one")
def from_values(rank: Rank) -> None:
    values = torch.cat(pieces(rank))
    offsets = torch.tensor([0, 3, 8, 10], device=rank.device)
    nested = torch.nested.nested_tensor_from_jagged(values, offsets)
    assert [len(part) for part in nested.unbind()] == list(LENGTHS)


@case("test_nestedtensor.py: test_to_padded_tensor", "rows that are missing are filled")
def padded(rank: Rank) -> None:
    found = jagged(rank).to_padded_tensor(-1.0)
    assert found.shape == (3, 5, 4)
    same(found[2, 2:], -1)
    same(found[1], pieces(rank)[1])


@case("test_nestedtensor.py: test_unary_pointwise", "pointwise operations reach the values, and so do gradients")
def pointwise(rank: Rank) -> None:
    nested = jagged(rank, requires_grad=True)
    out = functional.silu(nested.sin())
    same(out.values(), functional.silu(torch.cat(pieces(rank)).sin()))
    out.values().sum().backward()
    assert nested.grad is not None
    assert nested.grad.is_nested


@case("test_nestedtensor.py: test_binary_pointwise", "two of one shape add; two of other shapes do not")
def two(rank: Rank) -> None:
    nested = jagged(rank)
    same((nested + nested).values(), 2 * torch.cat(pieces(rank)))
    raises(lambda: nested + jagged(rank), "cannot call binary", "must", "shape", "size")


@case("test_nestedtensor.py: test_linear", "a linear layer trains on it as on its parts")
def trains(rank: Rank) -> None:
    nets = [_linear(rank) for _ in range(2)]
    nets[0](jagged(rank)).values().square().sum().backward()
    sum(nets[1](part).square().sum() for part in pieces(rank)).backward()  # type: ignore[union-attr]
    for found, wanted in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert found.grad is not None
        assert wanted.grad is not None
        same(found.grad, wanted.grad)


def _linear(rank: Rank) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(4, 3).to(rank.device)


@case("test_nestedtensor.py: test_layer_norm_operate_on_non_ragged_dim", "a layer norm of each row")
def normed(rank: Rank) -> None:
    same(functional.layer_norm(jagged(rank), (4,)).values(), functional.layer_norm(torch.cat(pieces(rank)), (4,)))


@case("test_nestedtensor.py: test_op_dim_reduce_ragged_idx_1_different_output_shape", "sums over the ragged axis")
def summed(rank: Rank) -> None:
    found = jagged(rank).sum(1)
    same(found, torch.stack([part.sum(0) for part in pieces(rank)]))


@case("test_nestedtensor.py: test_softmax", "a softmax of each row adds up to one")
def softmax(rank: Rank) -> None:
    same(jagged(rank).softmax(-1).values().sum(-1), 1)


@case(
    "test_nestedtensor.py: test_sdpa",
    "attention within each part: shapes, and gradients",
    "the values are not looked at",
)
def attention(rank: Rank) -> None:
    torch.manual_seed(0)
    parts_ = [torch.randn(length, 2, 8).to(rank.device) for length in LENGTHS]
    query = torch.nested.nested_tensor(parts_, layout=torch.jagged, requires_grad=True)
    heads = query.transpose(1, 2)
    out = functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2)
    assert [tuple(part.shape) for part in out.unbind()] == [(length, 2, 8) for length in LENGTHS]
    out.values().sum().backward()
    assert query.grad is not None
