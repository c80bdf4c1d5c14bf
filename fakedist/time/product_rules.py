"""Prices products and grouped products of the table ``work``.

Measured were products y = x w^T (TN in cuBLAS' words) of bf16 and fp8 operands with a bf16 result, each alone. Rules
for what was not:

- Other layouts (input gradients NN, weight gradients NT) take the same time.
- A result that is added to, or that has more bytes, adds its bytes to the reference.
- A batch fills the GPU as one product with as many rows does.
- A complex product takes as long as the four real ones that it is made of.
- TF32, fp32, fp64 and int8 reach the fraction of their peak that bf16 (int8: fp8) products of that size reach.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, cached_property

import numpy as np

from fakedist.time.experts import GroupedTimes
from fakedist.time.gpus import measured_spec, product_roof
from fakedist.time.measurements import load_measured
from fakedist.time.products import START_US, ProductRoof, ProductSizes, ProductTimes
from fakedist.time.rules import Rules
from fakedist.time.work_arrays import Assumptions, Estimates, WorkArrays, which_limits

#: Half widths of 90 % intervals (logarithms) that assumptions add.
_LAYOUT, _BATCH, _OTHER_TYPE, _ACCUMULATES, _OTHER_GPU = 0.08, 0.12, 0.25, 0.05, 0.10
_ROWS_SCALED = 0.10
#: What each octave beyond the table adds, and distance from measured sizes within it.
_BEYOND = 0.04
#: Whose layers of experts count where none were measured (A100).
_EXPERTS_ELSEWHERE = "h100-sxm"
#: The layout that was measured.
_MEASURED_LAYOUT = "TN"


class ProductRules(Rules):
    """Prices products on one GPU."""

    @cached_property
    def _times(self) -> dict[str, ProductTimes]:
        return _single_times(self.table.name)

    @cached_property
    def _experts(self) -> str:
        """Whose layers of experts count."""
        return self.table.name if len(load_measured(self.table.name).experts) else _EXPERTS_ELSEWHERE

    @cached_property
    def _grouped(self) -> GroupedTimes:
        return _grouped_times(self._experts)

    def load(self) -> None:
        """Load what was measured, which the first price needs."""
        _ = self._times

    def single(self, rows: WorkArrays) -> Estimates:
        """Products of one size each."""
        found = Estimates.unknown(len(rows))
        dtypes, scaling = rows.texts("dtype"), rows.texts("scaling")
        for dtype in sorted(set(dtypes)):
            for is_block in (False, True):
                chosen = (dtypes == dtype) & ((scaling == "block") == is_block)
                if chosen.any():
                    found.put(chosen, self._of_type(rows.only(chosen), dtype, is_block=is_block))
        return found

    def _of_type(self, rows: WorkArrays, dtype: str, *, is_block: bool) -> Estimates:
        wanted = "fp8_block" if dtype == "fp8" and is_block else "fp8" if dtype in ("fp8", "int8") else "bf16"
        peak = self.gpu.peak(dtype)
        if peak is None:
            return Estimates.unknown(len(rows))
        kind = wanted if wanted in self._times else "bf16"
        times = self._times[kind]
        sizes, roof = _sizes(rows), self._roof(peak)
        time_us = times.time_us(sizes, roof)
        within, beyond = times.octaves_away(sizes)
        assumed = Assumptions(len(rows))
        layout = rows.texts("layout")
        assumed.add(layout != _MEASURED_LAYOUT, _LAYOUT, f"as fast as {_MEASURED_LAYOUT}")
        assumed.add(sizes.batch > 1, _BATCH, "a batch like more rows")
        assumed.add(rows.flags("accumulates"), _ACCUMULATES, "adding to the result costs its bytes")
        every = np.ones(len(rows), bool)
        is_other = dtype not in ("bf16", "fp8") or kind != wanted
        assumed.add(every & is_other, _OTHER_TYPE, f"{dtype} reaches the fraction of its peak that {kind} does")
        assumed.add((rows.texts("scaling") == "row") & (dtype == "fp8"), _ROWS_SCALED, "scales a row like one a tensor")
        assumed.add(every & (not self.table.is_own), _OTHER_GPU, f"{self.gpu.name} like {self.table.name}")
        family = f"products {kind}"
        spread = self.intervals.half_width(family, time_us, within) + _BEYOND * beyond
        compute, memory = times.limits_us(sizes, roof)
        basis = np.full(len(rows), f"measured: {kind} products on {self.table.name}", object)
        return Estimates(
            time_us,
            assumed.spread(spread),
            which_limits(compute, memory, START_US),
            np.full(len(rows), family, object),
            assumed.basis(basis),
        )

    def grouped(self, rows: WorkArrays) -> Estimates:
        """Products of many groups, such as those of a layer's experts."""
        dtypes = rows.texts("dtype")
        found = Estimates.unknown(len(rows))
        for dtype in sorted(set(dtypes)):
            peak = self.gpu.peak(dtype)
            if peak is None:
                continue
            chosen = dtypes == dtype
            found.put(chosen, self._groups_of_type(rows.only(chosen), dtype, peak))
        return found

    def _groups_of_type(self, rows: WorkArrays, dtype: str, peak: float) -> Estimates:
        m, n, k, groups = (np.maximum(rows.numbers(name), 1.0) for name in ("m", "n", "k", "groups"))
        element = np.where(rows.numbers("a_bytes") > 0, rows.numbers("a_bytes"), 2.0)
        roof = replace(self._roof(peak), element_bytes=float(element[0]))
        time_us, compute, memory = self._grouped.estimate(m, groups, n, k, roof)
        assumed, every = Assumptions(len(rows)), np.ones(len(rows), bool)
        assumed.add(rows.texts("layout") != _MEASURED_LAYOUT, _LAYOUT, f"as fast as {_MEASURED_LAYOUT}")
        assumed.add(every & (dtype != "bf16"), _OTHER_TYPE, f"{dtype} reaches the fraction of its peak that bf16 does")
        is_own = self.table.is_own and self._experts == self.table.name
        assumed.add(every & (not is_own), _OTHER_GPU, f"{self.gpu.name} like {self._experts}")
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
    """Products by type on a measured GPU."""
    tables, spec = load_measured(name).products, measured_spec(name)
    return {kind: ProductTimes(rows, product_roof(spec, kind)) for kind, rows in tables.items()}


@cache
def _grouped_times(name: str) -> GroupedTimes:
    """Grouped products on a measured GPU."""
    return GroupedTimes(load_measured(name).experts, product_roof(measured_spec(name), "bf16"))


def _sizes(rows: WorkArrays) -> ProductSizes:
    """Sizes of products, with the bytes that they move; at least 1 each, as a batch of 0 is said of a single one.

    A complex product has four times the FLOPs: it is as one of real numbers with twice the rows and twice the sums.
    """
    m, n, k, batch = (np.maximum(rows.numbers(name), 1.0) for name in ("m", "n", "k", "batch"))
    operands = m * k * rows.numbers("a_bytes") + k * n * rows.numbers("b_bytes")
    result = m * n * rows.numbers("d_bytes") * np.where(rows.flags("accumulates"), 2.0, 1.0)
    parts = np.where(rows.numbers("flops") > 3.0 * 2.0 * m * n * k * batch, 2.0, 1.0)
    return ProductSizes(parts * m, n, parts * k, batch, batch * (operands + result))
