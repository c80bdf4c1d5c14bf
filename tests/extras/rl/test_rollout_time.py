"""The price of a rollout: by hand with kernels that all take as long, against a step at a time, and what it follows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from fakedist.cost_model.collectives.collective_times import CollectiveTimes, default_fabric
from fakedist.cost_model.hosts import HostCosts
from fakedist.cost_model.kernels.kernel_times import KernelTimes
from fakedist.cost_model.kernels.measurements import Floats, load_measured
from fakedist.errors import JobError
from fakedist.extras.rl.model_config import ModelShapes
from fakedist.extras.rl.rollout_time import (
    DecodingShape,
    DecodingTimes,
    EngineModels,
    RolloutTime,
    price_rollout,
    split_by_context,
)
from fakedist.extras.rl.schedule import EngineLimits, engine_steps
from fakedist.gpu.models.catalogue import GPUS
from fakedist.rundir.notes import Note
from fakedist.rundir.step_time import Calibration

LLAMA = ModelShapes(32, 4096, 32, 8, 128, 14336, 128256)
EXPERTS = ModelShapes(48, 2048, 32, 4, 128, 768, 151936, experts=128, top_k=8, has_head_norms=True)
LIMITS = EngineLimits(cache_tokens=400_000, max_running=1024, step_tokens=16384)


class _SameTimes:
    """Prices every kernel at 10 us. It implements ``Prices``."""

    product = "GPU"
    host = HostCosts()
    calibrated_on: Calibration | None = None

    def price(self, work: pd.DataFrame, counts: Floats) -> pd.DataFrame:
        columns = dict.fromkeys(("time_us", "low_us", "high_us"), 10.0) | {"accuracy": "same", "basis": "same"}
        return pd.DataFrame(columns, index=work.index)

    def step_interval(self, priced: pd.DataFrame, counts: Floats) -> tuple[float, float]:
        return 0.0, 0.0

    def notes(self) -> list[Note]:
        return []


def _models(gpu: str = "h100-80g", host: float = 0.0, *, same: bool = False) -> EngineModels:
    spec = GPUS[gpu]
    prices = _SameTimes() if same else KernelTimes(spec)
    return EngineModels(spec, prices, CollectiveTimes(spec, default_fabric(gpu)), host)


def _price(
    lengths: list[int], prompt: int = 512, *, ranks: int = 1, gpu: str = "h100-80g", host: float = 0.0
) -> RolloutTime:
    return price_rollout(LLAMA, [lengths], LIMITS, _models(gpu, host), prompt_tokens=prompt, ranks=ranks)


def _part(rollout: RolloutTime, name: str) -> float:
    return next((part.time_us for part in rollout.parts if part.name == name), 0.0)


def test_every_kernel_of_every_step_counts() -> None:
    rollout = price_rollout(LLAMA, [[5]], LIMITS, _models(same=True), prompt_tokens=3)
    assert rollout.num_steps == 5, "the prompt, and four tokens"
    assert _part(rollout, "products") == pytest.approx(5 * 10 * (4 * 32 + 1)), "and the logits"
    assert _part(rollout, "other kernels") == pytest.approx(5 * 10 * (4 * 32 + 6)), "and sampling"
    assert _part(rollout, "attention of prompts") == pytest.approx(10 * 32)
    decoding = DecodingTimes(load_measured("h100-sxm").decoding, GPUS["h100-80g"])
    contexts = np.array([4.0, 5.0, 6.0, 7.0])
    expected = 32 * decoding.time_us(DecodingShape(32, 8, 128), np.ones(4), contexts).sum()
    assert _part(rollout, "attention of decoding") == pytest.approx(expected, rel=1e-3)
    assert sum(part.time_us for part in rollout.parts) == pytest.approx(rollout.time_us)


def test_experts_and_norms_of_heads_are_kernels_more() -> None:
    rollout = price_rollout(EXPERTS, [[1]], LIMITS, _models(same=True), prompt_tokens=3)
    assert _part(rollout, "products") == pytest.approx(10 * (5 * 48 + 1)), "the router's, and the logits"
    assert _part(rollout, "other kernels") == pytest.approx(10 * (5 * 48 + 6))


def test_a_host_that_takes_longer_than_the_gpu_sets_the_pace() -> None:
    host = 50.0
    rollout = _price([101], host=host)
    steps_us = 1850.0 + 26.7  # one request: its prompt or its token
    assert rollout.time_us == pytest.approx(101 * host * steps_us)
    assert _part(rollout, "host") > 0.8 * rollout.time_us


def test_a_step_reads_the_weights_and_the_cache_at_least_once() -> None:
    rollout = _price([512] * 64)
    weights = 2 * (32 * (4096 * (6144 + 4096) + 3 * 4096 * 14336) + 4096 * 128256)
    cache = 2 * 2 * 8 * 128 * 32 * 64 * (512 + 256)
    least_us = 511 * (weights + cache) / 3.35e12 * 1e6
    assert least_us < rollout.time_us < 2.5 * least_us


@pytest.mark.parametrize("shape", [LLAMA, EXPERTS])
def test_rows_of_many_steps_cost_what_each_of_them_costs(shape: ModelShapes) -> None:
    lengths = [700, 30, 300, 2000, 1]
    whole = price_rollout(shape, [lengths], LIMITS, _models(), prompt_tokens=64)
    steps = engine_steps(lengths, 64, LIMITS)
    one = steps.loc[steps.index.repeat(steps["steps"])].reset_index(drop=True)
    at = np.concatenate([np.arange(number) for number in steps["steps"]])
    contexts = (one["context"] + one["decoding"] * at).to_numpy("f8")
    decoding = DecodingTimes(load_measured("h100-sxm").decoding, GPUS["h100-80g"])
    batch = one["decoding"].to_numpy("f8")
    own, chosen = DecodingShape(shape.heads, shape.kv_heads, shape.width), batch > 0
    each = decoding.time_us(own, batch[chosen], contexts[chosen] / batch[chosen])
    assert _part(whole, "attention of decoding") == pytest.approx(shape.layers * each.sum(), rel=0.01)


def test_splitting_changes_neither_steps_nor_keys() -> None:
    steps = engine_steps([4000, 17, 900], 16, LIMITS)
    split = split_by_context(steps)
    assert split["steps"].sum() == steps["steps"].sum()
    keys = (steps["steps"] * (steps["context"] + steps["decoding"] * (steps["steps"] - 1) / 2)).sum()
    assert (split["steps"] * split["context"]).sum() == pytest.approx(keys)
    assert len(split) > len(steps)


def test_more_takes_longer_and_more_gpus_take_less() -> None:
    short, long, many = _price([200] * 32), _price([400] * 32), _price([200] * 64)
    assert short.time_us < long.time_us
    assert short.time_us < many.time_us < 2 * short.time_us, "they share the weights"
    assert _price([200] * 32, prompt=2048).time_us > short.time_us
    assert _price([200] * 32, gpu="h200").time_us < short.time_us
    both = _price([200] * 32, ranks=2)
    assert 0.4 * short.time_us < both.time_us < short.time_us
    assert _part(both, "collectives") > 0


def test_a_smaller_cache_takes_longer() -> None:
    lengths = [int(length) for length in np.linspace(50, 800, 64)]
    small = price_rollout(LLAMA, [lengths], replace(LIMITS, cache_tokens=6000), _models(), prompt_tokens=64)
    large = price_rollout(LLAMA, [lengths], LIMITS, _models(), prompt_tokens=64)
    assert small.time_us > large.time_us
    assert small.num_given_back > large.num_given_back == 0
    assert small.mean_decoding < large.mean_decoding


def test_one_long_answer_is_a_tail() -> None:
    even, uneven = _price([500] * 32), _price([250] * 31 + [8250])
    assert even.tail_us == 0
    assert uneven.tail_us > 0.9 * (8000 / 8250) * uneven.time_us
    assert even.generated_tokens == uneven.generated_tokens == 16000
    assert uneven.tokens_per_s < even.tokens_per_s / 5


def test_the_interval_grows_with_what_is_not_known() -> None:
    known, host = _price([300] * 256), _price([300] * 256, host=1.0)
    assert known.low_us < known.time_us < known.high_us
    assert host.high_us - host.time_us > known.high_us - known.time_us
    drawn = price_rollout(LLAMA, [[300] * 8, [900] * 8], LIMITS, _models(), prompt_tokens=64)
    once = price_rollout(LLAMA, [[600] * 8], LIMITS, _models(), prompt_tokens=64)
    assert drawn.high_us / drawn.time_us > 1.2 * once.high_us / once.time_us
    assert drawn.generated_tokens == once.generated_tokens


def test_heads_that_do_not_split_are_refused() -> None:
    with pytest.raises(JobError, match="do not split over 3 GPUs"):
        _price([10], ranks=3)
