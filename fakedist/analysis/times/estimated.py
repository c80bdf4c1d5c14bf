"""The tables and figures of a step's time as a model of a GPU estimates them, from what the step launched."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from fakedist.analysis.times.totals import Times, find_times
from fakedist.gpu_models.spec import GpuSpec
from fakedist.run.step_time import FamilyAccuracy, KernelSource, Peaks
from fakedist.time.accuracy import closest
from fakedist.time.own import own_prices
from fakedist.time.roofline import RooflineTimes
from fakedist.time.step import Prices, price_step


@dataclass(frozen=True)
class EstimatedTimes:
    """A step's time on a GPU.

    Attributes:
        kernels: The table ``kernels``.
        times: The other tables of times, and the figures.
        source: Where they come from.
    """

    kernels: pd.DataFrame
    times: Times
    source: KernelSource


def prices_of(gpu: GpuSpec, times: str | None = None) -> Prices:
    """The model of a GPU's kernel times.

    Args:
        gpu: The GPU model.
        times: A file of times of the user's own GPU, which go before the model's; None without them.

    Raises:
        SetupError: The file cannot be read, or is of another GPU.
    """
    model = RooflineTimes(gpu)
    return own_prices(model, Path(times)) if times else model


def estimate_times(tables: Mapping[str, pd.DataFrame], gpu: GpuSpec, prices: Prices) -> EstimatedTimes:
    """Estimate every table and figure about a step's time.

    Args:
        tables: The tables ``launches`` (not empty), ``work`` and ``layers``.
        gpu: The GPU model.
        prices: The model of its kernel times.

    Raises:
        RunDirectoryError: The tables are damaged.
    """
    priced = price_step(tables["launches"], tables["work"], prices)
    peaks = Peaks(dict(gpu.peak_flops), gpu.memory_bandwidth)
    rows = closest(gpu, priced.families)
    accuracy = [FamilyAccuracy(row.family, row.gpu, row.median, row.p95) for row in rows]
    source = dataclasses.replace(priced.source, accuracy=accuracy)
    return EstimatedTimes(priced.kernels, find_times(priced.kernels, tables["layers"], source, peaks), source)
