"""The interval of a step: as wide as its kernels' where they fill it, and as the host's where that does."""

from typing import Any

import pandas as pd
import pytest

from fakedist.analysis.launches import launch_table, work_table
from fakedist.cost_model.hosts import CONSTANT_RANGE as HOST_RANGE
from fakedist.cost_model.kernels.kernel_times import KernelTimes
from fakedist.cost_model.step import PricedStep, price_step
from fakedist.cost_model.timeline import Array
from fakedist.gpu.models.catalogue import find_gpu
from tests.unit.cost_model.launches_by_hand import COPY, UNKNOWN, launch, record


class HalfToDouble(KernelTimes):
    """Kernels that together may take half or twice as long."""

    def step_interval(self, priced: pd.DataFrame, counts: Array) -> tuple[float, float]:
        whole = float((priced["time_us"] * counts).sum())
        return whole / 2, whole * 2


def step_of(*rows: dict[str, Any]) -> PricedStep:
    made = record(rows)
    return price_step(launch_table(made), work_table(made), HalfToDouble(find_gpu("h100-80g")))


def test_a_step_is_as_uncertain_as_its_kernels_or_as_the_host_that_fills_it() -> None:
    step = step_of(*[launch(COPY)] * 20)
    assert step.step_low_us == pytest.approx(step.step_us / 2, rel=0.01)
    assert step.step_high_us == pytest.approx(step.step_us * 2, rel=0.01)
    tiny = COPY._replace(moved_bytes=1024.0)
    step = step_of(*[launch(tiny, num_operations=1000)] * 20)
    assert step.step_low_us == pytest.approx(step.step_us * HOST_RANGE[0], rel=0.01)
    assert step.step_high_us == pytest.approx(step.step_us * HOST_RANGE[1], rel=0.01)
    step = step_of(launch(UNKNOWN))
    assert (step.step_low_us, step.step_high_us) == (None, None)
