"""Sustained clocks: how far a GPU's clocks fall in a step, so that its mean power stays within the limit.

Kernels were measured alone, in bursts; a training step is long enough for the power limit to count. At the fraction f
of the full clock, a kernel that arithmetic limits draws ``idle + products f^3`` (power is voltage squared times clock,
and the voltage follows the clock) and takes 1/f of its time. Below :data:`_FLOOR` the voltage falls no further. Kernels
that memory limits keep their time. f is the largest that keeps the step's mean power within the limit.

Products' power at full clock follows from measurements of long products at a GPU's own limit (:data:`LONG_PRODUCTS`),
by type. But their 10 ms are short, and a GPU in training is warmer than in a benchmark: :data:`HEAT`, fitted
(``make truth``), says how much more they draw. Products in fp8 have a parameter of their own. GPUs that are cooled by
liquid are taken to stay as cool as in a benchmark.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fakedist.cost_model.kernels.measurements import Floats
from fakedist.cost_model.kernels.work_arrays import Flags, Texts
from fakedist.gpu.models.spec import GpuSpec

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
