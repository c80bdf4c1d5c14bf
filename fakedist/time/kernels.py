"""Kernel times on one GPU: the work of launches in, microseconds with 90 % intervals out.

Each row of work goes to the rule of its family (``product_rules``, ``attention_rules``, ``memory_rules``), which takes
what was measured on this GPU or on the most similar one. Times of kernels that arithmetic limits then follow the clock
that the whole step keeps under the power limit (``clocks``).
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np
import pandas as pd

from fakedist.gpu_models.spec import GpuSpec
from fakedist.run import time_notes
from fakedist.run.notes import Note
from fakedist.run.step_time import Calibration
from fakedist.time.attention_rules import AttentionRules
from fakedist.time.clocks import CLOCK_SPREAD, HEAT, PowerModel, SustainedClock
from fakedist.time.gpus import nearest_table
from fakedist.time.host_times import HostCosts
from fakedist.time.interference import filled_sms
from fakedist.time.intervals import Intervals
from fakedist.time.memory_rules import MemoryRules
from fakedist.time.product_rules import ProductRules
from fakedist.time.timeline import Array
from fakedist.time.uncertainty import half_width
from fakedist.time.work_arrays import Assumptions, Estimates, Flags, WorkArrays, which_limits

#: Convolutions and templates whose sizes are not known: the fraction of the peak that they are assumed to reach.
_ACHIEVED, _ACHIEVED_SPREAD = 0.5, 0.5


class KernelTimes:
    """Kernel times on one GPU. It implements ``fakedist.time.step.Prices``.

    Args:
        gpu: The GPU model.
        power_watts: Its power limit, if not the model's.
        heat: What products draw in a step (``time.clocks.HEAT``).

    Attributes:
        product: The GPU's name.
        host: What the host takes for its part.
        calibrated_on: None: own times of a user's GPU go before these (``fakedist.time.own``).

    Raises:
        SetupError: The measured tables are missing or damaged.
    """

    def __init__(self, gpu: GpuSpec, power_watts: float | None = None, *, heat: float = HEAT) -> None:
        self._gpu = gpu if power_watts is None else dataclasses.replace(gpu, watts=float(power_watts))
        self._table = nearest_table(self._gpu)
        intervals = Intervals(self._table.name)
        self._products = ProductRules(self._gpu, self._table, intervals)
        self._attention = AttentionRules(self._gpu, self._table, intervals)
        self._memory = MemoryRules(self._gpu, self._table, intervals)
        self._power = PowerModel(self._gpu, self._table.measured_on, self._table.name, heat=heat)
        self._clock = SustainedClock(1.0, self._gpu.watts)
        self.product, self.host = gpu.product, HostCosts()
        self.calibrated_on: Calibration | None = None

    def load(self) -> None:
        """Load what was measured, which the first price needs.

        Raises:
            SetupError: The measured tables are missing or damaged.
        """
        for rules in (self._products, self._attention, self._memory):
            rules.load()

    @property
    def clock(self) -> SustainedClock:
        """The clock of what was priced last."""
        return self._clock

    def price(self, work: pd.DataFrame, counts: Array) -> pd.DataFrame:
        """How long each row of work takes.

        Args:
            work: The table ``work``; its columns are described at ``run.launch_records.WorkRow``.
            counts: How many launches of the step each row has, as clocks follow the whole step.

        Returns:
            A row for each row of work, in its order: time_us and its 90 % interval low_us to high_us, NaN where the
            work is unknown; bound (compute, memory, launch, or empty); basis, the measurement or rule; accuracy, the
            family of ``accuracy.json`` whose errors made the interval, or empty; filled, the fraction of the SMs that
            it needs if arithmetic limits it, else 0.
        """
        found = self.burst(work)
        computes = np.asarray(found.bound == "compute", bool)
        self._clock = self._power.clock(found.time_us, computes, counts.astype(np.float64))
        slower = self._power.slower(found.time_us, computes, self._clock)
        time_us = found.time_us * slower
        spread = np.sqrt(found.spread**2 + (CLOCK_SPREAD * np.log(slower)) ** 2)
        return pd.DataFrame(
            {
                "time_us": time_us,
                "low_us": time_us * np.exp(-spread),
                "high_us": time_us * np.exp(spread),
                "bound": found.bound,
                "basis": found.basis,
                "accuracy": found.accuracy,
                "filled": np.where(computes, filled_sms(work, self._gpu.sms), 0.0),
            }
        )

    def burst(self, work: pd.DataFrame) -> Estimates:
        """How long each row of work takes alone, at the clocks of a burst."""
        rows = WorkArrays(work)
        found = Estimates.unknown(len(rows))
        for chosen, rule in self._rules(rows):
            if chosen.any():
                found.put(chosen, rule(rows.only(chosen)))
        return found

    def step_interval(self, priced: pd.DataFrame, counts: Array) -> tuple[float, float]:
        """The 90 % interval of the sum of all launches, in microseconds.

        ``fakedist.time.uncertainty`` says which errors go together.
        """
        known = priced["time_us"].notna().to_numpy()
        times = counts[known].astype(np.float64)
        total = float((priced["time_us"].to_numpy()[known] * times).sum())
        return max(total - half_width(priced, counts, "low_us"), 0.0), total + half_width(priced, counts, "high_us")

    def notes(self) -> list[Note]:
        """Where the times come from."""
        measured_on = "" if self._table.is_own else self._table.measured_on.product
        return [time_notes.from_measurements(self.product, measured_on, self._clock.fraction, self._clock.watts)]

    def _rules(self, rows: WorkArrays) -> list[tuple[Flags, _Rule]]:
        """Which rows each rule prices; a row is of the first that has it, and unknown if none has."""
        flops, moved = rows.numbers("flops"), rows.numbers("moved_bytes")
        is_call = rows.texts("kind") == "collective"
        has_size = (rows.numbers("m") > 0) & (rows.numbers("n") > 0) & (rows.numbers("k") > 0)
        is_grouped = has_size & (rows.numbers("groups") > 0)
        is_attention = rows.texts("attention") != ""
        over_link = rows.flags("over_host_link")
        computes = flops > 0
        every: list[tuple[Flags, _Rule]] = [
            (is_call, lambda some: Estimates.unknown(len(some))),
            (over_link & ~np.isnan(moved), self._memory.over_host_link),
            (is_grouped, self._products.grouped),
            (has_size, self._products.single),
            (is_attention, self._attention.price),
            (computes, self._arithmetic),
            (~np.isnan(moved), self._memory.price),
        ]
        taken, found = np.zeros(len(rows), bool), []
        for own, rule in every:
            found.append((own & ~taken, rule))
            taken |= own
        return found

    def _arithmetic(self, rows: WorkArrays) -> Estimates:
        """Work of known FLOPs and unknown shape: convolutions, templates."""
        peaks = np.array([self._gpu.peak_flops.get(str(dtype), np.nan) for dtype in rows.texts("dtype")])
        compute = rows.numbers("flops") / (_ACHIEVED * peaks) * 1e6
        memory = self._memory.price(rows).time_us
        time_us = np.fmax(compute, memory)
        assumed = Assumptions(len(rows))
        assumed.add(np.ones(len(rows), bool), _ACHIEVED_SPREAD, f"arithmetic at {_ACHIEVED:.0%} of the peak")
        basis = assumed.basis(np.full(len(rows), "no measurement", object))
        bound = which_limits(compute, np.nan_to_num(memory), self._memory.start_us)
        return Estimates(time_us, assumed.spread(0 * time_us), bound, np.full(len(rows), "", object), basis)


class _Rule(Protocol):
    def __call__(self, rows: WorkArrays, /) -> Estimates: ...
