"""Sizes of attentions: which keys a query meets, and packed sequences as equal ones."""

from __future__ import annotations

import pytest
import torch

from fakedist.gpu.demand.work_shapes import AttentionShape, Lengths, Mask, ProductShape

MASKS = [
    Mask(),
    Mask(causal=True),
    Mask(causal=True, from_end=True),
    Mask(causal=True, left=3),
    Mask(causal=True, left=0),
    Mask(left=2, right=1),
    Mask(left=2, right=1, from_end=True),
    Mask(right=4, from_end=True),
    Mask(causal=True, left=100),
]


def counted(mask: Mask, queries: int, keys: int) -> int:
    offset = keys - queries if mask.from_end else 0
    right = 0 if mask.causal else mask.right
    return sum(
        (mask.left < 0 or key >= query + offset - mask.left) and (right < 0 or key <= query + offset + right)
        for query in range(queries)
        for key in range(keys)
    )


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("queries", "keys"), [(8, 8), (8, 5), (5, 8), (1, 9), (9, 1)])
def test_the_keys_that_queries_meet_are_those_of_the_mask(mask: Mask, queries: int, keys: int) -> None:
    assert mask.met_keys(queries, keys) * queries == pytest.approx(counted(mask, queries, keys))


def test_a_window_is_the_most_keys_that_a_query_meets() -> None:
    assert Mask(causal=True, left=127).window == 128
    assert Mask(left=2, right=1).window == 4
    assert Mask(causal=True).window == Mask(left=5).window == 0


def test_packed_sequences_are_as_much_as_equal_ones_and_meet_only_their_own_keys() -> None:
    assert Lengths([512, 512], [512, 512]).equal() == (2, 512, 512)
    batch, queries, keys = Lengths([100, 300, 1600], [100, 300, 1600]).equal()
    assert batch * queries == pytest.approx(2000, rel=0.01)
    assert batch * queries * keys == pytest.approx(100**2 + 300**2 + 1600**2, rel=0.01)
    assert Lengths([], []).equal() == (0, 0, 0)
    assert Lengths([4, 6], [4, 6]).met_pairs(Mask()) == 4 * 4 + 6 * 6
    assert Lengths([4, 6], [4, 6]).met_pairs(Mask(causal=True)) == 10 + 21


def test_backward_has_five_products_for_forwards_two() -> None:
    forward = AttentionShape("forward", "flash2", 2, 8, 2, 64, 32, 16, 16)
    assert forward.flops(32) == 2 * 2 * (2 * 8 * 64 * 32 * 16)
    assert forward._replace(direction="backward").flops(32) == 5 * 2 * (2 * 8 * 64 * 32 * 16)
    wide = forward._replace(value_width=48)
    assert wide.flops(32) == 2 * (2 * 8 * 64 * 32) * (16 + 48)


def test_a_product_has_the_bytes_of_its_operands_and_the_rows_of_all_groups() -> None:
    bf16, eight = (torch.empty(0, dtype=dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn))
    shape = ProductShape(1, 1, 1)
    operands = [shape.of(eight, eight, bf16), shape.of(None, eight), shape.of()]
    assert [each[-4:-1] for each in operands] == [(1, 1, 2), (1, 1, 1), (0, 0, 0)]
    assert ProductShape(1024, 256, 128, groups=8).flops == 2 * 1024 * 256 * 128
    assert ProductShape(16, 32, 64, batch=3).flops == 3 * 2 * 16 * 32 * 64
