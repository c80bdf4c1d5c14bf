"""Attention in decoding: what was measured, between it, and never below the bytes of the KV cache."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from fakedist.cost_model.kernels.gpus import MEASURED_GPUS, measured_spec
from fakedist.cost_model.kernels.measurements import load_measured
from fakedist.extras.rl.rollout_time import DecodingShape, DecodingTimes, beyond_l2
from fakedist.gpu.models.catalogue import GPUS

H100 = GPUS["h100-80g"]
LLAMA = DecodingShape(32, 8, 128)


@pytest.fixture(scope="module")
def times() -> DecodingTimes:
    return DecodingTimes(load_measured("h100-sxm").decoding, H100)


def _us(times: DecodingTimes, shape: DecodingShape, batch: float, context: float) -> float:
    return float(times.time_us(shape, np.array([batch]), np.array([context]))[0])


@pytest.mark.parametrize("name", MEASURED_GPUS)
def test_every_gpu_has_measurements_and_gets_them_back(name: str) -> None:
    spec = measured_spec(name)
    table = load_measured(name).decoding
    rows = beyond_l2(table[(table["heads"] == 32) & (table["kv_heads"] == 8) & (table["width"] == 128)], spec)
    assert len(table) > 3000
    assert len(rows) > 50
    batch, context = (rows[column].to_numpy("f8") for column in ("batch", "context"))
    estimated = DecodingTimes(table, spec).time_us(LLAMA, batch, context)
    assert estimated == pytest.approx(rows["time_us"].to_numpy(), rel=1e-6)


def test_between_what_was_measured_it_lies_between(times: DecodingTimes) -> None:
    below, at, above = (_us(times, LLAMA, 64, context) for context in (4096, 6000, 8192))
    assert below < at < above
    # 64 sequences of 8,192 tokens are 2.1 GB, which an H100 reads in 641 us at the peak.
    assert 641 < above < 641 / 0.8


def test_nothing_takes_less_than_its_bytes(times: DecodingTimes) -> None:
    table = load_measured("h100-sxm").decoding
    large = pd.DataFrame({"time_us": [1.0], "heads": [32], "kv_heads": [8], "width": [128]})
    rows = large.assign(batch=[1024], context=[4096])
    impossible = DecodingTimes(pd.concat([table, rows]), H100)
    least = 2 * 2 * 8 * 128 * 1024 * 4096 / H100.memory_bandwidth * 1e6
    assert _us(impossible, LLAMA, 1024, 4096) == pytest.approx(least)
    assert _us(times, LLAMA, 1024, 100_000) > least * 20, "beyond the table, too"


def test_a_cache_in_l2_counts_as_one_that_is_not() -> None:
    l40s, table = measured_spec("l40s"), load_measured("l40s").decoding
    moved = 4.0 * table["kv_heads"] * table["width"] * table["batch"] * table["context"]
    least_us = moved / l40s.memory_bandwidth * 1e6
    assert (table["time_us"] < least_us).any(), "the collector read it from L2"
    assert (beyond_l2(table, l40s)["time_us"] > least_us).all()


def test_heads_that_were_not_measured_are_like_their_neighbours(times: DecodingTimes) -> None:
    batch, context = np.array([1.0, 64.0, 256.0]), np.array([4096.0, 1024.0, 2048.0])
    estimated = times.time_us(LLAMA, batch, context, without=LLAMA)
    assert estimated == pytest.approx(times.time_us(LLAMA, batch, context), rel=0.15)
    assert (estimated != times.time_us(LLAMA, batch, context)).all()
    odd = DecodingShape(28, 7, 128)
    assert _us(times, DecodingShape(24, 4, 128), 64, 8192) < _us(times, odd, 64, 8192) < _us(times, LLAMA, 64, 8192)


def test_another_bandwidth_scales_what_is_long(times: DecodingTimes) -> None:
    slow = float(times.time_us(LLAMA, np.array([256.0]), np.array([8192.0]), 2.4e12)[0])
    assert slow / _us(times, LLAMA, 256, 8192) == pytest.approx(3.35 / 2.4, rel=0.01)
