"""The tables and figures of a step's time as a model of a GPU estimates them, from what the step launched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from fakedist.analysis.times.group_times import group_times
from fakedist.analysis.times.kernel_kinds import timed
from fakedist.analysis.times.totals import Times, find_times
from fakedist.gpu_models.spec import GpuSpec
from fakedist.job import Job
from fakedist.run.step_time import FamilyAccuracy, KernelSource, Peaks
from fakedist.time.accuracy import closest
from fakedist.time.communication import Communication, communication_of
from fakedist.time.fabric import Fabric, default_fabric, find_fabric
from fakedist.time.kernels import KernelTimes
from fakedist.time.own import own_prices
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
    model = KernelTimes(gpu)
    return own_prices(model, Path(times)) if times else model


@dataclass(frozen=True)
class Network:
    """What connects the GPUs of the job.

    Attributes:
        fabric: The interconnect.
        interferes: Whether kernels and collectives that run at once slow each other.
    """

    fabric: Fabric
    interferes: bool = True


@dataclass(frozen=True)
class NetworkChoice:
    """What a user chose of a network. None and True leave it as it is usual.

    Attributes:
        fabric: A preset or a fabric file.
        gpus_per_node: GPUs in one NVLink domain.
        interferes: Whether kernels and collectives that run at once slow each other.
    """

    fabric: str | None = None
    gpus_per_node: int | None = None
    interferes: bool = True


def network_of(gpu: GpuSpec, job: Job | None, chosen: NetworkChoice | None = None) -> Network:
    """The network of a job.

    Args:
        gpu: The GPU model, which has a usual fabric.
        job: The job; its nodes are NVLink domains unless the fabric's domains span hosts.
        chosen: What goes before that.

    Raises:
        JobError: There is no such fabric, or the file is not valid.
    """
    chosen = NetworkChoice() if chosen is None else chosen
    name = chosen.fabric or (job.fabric if job is not None else None) or default_fabric(gpu.like or gpu.name).name
    fabric = find_fabric(name, chosen.gpus_per_node)
    if chosen.gpus_per_node is None and job is not None and not fabric.spans_hosts:
        fabric = find_fabric(name, job.gpus_per_node)
    return Network(fabric, chosen.interferes)


def estimate_times(
    tables: Mapping[str, pd.DataFrame], gpu: GpuSpec, prices: Prices, network: Network | None = None
) -> EstimatedTimes:
    """Estimate every table and figure about a step's time.

    Args:
        tables: The tables ``launches`` (not empty), ``work``, ``ranges`` and ``layers``; with a network, ``calls`` and
            ``groups``.
        gpu: The GPU model.
        prices: The model of its kernel times.
        network: What connects the GPUs; None if collectives take no time.

    Raises:
        RunDirectoryError: The tables are damaged.
    """
    communication = None if network is None else _communication(tables, gpu, network)
    priced = price_step(tables["launches"], tables["work"], prices, communication)
    peaks = Peaks(dict(gpu.peak_flops), gpu.memory_bandwidth)
    rows = closest(gpu, priced.families)
    accuracy = [FamilyAccuracy(row.family, row.gpu, row.median, row.p95) for row in rows]
    source = replace(priced.source, accuracy=accuracy)
    times = find_times(priced.kernels, tables["layers"], source, peaks, ranges=tables["ranges"])
    if times.summary is not None and communication is not None:
        by_group = group_times(timed(priced.kernels), tables["calls"], tables["groups"], communication)
        times = replace(times, summary=replace(times.summary, by_group=by_group))
    return EstimatedTimes(priced.kernels, times, source)


def _communication(tables: Mapping[str, pd.DataFrame], gpu: GpuSpec, network: Network) -> Communication:
    calls = tables["calls"]
    own = calls[calls["sequence"].isin(tables["launches"]["call"])]
    return communication_of(own, tables["groups"], gpu, network.fabric, interferes=network.interferes)
