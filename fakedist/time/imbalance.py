"""Experts that do not get the same load: the busiest rank sets the pace of grouped products."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fakedist.run import time_notes
from fakedist.run.notes import Note
from fakedist.run.step_time import Calibration
from fakedist.time.step import Prices
from fakedist.time.timeline import Array, HostTimes


class ImbalancedPrices:
    """Kernel times with grouped products as long as those of the busiest rank. It implements ``time.step.Prices``.

    The routing of a virtual run is made up, so the real load of the experts is not known.

    Args:
        prices: The model.
        imbalance: How much more than its even share the busiest rank gets, 1 or more.

    Attributes:
        product: The GPU's name.
        host: What the host takes for its part.
        calibrated_on: The GPU that the model was calibrated on; None without calibration.
    """

    def __init__(self, prices: Prices, imbalance: float) -> None:
        self._prices, self._imbalance = prices, imbalance
        self._num_grouped = 0
        self.product: str = prices.product
        self.host: HostTimes = prices.host
        self.calibrated_on: Calibration | None = prices.calibrated_on

    def price(self, work: pd.DataFrame, counts: Array) -> pd.DataFrame:
        """How long each row of work takes, see ``Prices.price``."""
        priced = self._prices.price(work, counts)
        is_grouped = (work["groups"] > 0).to_numpy(bool)
        self._num_grouped = int(counts[is_grouped].sum())
        if self._imbalance == 1:
            return priced
        factor = np.where(is_grouped, self._imbalance, 1.0)
        return priced.assign(**{name: priced[name] * factor for name in ("time_us", "low_us", "high_us")})

    def step_interval(self, priced: pd.DataFrame, counts: Array) -> tuple[float, float]:
        """The interval of the sum over all launches, as the model makes it."""
        return self._prices.step_interval(priced, counts)

    def notes(self) -> list[Note]:
        """Where the times come from, and what load of experts they are for."""
        told = self._prices.notes()
        if self._num_grouped or self._imbalance != 1:
            told = [*told, time_notes.experts_load(self._imbalance)]
        return told
