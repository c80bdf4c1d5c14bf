"""Kernel times on one GPU: the work of launches in, microseconds with 90 % intervals out.

The rule of each row's family takes what was measured on this GPU or the most similar one. Times of kernels that
arithmetic limits then follow the clock that the step keeps under the power limit (``clocks``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from fakedist.cost_model.accuracy import ErrorIntervals, half_width
from fakedist.cost_model.hosts import HostCosts
from fakedist.cost_model.kernels.gpus import nearest_table
from fakedist.cost_model.kernels.measurements import (
    Assumptions,
    Estimates,
    Flags,
    Floats,
    Texts,
    WorkArrays,
    which_limits,
)
from fakedist.cost_model.kernels.rules import AttentionRules, MemoryRules, ProductRules
from fakedist.cost_model.overlap import filled_sms
from fakedist.cost_model.timeline import Array
from fakedist.gpu.models.spec import GpuSpec
from fakedist.rundir import time_notes
from fakedist.rundir.notes import Note
from fakedist.rundir.step_time import Calibration

#: The rate of products of 10 ms and more over that of products of 0.1 to 1 ms (bf16, m >= 2048, n and k >= 1024,
#: medians; ``fakedist/cost_model/data``): the fraction of the clock that pure products keep at the GPU's own limit.
LONG_PRODUCTS = {
    "a100-sxm": 1.0,
    "h100-sxm": 0.935,
    "h200-sxm": 0.90,
    "b200-sxm": 0.92,
    "b300-sxm": 0.88,
    "gb200": 0.84,
    "gb300": 0.92,
    "l40s": 0.885,
    "rtx-pro-6000": 1.0,
}
#: The same of narrower types; 1 where a GPU is missing. fp8: cuBLAS' products with a scale a tensor (TensorRT-LLM's
#: collector), whose long ones are as fast as short ones: at the GPU's own limit they keep the full clock. NVFP4:
#: the median of three collectors.
LONG_NARROW_PRODUCTS = {
    "fp8": {"l40s": 0.96},
    "nvfp4": {"b200-sxm": 0.913, "b300-sxm": 0.873, "gb200": 0.782, "gb300": 0.935},
}
#: Fitted: what products of a training step draw over those that were measured alone; and those in fp8 over the limit of
#: the GPU, which is all that is known of those that were measured, as they kept the full clock.
HEAT, FP8_HEAT = 1.6, 0.75
#: How the power of arithmetic grows with the clock, down to the fraction of the clock where the voltage has its floor.
_EXPONENT, _FLOOR = 3, 0.65
#: Cooled by liquid: their HEAT, chosen for a published step of 128 GB200 in bf16 (``nemotron-340b-gb200``), and their
#: floor: a GB300 at 500 W instead of 1,400 keeps 0.28 to 0.39 of the rate of products
#: (facebookexperimental/triton#2023); 0.36 with this one.
LIQUID_COOLED, _LIQUID_HEAT, _LIQUID_FLOOR = frozenset({"gb200", "gb300"}), 1.0, 0.8
#: Of the measured GPU's own limit: what it draws when idle, and under kernels that are limited by memory. Assumptions.
_IDLE, _MEMORY = 0.12, 0.5
#: Burst times of products up to the first are at the full clock, from the second on at the sustained one.
_BURST_US = (1e3, 1e4)
_LEAST_CLOCK = 0.2
#: Half the width of the 90 % interval (logarithm) that falling clocks add to a kernel's time, as a part of what they
#: cost.
CLOCK_SPREAD = 0.35


@dataclass(frozen=True)
class SustainedClock:
    """The fraction of the full clock that a step keeps, and the power limit that it follows from."""

    fraction: float
    watts: float


@dataclass(frozen=True)
class Draws:
    """Watts of work that arithmetic limits, by its type.

    Attributes:
        long: ``LONG_PRODUCTS``.
        full_watts: Above idle at the full clock.
        unknown: How far those may be off (logarithm, 90 %); 0 in bf16, where ``CLOCK_SPREAD`` says it.
    """

    long: Floats
    full_watts: Floats
    unknown: Floats

    def at(self, side: float) -> Draws:
        """At the end of the interval: 1 for the most that is drawn, -1 for the least."""
        return replace(self, full_watts=self.full_watts * np.exp(side * self.unknown))


class PowerModel:
    """The power that a GPU with the chip of ``measured_on`` draws.

    ``heat`` and ``fp8_heat`` replace HEAT, but of a GPU that is cooled by liquid, and FP8_HEAT.
    """

    def __init__(
        self, gpu: GpuSpec, measured_on: GpuSpec, name: str, *, heat: float = HEAT, fp8_heat: float = FP8_HEAT
    ) -> None:
        # Half as many SMs draw half as much.
        size = measured_on.watts * gpu.sms / measured_on.sms
        self._watts, self._idle, self._memory = gpu.watts, _IDLE * size, _MEMORY * size
        self._name, self._arithmetic, self._fitted = name, size - self._idle, {"fp8": fp8_heat, "": heat}
        is_cool = name in LIQUID_COOLED
        self._heats = self._fitted | ({"": _LIQUID_HEAT} if is_cool else {})
        self._floor = _LIQUID_FLOOR if is_cool else _FLOOR

    def draws(self, types: Texts) -> Draws:
        """Power of work by its type: "fp8", "nvfp4", or another, which is priced as bf16."""
        long = {text: self._long(str(text)) for text in set(types)}
        heated = {text: self._heats.get(str(text), self._heats[""]) * self._arithmetic for text in long}
        full = {text: heated[text] / long[text] ** _EXPONENT for text in long}
        unknown = {text: self._unknown(str(text)) for text in long}
        return Draws(*(np.array([by_type[each] for each in types]) for by_type in (long, full, unknown)))

    def clock(self, time_us: Floats, computes: Flags, counts: Floats, draws: Draws) -> SustainedClock:
        """The clock that a step keeps, from burst times of its work and its ``draws``; a time of NaN counts nothing."""
        total = np.nan_to_num(time_us) * counts
        if not total.sum() > 0:
            return SustainedClock(1.0, self._watts)
        low, high = _LEAST_CLOCK, 1.0
        if self._mean_watts(1.0, time_us, computes, total, draws) <= self._watts:
            return SustainedClock(1.0, self._watts)
        for _ in range(40):
            middle = (low + high) / 2
            if self._mean_watts(middle, time_us, computes, total, draws) <= self._watts:
                low = middle
            else:
                high = middle
        return SustainedClock(low, self._watts)

    def slower(self, time_us: Floats, computes: Flags, clock: SustainedClock, draws: Draws) -> Floats:
        """Factor by which each piece of work takes longer than in a burst."""
        # Long products were measured at the sustained clock already.
        begin, end = np.log(_BURST_US)
        part = ((np.log(np.maximum(np.nan_to_num(time_us), 1.0)) - begin) / (end - begin)).clip(0.0, 1.0)
        shorter = 1.0 + part * (draws.long - 1.0)
        return np.where(computes, np.maximum(shorter / clock.fraction, 1.0), 1.0)

    def _long(self, text: str) -> float:
        if text not in LONG_NARROW_PRODUCTS:
            return LONG_PRODUCTS[self._name]
        return LONG_NARROW_PRODUCTS[text].get(self._name, 1.0)

    def _unknown(self, text: str) -> float:
        # The parameter is all that is known besides the measured products: as far as it moves the power.
        heat = self._fitted.get(text, self._fitted[""])
        return abs(float(np.log(heat))) if text in LONG_NARROW_PRODUCTS else 0.0

    def _mean_watts(self, fraction: float, time_us: Floats, computes: Flags, total: Floats, draws: Draws) -> float:
        longer = total * self.slower(time_us, computes, SustainedClock(fraction, self._watts), draws)
        drawn = np.where(computes, self._idle + draws.full_watts * self._power(fraction), self._memory)
        return float((longer * drawn).sum() / longer.sum())

    def _power(self, fraction: float) -> float:
        return float(max(fraction, self._floor) ** (_EXPONENT - 1) * fraction)


#: Convolutions and templates whose sizes are not known: the fraction of the peak that they are assumed to reach.
_ACHIEVED, _ACHIEVED_SPREAD = 0.5, 0.5
#: What is bounded takes at least its roofline; the interval goes up to 16 times that.
_BOUNDED, _BOUNDED_SPREAD = 2.0, math.log(8.0)
#: Microseconds of a step that waits for the one before: the kernels of a recurrent network's step, or of a column of a
#: factorisation, on every SM, one after the other. An assumption.
_STEP_US, _STEP_SPREAD = 8.0, 0.9
#: Kernels whose arithmetic is not known: the interval goes up to a product of all their bytes at this fraction of the
#: peak, and to so many times what the bytes take.
_LEAST_ACHIEVED, _MOST_PASSES = 1 / 8, 16.0
_PRODUCT_ELEMENT_BYTES = 2.0
#: Kernels of Transformer Engine that compute one number from a few: the scale of an NVFP4 product from two maxima.
_SCALARS = "compute_nvfp4_per_tensor_scale_kernel"

_Rule = Callable[[WorkArrays], Estimates]


class KernelTimes:
    """Kernel times on one GPU, without a calibration table. It implements ``fakedist.cost_model.step.Prices``.

    Raises:
        SetupError: The measured tables are missing or damaged.
    """

    def __init__(
        self, gpu: GpuSpec, power_watts: float | None = None, *, heat: float = HEAT, fp8_heat: float = FP8_HEAT
    ) -> None:
        self._gpu = gpu if power_watts is None else dataclasses.replace(gpu, watts=float(power_watts))
        self._table = nearest_table(self._gpu)
        intervals = ErrorIntervals(self._table.name)
        self._products = ProductRules(self._gpu, self._table, intervals)
        self._attention = AttentionRules(self._gpu, self._table, intervals)
        self._memory = MemoryRules(self._gpu, self._table, intervals)
        measured_on, name = self._table.measured_on, self._table.name
        self._power = PowerModel(self._gpu, measured_on, name, heat=heat, fp8_heat=fp8_heat)
        self._clock = SustainedClock(1.0, self._gpu.watts)
        self.product, self.host = gpu.product, HostCosts()
        self.calibrated_on: Calibration | None = None

    def load(self) -> None:
        """Load the measurements for the first price; SetupError if they are missing or damaged."""
        _ = [rules.times for rules in (self._products, self._attention, self._memory)]

    @property
    def clock(self) -> SustainedClock:
        """The clock of what was priced last."""
        return self._clock

    def price(self, work: pd.DataFrame, counts: Array) -> pd.DataFrame:
        """Price the rows of the table ``work``; ``counts`` are their launches in the step, which clocks depend on.

        Returns:
            A row for each row of work, in its order: time_us and its 90 % interval low_us to high_us; least_us, its
            roofline; bound (compute, memory, launch, or empty); basis, the measurement or rule; accuracy, the family of
            ``accuracy.json`` whose errors made the interval, or empty; filled, the fraction of the SMs that it needs if
            arithmetic limits it, else 0. No time and no low_us is below the roofline. Where the work is unknown,
            time_us is NaN, low_us is what is known of it, and high_us the most that it is assumed to take.
        """
        work = _without_scalars(work)
        alone = self.burst(work)
        computes = np.asarray(alone.bound == "compute", bool)
        draws = self._power.draws(np.where(is_nvfp4(work), "nvfp4", work["dtype"].to_numpy(object)))
        self._clock = self._power.clock(alone.time_us, computes, counts.astype(np.float64), draws)
        slower = self._power.slower(alone.time_us, computes, self._clock, draws)
        time_us = alone.time_us * slower
        spread = np.sqrt(alone.spread**2 + (CLOCK_SPREAD * np.log(slower)) ** 2)
        shorter, longer = (np.sqrt(spread**2 + self._apart(alone, computes, counts, draws, at)) for at in (-1.0, 1.0))
        spare = np.zeros(len(time_us)) if alone.spare is None else alone.spare
        spared = np.where(work["is_dense"].to_numpy(bool), spare, 0.0)  # a mask lowers the roofline, too
        least_us = roofline_us(work, self._gpu) * np.exp(-spared)
        is_unknown = np.isnan(time_us) & (work["kind"] != "collective").to_numpy(bool)
        most_us = self._most_us(work, np.nan_to_num(time_us))
        return pd.DataFrame(
            {
                "time_us": time_us,
                "low_us": np.where(is_unknown, least_us, np.maximum(time_us * np.exp(-shorter - spare), least_us)),
                "high_us": np.where(is_unknown, most_us, time_us * np.exp(longer)),
                "least_us": least_us,
                "bound": alone.bound,
                "basis": alone.basis,
                "accuracy": alone.accuracy,
                "filled": np.where(computes, filled_sms(work, self._gpu.sms), 0.0),
            }
        )

    def _apart(self, alone: Estimates, computes: Flags, counts: Array, draws: Draws, side: float) -> Floats:
        """The square of how far (logarithm) times move if work draws what its type draws at most (1) or least (-1)."""
        if not draws.unknown.any():
            return np.zeros(len(computes))
        there = draws.at(side)
        clock = self._power.clock(alone.time_us, computes, counts.astype(np.float64), there)
        times = [self._power.slower(alone.time_us, computes, *each) for each in ((self._clock, draws), (clock, there))]
        return np.asarray(np.log(times[1] / times[0]) ** 2)

    def burst(self, work: pd.DataFrame) -> Estimates:
        """Price each row of work alone, at the clocks of a burst."""
        work = _without_scalars(work)
        rows = WorkArrays(work)
        estimates = Estimates.unknown(len(rows))
        for chosen, rule in self._rules(rows):
            if chosen.any():
                estimates.put(chosen, rule(rows.only(chosen)))
        least_us = roofline_us(work, self._gpu)
        is_below = estimates.time_us < least_us
        estimates.time_us[is_below] = least_us[is_below]
        estimates.basis[is_below] += "; not below the roofline"
        return estimates

    def step_interval(self, priced: pd.DataFrame, counts: Array) -> tuple[float, float]:
        """The 90 % interval of the sum of all launches in microseconds; unknown work adds all that it may take."""
        known = priced["time_us"].notna().to_numpy()
        times = counts[known].astype(np.float64)
        total = float((priced["time_us"].to_numpy()[known] * times).sum())
        unknown = float(np.nansum(priced["high_us"].to_numpy("f8")[~known] * counts[~known]))
        high = total + half_width(priced, counts, "high_us") + unknown
        return max(total - half_width(priced, counts, "low_us"), 0.0), high

    def notes(self) -> list[Note]:
        """Where the times come from."""
        measured_on = "" if self._table.is_own else self._table.measured_on.product
        return [time_notes.from_measurements(self.product, measured_on, self._clock.fraction, self._clock.watts)]

    def _rules(self, rows: WorkArrays) -> list[tuple[Flags, _Rule]]:
        """The rows that each rule prices: the first that has a row prices it; unknown if none has."""
        flops, moved = rows.numbers("flops"), rows.numbers("moved_bytes")
        is_call = rows.texts("kind") == "collective"
        has_size = (rows.numbers("m") > 0) & (rows.numbers("n") > 0) & (rows.numbers("k") > 0)
        is_grouped = has_size & (rows.numbers("groups") > 0)
        is_attention = rows.texts("attention") != ""
        over_link = rows.flags("over_host_link")
        computes = flops > 0
        is_known = ~np.isnan(flops)
        every: list[tuple[Flags, _Rule]] = [
            (is_call, lambda some: Estimates.unknown(len(some))),
            (over_link & ~np.isnan(moved), self._memory.over_host_link),
            (rows.flags("is_bounded") & is_known, self._bounded),
            (rows.numbers("steps") > 0, self._stepwise),
            (is_grouped, self._products.grouped),
            (has_size, self._products.single),
            (is_attention, self._attention.price),
            (computes, self._arithmetic),
            (is_known & ~np.isnan(moved), self._memory.price),
        ]
        taken = np.zeros(len(rows), bool)
        chosen = []
        for own, rule in every:
            chosen.append((own & ~taken, rule))
            taken |= own
        return chosen

    def _arithmetic(self, rows: WorkArrays) -> Estimates:
        """Work of known FLOPs and unknown shape: convolutions, templates."""
        compute = rows.numbers("flops") / (_ACHIEVED * peaks(rows.texts("dtype"), self._gpu)) * 1e6
        memory = np.nan_to_num(self._memory.price(rows).time_us)
        return self._assumed(rows, compute, memory, _ACHIEVED_SPREAD, f"arithmetic at {_ACHIEVED:.0%} of the peak")

    def _stepwise(self, rows: WorkArrays) -> Estimates:
        """Work in steps each of which waits for the one before: recurrent networks."""
        estimates = self._arithmetic(rows)
        steps_us = rows.numbers("steps") * _STEP_US
        words = f"{_STEP_US:g} us for each step that waits for the one before"
        return self._assumed(rows, estimates.time_us + steps_us, 0 * steps_us, _STEP_SPREAD, words)

    def _bounded(self, rows: WorkArrays) -> Estimates:
        """Work of which only the least is known."""
        start_us = self._memory.start_us
        compute = rows.numbers("flops") / peaks(rows.texts("dtype"), self._gpu) * 1e6
        memory = np.nan_to_num(rows.numbers("moved_bytes")) / self._gpu.memory_bandwidth * 1e6
        steps_us = rows.numbers("steps") * _STEP_US
        words = f"{_BOUNDED:g} times its roofline, and at most {_BOUNDED * math.exp(_BOUNDED_SPREAD):.0f} times"
        return self._assumed(
            rows, start_us + steps_us + _BOUNDED * compute, start_us + _BOUNDED * memory, _BOUNDED_SPREAD, words
        )

    def _assumed(self, rows: WorkArrays, compute: Floats, memory: Floats, spread: float, words: str) -> Estimates:
        """Estimates that rest on an assumption alone. NaN where the GPU has no units for the type."""
        time_us = np.maximum(compute, memory)
        assumed = Assumptions(len(rows))
        assumed.add((np.ones(len(rows), bool), spread, words))
        basis = assumed.basis(np.full(len(rows), "no measurement", object))
        bound = which_limits(compute, memory, self._memory.start_us)
        return Estimates(time_us, assumed.spread(0 * time_us), bound, np.full(len(rows), "", object), basis)

    def _most_us(self, work: pd.DataFrame, time_us: Floats) -> Floats:
        """The longest assumed time of work of unknown arithmetic.

        It is that of a product of all its bytes, or its bytes several times; without known bytes, the longest kernel's.
        """
        moved = work["moved_bytes"].to_numpy("f8")
        peak = self._gpu.peak("bf16") or np.inf
        elements = moved / _PRODUCT_ELEMENT_BYTES / 3
        product_us = 2 * elements**1.5 / (peak * _LEAST_ACHIEVED) * 1e6
        bytes_us = self._memory.start_us + _MOST_PASSES * moved / self._gpu.memory_bandwidth * 1e6
        return np.asarray(np.where(np.isnan(moved), time_us.max(initial=0.0), np.maximum(product_us, bytes_us)))


def _without_scalars(work: pd.DataFrame) -> pd.DataFrame:
    """The rows, in which kernels of a few numbers move no bytes: recorded are those of their whole operation."""
    few = work["name"].astype(str).str.contains(_SCALARS).to_numpy(bool)
    return work.assign(moved_bytes=work["moved_bytes"].mask(few, 0.0)) if few.any() else work


def is_nvfp4(work: pd.DataFrame) -> Flags:
    """Find products of 4 bits: their types have no name in ``dtype``, and cuBLAS scales them by blocks."""
    return ((work["dtype"] == "") & (work["scaling"] == "block")).to_numpy(bool)


def roofline_us(work: pd.DataFrame, gpu: GpuSpec) -> Floats:
    """The least microseconds of each row: FLOPs at the type's peak or bytes at the bandwidth; 0 if unknown."""
    compute = work["flops"].to_numpy("f8") / peaks(work["dtype"].to_numpy(object), gpu) * 1e6
    rate = np.where(work["over_host_link"].to_numpy(bool), gpu.host_bandwidth, gpu.memory_bandwidth)
    memory = work["moved_bytes"].to_numpy("f8") / rate * 1e6
    return np.asarray(np.fmax(np.nan_to_num(compute), np.nan_to_num(memory)))


def peaks(dtypes: Texts, gpu: GpuSpec) -> Floats:
    """A GPU's operations per second in each type; NaN where it has no units for it."""
    by_type = {dtype: gpu.peak(str(dtype)) or np.nan for dtype in set(dtypes)}
    return np.array([by_type[dtype] for dtype in dtypes], np.float64)
