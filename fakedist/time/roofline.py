"""Prices the table ``work`` by the roofline of :mod:`fakedist.gpu.pricing`, which says nothing of its own error."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from fakedist.gpu.pricing import Roofline
from fakedist.gpu_models.spec import GpuSpec
from fakedist.run import time_notes
from fakedist.run.launch_records import WorkRow
from fakedist.run.notes import Note
from fakedist.run.plain import from_plain
from fakedist.run.step_time import Calibration
from fakedist.time.timeline import Array

_NAN = float("nan")


class _Host(NamedTuple):
    operation_us: float
    launch_us: float
    graph_us: float


class RooflineTimes:
    """Kernel times on one GPU. It implements ``fakedist.time.step.Prices``.

    Args:
        gpu: The GPU model.

    Attributes:
        product: The GPU's name.
        host: What the host takes for its part.
        calibrated_on: The GPU that the curves were measured on; None if they were not.
    """

    def __init__(self, gpu: GpuSpec) -> None:
        self._roofline = roofline = Roofline(gpu)
        self.product = gpu.product
        self.host = _Host(roofline.fixed.operation, roofline.fixed.launch, roofline.fixed.graph)
        measured_on = roofline.measured_on
        self.calibrated_on = None if measured_on is None else from_plain(Calibration, measured_on)

    def price(self, work: pd.DataFrame, counts: Array) -> pd.DataFrame:
        """How long each row of work takes: time_us, low_us, high_us (NaN), bound, basis (empty)."""
        rows = map(WorkRow._make, zip(*(work[name].tolist() for name in WorkRow._fields), strict=True))
        times = [self._roofline.duration(row) for row in rows]
        unknown = np.full(len(times), _NAN)
        bound = np.array([bound for _, bound in times], object)
        time_us = np.array([duration for duration, _ in times], "f8")
        return pd.DataFrame({"time_us": time_us, "low_us": unknown, "high_us": unknown, "bound": bound, "basis": ""})

    def step_interval(self, priced: pd.DataFrame, counts: Array) -> tuple[float, float]:
        """Not known."""
        return _NAN, _NAN

    def notes(self) -> list[Note]:
        """Whether anything was measured."""
        on = self.calibrated_on
        return [time_notes.not_calibrated() if on is None else time_notes.calibrated(on)]
