from __future__ import annotations

import numpy as np
import pytest

from fakedist.cost_model.kernels.kernel_times import KernelTimes
from fakedist.cost_model.step import ImbalancedPrices
from fakedist.gpu.models.catalogue import find_gpu
from tests.unit.cost_model.work_by_hand import product, work

WORK = work(product(4096, 4096, 4096), product(4096, 2048, 4096, groups=8))
COUNTS = np.array([1, 3])


def test_the_busiest_rank_sets_the_pace_of_grouped_products_alone() -> None:
    even = KernelTimes(find_gpu("h100-80g")).price(WORK, COUNTS)
    prices = ImbalancedPrices(KernelTimes(find_gpu("h100-80g")), 1.5)
    found = prices.price(WORK, COUNTS)
    for column in ("time_us", "low_us", "high_us"):
        assert (found[column] / even[column]).tolist() == pytest.approx([1.0, 1.5])
    assert "1.5 times its even load" in prices.notes()[-1].text


def test_an_even_load_is_said_where_there_are_experts() -> None:
    prices = ImbalancedPrices(KernelTimes(find_gpu("h100-80g")), 1.0)
    prices.price(WORK, COUNTS)
    assert prices.notes()[-1].code == "experts_load"
    prices.price(WORK[:1], COUNTS[:1])
    assert prices.notes()[-1].code == "from_measurements"
