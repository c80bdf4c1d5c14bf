"""A step with collectives: on two streams, with known durations."""

import numpy as np
import pandas as pd
import pytest

from fakedist.cost_model.collectives.collective_times import FABRICS
from fakedist.cost_model.collectives.communication import Communication
from fakedist.cost_model.step import PlacedStep, StepLaunches
from fakedist.gpu.models.catalogue import GPUS
from tests.unit.cost_model.launches_by_hand import Host

WORK = pd.DataFrame([("product", 132 * 128, 256, 1), ("collective", 0, 0, 0)], columns=["kind", "m", "n", "batch"])
PRICED = pd.DataFrame({"time_us": [100.0, np.nan], "bound": ["compute", ""]})
#: A collective on stream 7 that begins with a kernel of 100 us, and a second kernel that waits for both.
LAUNCHES = pd.DataFrame(
    [
        ("stream_records", -1, 0, 1, -1),
        ("stream_waits", -1, 7, 1, -1),
        ("collective", 1, 7, 0, 40),
        ("product", 0, 0, 0, -1),
        ("stream_records", -1, 7, 2, -1),
        ("stream_waits", -1, 0, 2, -1),
        ("product", 0, 0, 0, -1),
    ],
    columns=["what", "work", "stream", "event", "call"],
).assign(num_operations=0, graph=0, device=0)


def communication(time_us: float, *, interferes: bool = False) -> Communication:
    calls = pd.DataFrame({"time_us": time_us, "low_us": time_us / 2, "high_us": time_us * 2}, index=[40])
    calls = calls.assign(num_nodes=1, moved_bytes=0.0, link_share=1.0, queue=0, algorithm="ring", sms=-1)
    return Communication(calls, GPUS["h100-80g"], FABRICS["dgx-h100-ndr"], interferes)


def placed(*arguments: object, **options: object) -> PlacedStep:
    return step(communication(*arguments, **options)).place(Host())  # type: ignore[arg-type]


def step(found: Communication | None) -> StepLaunches:
    return StepLaunches(LAUNCHES, WORK, PRICED, found)


def test_only_an_exposed_collective_lengthens_the_step_and_a_faster_one_never() -> None:
    assert placed(60.0).placed.end_us == 200.0
    assert placed(150.0).placed.end_us == 250.0
    found = step(None).place(Host())
    assert found.placed.end_us == 200.0
    assert np.isnan(found.time_us[2])
    ends = [placed(time_us, interferes=True).placed.end_us for time_us in (10.0, 60.0, 100.0, 150.0, 400.0, 1000.0)]
    assert ends == sorted(ends)


def test_a_product_that_fills_the_gpu_is_slower_during_a_collective() -> None:
    # The collective holds 24 of 132 SMs: a product of exactly 132 tiles takes a second wave, so twice as long.
    found = placed(1000.0, interferes=True)
    assert found.time_us[3] == pytest.approx(200.0)
    assert found.time_us[6] == pytest.approx(100.0)
    assert found.time_us[2] == 1000.0


def test_the_interval_takes_kernels_and_collectives_as_independent() -> None:
    made = step(communication(150.0))
    found = made.place(Host())
    low, high, kernels, calls, host, *_ = made.interval(found, Host(), lambda: (180.0, 240.0))
    # Kernels alone: 240 to 270. Collectives alone: 200 (hidden) to 400.
    assert low == pytest.approx(250 - np.hypot(10, 50))
    assert high == pytest.approx(250 + np.hypot(20, 150))
    assert (kernels, calls, host) == (20.0, 150.0, 0.0)
    assert made.interval(made.place(Host()), Host(), lambda: (float("nan"), 1.0))[:2] == (None, None)


def test_products_on_two_streams_share_the_gpu() -> None:
    rows = [("product", 0, stream, 0, -1) for stream in (0, 7)]
    launches = pd.DataFrame(rows, columns=LAUNCHES.columns[:5]).assign(num_operations=0, graph=0, device=0)

    def end_us(filled: float, found: Communication | None = None, **measured: object) -> float:
        priced = PRICED.assign(filled=[filled, 0.0])
        return StepLaunches(launches.assign(**measured), WORK, priced, found).place(Host()).placed.end_us

    assert end_us(1.0) == 200.0
    assert end_us(0.5) == 100.0
    assert end_us(1.0, communication(1.0, interferes=True)) == 200.0
    assert end_us(1.0, communication(1.0)) == 100.0
    assert end_us(1.0, measured_us=[100.0, 100.0]) == 100.0  # as long as they took next to each other
