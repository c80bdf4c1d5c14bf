"""Prices attention of the table ``work``: by the library that computes it, as measured or by the rules of
:mod:`fakedist.time.attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, cached_property

import numpy as np
import pandas as pd

from fakedist.time.attention import AttentionKernel, AttentionShapes, AttentionTimes
from fakedist.time.gpus import MEASURED_GPUS, attention_roof, measured_spec
from fakedist.time.measurements import Floats, load_measured
from fakedist.time.rules import Rules
from fakedist.time.work_arrays import Assumptions, Estimates, Flags, WorkArrays, which_limits

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
#: Half widths of 90 % intervals (logarithms) that assumptions add.
_OTHER_GPU, _FLASH_2, _FLEX, _EFFICIENT, _BACKWARD = 0.10, 0.12, 0.20, 0.35, 0.20
_NO_LIBRARY, _WINDOW, _NARROW_WINDOW, _CROSS, _OTHER_TYPE, _NO_SHAPE = 0.25, 0.15, 0.40, 0.15, 0.35, 0.45
_NARROW = 512
#: The fewest keys that a query of flex_attention meets, in a mask that is not known: a block.
_BLOCK = 128
#: The fraction of the peak that is assumed where only the FLOPs are known.
_ACHIEVED = 0.5
_START_US = 4.0
#: The rate of cuDNN's deterministic backward over that of the other in bf16: GB200, width 128, causal, 2,048 to 32,768
#: tokens: 0.87 to 0.90 (``Measured.training_attention``); on H800, FlashAttention-3's loses up to 38 %
#: (arXiv:2601.21824).
_DETERMINISTIC_RATE, _DETERMINISTIC = 0.87, 0.15
#: SM clocks that dropout takes for each score, forward and backward, as both make the random numbers again.
#: FlashAttention-2 makes 16 with 7 rounds of Philox, 40 integer instructions, and unpacks, compares and masks each in
#: 2 or 3; an SM issues 64 a clock. cuDNN does not say how it makes them; it is taken to need half as much again:
#: Nvidia's own attention with dropout makes a block of Llama 3 in fp8 take up to 1.22 times as long
#: (arXiv:2410.07531).
_DROPOUT_CLOCKS, _CUDNN_DROPOUT_CLOCKS, _DROPOUT = 0.08, 0.12, 0.12


class AttentionRules(Rules):
    """Prices attention on one GPU."""

    @cached_property
    def _training_on(self) -> str:
        """Where training was measured; empty if it was not, on this generation."""
        return _training_table(self.table.name)

    @cached_property
    def _times(self) -> AttentionTimes:
        return _measured_times(self.table.name)

    def load(self) -> None:
        """Load what was measured, which the first price needs."""
        _ = self._times

    def price(self, rows: WorkArrays) -> Estimates:
        """Attentions, forward and backward."""
        found = Estimates.unknown(len(rows))
        if "bf16" not in self.gpu.peak_flops:
            return found
        has_shape = (rows.numbers("heads") > 0) & (rows.numbers("queries") > 0) & (rows.numbers("keys") > 0)
        codes, combinations = rows.combinations("attention", "library")
        for code, (direction, library) in enumerate(combinations):
            chosen = has_shape & (codes == code)
            if chosen.any():
                found.put(chosen, self._with_shape(rows.only(chosen), direction, library))
        bare = ~has_shape & (rows.numbers("flops") > 0)
        if bare.any():
            found.put(bare, self._without_shape(rows.only(bare)))
        return found

    def _with_shape(self, rows: WorkArrays, direction: str, library: str) -> Estimates:
        shapes = _shapes(rows)
        kernel, roof = _KERNELS.get(library, "flash2"), attention_roof(self.gpu)
        is_backward = direction == "backward"
        price = self._times.backward_us if is_backward else self._times.forward_us
        time_us = price(shapes, kernel, roof)
        dtypes = rows.texts("dtype")
        own_peak = np.array([self.gpu.peak(str(dtype)) or np.nan for dtype in dtypes])
        narrower = (dtypes == "fp8") | (dtypes == "bf16")  # fp8 is taken to be no faster: most kernels are not
        time_us = time_us * np.where(narrower, 1.0, roof.peak_flops / own_peak)
        time_us = np.where(rows.flags("deterministic"), time_us / _DETERMINISTIC_RATE, time_us)
        time_us = time_us + np.where(rows.flags("dropout"), self._dropout_us(shapes, kernel), 0.0)
        family = f"attention training {direction}" if self._times.has_training else "attention forward"
        source = self._training_on or self.table.name
        spread = self.intervals.half_width(family, time_us, gpu=source)
        assumed = self._assumed(rows, shapes, kernel, library, is_backward=is_backward)
        flops = shapes.flops("backward" if is_backward else "forward")
        compute = flops / roof.peak_flops * 1e6
        memory = shapes.moved_bytes() * (2.0 if is_backward else 1.0) / roof.memory_bandwidth * 1e6
        basis = np.full(len(rows), f"measured: attention on {source}", object)
        accuracy = np.full(len(rows), family, object)
        bound = which_limits(compute, memory, _START_US)
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
        """What random numbers for the scores take."""
        scores = (shapes.batch * shapes.heads).astype(float) * shapes.queries * shapes.met_keys()
        clocks = _CUDNN_DROPOUT_CLOCKS if kernel == "cudnn" else _DROPOUT_CLOCKS
        return np.asarray(scores * clocks / (self.gpu.sms * self.gpu.clock_khz * 1e3) * 1e6)

    def _assumed(
        self, rows: WorkArrays, shapes: AttentionShapes, kernel: AttentionKernel, library: str, *, is_backward: bool
    ) -> Assumptions:
        assumed, every = Assumptions(len(rows)), np.ones(len(rows), bool)
        if kernel != "cudnn" and self._times.has_training:
            assumed.add(every, _FLASH_2, "FlashAttention-2 as much slower than cuDNN as on H100")
        if is_backward and not self._times.has_training:
            assumed.add(every, _BACKWARD, "backward at FlashAttention-2's rate on A100")
        if kernel in ("flex", "efficient"):
            slower = _FLEX if kernel == "flex" else _EFFICIENT
            assumed.add(every, slower, f"{kernel} attention a fraction of FlashAttention-2's rate")
        assumed.add(every & (library == ""), _NO_LIBRARY, "FlashAttention-2, as the library is not known")
        is_other = self.gpu.compute_capability != self.table.measured_on.compute_capability
        assumed.add(every & (not self.table.is_own), _OTHER_GPU * (1 + is_other), f"like {self.table.name}")
        cut = (shapes.window > 0) & (shapes.window < shapes.keys)
        blocks = cut & shapes.in_blocks
        assumed.add(cut & (shapes.window >= _NARROW) & ~blocks, _WINDOW, "a window costs what its keys do")
        assumed.add(cut & (shapes.window < _NARROW) & ~blocks, _NARROW_WINDOW, "a narrow window costs whole tiles")
        assumed.add(blocks & (shapes.window >= _NARROW), _WINDOW, "a mask costs what its blocks do")
        assumed.add(blocks & (shapes.window < _NARROW), _NARROW_WINDOW, "a mask of few blocks costs what they do")
        assumed.add(shapes.queries != shapes.keys, _CROSS, "queries and keys of different length like their mean")
        assumed.add(rows.flags("is_dense"), 0.0, "every query meets every key, as the mask is not known")
        assumed.add(rows.flags("deterministic"), _DETERMINISTIC, "a deterministic backward as much slower as on GB200")
        assumed.add(rows.flags("dropout"), _DROPOUT, "dropout takes integer instructions")
        assumed.add(rows.texts("dtype") != "bf16", _OTHER_TYPE, "the type's fraction of the peak is bf16's")
        return assumed

    def _without_shape(self, rows: WorkArrays) -> Estimates:
        peak = self.gpu.peak_flops["bf16"]
        time_us = _START_US + rows.numbers("flops") / (_ACHIEVED * peak) * 1e6
        texts = ("compute", "", f"assumed: attention at {_ACHIEVED:.0%} of the peak")
        filled = [np.full(len(rows), words, object) for words in texts]
        return Estimates(time_us, np.full(len(rows), _NO_SHAPE), *filled)


@cache
def _measured_times(name: str) -> AttentionTimes:
    """Attention on a measured GPU."""
    measured, own = load_measured(name), _training_table(name)
    training = load_measured(own).training_attention if own else pd.DataFrame()
    peak = measured_spec(own).peak_flops["bf16"] if own else 1.0
    roof = attention_roof(measured_spec(name))
    return AttentionTimes(measured.attention, training, roof, training_peak_flops=peak)


def _training_table(name: str) -> str:
    """Where training was measured on this generation (cuDNN's kernels follow the first number of the capability)."""
    generation = measured_spec(name).compute_capability[0]
    same = [each for each in _TRAINING if measured_spec(each).compute_capability[0] == generation]
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
