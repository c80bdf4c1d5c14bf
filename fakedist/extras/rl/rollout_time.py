"""How long an engine takes for a rollout: the kernels, collectives and host time of its steps.

A rank of the engine runs a decoder in bf16 with tensor parallelism, as vLLM does: products of as many rows as the step
computes tokens, norms, activations and rotary embeddings by their bytes, attention of the requests that decode
(:mod:`fakedist.extras.rl.rollout_time`) and of prompts, one all_reduce after attention and one after the inner
products, and the sampling of a token from the logits. Up to 512 tokens, a step is a CUDA graph of the next captured
size, so the kernels follow one another without the host.

The host schedules a step while the GPU computes the one before, so the longer of the two counts.

Times of attention in decoding: one query for each sequence, over the keys and values that are kept of it.

vLLM's kernels were measured, by batch and context, for many combinations of heads, keys' heads and width. The reference
reads the KV cache once at the achieved bandwidth. The ratio of the measured time to it is interpolated over the
logarithms of batch and context, for the nearest measured combinations weighted by their distance. Beyond the table, the
ratio at its nearest edge holds. No time is below that of the cache's bytes at the peak bandwidth.

A KV cache that fits into the L2 cache counts as no faster than one that does not: the collector reads one cache again
and again, and between the layers of a model the weights pass through.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple, Unpack

import numpy as np
import pandas as pd

from fakedist.cost_model.accuracy import ErrorIntervals, half_width
from fakedist.cost_model.collectives.collective_times import CollectiveTime, CollectiveTimes, symmetric_time
from fakedist.cost_model.estimated import Models
from fakedist.cost_model.hosts import default_host, find_host
from fakedist.cost_model.kernels.gpus import measured_spec, nearest_table
from fakedist.cost_model.kernels.measurements import Flags, Floats, beyond_cache, fill_gaps, interpolate, load_measured
from fakedist.cost_model.nccl.settings import GroupShape, read_settings
from fakedist.cost_model.step import Prices
from fakedist.errors import JobError
from fakedist.extras.rl.model_config import ModelShapes, model_shapes, read_model_config
from fakedist.extras.rl.rollout import Rollout
from fakedist.extras.rl.schedule import EngineLimits, engine_steps, request_lengths
from fakedist.gpu.models.spec import GpuSpec
from fakedist.options.pricing import Pricing, PricingOptions
from fakedist.results.repricing import models_of
from fakedist.results.run import Run
from fakedist.rundir.launch_records import WorkRow
from fakedist.rundir.summary import EngineMemory
from fakedist.units import GIB

_START_US = 4.0
_ELEMENT_BYTES = 2.0
_ACHIEVED_BANDWIDTH = 0.9
#: What one unit (logarithm) of width, keys' heads and queries for each of these heads counts as distance: kernels are
#: compiled for a width.
_WIDTH, _KV_HEADS, _GROUP = 4.0, 1.0, 1.0
_NEIGHBOURS = 3
#: Squared distance within which neighbours count alike.
_SAME = 1e-3
_SHAPE = ["heads", "kv_heads", "width"]


@dataclass(frozen=True)
class DecodingShape:
    """One layer's attention, of one rank: query heads, heads of keys and values, width of a head."""

    heads: int
    kv_heads: int
    width: int

    def cache_bytes(self, tokens: Floats) -> Floats:
        """Bytes of the keys and values of so many tokens in bf16."""
        return np.asarray(2.0 * _ELEMENT_BYTES * self.kv_heads * self.width * tokens)

    def point(self) -> Floats:
        """Where it lies among others."""
        group = self.heads / self.kv_heads
        return np.array([_WIDTH * np.log(self.width), _KV_HEADS * np.log(self.kv_heads), _GROUP * np.log(group)])


class DecodingTimes:
    """Estimates attention of decoding on the GPU that was measured, or one of its architecture.

    Args:
        table: The rows of ``Measured.decoding``, of which there is at least one.
        measured_on: Their GPU.
    """

    def __init__(self, table: pd.DataFrame, measured_on: GpuSpec) -> None:
        self._bandwidth = measured_on.memory_bandwidth
        rows = beyond_l2(table, measured_on)
        shapes, of_row = np.unique(rows[_SHAPE].to_numpy("i8"), axis=0, return_inverse=True)
        self._shapes = [DecodingShape(*map(int, shape)) for shape in shapes]
        self._points = np.stack([shape.point() for shape in self._shapes])
        order = np.argsort(of_row.ravel(), kind="stable")
        self._rows = rows[["batch", "context", "time_us"]].to_numpy(np.float64)[order]
        self._begins = np.searchsorted(of_row.ravel()[order], np.arange(len(shapes) + 1))

    def _grid(self, at: int) -> tuple[list[Floats], Floats]:
        """The logarithm of one combination's time over its reference, over the logarithms of batch and context."""
        batch, context, time_us = self._rows[self._begins[at] : self._begins[at + 1]].T
        (batches, in_batch), (contexts, in_context) = (
            np.unique(axis, return_inverse=True) for axis in (batch, context)
        )
        grid = np.full((len(batches), len(contexts)), np.nan)
        grid[in_batch, in_context] = np.log(time_us / _reference_us(self._shapes[at], batch, context, self._bandwidth))
        return [np.log(batches), np.log(contexts)], fill_gaps(grid)

    def time_us(
        self,
        shape: DecodingShape,
        batch: Floats,
        context: Floats,
        bandwidth: float | None = None,
        *,
        without: DecodingShape | None = None,
    ) -> Floats:
        """Microseconds of attention of ``batch`` sequences with ``context`` keys each, on average.

        Args:
            shape: The combination of heads and width.
            batch: Sequences.
            context: Keys of each, on average.
            bandwidth: The peak of another GPU of the architecture; None for the one that was measured.
            without: A measured combination that is left out, to judge how well the others estimate it.
        """
        bandwidth = self._bandwidth if bandwidth is None else bandwidth
        distances = np.square(self._points - shape.point()).sum(axis=1)
        if without is not None:
            distances[[own == without for own in self._shapes]] = np.inf
        nearest = np.argsort(distances, kind="stable")[:_NEIGHBOURS]
        if distances[nearest[0]] == 0:
            nearest = nearest[:1]
        weights = 1 / (distances[nearest] + _SAME)
        points = [np.log(np.maximum(batch, 1.0)), np.log(np.maximum(context, 1.0))]
        ratio = np.zeros(len(batch))
        for at, weight in zip(nearest.tolist(), weights / weights.sum(), strict=True):
            axes, grid = self._grid(at)
            ratio += weight * interpolate(axes, grid, points)
        time_us = np.exp(ratio) * _reference_us(shape, batch, context, bandwidth)
        return np.asarray(np.maximum(time_us, self.floor_us(shape, batch, context, bandwidth)))

    @staticmethod
    def floor_us(shape: DecodingShape, batch: Floats, context: Floats, bandwidth: float) -> Floats:
        """Microseconds of the cache's bytes at the peak bandwidth."""
        return np.asarray(shape.cache_bytes(batch * context) / bandwidth * 1e6)


def beyond_l2(table: pd.DataFrame, gpu: GpuSpec) -> pd.DataFrame:
    """The rows of ``Measured.decoding`` with what they take at least if the L2 cache of the GPU holds nothing."""
    moved = 2.0 * _ELEMENT_BYTES * table["kv_heads"] * table["width"] * table["batch"] * table["context"]
    least_us = moved / (gpu.memory_bandwidth * _ACHIEVED_BANDWIDTH) * 1e6
    fits = ~beyond_cache(moved.to_numpy(np.float64), gpu.l2_bytes)
    return table.assign(time_us=np.where(fits, np.maximum(table["time_us"], least_us), table["time_us"]))


def _reference_us(shape: DecodingShape, batch: Floats, context: Floats, bandwidth: float) -> Floats:
    return np.asarray(_START_US + shape.cache_bytes(batch * context) / (bandwidth * _ACHIEVED_BANDWIDTH) * 1e6)


_BYTES = 2.0
#: vLLM 0.33.0's sizes of CUDA graphs: multiples of 8 up to 256, then of 16 (``VllmConfig._set_cudagraph_sizes``).
_CAPTURED = np.array([1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)])
#: Bytes for each logit that sampling reads and writes: fp32 from bf16 (6), a division by the temperature (8), softmax
#: (8), random numbers (4), their division (12) and the largest (4), as vLLM 0.33.0's own sampler runs them.
_SAMPLING_BYTES = (6.0, 8.0, 8.0, 4.0, 12.0, 4.0)
#: vLLM's own all_reduce, or symmetric memory, runs up to these bytes; NCCL's beyond.
_OWN_ALL_REDUCE_BYTES = 8 << 20
#: Microseconds of the host in a step, and for each of its requests: vLLM 0.33.0 in one process, with CUDA graphs and
#: asynchronous scheduling, 1 to 512 requests of Llama 3.2 1B (CPU time on a virtual H100 next to an Intel Xeon, on
#: which a forward of torch's Linear takes 7.1 us; docs/rl.md).
_HOST_STEP_US, _HOST_REQUEST_US, HOST_LINEAR_US = 1850.0, 26.7, 7.1
#: The host's time, least and most, over that. The engine in a process of its own leaves some of it to another process.
_HOST_RANGE = (0.35, 1.5)
#: vLLM 0.33.0's defaults for ``LLM`` (``EngineArgs.get_batch_defaults``): requests and tokens of a step, by memory.
_LARGE_BYTES, _LARGE, _SMALL = 70 * GIB, (1024, 16384), (256, 8192)
#: Contexts that grow by no more than this are priced as their mean.
_GROWTH = 1.25
#: From how few of the most requests at once the tail begins.
_TAIL = 0.25
#: A size that another GPU's table estimates.
_OTHER_GPU = 0.10
_DEVIATIONS = 1.645


@dataclass(frozen=True)
class RolloutPart:
    """Time of one kind, in microseconds: the GPU's own, or that by which the host lengthens steps."""

    name: str
    time_us: float


@dataclass(frozen=True)
class RolloutTime:
    """A rollout on one engine. Means over draws, if lengths are drawn.

    Attributes:
        num_requests: Requests.
        prompt_tokens: Tokens of each prompt.
        generated_tokens: Tokens that are generated, over all requests.
        ranks: GPUs of the engine.
        time_us: From the first step to the last.
        low_us: The least of its 90 % interval.
        high_us: The most.
        num_steps: The engine's steps.
        mean_decoding: Requests that decode in a step, mean of the steps that have any.
        most_decoding: The most that decode at once.
        num_given_back: Times that a request gave its slots of the KV cache back.
        tail_us: Time in which none waits and at most a quarter of ``most_decoding`` decode.
        parts: They add up to ``time_us``.
    """

    num_requests: int
    prompt_tokens: int
    generated_tokens: float
    ranks: int
    time_us: float
    low_us: float
    high_us: float
    num_steps: float
    mean_decoding: float
    most_decoding: int
    num_given_back: float
    tail_us: float
    parts: list[RolloutPart]

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of the engine."""
        return self.generated_tokens / self.time_us * 1e6


@dataclass(frozen=True)
class EngineModels:
    """The models that price an engine's steps.

    Attributes:
        prices: Of its GPU's kernels.
        host: Its host's time over that of the machine on which vLLM was measured.
    """

    gpu: GpuSpec
    prices: Prices
    collectives: CollectiveTimes
    host: float


def time_rollout(rollout: Rollout, models: Models, own: EngineMemory | None) -> RolloutTime:
    """Price a rollout with the models that price a run's step.

    Args:
        own: The run's engine, which is that of the rollout unless that names another.

    Raises:
        JobError: There is no engine, the model's configuration or the lengths cannot be read, or the engine cannot
            answer such requests.
    """
    assert rollout.lengths is not None
    assert rollout.prompt_tokens is not None
    gpu, network, host = models.gpu, models.network, models.host
    draws = request_lengths(rollout.lengths, rollout.requests)
    max_running, step_tokens = _LARGE if gpu.memory_bytes >= _LARGE_BYTES and "A100" not in gpu.product else _SMALL
    kv_tokens, ranks = rollout.kv_tokens, rollout.engine_tp
    if rollout.engine is not None:
        model = read_model_config(Path(rollout.engine))
    elif own is not None:
        model = model_shapes(json.loads(own.model_config or "null"), "the configuration of the run's engine")
        kv_tokens, ranks = kv_tokens or own.num_blocks * own.block_tokens, ranks or own.ranks
        max_running, step_tokens = own.max_running, own.step_tokens
    if kv_tokens is None:
        raise JobError(
            "the run has no engine of vLLM" if rollout.engine is None else "the size of the KV cache is not known",
            "--engine llama/config.json --kv-tokens 400000",
        )
    limits = EngineLimits(kv_tokens, rollout.max_running or max_running, rollout.step_tokens or step_tokens)
    collectives = CollectiveTimes(gpu, network.fabric, nccl=read_settings(network.nccl))
    spec = default_host(gpu.like or gpu.name) if host.chosen is None else find_host(host.chosen, host.time.machine_us)
    engine = EngineModels(gpu, models.prices, collectives, spec.dispatch_us / HOST_LINEAR_US)
    return price_rollout(model, draws, limits, engine, prompt_tokens=rollout.prompt_tokens, ranks=ranks or 1)


def price_rollout(
    model: ModelShapes,
    draws: list[list[int]],
    limits: EngineLimits,
    models: EngineModels,
    *,
    prompt_tokens: int,
    ranks: int = 1,
) -> RolloutTime:
    """Price the answers of one engine of ``ranks`` GPUs, whose lengths are drawn one or several times.

    Raises:
        JobError: The model does not split over the ranks, or a request does not fit into the KV cache.
    """
    model.check_split(ranks)
    every = [engine_steps(lengths, prompt_tokens, limits).assign(draw=at) for at, lengths in enumerate(draws)]
    steps = split_by_context(pd.concat(every, ignore_index=True))
    times = _StepTimes(steps, _OneRank(model, ranks), models, len(draws))
    us, by_draw = times.total_us(), times.by_draw_us()
    apart = _DEVIATIONS * float(by_draw.std(ddof=1)) if len(draws) > 1 else 0.0
    low, high = times.interval()
    decoding, number = steps["decoding"].to_numpy("f8"), steps["steps"].to_numpy("f8")
    most = int(decoding.max())
    in_tail = (
        (steps["waiting"] == 0).to_numpy(bool) & (decoding <= _TAIL * most) & (steps["prefill"] == 0).to_numpy(bool)
    )
    busy = decoding > 0
    completed = float(steps["ended"].sum()) / len(draws)
    return RolloutTime(
        num_requests=len(draws[0]),
        prompt_tokens=prompt_tokens,
        generated_tokens=sum(map(sum, draws)) / len(draws),
        ranks=ranks,
        time_us=us,
        low_us=max(us - float(np.hypot(us - low, apart)), 0.0),
        high_us=us + float(np.hypot(high - us, apart)),
        num_steps=float(number.sum()) / len(draws),
        mean_decoding=float((decoding * number).sum() / max(number[busy].sum(), 1.0)),
        most_decoding=most,
        num_given_back=completed - len(draws[0]),
        tail_us=float((times.step_us() * number)[in_tail].sum()) / len(draws),
        parts=times.parts(),
    )


def split_by_context(steps: pd.DataFrame) -> pd.DataFrame:
    """Steps of which no row's contexts grow by more than a quarter; ``context`` becomes the mean over a row's steps."""
    number, decoding = steps["steps"].to_numpy("i8"), steps["decoding"].to_numpy("i8")
    context = steps["context"].to_numpy("f8")
    grown = (context + decoding * (number - 1.0)) / np.maximum(context, 1.0)
    pieces = np.maximum(np.ceil(np.log(np.maximum(grown, 1.0)) / np.log(_GROWTH)), 1).astype(np.int64)
    pieces = np.minimum(pieces, number)
    row = np.repeat(np.arange(len(steps)), pieces)
    piece = np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begins, ends = (number[row] * at // pieces[row] for at in (piece, piece + 1))
    mean = context[row] + decoding[row] * (begins + (ends - begins - 1) / 2.0)
    return steps.iloc[row].assign(steps=ends - begins, context=mean).reset_index(drop=True)


class _OneRank(NamedTuple):
    """One rank's part of a model."""

    model: ModelShapes
    ranks: int

    @property
    def attention(self) -> DecodingShape:
        model = self.model
        return DecodingShape(model.heads // self.ranks, max(model.kv_heads // self.ranks, 1), model.width)

    def layer_work(self, tokens: Floats) -> pd.DataFrame:
        """The work of a layer of a step of so many tokens, attention and collectives left out: rows with ``tokens``."""
        model, own = self.model, self.attention
        queries, keys = own.heads * own.width, own.kv_heads * own.width
        rotated = 2 * (queries + keys) + 4 * keys  # and keys and values written into the cache
        rows = [
            *(_moving(tokens, "norm", "triton_red_fused_rms_norm", 4 * model.hidden) for _ in range(2)),
            _product(tokens, queries + 2 * keys, model.hidden),
            _moving(tokens, "elementwise", "rotary_embedding", rotated),
            _product(tokens, model.hidden, queries),
        ]
        if model.has_head_norms:
            rows.append(_moving(tokens, "norm", "triton_red_fused_rms_norm", 2 * (queries + keys)))
        return pd.concat([*rows, *self._inner(tokens)], ignore_index=True)

    def _inner(self, tokens: Floats) -> list[pd.DataFrame]:
        model, inner = self.model, self.model.inner // self.ranks
        if not model.experts:
            return [
                _product(tokens, 2 * inner, model.hidden),
                _moving(tokens, "elementwise", "silu_and_mul", 3 * inner),
                _product(tokens, model.hidden, inner),
            ]
        rows = tokens * model.top_k
        # Experts that any of the tokens goes to, if each token picks evenly among all.
        groups = np.maximum(np.rint(model.experts * (1 - (1 - model.top_k / model.experts) ** tokens)), 1)
        return [
            _product(tokens, model.experts, model.hidden),
            _product(tokens, 2 * inner, model.hidden, rows, groups),
            _moving(tokens, "elementwise", "silu_and_mul", 3 * inner * model.top_k),
            _product(tokens, model.hidden, inner, rows, groups),
        ]

    def head_work(self, sampled: Floats) -> pd.DataFrame:
        """The work of logits and of sampling so many tokens: rows with ``tokens``, their number."""
        vocabulary = self.model.vocabulary
        rows = [_product(sampled, -(-vocabulary // self.ranks), self.model.hidden)]
        rows += [
            _moving(sampled, "elementwise", "sampling", bytes_ * vocabulary / _BYTES) for bytes_ in _SAMPLING_BYTES
        ]
        return pd.concat(rows, ignore_index=True)


def _work(tokens: Floats, row: WorkRow, **columns: Floats | float) -> pd.DataFrame:
    table = pd.DataFrame([row] * len(tokens), columns=list(WorkRow._fields))
    return table.assign(**columns, tokens=tokens)


def _moving(tokens: Floats, family: str, name: str, elements: float) -> pd.DataFrame:
    operation = "rms_norm" if family == "norm" else name
    return _work(tokens, WorkRow(name, "kernel", family, operation), moved_bytes=tokens * elements * _BYTES)


def _product(tokens: Floats, n: int, k: int, rows: Floats | None = None, groups: Floats | None = None) -> pd.DataFrame:
    row = WorkRow(
        "product", "product", "gemm", dtype="bf16", layout="TN", a_bytes=_BYTES, b_bytes=_BYTES, d_bytes=_BYTES
    )
    m = tokens if rows is None else rows
    weights = 1.0 if groups is None else groups
    return _work(
        tokens,
        row,
        m=m,
        n=float(n),
        k=float(k),
        batch=0.0 if groups is not None else 1.0,
        groups=0.0 if groups is None else groups,
        flops=2.0 * m * n * k,
        moved_bytes=_BYTES * (m * k + weights * n * k + m * n),
    )


def _padded(tokens: Floats) -> Floats:
    """Tokens of the CUDA graph that computes so many; beyond the largest, none does."""
    at = np.searchsorted(_CAPTURED, tokens)
    graph = _CAPTURED[np.minimum(at, len(_CAPTURED) - 1)]
    return np.asarray(np.where(at < len(_CAPTURED), graph, tokens), np.float64)


class _StepTimes:
    """Microseconds of each row of steps, by part, and how far the sum may be off."""

    def __init__(self, steps: pd.DataFrame, rank: _OneRank, models: EngineModels, num_draws: int) -> None:
        self._steps, self._rank, self._models, self._num_draws = steps, rank, models, num_draws
        self._number = steps["steps"].to_numpy("f8")
        self._decoding, self._prefill = (steps[name].to_numpy("f8") for name in ("decoding", "prefill"))
        self._priced: list[tuple[pd.DataFrame, Floats]] = []
        self._parts: dict[str, Floats] = {}
        layers, tokens = rank.model.layers, _padded(self._decoding + self._prefill)
        # Prompts are priced apart: the power limit holds for a step with products of thousands of rows alone.
        for is_prefill in (True, False):
            chosen = (self._prefill > 0) == is_prefill
            if chosen.any():
                self._add_work(tokens, chosen, self._rank.layer_work, layers)
                self._add_work(self._decoding + steps["ended"].to_numpy("f8"), chosen, self._rank.head_work, 1)
        self._add_prompts(layers)
        self._add_decoding(layers)
        self._call_us, self._call_spread = self._calls(tokens)
        self._host_us = models.host * (
            _HOST_STEP_US + _HOST_REQUEST_US * (self._decoding + steps["prompts"].to_numpy("f8"))
        )

    def _add(self, part: str, rows_us: Floats) -> None:
        self._parts[part] = self._parts.get(part, np.zeros(len(self._number))) + rows_us

    def _add_work(self, tokens: Floats, chosen: Flags, work_of: Callable[[Floats], pd.DataFrame], times: int) -> None:
        sizes, of_row = np.unique(tokens[chosen], return_inverse=True)
        if not sizes[-1]:
            return
        work = work_of(np.maximum(sizes, 1.0))
        steps = np.bincount(of_row, self._number[chosen], len(sizes)) * (sizes > 0) / self._num_draws
        size_of = np.tile(np.arange(len(sizes)), len(work) // len(sizes))
        priced = self._price(work, times * steps[size_of])
        is_product = (work["kind"] == "product").to_numpy(bool)
        for part, own in (("products", is_product), ("other kernels", ~is_product)):
            us = np.bincount(size_of[own], priced["time_us"].to_numpy("f8")[own], len(sizes)) * (sizes > 0)
            rows_us = np.zeros(len(self._number))
            rows_us[chosen] = times * us[of_row]
            self._add(part, rows_us)

    def _price(self, work: pd.DataFrame, counts: Floats) -> pd.DataFrame:
        priced = self._models.prices.price(work, counts)
        self._priced.append((priced, counts))
        return priced

    def _add_prompts(self, layers: int) -> None:
        chosen = self._prefill > 0
        prompts = self._steps["prompts"].to_numpy("f8")[chosen]
        tokens = np.maximum(np.rint(np.sqrt(self._steps["squares"].to_numpy("f8")[chosen] / prompts)), 1)
        own, is_newer = self._rank.attention, self._models.gpu.compute_capability[0] >= 9
        row = WorkRow(
            "flash_attention", "kernel", "attention", dtype="bf16", attention="forward", causal=True,
            library="flash3" if is_newer else "flash2", heads=own.heads, kv_heads=own.kv_heads, width=own.width,
        )  # fmt: skip
        flops = 2.0 * prompts * own.heads * tokens**2 * own.width
        moved = _BYTES * 2.0 * prompts * tokens * own.width * (own.heads + own.kv_heads)
        work = _work(tokens, row, batch=prompts, queries=tokens, keys=tokens, flops=flops, moved_bytes=moved)
        rows_us = np.zeros(len(chosen))
        if len(work):
            rows_us[chosen] = layers * self._price(work, layers * self._number[chosen] / self._num_draws)["time_us"]
        self._add("attention of prompts", rows_us)

    def _add_decoding(self, layers: int) -> None:
        gpu, chosen = self._models.gpu, self._decoding > 0
        table = nearest_table(gpu)
        times = _decoding_times(table.name)
        batch = self._decoding[chosen]
        context = self._steps["context"].to_numpy("f8")[chosen] / np.maximum(batch, 1.0)
        us = times.time_us(self._rank.attention, batch, context, gpu.memory_bandwidth)
        least = times.floor_us(self._rank.attention, batch, context, gpu.memory_bandwidth)
        spread = ErrorIntervals(table.name).half_width("attention decoding", us)
        spread = spread if table.is_own else np.hypot(spread, _OTHER_GPU)
        low, high = np.maximum(us * np.exp(-spread), least), us * np.exp(spread)
        columns = {"time_us": us, "low_us": low, "high_us": high, "accuracy": "attention decoding", "basis": ""}
        self._priced.append((pd.DataFrame(columns), layers * self._number[chosen] / self._num_draws))
        rows_us = np.zeros(len(chosen))
        rows_us[chosen] = layers * us
        self._add("attention of decoding", rows_us)

    def _calls(self, tokens: Floats) -> tuple[Floats, Floats]:
        """Microseconds of a step's collectives, and half of their interval's logarithm."""
        model, ranks = self._rank.model, self._rank.ranks
        if ranks == 1:
            return np.zeros(len(tokens)), np.zeros(len(tokens))
        shape = GroupShape.of(range(ranks), self._models.collectives.fabric.gpus_per_node)
        sizes, of_row = np.unique(tokens, return_inverse=True)
        reduced = [self._all_reduce(size * model.hidden * _BYTES, shape) for size in sizes.tolist()]
        sampled, of_sampled = np.unique(self._decoding + self._steps["ended"].to_numpy("f8"), return_inverse=True)
        gathered = [
            self._models.collectives.time("all_gather", rows * model.vocabulary * _BYTES, shape)
            for rows in sampled.tolist()
        ]
        us = [np.array([call.time_us for call in calls]) for calls in (reduced, gathered)]
        longer = [np.array([call.time_us * call.spread for call in calls]) for calls in (reduced, gathered)]
        total, off = (2 * model.layers * each[0][of_row] + each[1][of_sampled] for each in (us, longer))
        return np.asarray(total), np.asarray(off / total)

    def _all_reduce(self, num_bytes: float, shape: GroupShape) -> CollectiveTime:
        nccl = self._models.collectives.time("all_reduce", num_bytes, shape)
        return symmetric_time(nccl) if num_bytes <= _OWN_ALL_REDUCE_BYTES and shape.num_nodes == 1 else nccl

    @property
    def _kernels_us(self) -> Floats:
        return np.asarray(np.sum(list(self._parts.values()), axis=0), np.float64)

    def step_us(self, *, kernels: float = 1.0, calls: float = 0.0, host: float = 1.0, bare: float = 0.0) -> Floats:
        """Microseconds of a step of each row.

        Args:
            kernels: Their time over the estimate.
            calls: Where the collectives are in their interval, from -1 to 1.
            host: Its time over the estimate.
            bare: The fraction of the host's time without requests during which the GPU waits.
        """
        gpu_us = kernels * self._kernels_us + self._call_us * np.exp(calls * self._call_spread)
        return np.asarray(np.maximum(gpu_us, host * self._host_us) + bare * self._models.host * _HOST_STEP_US)

    def total_us(self) -> float:
        """Microseconds of all steps, mean of the draws."""
        return float((self.step_us() * self._number).sum()) / self._num_draws

    def by_draw_us(self) -> Floats:
        """Microseconds of all steps of each draw."""
        return np.asarray(np.bincount(self._steps["draw"].to_numpy("i8"), self.step_us() * self._number), np.float64)

    def interval(self) -> tuple[float, float]:
        """The 90 % interval of the sum: kernels, collectives and host err independently."""
        priced = pd.concat([table for table, _ in self._priced], ignore_index=True)
        counts = np.concatenate([own for _, own in self._priced])
        whole = float((self._kernels_us * self._number).sum()) / self._num_draws
        total, ends = self.total_us(), []
        for side, sign, host, bare in (("low_us", -1, _HOST_RANGE[0], 0.0), ("high_us", 1, _HOST_RANGE[1], 1.0)):
            wide = 1 + sign * half_width(priced, counts, side) / whole
            changed = [self.step_us(kernels=wide), self.step_us(calls=sign), self.step_us(host=host, bare=bare)]
            off = [float((us * self._number).sum()) / self._num_draws - total for us in changed]
            ends.append(total + sign * float(np.sqrt(np.square(off).sum())))
        return ends[0], ends[1]

    def parts(self) -> list[RolloutPart]:
        """The parts of the total."""
        gpu_us = self._kernels_us + self._call_us
        every = {**self._parts, "collectives": self._call_us, "host": np.maximum(self._host_us - gpu_us, 0.0)}
        sums = {name: float((us * self._number).sum()) / self._num_draws for name, us in every.items()}
        return [RolloutPart(name, us) for name, us in sums.items() if us]


@cache
def _decoding_times(name: str) -> DecodingTimes:
    return DecodingTimes(load_measured(name).decoding, measured_spec(name))


def run_rollout(run: Run, rollout: Rollout, gpu: str | None = None, **options: Unpack[PricingOptions]) -> RolloutTime:
    """The rollout of an inference engine on the run's GPUs, or others. The run's own steps do not matter.

    Args:
        rollout: With lengths and a prompt's tokens; of the run's own engine, unless it names another and how many
            tokens that one's KV cache has.
        gpu: As for :meth:`Run.priced_for`.
        options: See :class:`fakedist.options.definition.Pricing`.

    Raises:
        SetupError: The calibration table cannot be read, or is of another GPU.
        JobError: There is no such GPU, fabric or host, the model's configuration or the lengths cannot be read, or
            the engine cannot answer such requests.
        RunDirectoryError: The run's own GPU model is not known.
    """
    models = models_of(Pricing(gpu, **options), run.manifest, run.summary)
    return time_rollout(rollout, models, run.summary.engine)
