"""Prices the rows of the table ``work`` by family: products, attention, and kernels that memory limits.

The latter take their bytes over the bandwidth of a measured kind of kernel (:mod:`.moving`). The rules name the kind
that stands for a kernel, and how much slower it is taken to be.

Measured were products y = x w^T (TN in cuBLAS' words) of bf16, fp8 and NVFP4 operands with a bf16 result, each alone.
Else:

- Other layouts (input gradients NN, weight gradients NT) take the same time.
- A result that is added to, or that has more bytes, adds its bytes to the reference.
- A batch fills the GPU as one product with as many rows does.
- A complex product takes as long as the four real ones that it is made of.
- A product of 2-byte elements with an odd leading dimension (a vocabulary of 50,257) runs without the tensor memory
  accelerator, at the rate that three such products reach on an H200; one of 2, 4 or 6 more lies between that and the
  usual one. Arrays are taken to be contiguous.
- TF32, fp32, fp64 and int8 reach the fraction of their peak that bf16 (int8: fp8) products of that size reach.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fakedist.cost_model.accuracy import ErrorIntervals
from fakedist.cost_model.kernels.attention import AttentionKernel, AttentionShapes, AttentionTimes
from fakedist.cost_model.kernels.gpus import (
    MEASURED_GPUS,
    NVFP4_BYTES,
    NearestTable,
    attention_roof,
    measured_spec,
    product_roof,
)
from fakedist.cost_model.kernels.measurements import (
    ELEMENTWISE,
    START_US,
    WIDE_ROW,
    Assumptions,
    Estimates,
    Flags,
    Floats,
    GroupedTimes,
    Integers,
    MovingTimes,
    ProductRoof,
    ProductSizes,
    ProductTimes,
    WorkArrays,
    load_measured,
    measured_moves,
    which_limits,
)
from fakedist.gpu.models.spec import GpuSpec

#: Assumptions, with their sources.
_ASSUMED: dict[str, Any] = tomllib.loads(Path(__file__).with_name("rules.toml").read_text("utf-8"))
_FACTORS: dict[str, float] = _ASSUMED["factors"]
_SPREADS: dict[str, float] = _ASSUMED["spreads"]


@dataclass(frozen=True)
class Rules:
    """Rules that price one kind of work on one GPU, estimated by the measurements of ``table``."""

    gpu: GpuSpec
    table: NearestTable
    intervals: ErrorIntervals


#: What ``WorkRow.library`` says -> the kernel that is estimated.
_KERNELS: dict[str, AttentionKernel] = {
    "cudnn": "cudnn",
    "flash2": "flash2",
    "flash3": "cudnn",  # as fast, within a tenth (arXiv:2407.08608)
    "efficient": "efficient",
    "flex": "flex",
    "": "flash2",
}
#: Where forward and backward of training were measured.
_TRAINING = ("h200-sxm", "gb200")
#: Windows of fewer keys cost whole tiles.
_NARROW = 512
#: Shorter sequences than this were not published in training.
_PUBLISHED = 512
#: The fewest keys that a query of flex_attention meets, in a mask that is not known: a block.
_BLOCK = 128


class AttentionRules(Rules):
    """Prices attention on one GPU."""

    @cached_property
    def _training_on(self) -> str:
        """Where training was measured; empty if it was not, on this generation."""
        return _training_table(self.table.name)

    @cached_property
    def times(self) -> AttentionTimes:
        """Measured times."""
        return _measured_times(self.table.name)

    def price(self, rows: WorkArrays) -> Estimates:
        """Attentions, forward and backward."""
        estimates = Estimates.unknown(len(rows))
        if "bf16" not in self.gpu.peak_flops:
            return estimates
        has_shape = (rows.numbers("heads") > 0) & (rows.numbers("queries") > 0) & (rows.numbers("keys") > 0)
        codes, combinations = rows.combinations("attention", "library")
        for code, (direction, library) in enumerate(combinations):
            chosen = has_shape & (codes == code)
            if chosen.any():
                estimates.put(chosen, self._with_shape(rows.only(chosen), direction, library))
        bare = ~has_shape & (rows.numbers("flops") > 0)
        if bare.any():
            estimates.put(bare, self._without_shape(rows.only(bare)))
        return estimates

    def _with_shape(self, rows: WorkArrays, direction: str, library: str) -> Estimates:
        dtypes = rows.texts("dtype")
        own_peak = np.array([self.gpu.peak(str(dtype)) or np.nan for dtype in dtypes])
        narrower = (dtypes == "fp8") | (dtypes == "bf16")  # fp8 is taken to be no faster: most kernels are not
        slowdown = np.where(narrower, 1.0, self.gpu.peak_flops["bf16"] / own_peak)
        shapes = replace(
            _shapes(rows),
            slowdown=slowdown,
            element_bytes=np.where(narrower, 2.0, np.where(dtypes == "fp64", 8.0, 4.0)),
        )
        kernel = _KERNELS.get(library, "flash2")
        roof = attention_roof(self.gpu)
        is_backward = direction == "backward"
        price = self.times.backward_us if is_backward else self.times.forward_us
        time_us = price(shapes, kernel, roof)
        time_us = np.where(rows.flags("deterministic"), time_us / _FACTORS["deterministic_rate"], time_us)
        time_us = time_us + np.where(rows.flags("dropout"), self._dropout_us(shapes, kernel), 0.0)
        family = f"attention training {direction}" if self.times.has_training else "attention forward"
        source = self._training_on or self.table.name
        spread = self.intervals.half_width(family, time_us, gpu=source)
        assumed = self._assumed(rows, shapes, kernel, library, is_backward=is_backward)
        flops = shapes.flops("backward" if is_backward else "forward")
        compute = flops * np.nan_to_num(slowdown, nan=1.0) / roof.peak_flops * 1e6
        memory = shapes.moved_bytes() * (2.0 if is_backward else 1.0) / roof.memory_bandwidth * 1e6
        basis = np.full(len(rows), f"measured: attention on {source}", object)
        accuracy = np.full(len(rows), family, object)
        bound = which_limits(compute, memory, _FACTORS["start_us"])
        spare = self._spare(
            rows.flags("is_dense"), shapes, price(shapes, kernel, roof), lambda s: price(s, kernel, roof)
        )
        return Estimates(time_us, assumed.spread(spread), bound, accuracy, assumed.basis(basis), spare)

    @staticmethod
    def _spare(
        is_dense: Flags, shapes: AttentionShapes, dense_us: Floats, price: Callable[[AttentionShapes], Floats]
    ) -> Floats | None:
        """How much less (logarithm) attentions may take whose mask is not known: one block of keys for each query."""
        if not is_dense.any():
            return None
        window = np.minimum(shapes.keys, _BLOCK)
        sparse_us = price(replace(shapes, window=window, in_blocks=np.full(len(window), True)))
        return np.asarray(np.where(is_dense, np.log(np.maximum(dense_us / sparse_us, 1.0)), 0.0))

    def _dropout_us(self, shapes: AttentionShapes, kernel: AttentionKernel) -> Floats:
        scores = (shapes.batch * shapes.heads).astype(float) * shapes.queries * shapes.met_keys()
        clocks = _FACTORS["cudnn_dropout_clocks"] if kernel == "cudnn" else _FACTORS["dropout_clocks"]
        return np.asarray(scores * clocks / (self.gpu.sms * self.gpu.clock_khz * 1e3) * 1e6)

    def _assumed(
        self, rows: WorkArrays, shapes: AttentionShapes, kernel: AttentionKernel, library: str, *, is_backward: bool
    ) -> Assumptions:
        assumed = Assumptions(len(rows))
        every = np.ones(len(rows), bool)
        if kernel != "cudnn" and self.times.has_training:
            assumed.add((every, _SPREADS["flash2"], "FlashAttention-2 as much slower than cuDNN as on H100"))
        if is_backward and not self.times.has_training:
            assumed.add((every, _SPREADS["attention_backward"], "backward at FlashAttention-2's rate on A100"))
        if kernel in ("flex", "efficient"):
            slower = _SPREADS["flex"] if kernel == "flex" else _SPREADS["efficient"]
            assumed.add((every, slower, f"{kernel} attention a fraction of FlashAttention-2's rate"))
        is_other = self.gpu.compute_capability != self.table.measured_on.compute_capability
        cut = (shapes.window > 0) & (shapes.window < shapes.keys)
        blocks = cut & shapes.in_blocks
        assumed.add(
            (every & (library == ""), _SPREADS["no_library"], "FlashAttention-2, as the library is not known"),
            (
                every & (not self.table.is_own),
                _SPREADS["attention_other_gpu"] * (1 + is_other),
                f"like {self.table.name}",
            ),
            (cut & (shapes.window >= _NARROW) & ~blocks, _SPREADS["window"], "a window costs what its keys do"),
            (cut & (shapes.window < _NARROW) & ~blocks, _SPREADS["narrow_window"], "a narrow window costs whole tiles"),
            (blocks & (shapes.window >= _NARROW), _SPREADS["window"], "a mask costs what its blocks do"),
            (blocks & (shapes.window < _NARROW), _SPREADS["narrow_window"], "a mask of few blocks costs what they do"),
            (shapes.queries != shapes.keys, _SPREADS["cross"], "queries and keys of different length like their mean"),
            (
                shapes.length() < _PUBLISHED,
                _SPREADS["short"],
                "short sequences slow down further as they do from 2,048 to 512 tokens",
            ),
            (rows.flags("is_dense"), 0.0, "every query meets every key, as the mask is not known"),
            (
                rows.flags("deterministic"),
                _SPREADS["deterministic"],
                "a deterministic backward as much slower as on GB200",
            ),
            (rows.flags("dropout"), _SPREADS["dropout"], "dropout takes integer instructions"),
            (
                rows.texts("dtype") != "bf16",
                _SPREADS["attention_other_type"],
                "the type's fraction of the peak is bf16's",
            ),
        )
        return assumed

    def _without_shape(self, rows: WorkArrays) -> Estimates:
        peak = self.gpu.peak_flops["bf16"]
        time_us = _FACTORS["start_us"] + rows.numbers("flops") / (_FACTORS["achieved"] * peak) * 1e6
        texts = ("compute", "", f"assumed: attention at {_FACTORS['achieved']:.0%} of the peak")
        filled = [np.full(len(rows), words, object) for words in texts]
        return Estimates(time_us, np.full(len(rows), _SPREADS["no_shape"]), *filled)


@cache
def _measured_times(name: str) -> AttentionTimes:
    measured, own = load_measured(name), _training_table(name)
    training = load_measured(own).training_attention if own else pd.DataFrame()
    peak = measured_spec(own).peak_flops["bf16"] if own else 1.0
    roof = attention_roof(measured_spec(name))
    return AttentionTimes(measured.attention, training, roof, training_peak_flops=peak)


def _training_table(name: str) -> str:
    """Where training was measured on this generation, by the first number of the capability, as cuDNN's kernels."""
    generation = measured_spec(name).compute_capability[0]
    same = [name_of for name_of in _TRAINING if measured_spec(name_of).compute_capability[0] == generation]
    return same[0] if same and name in MEASURED_GPUS else ""


def _shapes(rows: WorkArrays) -> AttentionShapes:
    batch, heads, queries, keys, width = (
        np.maximum(rows.counts(name), 1) for name in ("batch", "heads", "queries", "keys", "width")
    )
    kv_heads, value_width = rows.counts("kv_heads"), rows.counts("value_width")
    return AttentionShapes(
        batch,
        heads,
        np.where(kv_heads > 0, kv_heads, heads),
        queries,
        keys,
        width,
        np.where(value_width > 0, value_width, width),
        rows.flags("causal"),
        rows.counts("window"),
        rows.texts("library") == "flex",
    )


@dataclass(frozen=True)
class MemoryRule:
    """The price of a kernel that is limited by memory.

    Attributes:
        kind: The measured kind whose bandwidth counts (``MovingTimes.kinds``).
        slower: Its time over that kind's.
        spread: Half the width of the 90 % interval (logarithm) that the rule adds.
        words: The assumption; empty where the kind itself was measured.
    """

    spread: float
    kind: str = ELEMENTWISE
    slower: float = 1.0
    words: str = ""


class _MemoryPattern(NamedTuple):
    """The kernels that a rule is for, as rules.toml describes them."""

    families: Sequence[str]
    direction: str
    name: re.Pattern[str]
    either: re.Pattern[str]
    rule: MemoryRule

    def fits(self, family: str, name: str, both: str, direction: str) -> bool:
        """Return whether it is for a kernel; ``both`` are its name and its operation."""
        is_its_family = not self.families or family in self.families
        is_its_direction = self.direction in ("", direction)
        return is_its_family and is_its_direction and bool(self.name.search(name) and self.either.search(both))


def _memory_pattern(
    *, families: Sequence[str] = (), direction: str = "", name: str = "", either: str = "", **rule: Any
) -> _MemoryPattern:
    return _MemoryPattern(families, direction, re.compile(name), re.compile(either), MemoryRule(**rule))


_MEMORY_PATTERNS = [_memory_pattern(**row) for row in _ASSUMED["memory"]]


class MemoryRules(Rules):
    """Prices kernels that are limited by memory on one GPU."""

    @cached_property
    def times(self) -> MovingTimes:
        """Measured times."""
        return _moving_times(self.table.name)

    @cached_property
    def start_us(self) -> float:
        """The time of a kernel that moves nothing."""
        return self.times.start_us(ELEMENTWISE, self.gpu.memory_bandwidth)

    def price(self, rows: WorkArrays) -> Estimates:
        """Kernels with bytes, and kernels with neither bytes nor FLOPs, which take a start."""
        estimates = Estimates.unknown(len(rows))
        codes, combinations = rows.combinations("family", "name", "operation")
        rules = [memory_rule(*chosen_rule) for chosen_rule in combinations]
        narrow = (rows.numbers("width") > 0) & (rows.numbers("width") < WIDE_ROW)
        for rule in dict.fromkeys(rules):
            with_rule = (
                np.array([chosen_rule == rule for chosen_rule in rules])[codes] if len(rows) else np.zeros(0, bool)
            )
            for is_narrow in (False, True):
                chosen = with_rule & (narrow == is_narrow)
                if chosen.any():
                    own = self._narrow(rule) if is_narrow else rule
                    estimates.put(chosen, self._by_rule(rows.only(chosen), own))
        return estimates

    def over_host_link(self, rows: WorkArrays) -> Estimates:
        """Copies between host and GPU."""
        pinned, moved = rows.flags("pinned"), rows.numbers("moved_bytes")
        rate = self.gpu.host_bandwidth * np.where(pinned, _FACTORS["pinned"], _FACTORS["pageable"])
        words = np.where(
            pinned,
            f"assumed: {_FACTORS['pinned']:.0%} of the link",
            f"assumed: pageable, {_FACTORS['pageable']:.0%} of the link",
        )
        return Estimates(
            _FACTORS["link_start_us"] + moved / rate * 1e6,
            np.where(pinned, _SPREADS["pinned"], _SPREADS["pageable"]),
            np.where(moved / rate * 1e6 > _FACTORS["link_start_us"], "memory", "launch").astype(object),
            np.full(len(rows), "", object),
            words.astype(object),
        )

    def _by_rule(self, rows: WorkArrays, rule: MemoryRule) -> Estimates:
        moved = rows.numbers("moved_bytes")
        time_us = self.times.time_us(rule.kind, moved, self.gpu.memory_bandwidth) * rule.slower
        source = self.times.measured_on(rule.kind)
        family = "elementwise" if rule.kind == ELEMENTWISE else "norms"
        spread = np.square(self.intervals.half_width(family, time_us, gpu=source)) + rule.spread**2
        basis = f"measured: {rule.kind} on {source}"
        if not self.table.is_own or source != self.table.name:
            spread = spread + _SPREADS["memory_other_gpu"] ** 2
            basis += f"; assumed: {self.gpu.name} reaches the same fraction of its bandwidth"
        if self.times.is_like_another(rule.kind):
            spread = spread + _SPREADS["one_size"] ** 2
            basis += "; assumed: other sizes as RMSNorm's"
        if rule.words:
            basis += f"; assumed: {rule.words}"
        start = self.times.start_us(rule.kind, self.gpu.memory_bandwidth) * rule.slower
        return Estimates(
            time_us,
            np.sqrt(np.where(np.isnan(moved), np.nan, spread)),
            np.where(np.isnan(moved), "", np.where(time_us > 2 * start, "memory", "launch")).astype(object),
            np.full(len(rows), family, object),
            np.where(np.isnan(moved), "", basis).astype(object),
        )

    def _narrow(self, rule: MemoryRule) -> MemoryRule:
        """The rule for narrow rows: eager norms of them have a kind of their own."""
        kind = f"{rule.kind}.narrow"
        return replace(rule, kind=kind) if kind in self.times.kinds else rule


def memory_rule(family: str, name: str, operation: str) -> MemoryRule:
    """The rule for a kernel of a family of ``rundir.schema.FAMILIES``."""
    both = f"{name} {operation}"
    norms = _ASSUMED["norms"]
    direction = "backward" if re.search(norms["backward"], both) else "forward"
    rule = next(pattern.rule for pattern in _MEMORY_PATTERNS if pattern.fits(family, name, both, direction))
    norm = "layer_norm" if re.search(norms["layer_norm"], operation or name) else "rms_norm"
    return replace(rule, kind=rule.kind.format(norm=norm, direction=direction))


@cache
def _moving_times(name: str) -> MovingTimes:
    """The memory-bound kernels of every measured GPU, those of the most similar one first."""
    own = measured_spec(name)

    def unlike(other: str) -> tuple[float, float]:
        spec = measured_spec(other)
        generation = abs(spec.compute_capability[0] - own.compute_capability[0])
        return float(generation), abs(np.log(spec.memory_bandwidth / own.memory_bandwidth))

    order = sorted(MEASURED_GPUS, key=unlike)
    return MovingTimes([measured_moves(load_measured(table), measured_spec(table)) for table in order])


_HOPPER = ("h100-sxm", "h200-sxm")
#: Bytes that the leading dimensions of operands and result have to be a multiple of.
_ALIGNED_BYTES = 16
#: Whose layers of experts count where none were measured (A100).
_EXPERTS_ELSEWHERE = "h100-sxm"
#: The layout that was measured.
_MEASURED_LAYOUT = "TN"


class ProductRules(Rules):
    """Prices products on one GPU."""

    @cached_property
    def times(self) -> dict[str, ProductTimes]:
        """Measured times."""
        return _single_times(self.table.name)

    @cached_property
    def _experts(self) -> str:
        return self.table.name if len(load_measured(self.table.name).experts) else _EXPERTS_ELSEWHERE

    @cached_property
    def _grouped(self) -> GroupedTimes:
        return _grouped_times(self._experts)

    def single(self, rows: WorkArrays) -> Estimates:
        """Products of one size each."""
        estimates = Estimates.unknown(len(rows))
        dtypes, scaling = rows.texts("dtype"), rows.texts("scaling")
        for dtype in sorted(set(dtypes)):
            for is_block in (False, True):
                chosen = (dtypes == dtype) & ((scaling == "block") == is_block)
                if chosen.any():
                    estimates.put(chosen, self._of_type(rows.only(chosen), dtype, is_block=is_block))
        return estimates

    def _of_type(self, rows: WorkArrays, dtype: str, *, is_block: bool) -> Estimates:
        if dtype == "" and is_block:  # what cuBLAS scales by blocks is fp8, or 4 bits, which have no name in ``dtype``
            wanted = "nvfp4"
            peak = self.gpu.peak("fp8") if "nvfp4" in self.times else None
        else:
            wanted = "fp8_block" if dtype == "fp8" and is_block else "fp8" if dtype in ("fp8", "int8") else "bf16"
            peak = self.gpu.peak(dtype)
        if peak is None:
            return Estimates.unknown(len(rows))
        kind = wanted if wanted in self.times else "bf16"
        times = self.times[kind]
        sizes = _sizes(rows, NVFP4_BYTES)
        roof = product_roof(self.gpu, kind) if kind == "nvfp4" else self._roof(peak)
        time_us = times.time_us(sizes, roof)
        within, beyond = times.octaves_away(sizes)
        assumed = Assumptions(len(rows))
        time_us = self._aligned(rows, sizes, time_us, dtype, assumed)
        every = np.ones(len(rows), bool)
        is_other = wanted != "nvfp4" and (dtype not in ("bf16", "fp8") or kind != wanted)
        apart = _ASSUMED["apart"].get(kind, {}).get(self.table.name, 0.0)
        assumed.add(
            (rows.texts("layout") != _MEASURED_LAYOUT, _SPREADS["layout"], f"as fast as {_MEASURED_LAYOUT}"),
            (sizes.batch > 1, _SPREADS["batch"], "a batch like more rows"),
            (rows.flags("accumulates"), _SPREADS["accumulates"], "adding to the result costs its bytes"),
            (
                every & is_other,
                _SPREADS["product_other_type"],
                f"{dtype} reaches the fraction of its peak that {kind} does",
            ),
            (
                (rows.texts("scaling") == "row") & (dtype == "fp8"),
                _SPREADS["rows_scaled"],
                "scales a row like one a tensor",
            ),
            (every & (not self.table.is_own), _SPREADS["product_other_gpu"], f"{self.gpu.name} like {self.table.name}"),
            (every & (apart > 0.0), apart, "libraries and collectors differ"),
        )
        family = f"products {kind}"
        spread = self.intervals.half_width(family, time_us, within) + _SPREADS["beyond"] * beyond
        compute, memory = times.limits_us(sizes, roof)
        basis = np.full(len(rows), f"measured: {kind} products on {self.table.name}", object)
        return Estimates(
            time_us,
            assumed.spread(spread),
            which_limits(compute, memory, START_US),
            np.full(len(rows), family, object),
            assumed.basis(basis),
            self._nvfp4_spare(rows, time_us) if kind == "nvfp4" else None,
        )

    def _nvfp4_spare(self, rows: WorkArrays, time_us: Floats) -> Floats:
        """How much less (logarithm) products in NVFP4 take at the fraction of their peak that those in fp8 reach."""
        in_fp8 = self.times["fp8"].time_us(_sizes(rows, 1.0), product_roof(self.gpu, "fp8"))
        higher = _ASSUMED["nvfp4_peak"].get(self.table.name, 2.0)
        return np.asarray(np.log(np.maximum(time_us / np.maximum(in_fp8 / higher, START_US), 1.0)))

    def _aligned(
        self, rows: WorkArrays, sizes: ProductSizes, time_us: Floats, dtype: str, assumed: Assumptions
    ) -> Floats:
        """Times of products, longer where the leading dimensions of 2-byte elements are not aligned."""
        if dtype not in ("bf16", "fp16"):
            return time_us
        elements = np.gcd.reduce([*_leading_dimensions(rows), np.full(len(rows), _ALIGNED_BYTES // 2)])
        rate = _FACTORS["unaligned_rate"] * self.gpu.sms * self.gpu.clock_khz * 1e3
        odd_us = np.maximum(time_us, START_US + 2.0 * sizes.batch * sizes.m * sizes.n * sizes.k / rate * 1e6)
        is_odd, is_between = elements == 1, (elements > 1) & (elements < _ALIGNED_BYTES // 2)
        slower = np.log(odd_us / time_us)
        words = "not aligned: as fast as such products on an H200"
        own = _SPREADS["unaligned"] if self.table.name in _HOPPER else _SPREADS["unaligned_elsewhere"]
        assumed.add(
            (is_odd & (slower > 0), own, words),
            (is_between & (slower > 0), slower / 2, f"{words}, or aligned"),
        )
        return np.asarray(time_us * np.exp(np.select([is_odd, is_between], [slower, slower / 2], 0.0)))

    def grouped(self, rows: WorkArrays) -> Estimates:
        """Products of many groups, such as those of a layer's experts."""
        dtypes = rows.texts("dtype")
        estimates = Estimates.unknown(len(rows))
        for dtype in sorted(set(dtypes)):
            peak = self.gpu.peak(dtype)
            if peak is None:
                continue
            chosen = dtypes == dtype
            estimates.put(chosen, self._groups_of_type(rows.only(chosen), dtype, peak))
        return estimates

    def _groups_of_type(self, rows: WorkArrays, dtype: str, peak: float) -> Estimates:
        m, n, k, groups = (np.maximum(rows.numbers(name), 1.0) for name in ("m", "n", "k", "groups"))
        element = np.where(rows.numbers("a_bytes") > 0, rows.numbers("a_bytes"), 2.0)
        roof = replace(self._roof(peak), element_bytes=float(element[0]))
        time_us, compute, memory = self._grouped.estimate(m, groups, n, k, roof)
        assumed = Assumptions(len(rows))
        every = np.ones(len(rows), bool)
        is_own = self.table.is_own and self._experts == self.table.name
        assumed.add(
            (rows.texts("layout") != _MEASURED_LAYOUT, _SPREADS["layout"], f"as fast as {_MEASURED_LAYOUT}"),
            (
                every & (dtype != "bf16"),
                _SPREADS["product_other_type"],
                f"{dtype} reaches the fraction of its peak that bf16 does",
            ),
            (every & (not is_own), _SPREADS["product_other_gpu"], f"{self.gpu.name} like {self._experts}"),
        )
        spread = self.intervals.half_width("experts bf16", time_us, gpu=self._experts)
        return Estimates(
            time_us,
            assumed.spread(spread),
            which_limits(compute, memory, START_US),
            np.full(len(rows), "experts bf16", object),
            assumed.basis(np.full(len(rows), f"measured: layers of experts on {self._experts}", object)),
        )

    def _roof(self, peak: float) -> ProductRoof:
        return ProductRoof(self.gpu.sms, peak, self.gpu.memory_bandwidth)


@cache
def _single_times(name: str) -> dict[str, ProductTimes]:
    tables = load_measured(name).products
    spec = measured_spec(name)
    return {kind: ProductTimes(rows, product_roof(spec, kind)) for kind, rows in tables.items()}


@cache
def _grouped_times(name: str) -> GroupedTimes:
    return GroupedTimes(load_measured(name).experts, product_roof(measured_spec(name), "bf16"))


def _leading_dimensions(rows: WorkArrays) -> list[Integers]:
    """Strides of operands and result, if they are contiguous: cuBLAS' layout names the second operand first."""
    m, n, k = (np.maximum(rows.numbers(name), 1.0).astype(np.int64) for name in ("m", "n", "k"))
    layout = rows.texts("layout").astype(str)
    second, first = np.char.startswith(layout, "N"), np.char.endswith(layout, "T")
    return [np.where(second, n, k), np.where(first, m, k), n]


def _sizes(rows: WorkArrays, unnamed_bytes: float) -> ProductSizes:
    """Sizes of products with their bytes, at least 1 each; a complex one counts with twice the rows and sums.

    ``unnamed_bytes`` are those of an operand's element whose size is not recorded.
    """
    m, n, k, batch = (np.maximum(rows.numbers(name), 1.0) for name in ("m", "n", "k", "batch"))
    a, b = (np.nan_to_num(rows.numbers(name), nan=unnamed_bytes) for name in ("a_bytes", "b_bytes"))
    operands = m * k * a + k * n * b
    result = m * n * rows.numbers("d_bytes") * np.where(rows.flags("accumulates"), 2.0, 1.0)
    parts = np.where(rows.numbers("flops") > 3.0 * 2.0 * m * n * k * batch, 2.0, 1.0)
    return ProductSizes(parts * m, n, parts * k, batch, batch * (operands + result))
