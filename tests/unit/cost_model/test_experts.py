"""Grouped products: measured layers of experts, and what must hold between shapes."""

from __future__ import annotations

import numpy as np
import pytest

from fakedist.cost_model.kernels.gpus import product_roof
from fakedist.cost_model.kernels.measurements import load_measured
from fakedist.cost_model.kernels.products import GroupedTimes
from fakedist.gpu.models.catalogue import GPUS

H100 = product_roof(GPUS["h100-80g"], "bf16")


@pytest.fixture(scope="module")
def times() -> GroupedTimes:
    return GroupedTimes(load_measured("h100-sxm").experts, H100)


def grouped(times: GroupedTimes, rows: int, groups: int, n: int, k: int) -> float:
    sizes = (np.array([float(size)]) for size in (rows, groups, n, k))
    return float(times.estimate(*sizes, roof=H100)[0][0])


def test_a_large_layer_reaches_what_was_published(times: GroupedTimes) -> None:
    # TensorRT-LLM's collector on an H100, Mixtral's experts, 16,384 tokens to 2 of 8 experts: 806 TFLOP/s.
    rows, experts, hidden, inner = 32_768, 8, 4_096, 14_336
    time_us = times.layer_us(*(np.array([size]) for size in (rows, experts, hidden, inner)))[0]
    assert 6.0 * rows * hidden * inner / time_us / 1e6 == pytest.approx(806, rel=0.05)


def test_the_two_products_of_a_layer_take_about_as_long_as_the_layer(times: GroupedTimes) -> None:
    rows, experts, hidden, inner = 32_768, 8, 4_096, 14_336
    layer = times.layer_us(*(np.array([size]) for size in (rows, experts, hidden, inner)))[0]
    parts = grouped(times, rows, experts, 2 * inner, hidden) + grouped(times, rows, experts, hidden, inner)
    assert parts == pytest.approx(layer, rel=0.25)


def test_many_small_experts_are_slower_than_one(times: GroupedTimes) -> None:
    assert grouped(times, 8192, 128, 4096, 4096) > 1.3 * grouped(times, 8192, 1, 4096, 4096)
