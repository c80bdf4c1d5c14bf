"""What an interval of a sum is made of."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fakedist.time.measurements import Floats
from fakedist.time.timeline import Array

#: How errors of different shapes of one family go together: as if half of their variance was common to all.
_COMMON = 0.5


def half_width(priced: pd.DataFrame, counts: Array, side: str) -> float:
    """Half the width of the interval of the sum of all launches, in microseconds.

    Args:
        priced: A result of ``fakedist.time.step.Prices.price``.
        counts: How many launches each row has.
        side: The bound: low_us or high_us.
    """
    return float(np.sqrt(sum(variances(priced, counts, side).values())))


def variances(priced: pd.DataFrame, counts: Array, side: str = "high_us") -> dict[str, float]:
    """The square of that, by family: a family of ``accuracy.json``, or else what the estimate rests on.

    Launches of one row of work err alike. Half of the variance of a family's errors is common to all of its rows, the
    rest is each row's own; families err independently.
    """
    known = priced["time_us"].notna().to_numpy()
    off: Floats = np.abs((priced[side] - priced["time_us"]).to_numpy("f8"))[known] * counts[known]
    families = priced["accuracy"].where(priced["accuracy"] != "", priced["basis"]).to_numpy()[known]
    codes, names = pd.factorize(families)
    together, alone = np.bincount(codes, off), np.bincount(codes, off**2)
    found = _COMMON * together**2 + (1 - _COMMON) * alone
    return {str(name): float(each) for name, each in zip(names, found, strict=True)}
