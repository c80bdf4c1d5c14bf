"""Facts about all elements of a tensor: the answers of the plain ways."""

from __future__ import annotations

import math

import pytest
import torch

from fakedist.gpu.values.tensors import all_true, any_true, distinct, has_no_negative, is_finite, selected

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn])
@pytest.mark.parametrize("value", [0.0, 3.0, -3.0, math.nan, math.inf, -math.inf])
def test_one_value_decides(dtype: torch.dtype, value: float) -> None:
    values = torch.ones(4, 8)
    values[2, 3] = value
    values = values.to(dtype)
    assert is_finite(values) is bool(torch.isfinite(values.float()).all())
    assert has_no_negative(values) is bool((values.float() >= 0).all())


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_sum_that_overflows_is_of_finite_numbers_and_infinities_that_cancel_are_found(dtype: torch.dtype) -> None:
    assert is_finite(torch.full((4,), torch.finfo(dtype).max, dtype=dtype))
    assert not is_finite(torch.tensor([math.inf, -math.inf], dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8, torch.uint16, torch.bool])
def test_integers_have_a_sign_too(dtype: torch.dtype) -> None:
    values = torch.tensor([1, 0, -1]).to(dtype)
    assert has_no_negative(values) is (not dtype.is_signed)
    assert has_no_negative(values[:2])
    assert not has_no_negative(torch.ones(2, dtype=torch.complex64))  # which has no sign


def test_of_no_elements_everything_holds_and_nothing_is_true() -> None:
    assert is_finite(torch.empty(0))
    assert has_no_negative(torch.empty(0))
    assert all_true(torch.empty(0, dtype=torch.bool))
    assert not any_true(torch.empty(0, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_masks(dtype: torch.dtype) -> None:
    mask = torch.tensor([[True, False], [True, False]]).to(dtype)
    assert [all_true(column) for column in mask.unbind(1)] == [True, False]
    assert [any_true(column) for column in mask.unbind(1)] == [True, False]
    assert any_true(mask)
    assert not all_true(mask)


def test_an_expanded_tensor_is_looked_at_once() -> None:
    values = torch.arange(3.0).expand(5, 3)
    assert distinct(values).shape == (1, 3)
    assert has_no_negative(values)
    assert not has_no_negative(-values)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shapes", [((3, 4), (3, 4)), ((4,), (3, 4)), ((3, 4), (4,)), ((), (3, 4)), ((), ())])
def test_a_selection_is_in_the_order_of_torchs_own(dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 99, shapes[0], generator=generator).to(dtype)
    mask = torch.randint(0, 2, shapes[1], generator=generator).bool()
    for each in (mask, ~mask):
        found, expected = selected(values, each), torch.masked_select(values, each)
        assert found.shape == expected.shape
        assert torch.equal(found, expected)
