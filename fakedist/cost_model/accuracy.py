"""Errors of estimates against measurements that were left out, and the 90 % intervals that follow.

Written by ``make accuracy-times`` (bench/accuracy_times.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.cost_model.kernels.gpus import nearest_table
from fakedist.cost_model.kernels.measurements import DATA, Floats
from fakedist.cost_model.timeline import Array
from fakedist.errors import SetupError
from fakedist.gpu.models.spec import GpuSpec
from fakedist.rundir.plain import PlainValueError, from_plain

#: Widths of intervals are given by estimated time, in microseconds, and by distance from the nearest measured sizes, in
#: powers of two: below, between and above these.
TIME_EDGES_US = (16.0, 64.0, 256.0, 1024.0)
OCTAVE_EDGES = (0.2, 0.5)
#: The share of published steps inside their 90 % intervals, of those that no width was fitted on (docs/truth.md): steps
#: that kernels limit, and steps that the host limits.
HELD_STEPS = 22 / 28
HELD_HOST_STEPS = 14 / 15


@dataclass(frozen=True)
class AccuracyRow:
    """Errors of the estimates of one family on one measured GPU model.

    Attributes:
        median: Median of the relative error's size.
        half_widths: Half the 90 % interval, of the logarithm of estimate over measurement: by the bins of
            ``TIME_EDGES_US``, and in each by those of ``OCTAVE_EDGES``.
        inside: The fraction of left-out kernels within an interval that the others gave.
        noise: 5 % and 95 % quantiles of the logarithm of one collector's time over the median of all, on the same
            shapes; None if only one measured.
    """

    family: str
    gpu: str
    kernels: int
    median: float
    p95: float
    half_widths: list[list[float]]
    inside: float
    noise: tuple[float, float] | None = None


@cache
def accuracy_rows(path: Path = DATA / "accuracy.json") -> tuple[AccuracyRow, ...]:
    """Every row; SetupError if the file is missing or damaged."""
    try:
        return tuple(from_plain(list[AccuracyRow], json.loads(path.read_text())))
    except FileNotFoundError:
        raise SetupError(f"the accuracy of kernel times is missing: {path}", "make accuracy-times writes it") from None
    except (OSError, ValueError, PlainValueError) as error:
        raise SetupError(f"the accuracy of kernel times is damaged: {path}: {error}", "make accuracy-times") from error


def closest(gpu: GpuSpec, families: Iterable[str]) -> list[AccuracyRow]:
    """The rows of a job's families (column ``accuracy`` of priced work), on the GPU most like its own."""
    wanted = dict.fromkeys(families)
    name = nearest_table(gpu).name
    closest_rows = []
    for family in wanted:
        rows = [row for row in accuracy_rows() if row.family == family]
        own = [row for row in rows if row.gpu == name]
        closest_rows += own or rows[:1]
    return closest_rows


#: For a family whose errors are not known on any GPU.
UNKNOWN = 0.35


class ErrorIntervals:
    """Widths for estimates from one GPU's measurements."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._widths = {(row.gpu, row.family): row.half_widths for row in accuracy_rows()}

    def half_width(self, family: str, time_us: Floats, octaves: Floats | None = None, gpu: str = "") -> Floats:
        """Half the interval of each time's logarithm; ``octaves`` is the distance from the measured sizes."""
        widths = self._widths.get((gpu or self._name, family))
        if widths is None:
            return np.full(len(time_us), UNKNOWN)
        return half_widths_at(widths, time_us, np.zeros(len(time_us)) if octaves is None else octaves)


def half_widths_at(widths: list[list[float]], time_us: Floats, octaves: Floats) -> Floats:
    """Half the width of each interval, from ``AccuracyRow.half_widths``."""
    longer, further = bins_of(time_us, octaves)
    return np.asarray(np.array(widths)[longer, further])


def bins_of(time_us: Floats, octaves: Floats) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """The bin of each time, and of each distance."""
    longer = np.searchsorted(TIME_EDGES_US, np.nan_to_num(time_us), side="right")
    return longer, np.searchsorted(OCTAVE_EDGES, octaves, side="right")


#: How errors of different shapes of one family go together: as if half of their variance was common to all.
_COMMON = 0.5
#: How many times as wide the interval of a sum is as these errors say: fitted on half of the published steps that
#: kernels limit (tests/truth/fits.py).
KERNELS_WIDER = 1.1


def half_width(priced: pd.DataFrame, counts: Array, side: str) -> float:
    """Half the interval of the sum of all launches, in microseconds, on the ``side`` low_us or high_us."""
    return KERNELS_WIDER * float(np.sqrt(sum(variances(priced, counts, side).values())))


def variances(priced: pd.DataFrame, counts: Array, side: str = "high_us") -> dict[str, float]:
    """The square of that, by family of ``accuracy.json``, or else by what the estimate rests on.

    Half of it is common to a family's rows, the rest to the launches of a row. Families err independently.
    """
    known = priced["time_us"].notna().to_numpy()
    off: Floats = np.abs((priced[side] - priced["time_us"]).to_numpy("f8"))[known] * counts[known]
    families = priced["accuracy"].where(priced["accuracy"] != "", priced["basis"]).to_numpy()[known]
    codes, names = pd.factorize(families)
    together = np.bincount(codes, off)
    alone = np.bincount(codes, off**2)
    by_family = _COMMON * together**2 + (1 - _COMMON) * alone
    return {str(name): float(variance) for name, variance in zip(names, by_family, strict=True)}
