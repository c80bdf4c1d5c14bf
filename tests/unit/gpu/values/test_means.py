from __future__ import annotations

from typing import Any

import pytest
import torch

from fakedist.gpu.values.contents import Storages, Watch
from fakedist.gpu.values.means import Means


@pytest.fixture
def means() -> Means:
    return Means(lambda tensor: None, Storages(Watch()))


def test_nothing_is_nan(means: Means) -> None:
    x = torch.empty(8)
    isnan = torch.empty(8, dtype=torch.bool)
    assert means.follow("isnan", (x,), isnan) == 0.0
    means.forget(isnan)  # written over
    assert means.of(isnan) is None
    means.follow("isnan", (x,), isnan)
    assert means.follow("any", (isnan,), torch.empty((), dtype=torch.bool)) == 0.0
    assert means.follow("logical_not", (isnan,), torch.empty(8, dtype=torch.bool)) == 1.0


def test_isfinite_as_it_reaches_the_kernels(means: Means) -> None:
    x, same, bounded, both = torch.empty(8), *(torch.empty(8, dtype=torch.bool) for _ in range(3))
    assert means.follow("eq", (x, x), same) == 1.0
    assert means.follow("ne", (torch.empty(8), float("inf")), bounded) == 1.0
    assert means.follow("mul", (same, bounded), both) == 1.0
    assert means.follow("all", (both,), torch.empty((), dtype=torch.bool)) == 1.0


def test_a_routing_map_gives_every_expert_its_share(means: Means) -> None:
    zeros, routing = torch.empty(16, 8, dtype=torch.int32), torch.empty(16, 8, dtype=torch.int32)
    mask, counts = torch.empty(16, 8, dtype=torch.bool), torch.empty(8, dtype=torch.int64)
    assert means.follow("zeros_like", (torch.empty(16, 8),), zeros) == 0.0
    assert means.follow("scatter", (zeros, 1, torch.empty(16, 2, dtype=torch.int64), 1), routing) == 0.25
    assert means.follow("_to_copy", (routing,), mask) == 0.25
    assert means.follow("sum", (mask, [0]), counts) == 4.0
    assert means.follow("any", (mask,), torch.empty((), dtype=torch.bool)) is None


def test_half_of_a_mask_that_nothing_is_known_about_is_assumed(means: Means) -> None:
    x, positive, both = torch.empty(8), *(torch.empty(8, dtype=torch.bool) for _ in range(2))
    counts, routing = torch.empty((), dtype=torch.int64), torch.empty(8, 8, dtype=torch.bool)
    assert means.follow("gt", (x, 1.0), positive) == 0.5
    assert means.is_assumed(positive)
    assert means.follow("logical_not", (positive,), both) == 0.5
    assert means.follow("sum", (both,), counts) == 4.0
    assert means.is_assumed(counts)
    means.know(routing, 0.25)  # by how it was made
    assert means.follow("sum", (routing,), counts) == 16.0
    assert not means.is_assumed(counts)
    means.follow("isnan", (x,), positive)
    assert not means.is_assumed(positive)


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
def test_signs(means: Means, name: str, arguments: tuple[Any, ...], expected: bool) -> None:
    result = torch.empty(2)
    means.follow(name, arguments, result)
    assert means.is_non_negative(result) is expected


def test_a_norm_that_is_tested_in_detail_is_valid(means: Means) -> None:
    """As DeepSpeed does: the root of summed squares, -1 in the place of what is not finite, infinity where negative."""
    squared, norm, masked, chosen, total, scaled = (torch.empty(()) for _ in range(6))
    isnan, negative = (torch.empty((), dtype=torch.bool) for _ in range(2))
    means.follow("pow", (torch.empty(()), 2.0), squared)
    means.follow("sum", (squared,), total)
    means.follow("mul", (total, -1.0), scaled)
    assert (means.is_non_negative(total), means.is_non_negative(scaled)) == (True, False)
    means.follow("pow", (squared, 0.5), norm)
    means.follow("isnan", (norm,), isnan)
    means.follow("masked_fill_", (norm, isnan, -1.0), masked)
    assert means.is_non_negative(masked)
    assert means.follow("lt", (masked, 0), negative) == 0.0
    assert means.follow("ge", (masked, 0), torch.empty((), dtype=torch.bool)) == 1.0
    means.follow("where", (negative, torch.empty(()), masked), chosen)
    assert means.is_non_negative(chosen)
    means.follow("where", (torch.empty((), dtype=torch.bool), torch.empty(()), masked), chosen)
    assert not means.is_non_negative(chosen)


def test_a_mask_whose_values_are_there_says_what_it_leaves() -> None:
    values = {"nowhere": torch.tensor([False, False]), "somewhere": torch.tensor([False, True])}
    masks = {name: torch.empty(2, dtype=torch.bool) for name in values}
    means = Means(
        lambda tensor: next((values[name] for name in masks if masks[name] is tensor), None), Storages(Watch())
    )
    kept, replaced, norm = (torch.empty(2) for _ in range(3))
    means.know_non_negative(norm)
    means.follow("masked_fill", (norm, masks["nowhere"], -1.0), kept)
    means.follow("masked_fill", (norm, masks["somewhere"], -1.0), replaced)
    assert means.is_non_negative(kept)
    assert not means.is_non_negative(replaced)
