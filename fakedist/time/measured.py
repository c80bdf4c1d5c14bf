"""A step whose kernels were measured: only its collectives are priced."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fakedist.run.notes import Note
from fakedist.run.step_time import Calibration
from fakedist.time.host_times import HostCosts
from fakedist.time.timeline import Array


class MeasuredPrices:
    """Prices nothing: the table ``launches`` has what each kernel took. It implements ``fakedist.time.step.Prices``.

    Args:
        product: The GPU's name.
        launches: The table ``launches`` of the step.

    Attributes:
        product: The GPU's name.
        host: What the host takes, where that was not measured.
        calibrated_on: None.
    """

    def __init__(self, product: str, launches: pd.DataFrame) -> None:
        self.product = product
        self.host = HostCosts()
        self.calibrated_on: Calibration | None = None
        self._whole_us = float(np.nansum(launches["measured_us"].to_numpy("f8")))

    def price(self, work: pd.DataFrame, counts: Array) -> pd.DataFrame:
        """No times, for every row of work."""
        nothing = np.full(len(work), np.nan)
        texts = pd.Series("", work.index, dtype=object)
        columns = {"time_us": nothing, "low_us": nothing, "high_us": nothing, "bound": texts}
        basis = np.where(work["kind"] == "collective", "", "measured")
        return pd.DataFrame({**columns, "basis": basis}, index=work.index)

    def step_interval(self, priced: pd.DataFrame, counts: Array) -> tuple[float, float]:
        """The sum of what was measured, which has no interval."""
        return self._whole_us, self._whole_us

    def notes(self) -> list[Note]:
        """None: the tool's own notes say where the times come from."""
        return []
