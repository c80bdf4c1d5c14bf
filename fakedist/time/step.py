"""Estimates a step's time on a GPU: prices the work of its launches, and places the launches in time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.run import time_notes
from fakedist.run.notes import Note
from fakedist.run.schema import TABLES
from fakedist.run.step_time import Calibration, KernelSource
from fakedist.time.communication import Communication
from fakedist.time.critical_path import CriticalPath, find_critical_path
from fakedist.time.placing import StepInterval, StepLaunches
from fakedist.time.shapes import shape_texts
from fakedist.time.timeline import Array, HostTimes, Placed
from fakedist.time.uncertainty import variances

#: Columns that a kernel takes over from its launch, its work, and the price of that.
_OF_LAUNCH = ("stream", "grid", "block", "op", "step", "phase", "recompute", "layer", "call")
_OF_WORK = ("name", "family", "operation", "flops", "moved_bytes")
_OF_PRICE = ("low_us", "high_us", "bound", "shape", "basis")


class Prices(Protocol):
    """A model of one GPU's kernel times."""

    @property
    def product(self) -> str:
        """The GPU's name, as CUDA reports it."""

    @property
    def host(self) -> HostTimes:
        """What the host takes for its part."""

    @property
    def calibrated_on(self) -> Calibration | None:
        """The GPU that it was calibrated on; None without calibration."""

    def price(self, work: pd.DataFrame, counts: Array) -> pd.DataFrame:
        """How long each row of work takes: time_us, low_us, high_us, bound, basis; NaN and "" where not known.

        A model also says which SMs it needs (``filled``), a measurement does not.

        Args:
            work: The table ``work``.
            counts: How many launches each row has.
        """

    def step_interval(self, priced: pd.DataFrame, counts: Array) -> tuple[float, float]:
        """The interval of the sum over all launches, as two sums; NaN if it is not known."""

    def notes(self) -> list[Note]:
        """Where the times come from."""


@dataclass(frozen=True)
class PricedStep:
    """A step on a GPU.

    Attributes:
        kernels: The table ``kernels``.
        source: Where it comes from, how long the step takes, and what limits what that means.
        families: The families of ``time.accuracy`` that its times are estimated as, most time first.
        interval: The step's interval.
        variances: What the kernels' part of it is made of, by family (``time.uncertainty``).
        path: Its critical path.
    """

    kernels: pd.DataFrame
    source: KernelSource
    families: list[str]
    interval: StepInterval
    variances: dict[str, float]
    path: CriticalPath


def price_step(
    launches: pd.DataFrame, work: pd.DataFrame, prices: Prices, communication: Communication | None = None
) -> PricedStep:
    """Estimate the kernels of a step.

    Args:
        launches: The table ``launches``, not empty.
        work: The table ``work``.
        prices: The model of the GPU.
        communication: What its collectives take; None if they take no time.

    Raises:
        RunDirectoryError: The tables are damaged.
    """
    of_work = launches["work"].to_numpy("i8")
    counts = np.bincount(of_work[of_work >= 0], minlength=len(work))
    priced = prices.price(work, counts).assign(shape=shape_texts(work))
    step = StepLaunches(launches, work, priced, communication)
    found = step.place(prices.host)
    kernels = _kernels(launches, work, priced, found.placed, found.time_us)
    if communication is not None:
        kernels = _with_calls(kernels, communication)
    interval = step.interval(found, prices.host, lambda: prices.step_interval(priced, counts))
    source = KernelSource(
        source="estimated",
        tool="model",
        step=int(launches["step"].iloc[0]),
        gpu=prices.product,
        step_us=found.placed.end_us,
        step_low_us=interval.low_us,
        step_high_us=interval.high_us,
        calibrated_on=prices.calibrated_on,
        fabric="" if communication is None else communication.fabric.name,
        notes=[*prices.notes(), *_notes(launches, work, found.time_us, communication)],
    )
    path = find_critical_path(step.timeline, found.placed, prices.host)
    by_family = variances(priced, counts) if "accuracy" in priced else {}
    return PricedStep(kernels, source, _families(priced, counts), interval, by_family, path)


def _families(priced: pd.DataFrame, counts: Array) -> list[str]:
    if "accuracy" not in priced:
        return []
    sums = (priced["time_us"].fillna(0.0) * counts).groupby(priced["accuracy"]).sum()
    return [str(name) for name in sums[sums > 0].sort_values(ascending=False, kind="stable").index if name]


def _kernels(
    launches: pd.DataFrame, work: pd.DataFrame, priced: pd.DataFrame, placed: Placed, time_us: Array
) -> pd.DataFrame:
    """The table ``kernels``, in order of start. Texts are categorical: a million of them take no time so."""
    of_work = launches["work"].to_numpy("i8")
    rows = np.flatnonzero(of_work >= 0)
    order = np.lexsort((launches["stream"].to_numpy()[rows], placed.start_us))
    rows = rows[order]
    found: dict[str, object] = {
        "start_us": placed.start_us[order],
        "launch_us": placed.launch_us[order],
        "duration_us": time_us[rows],
        "launch": rows,
    }
    for names, table, places in (
        (_OF_LAUNCH, launches, rows),
        (_OF_WORK, work, of_work[rows]),
        (_OF_PRICE, priced, of_work[rows]),
    ):
        for name in names:
            column = table[name]
            is_text = not pd.api.types.is_numeric_dtype(column.dtype)
            found[name] = pd.Categorical(column).take(places) if is_text else column.to_numpy()[places]
    return pd.DataFrame({column.name: found[column.name] for column in TABLES["kernels"].columns})


def _with_calls(kernels: pd.DataFrame, communication: Communication) -> pd.DataFrame:
    """The table ``kernels`` with the intervals of its collectives, and what runs them."""
    is_call = (kernels["call"] >= 0).to_numpy(bool)
    call = kernels["call"].to_numpy("i8")[is_call]
    bounds = {name: kernels[name].to_numpy("f8", copy=True) for name in ("low_us", "high_us")}
    for name, column in bounds.items():
        column[is_call] = communication.of_rows(call, name)
    texts = communication.calls["text"].reindex(call).fillna("").to_numpy(str)
    shape = kernels["shape"].to_numpy(object, copy=True)
    shape[is_call] = texts
    return kernels.assign(**bounds, shape=pd.Categorical(shape))


def _notes(
    launches: pd.DataFrame, work: pd.DataFrame, time_us: Array, communication: Communication | None
) -> list[Note]:
    found = [time_notes.collectives_take_no_time()]
    if communication is not None:
        fabric, num_unknown = communication.fabric, int(communication.calls["time_us"].isna().sum())
        found = [time_notes.collectives_estimated(fabric.name, fabric.source, num_unknown)]
        if num_uneven := int(communication.calls["is_uneven"].sum()):
            found.append(time_notes.uneven_splits(num_uneven))
    of_work = launches["work"].to_numpy("i8")
    counts = np.bincount(of_work[of_work >= 0], minlength=len(work))
    if dense := _by_name(work, np.where(work["is_dense"].to_numpy(bool), counts, 0)):
        found.append(time_notes.attention_is_dense(dense))
    unknown = of_work[(of_work >= 0) & np.isnan(time_us)]
    counts = np.bincount(unknown, minlength=len(work))
    counts[(work["kind"] == "collective").to_numpy(bool)] = 0
    if names := _by_name(work, counts):
        found.append(time_notes.not_estimated(names))
    return found


def _by_name(work: pd.DataFrame, counts: npt.NDArray[np.int64]) -> dict[str, int]:
    """How many launches each kernel has, given those of each row."""
    found: dict[str, int] = {}
    for row in np.flatnonzero(counts).tolist():
        name = str(work["name"].iloc[row])
        found[name] = found.get(name, 0) + int(counts[row])
    return found
