"""Widths of 90 % intervals, from the errors on measurements that were left out."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fakedist.time.accuracy import OCTAVE_EDGES, TIME_EDGES_US, accuracy_rows
from fakedist.time.measurements import Floats

#: For a family whose errors are not known on any GPU.
UNKNOWN = 0.35
#: A quantile of fewer errors says little.
_LEAST = 30


class Intervals:
    """Widths for estimates from one GPU's measurements.

    Args:
        name: The name of its table.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._widths = {(row.gpu, row.family): row.half_widths for row in accuracy_rows()}

    def half_width(self, family: str, time_us: Floats, octaves: Floats | None = None, gpu: str = "") -> Floats:
        """Half the width of each interval, of the logarithm.

        Args:
            family: A family of ``accuracy.json``.
            time_us: What was estimated.
            octaves: Distance from the nearest measured sizes, in powers of two.
            gpu: The table that the estimates are from; by default this GPU's own.
        """
        widths = self._widths.get((gpu or self._name, family))
        if widths is None:
            return np.full(len(time_us), UNKNOWN)
        return half_widths_at(widths, time_us, np.zeros(len(time_us)) if octaves is None else octaves)


def half_widths_at(widths: list[list[float]], time_us: Floats, octaves: Floats) -> Floats:
    """Half the width of each interval, from ``AccuracyRow.half_widths``."""
    longer, further = _bins(time_us, octaves)
    return np.asarray(np.array(widths)[longer, further])


def widths_by_bin(estimated_us: Floats, errors: Floats, octaves: Floats) -> list[list[float]]:
    """The 90 % quantiles of errors (logarithms), by time and distance; a bin of few errors takes those of all.

    Args:
        estimated_us: What was estimated.
        errors: Logarithms of estimate over measurement.
        octaves: Distance from the nearest measured sizes.
    """
    size = np.abs(errors)
    every = float(np.quantile(size, 0.9))
    longer, further = _bins(estimated_us, octaves)
    found = []
    for time in range(len(TIME_EDGES_US) + 1):
        row = []
        for distance in range(len(OCTAVE_EDGES) + 1):
            own = size[(longer == time) & (further == distance)]
            row.append(round(float(np.quantile(own, 0.9)) if len(own) >= _LEAST else every, 4))
        found.append(row)
    return found


def _bins(time_us: Floats, octaves: Floats) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    longer = np.searchsorted(TIME_EDGES_US, np.nan_to_num(time_us), side="right")
    return longer, np.searchsorted(OCTAVE_EDGES, octaves, side="right")
