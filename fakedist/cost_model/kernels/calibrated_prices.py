"""Prices from a calibration table: it replaces estimates of work that it has, and scales those of similar work.

Similar is work of the same family and type with sizes within a factor of two. Its measured times over their estimates
multiply estimate and interval. The nearest count most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.cost_model.hosts import HostCosts
from fakedist.cost_model.kernels.calibration_table import CalibrationTable, check_calibration_table, work_key
from fakedist.cost_model.kernels.measurements import Floats
from fakedist.cost_model.step import Prices
from fakedist.cost_model.timeline import Array
from fakedist.rundir import time_notes
from fakedist.rundir.launch_records import WorkRow
from fakedist.rundir.notes import Note
from fakedist.rundir.step_time import Calibration

Bools = npt.NDArray[np.bool_]

#: Work counts as similar if no size differs by more than this factor.
_MOST_DIFFERENT = 2.0
#: Work that differs in something other than a size counts as different as this factor in each.
_OTHER_KIND = 2.0
_NEIGHBOURS = 4
#: Squared distance (of logarithms) within which neighbours count alike.
_SAME = 1e-2
#: Fewer kernels than this do not show their spread: the interval is at least this wide on either side.
_FEW, _LEAST_SPREAD = 5, 0.05

#: Sizes that matter, by what the work is.
_SIZES = {
    "product": ("m", "n", "k", "batch", "groups"),
    "attention": ("batch", "heads", "kv_heads", "queries", "keys", "width", "value_width"),
    "bytes": ("moved_bytes",),
}
#: What must be the same, and what may differ at a distance.
_SAME_WORK = ("sizes", "family", "dtype", "scaling", "attention", "over_host_link", "pinned")
_LIKE_WORK = ("layout", "accumulates", "library", "causal", "window", "is_dense", "short_name")


@dataclass(frozen=True)
class WorkTimes:
    """Times of works, with their 90 % intervals, in microseconds (NaN if unknown); arrays of one length."""

    time_us: Floats
    low_us: Floats
    high_us: Floats


@dataclass(frozen=True)
class CalibratedTimes:
    """Times of works after a calibration table was applied: the table's, or scaled by those of similar work."""

    times: WorkTimes
    is_measured: Bools
    is_scaled: Bools


@dataclass(frozen=True)
class TimeFractions:
    """Fractions of the time of a step's kernels that are measured on the user's GPU, or scaled by similar kernels."""

    measured: float
    scaled: float


class CalibratedPrices:
    """Kernel times by a model and a calibration table. It implements ``fakedist.cost_model.step.Prices``.

    ``fractions`` are those of the last priced time that are from the table.
    """

    def __init__(self, prices: Prices, table: CalibrationTable) -> None:
        origin = table.origin
        self._prices, self._table = prices, table
        self.product: str = prices.product
        self.host: HostCosts = prices.host
        self.calibrated_on: Calibration | None = Calibration(origin.gpu, origin.torch, origin.date, origin.driver)
        self.fractions = TimeFractions(0.0, 0.0)

    def price(self, work: pd.DataFrame, counts: Array) -> pd.DataFrame:
        """How long each row of work takes, see ``Prices.price``."""
        of_table = self._prices.price(self._table.work(), self._table.times()[:, 3].astype(np.int64))
        priced = self._prices.price(work, counts)
        own = apply_calibration(work, _times(priced), self._table, _times(of_table))
        basis = priced["basis"].astype(str)
        basis = basis.where(~own.is_scaled, basis + ", scaled by the calibration table")
        basis = basis.where(~own.is_measured, "calibration table")
        columns = {"time_us": own.times.time_us, "low_us": own.times.low_us, "high_us": own.times.high_us}
        if "least_us" in priced:  # a factor of similar work does not bring an estimate below its roofline
            least_us = np.where(own.is_measured, 0.0, priced["least_us"].to_numpy("f8"))
            columns = {name: np.maximum(column, least_us) for name, column in columns.items()}
        calibrated = priced.assign(**columns, basis=basis)
        if "accuracy" in calibrated:
            calibrated["accuracy"] = calibrated["accuracy"].where(~own.is_measured, "")
        took = np.nan_to_num(own.times.time_us) * counts
        whole = max(float(took.sum()), 1e-9)
        self.fractions = TimeFractions(
            float(took[own.is_measured].sum()) / whole, float(took[own.is_scaled].sum()) / whole
        )
        return calibrated

    def step_interval(self, priced: pd.DataFrame, counts: Array) -> tuple[float, float]:
        """The interval of the sum over all launches, as the model makes it."""
        return self._prices.step_interval(priced, counts)

    def notes(self) -> list[Note]:
        """Where the times come from."""
        origin = self._table.origin
        note = time_notes.times_calibrated(origin.gpu, origin.date, self.fractions.measured, self.fractions.scaled)
        return [note, *self._prices.notes()]


def calibrated_prices_of(prices: Prices, path: Path) -> CalibratedPrices:
    """A model with a calibration table; SetupError if the file cannot be read, or is of another GPU."""
    return CalibratedPrices(prices, check_calibration_table(path, prices.product))


def _times(priced: pd.DataFrame) -> WorkTimes:
    time, low, high = (priced[name].to_numpy(np.float64) for name in ("time_us", "low_us", "high_us"))
    return WorkTimes(time, low, high)


def apply_calibration(
    work: pd.DataFrame, estimated: WorkTimes, table: CalibrationTable, estimated_table: WorkTimes
) -> CalibratedTimes:
    """Replace and scale estimates by a table's times; ``estimated_table`` are the same model's for its work."""
    rows = [WorkRow(*values) for values in work[list(WorkRow._fields)].itertuples(index=False, name=None)]
    row_of = {work_key(row.work): number for number, row in enumerate(table.rows)}
    own = np.array([row_of.get(work_key(row), -1) for row in rows], np.int64)
    is_measured = own >= 0
    columns = [np.array(column, np.float64) for column in (estimated.time_us, estimated.low_us, estimated.high_us)]
    measured = table.times()
    for column, measured_values in zip(columns, _spread(measured), strict=True):
        column[is_measured] = measured_values[own[is_measured]]
    is_known = estimated_table.time_us > 0
    ratio = np.log(measured[:, 0] / np.where(is_known, estimated_table.time_us, np.nan))
    factor = np.full(len(work), np.nan)
    factor[~is_measured] = _factors(work[~is_measured], table.work(), ratio)
    is_scaled = np.isfinite(factor) & np.isfinite(columns[0])
    for column in columns:
        column[is_scaled] *= factor[is_scaled]
    return CalibratedTimes(WorkTimes(*columns), is_measured, is_scaled)


def _spread(measured: Floats) -> tuple[Floats, Floats, Floats]:
    time, low, high, count = measured.T
    few = count < _FEW
    return (
        time,
        np.where(few, np.minimum(low, time * (1 - _LEAST_SPREAD)), low),
        np.where(few, np.maximum(high, time * (1 + _LEAST_SPREAD)), high),
    )


def _factors(work: pd.DataFrame, table: pd.DataFrame, ratio: Floats) -> Floats:
    """For each work, what its estimate is multiplied by; NaN if the table has nothing similar."""
    factors = np.full(len(work), np.nan)
    known = np.isfinite(ratio)
    groups, table_groups = (_described(rows) for rows in (work, table[known]))
    ratio = ratio[known]
    by_group = table_groups.groupby(list(_SAME_WORK), sort=False).indices
    for key, mine in groups.groupby(list(_SAME_WORK), sort=False).indices.items():
        if (others := by_group.get(key)) is None:
            continue
        distance = _distances(groups.iloc[mine], table_groups.iloc[others])
        for row, from_others in zip(mine, distance, strict=True):
            nearest = np.argsort(from_others)[:_NEIGHBOURS]
            nearest = nearest[np.isfinite(from_others[nearest])]
            if len(nearest):
                weights = 1 / (np.square(from_others[nearest]) + _SAME)
                factors[row] = math.exp(float(np.average(ratio[others[nearest]], weights=weights)))
    return factors


def _described(work: pd.DataFrame) -> pd.DataFrame:
    """The work with the kernels' names without their arguments, and which sizes matter."""
    short = work["name"].astype(str).str.replace(r"[<(].*", "", regex=True).where(work["kind"] == "kernel", "")
    is_attention = (work["family"] == "attention") & (work["queries"] > 0)
    sizes = np.where(is_attention, "attention", np.where((work["m"] > 0) & (work["k"] > 0), "product", "bytes"))
    return work.assign(short_name=short, sizes=sizes).reset_index(drop=True)


def _distances(work: pd.DataFrame, table: pd.DataFrame) -> Floats:
    """Distances between works and a table's rows; infinite where they are not similar."""
    total = np.zeros((len(work), len(table)))
    far = np.zeros_like(total, bool)
    for name in _SIZES[work["sizes"].iloc[0]]:
        mine, others = (np.log(np.maximum(table_of[name].to_numpy(np.float64), 1.0)) for table_of in (work, table))
        apart = np.abs(mine[:, None] - others[None, :])
        far |= ~(apart <= math.log(_MOST_DIFFERENT) + 1e-9)  # NaN is far from everything
        total += np.square(apart)
    for name in _LIKE_WORK:
        differs = work[name].to_numpy()[:, None] != table[name].to_numpy()[None, :]
        total += differs * math.log(_OTHER_KIND) ** 2
    return np.where(far, np.inf, np.sqrt(total))
