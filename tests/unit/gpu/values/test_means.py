from __future__ import annotations

import math
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


X = torch.empty(4)


@pytest.mark.parametrize(
    ("name", "more", "expected"),
    [
        *((name, (number,), 0.25) for name, number in (("gt", 0), ("ne", 0), ("eq", 1), ("ge", 1))),
        *((name, (number,), 0.75) for name, number in (("eq", 0), ("le", 0), ("ne", 1), ("lt", 1))),
        *((name, (2,), 0.5) for name in ("eq", "gt")),  # assumed
        *((name, (math.inf,), mean) for name, mean in (("eq", 0.0), ("ne", 1.0), ("lt", 0.5))),
        *((name, (), 0.25) for name in ("clone", "_to_copy", "mean")),
        *((name, (), 0.75) for name in ("logical_not", "bitwise_not")),
        *((name, (), None) for name in ("all", "any", "amin", "amax", "cos")),
        ("sum", (), 1.0),
        *((name, "half", 0.125) for name in ("mul", "bitwise_and", "logical_and")),
        *((name, "half", 0.625) for name in ("bitwise_or", "logical_or")),
        ("stack", "half", None),
        ("mul", (2,), None),
        *((name, (), mean) for name, mean in (("zeros_like", 0.0), ("new_zeros", 0.0), ("ones_like", 1.0))),
        *((name, (), mean) for name, mean in (("isinf", 0.0), ("isposinf", 0.0), ("isneginf", 0.0), ("isfinite", 1.0))),
        *((name, (3,), 3.0) for name in ("full_like", "fill_")),
        ("new_full", ((4,), 0.5), 0.5),
        ("full_like", (None,), None),
        ("scatter", (0, torch.empty(1, dtype=torch.int64), 1), 0.4375),
        ("scatter", (0, torch.empty(1, dtype=torch.int64), None), None),
    ],
)
def test_the_mean_of_a_result_follows_from_that_of_a_mask(means: Means, name: str, more: Any, expected: object) -> None:
    mask, half, result = (torch.empty(4, dtype=torch.bool) for _ in range(3))
    means.know(mask, 0.25)
    means.know(half, 0.5)
    args = (mask, half) if more == "half" else (mask, *more)
    result = torch.empty((), dtype=torch.int64) if name == "sum" else result
    assert means.follow(name, args, result) == expected


@pytest.mark.parametrize("name", ["all", "_is_all_true", "min", "amin", "any", "_is_any_true", "max", "amax"])
def test_extremes_of_a_mask_are_known_where_all_of_it_is_the_same(means: Means, name: str) -> None:
    for mean in (0.0, 1.0):
        mask = torch.empty(4, dtype=torch.bool)
        means.know(mask, mean)
        assert means.follow(name, (mask,), torch.empty((), dtype=torch.bool)) == mean


MASK = torch.empty(4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("name", "more", "is_after_any", "is_after_squares"),
    [
        *((name, (), True, True) for name in ("norm", "exp", "relu", "sigmoid", "softplus", "_softmax", "var", "abs")),
        *((name, (), True, True) for name in ("mse_loss", "cross_entropy_loss", "nll_loss_forward", "zeros_like")),
        *((name, (), False, False) for name in ("cos", "neg")),
        *((name, (number,), number >= 0, number >= 0) for name in ("full_like", "fill_") for number in (0, -1)),
        *(("pow", (number,), number % 2 == 0, True) for number in (2, 3, 0.5)),
        ("clamp", (0.0,), True, True),
        ("clamp", (-1.0,), False, True),
        ("clamp", (-1.0, 9.0), False, True),
        ("clamp", (None, -1.0), False, False),
        ("clamp", (X, X), False, False),
        ("masked_fill", (MASK, 0), False, True),
        ("masked_fill", (MASK, -1), False, False),
        *((name, (2.0,), False, True) for name in ("add", "mul", "div")),
        *((name, (-2.0,), False, False) for name in ("add", "mul", "div")),
        ("add", (X,), False, False),
        ("sub", (2.0,), False, False),
    ],
)
def test_signs_follow_from_operations_and_numbers(
    means: Means, name: str, more: Any, is_after_any: bool, is_after_squares: bool
) -> None:
    squares = torch.empty(4)
    means.know_non_negative(squares)
    for value, expected in ((X, is_after_any), (squares, is_after_squares)):
        result = torch.empty(4)
        means.follow(name, (value, *more), result)
        assert means.is_non_negative(result) is expected


@pytest.mark.parametrize("name", ["exp", "softplus", "sigmoid", "_softmax", "add", "clamp"])
def test_what_is_positive_is_above_zero(means: Means, name: str) -> None:
    positive, squares = torch.empty(4), torch.empty(4)
    means.know_non_negative(squares)
    means.follow(name, (squares, 1e-6) if name in ("add", "clamp") else (X,), positive)
    for compare, mean in (("gt", 1.0), ("ne", 1.0), ("le", 0.0), ("eq", 0.0), ("lt", 0.0), ("ge", 1.0)):
        assert means.follow(compare, (positive, 0), torch.empty(4, dtype=torch.bool)) == mean


def test_marking_elements_one_by_one_raises_the_mean() -> None:
    means = Means(lambda tensor: tensor if tensor.numel() == 1 else None, Storages(Watch()))
    zeros, one = torch.empty(8, 4, dtype=torch.int64), torch.tensor(1)
    means.know(zeros, 0.0)
    picked, rows = torch.empty(6, dtype=torch.int64), torch.empty(8, dtype=torch.bool)
    assert means.follow("index_put_", (zeros, [picked, picked], one), torch.empty(8, 4)) == 6 / 32
    for unknown in ((zeros, [picked], one), (zeros, [rows, picked], one), (zeros, [picked, picked], one, True)):
        assert means.follow("index_put_", unknown, torch.empty(8, 4)) is None


def _reduced(means: Means, name: str, mask: torch.Tensor) -> tuple[float | None, bool]:
    """Result of any or all of a mask, and whether that is assumed."""
    result = torch.empty((), dtype=torch.bool)
    return means.follow(name, (mask,), result), means.is_assumed(result)


def _compared(means: Means, name: str, values: torch.Tensor, other: object) -> torch.Tensor:
    mask = torch.empty(values.shape, dtype=torch.bool)
    means.follow(name, (values, other), mask)
    return mask


def test_bounds_decide_what_holds_for_all(means: Means) -> None:
    """Boxes as ``rand() * 800 + 1``, and what a matcher divides of them."""
    drawn, scaled, boxes, more, iou = (torch.empty(1 << 20) for _ in range(5))
    means.follow("rand", ([1 << 20],), drawn)
    means.follow("mul", (drawn, 800), scaled)
    means.follow("add", (scaled, 1), boxes)
    means.follow("add", (boxes, 5), more)
    means.follow("div", (boxes, more), iou)
    assert _reduced(means, "all", _compared(means, "ge", iou, 0)) == (1.0, False)
    assert _reduced(means, "any", _compared(means, "lt", iou, 0)) == (0.0, False)
    assert _reduced(means, "any", _compared(means, "gt", boxes, 801.5)) == (0.0, False)
    assert _reduced(means, "all", _compared(means, "lt", boxes, more)) == (0.0, True)
    assert _reduced(means, "any", _compared(means, "gt", boxes, 400)) == (1.0, False)
    assert means.of(_compared(means, "gt", boxes, 201)) == pytest.approx(0.75)
    means.follow("add", (boxes, boxes), more, is_plain=False)  # of which one may count negative
    assert _reduced(means, "all", _compared(means, "ge", more, 2)) != (1.0, False)
    values = torch.full((8,), -3.0)
    means.confine(boxes, values)
    assert values.tolist() == [1.0] * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_bound_beyond_the_type_bounds_nothing(means: Means, dtype: torch.dtype) -> None:
    drawn, scaled = (torch.empty(8, dtype=dtype) for _ in range(2))
    means.follow("rand", ([8],), drawn)
    means.follow("mul", (drawn, 1e300), scaled)
    values = torch.tensor([-3.0, 5.0], dtype=dtype)
    means.confine(scaled, values)
    assert values.tolist() == [0.0, 5.0]


def test_values_are_drawn_again_until_none_is_outside(means: Means) -> None:
    """``trunc_normal_`` of torch 2.15, of a million elements."""
    for deviations, draws in ((100, 1), (3, 3), (2, 5)):
        shape, limit = (1 << 20,), deviations * 0.02
        result = torch.empty(shape)
        means.follow("normal_", (result, 0.0, 0.02), result)
        drawn = 1
        while drawn < 12:
            above, below, mask = (torch.empty(shape, dtype=torch.bool) for _ in range(3))
            means.follow("lt", (result, -limit), below)
            means.follow("gt", (result, limit), above)
            means.follow("bitwise_or", (below, above), mask)
            if not _reduced(means, "any", mask)[0]:
                break
            again, chosen = torch.empty(shape), torch.empty(shape)
            means.follow("normal_", (again, 0.0, 0.02), again)
            means.follow("where", (mask, again, result), chosen)
            result, drawn = chosen, drawn + 1
        assert drawn == draws


def test_made_up_values_are_normal_where_their_distribution_is_not_known(means: Means) -> None:
    x, size = torch.empty(1 << 20), torch.empty(1 << 20)
    assert _reduced(means, "any", _compared(means, "gt", x, 1e4)) == (0.0, True)
    assert _reduced(means, "all", _compared(means, "lt", x, 1e4)) == (1.0, True)
    assert _reduced(means, "all", _compared(means, "ne", x, 3.0)) == (1.0, True)
    assert _reduced(means, "any", _compared(means, "gt", x, 0.5)) == (1.0, True)
    means.follow("abs", (x,), size)
    assert _reduced(means, "any", _compared(means, "lt", size, -1e-3)) == (0.0, False)
    assert _reduced(means, "any", _compared(means, "gt", size, 50)) == (0.0, True)
    ids = torch.empty(1 << 20, dtype=torch.int64)
    assert _reduced(means, "any", _compared(means, "lt", ids, 0)) == (0.0, True)
    assert _reduced(means, "any", _compared(means, "ge", ids, 128_256)) == (0.0, True)
    assert _reduced(means, "any", _compared(means, "eq", ids, 7)) == (None, False)
