"""What is known of tensors that hold no values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fakedist.gpu.values.known import Storages, Watch
from fakedist.gpu.values.shares import Shares


@pytest.fixture
def shares() -> Shares:
    return Shares(lambda tensor: None, Storages(Watch()))


def test_nothing_is_nan(shares: Shares) -> None:
    x = torch.empty(8)
    isnan = torch.empty(8, dtype=torch.bool)
    assert shares.follow("isnan", (x,), isnan) == 0.0
    assert shares.follow("any", (isnan,), torch.empty((), dtype=torch.bool)) == 0.0
    assert shares.follow("logical_not", (isnan,), torch.empty(8, dtype=torch.bool)) == 1.0


def test_isfinite_as_it_reaches_the_kernels(shares: Shares) -> None:
    x, same, bounded, both = torch.empty(8), *(torch.empty(8, dtype=torch.bool) for _ in range(3))
    assert shares.follow("eq", (x, x), same) == 1.0
    assert shares.follow("ne", (torch.empty(8), float("inf")), bounded) == 1.0
    assert shares.follow("mul", (same, bounded), both) == 1.0
    assert shares.follow("all", (both,), torch.empty((), dtype=torch.bool)) == 1.0


def test_a_routing_map_gives_every_expert_its_share(shares: Shares) -> None:
    zeros, routing = torch.empty(16, 8, dtype=torch.int32), torch.empty(16, 8, dtype=torch.int32)
    mask, counts = torch.empty(16, 8, dtype=torch.bool), torch.empty(8, dtype=torch.int64)
    assert shares.follow("zeros_like", (torch.empty(16, 8),), zeros) == 0.0
    assert shares.follow("scatter", (zeros, 1, torch.empty(16, 2, dtype=torch.int64), 1), routing) == 0.25
    assert shares.follow("_to_copy", (routing,), mask) == 0.25
    assert shares.follow("sum", (mask, [0]), counts) == 4.0
    assert shares.follow("any", (mask,), torch.empty((), dtype=torch.bool)) is None


def test_half_of_a_mask_that_nothing_is_known_about_is_assumed(shares: Shares) -> None:
    x, positive, both = torch.empty(8), *(torch.empty(8, dtype=torch.bool) for _ in range(2))
    counts, routing = torch.empty((), dtype=torch.int64), torch.empty(8, 8, dtype=torch.bool)
    assert shares.follow("gt", (x, 1.0), positive) == 0.5
    assert shares.is_assumed(positive)
    assert shares.follow("logical_not", (positive,), both) == 0.5
    assert shares.follow("sum", (both,), counts) == 4.0
    assert shares.is_assumed(counts)
    shares.know(routing, 0.25)  # by how it was made
    assert shares.follow("sum", (routing,), counts) == 16.0
    assert not shares.is_assumed(counts)
    shares.follow("isnan", (x,), positive)
    assert not shares.is_assumed(positive)


def test_what_is_written_over_is_not_known(shares: Shares) -> None:
    mask = torch.empty(8, dtype=torch.bool)
    shares.follow("isfinite", (torch.empty(8),), mask)
    shares.forget(mask)
    assert shares.of(mask) is None


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("abs", (torch.empty(2),), True),
        ("pow", (torch.empty(2), 2), True),
        ("pow", (torch.empty(2), 3), False),
        ("pow", (torch.empty(2), 0.5), False),
        ("masked_fill", (torch.empty(2), torch.empty(2, dtype=torch.bool), 0), False),
        ("where", (torch.empty(2, dtype=torch.bool), torch.empty(2), torch.empty(2)), False),
        ("nll_loss_forward", (torch.empty(2),), True),
        ("add", (torch.empty(2), torch.empty(2)), False),
        ("neg", (torch.empty(2),), False),
    ],
)
def test_signs(shares: Shares, name: str, arguments: tuple[Any, ...], expected: bool) -> None:
    result = torch.empty(2)
    shares.follow(name, arguments, result)
    assert shares.is_non_negative(result) is expected


def test_a_sum_of_what_is_not_negative_is_not_negative(shares: Shares) -> None:
    squares, total, scaled = torch.empty(8), torch.empty(()), torch.empty(())
    shares.follow("pow", (torch.empty(8), 2), squares)
    shares.follow("sum", (squares,), total)
    shares.follow("mul", (total, -1.0), scaled)
    assert shares.is_non_negative(total)
    assert not shares.is_non_negative(scaled)


def test_a_norm_that_is_tested_in_detail_is_valid(shares: Shares) -> None:
    """As DeepSpeed does: the root of summed squares, -1 in the place of what is not finite, infinity where negative."""
    squared, norm, masked, chosen = (torch.empty(()) for _ in range(4))
    isnan, negative = (torch.empty((), dtype=torch.bool) for _ in range(2))
    shares.follow("pow", (torch.empty(()), 2.0), squared)
    shares.follow("pow", (squared, 0.5), norm)
    shares.follow("isnan", (norm,), isnan)
    shares.follow("masked_fill_", (norm, isnan, -1.0), masked)
    assert shares.is_non_negative(masked)
    assert shares.follow("lt", (masked, 0), negative) == 0.0
    assert shares.follow("ge", (masked, 0), torch.empty((), dtype=torch.bool)) == 1.0
    shares.follow("where", (negative, torch.empty(()), masked), chosen)
    assert shares.is_non_negative(chosen)
    shares.follow("where", (torch.empty((), dtype=torch.bool), torch.empty(()), masked), chosen)
    assert not shares.is_non_negative(chosen)


def test_a_mask_whose_values_are_there_says_what_it_leaves() -> None:
    values = {"nowhere": torch.tensor([False, False]), "somewhere": torch.tensor([False, True])}
    masks = {name: torch.empty(2, dtype=torch.bool) for name in values}
    shares = Shares(
        lambda tensor: next((values[name] for name in masks if masks[name] is tensor), None), Storages(Watch())
    )
    kept, replaced, norm = (torch.empty(2) for _ in range(3))
    shares.know_non_negative(norm)
    shares.follow("masked_fill", (norm, masks["nowhere"], -1.0), kept)
    shares.follow("masked_fill", (norm, masks["somewhere"], -1.0), replaced)
    assert shares.is_non_negative(kept)
    assert not shares.is_non_negative(replaced)
