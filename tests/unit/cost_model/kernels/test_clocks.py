"""Sustained clocks: what falls with the power limit, and how far."""

from dataclasses import replace

import numpy as np
import pytest

from fakedist.cost_model.kernels.kernel_times import FP8_HEAT, HEAT, PowerModel, SustainedClock
from fakedist.gpu.models.catalogue import GPUS

ARITHMETIC, MEMORY = np.array([True]), np.array([False])
SHORT, OFTEN = np.array([500.0]), np.array([1000.0])
BF16 = np.array(["bf16"], object)


def clock_at(gpu: str, table: str, watts: float, *, computes: bool = True) -> SustainedClock:
    model = PowerModel(replace(GPUS[gpu], watts=watts), GPUS[gpu], table)
    return model.clock(SHORT, ARITHMETIC if computes else MEMORY, OFTEN, model.draws(BF16))


def test_a_gb300_at_500_watts_keeps_as_much_of_its_products_rate_as_was_published() -> None:
    ratio = clock_at("gb300", "gb300", 500).fraction / clock_at("gb300", "gb300", 1400).fraction
    assert 617 / 2174 <= ratio <= 617 / 1600  # TFLOP/s, facebookexperimental/triton#2023


def test_clocks_follow_the_power_that_is_left() -> None:
    watts = [500.0, 700.0]
    fractions = [clock_at("h100-80g", "h100-sxm", each).fraction for each in watts]
    idle = 0.12 * 700
    assert fractions[1] / fractions[0] == pytest.approx(((watts[1] - idle) / (watts[0] - idle)) ** (1 / 3), rel=1e-3)
    found = [clock_at("h100-80g", "h100-sxm", watts).fraction for watts in (200, 300, 400, 500, 600, 700, 5000)]
    assert found == sorted(found)
    assert found[-1] == 1.0


def test_memory_bound_work_neither_falls_nor_takes_longer_and_keeps_more_clock() -> None:
    assert clock_at("h100-80g", "h100-sxm", 500, computes=False).fraction == 1.0
    model = PowerModel(replace(GPUS["h100-80g"], watts=500.0), GPUS["h100-80g"], "h100-sxm")
    assert model.slower(SHORT, MEMORY, SustainedClock(0.7, 500.0), model.draws(BF16)) == 1.0
    assert model.slower(SHORT, ARITHMETIC, SustainedClock(0.7, 500.0), model.draws(BF16)) == pytest.approx(1 / 0.7)
    model = PowerModel(GPUS["h100-80g"], GPUS["h100-80g"], "h100-sxm")
    assert model.clock(np.array([np.nan]), ARITHMETIC, OFTEN, model.draws(BF16)).fraction == 1.0
    both, often = np.array([500.0, 500.0]), np.array([1000.0, 1000.0])
    alone = model.clock(SHORT, ARITHMETIC, OFTEN, model.draws(BF16)).fraction
    assert model.clock(both, np.array([True, False]), often, model.draws(BF16.repeat(2))).fraction > alone


def test_products_in_fp8_draw_less_than_others_and_long_ones_were_measured_at_the_full_clock() -> None:
    model = PowerModel(GPUS["b200"], GPUS["b200"], "b200-sxm")
    types = ("fp8", "nvfp4", "bf16", "fp16")
    clocks = {text: model.clock(SHORT, ARITHMETIC, OFTEN, model.draws(np.array([text], object))) for text in types}
    assert clocks["fp8"].fraction > 1.2 * clocks["bf16"].fraction
    assert clocks["nvfp4"].fraction < clocks["bf16"].fraction == clocks["fp16"].fraction
    both, half = np.array(["fp8", "bf16"], object), np.array([500.0, 500.0])
    mixed = model.clock(half, np.array([True, True]), np.array([1000.0, 1000.0]), model.draws(both)).fraction
    assert clocks["bf16"].fraction < mixed < clocks["fp8"].fraction
    long_us = np.array([20_000.0])
    slower = [model.slower(long_us, ARITHMETIC, SustainedClock(0.7, 1000.0), model.draws(both[[at]])) for at in (0, 1)]
    assert slower == [pytest.approx(1 / 0.7), pytest.approx(0.92 / 0.7)]


def test_a_gpu_that_is_cooled_by_liquid_keeps_in_a_step_what_it_keeps_in_a_benchmark() -> None:
    assert clock_at("gb200", "gb200", 1200).fraction == pytest.approx(0.84, abs=0.001)  # LONG_PRODUCTS
    assert clock_at("b200", "b200-sxm", 1000).fraction < 0.9 * 0.92


def test_what_products_in_narrow_types_draw_is_known_less_well_than_what_bf16_draws() -> None:
    model = PowerModel(GPUS["gb300"], GPUS["gb300"], "gb300")
    draws = model.draws(np.array(["bf16", "fp8", "nvfp4"], object))
    assert draws.at(1.0).full_watts / draws.full_watts == pytest.approx([1.0, 1 / FP8_HEAT, HEAT])
    assert draws.at(-1.0).full_watts / draws.full_watts == pytest.approx([1.0, FP8_HEAT, 1 / HEAT])
