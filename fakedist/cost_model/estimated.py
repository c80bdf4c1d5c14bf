"""The tables and figures of a step's time as a model of a GPU estimates them, from what the step launched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import pandas as pd

from fakedist.cost_model.accuracy import closest
from fakedist.cost_model.breakdown import Times, find_times, timed
from fakedist.cost_model.communication import Communication, communication_of
from fakedist.cost_model.fabric import Fabric, default_fabric, find_fabric
from fakedist.cost_model.kernels import KernelTimes
from fakedist.cost_model.nccl.settings import TIME_VARIABLES, read_settings
from fakedist.cost_model.own import own_prices
from fakedist.cost_model.step import ImbalancedPrices, MeasuredPrices, Prices, price_step
from fakedist.cost_model.step_parts import call_spreads, group_times, path_parts, uncertain_parts
from fakedist.cost_model.what_if import WhatIf, changed_fabric, changed_launches, read_what_if
from fakedist.gpu.models.spec import GpuSpec
from fakedist.options import Job
from fakedist.rundir import time_notes
from fakedist.rundir.notes import Note
from fakedist.rundir.step_time import FamilyAccuracy, KernelSource, Peaks


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


def measured_prices(product: str, launches: pd.DataFrame) -> Prices:
    """The prices of a step whose kernels were measured: only its collectives have any.

    Args:
        product: The GPU's name.
        launches: The table ``launches``.
    """
    return MeasuredPrices(product, launches)


@dataclass(frozen=True)
class Network:
    """What connects the GPUs of the job, and how the job uses it.

    Attributes:
        fabric: The interconnect.
        interferes: Whether kernels and collectives that run at once slow each other.
        nccl: NCCL's variables.
        moe_imbalance: How much more than its even share the busiest rank gets of an all_to_all and of grouped products.
        what_if: A change to price; None for the step as it is.
    """

    fabric: Fabric
    interferes: bool = True
    nccl: Mapping[str, str] = field(default_factory=dict)
    moe_imbalance: float = 1.0
    what_if: WhatIf | None = None


@dataclass(frozen=True)
class NetworkChoice:
    """What a user chose of a network. None and True leave it as it is usual.

    Attributes:
        fabric: A preset or a fabric file.
        gpus_per_node: GPUs in one NVLink domain.
        interferes: Whether kernels and collectives that run at once slow each other.
        nccl: NCCL's variables, which go before the run's own.
        moe_imbalance: How much more than its even share the busiest rank gets of an all_to_all and of grouped products.
        what_if: A change to price, as ``fakedist.cost_model.what_if`` reads it.
    """

    fabric: str | None = None
    gpus_per_node: int | None = None
    interferes: bool = True
    nccl: Mapping[str, str] = field(default_factory=dict)
    moe_imbalance: float = 1.0
    what_if: str | None = None


def network_of(
    gpu: GpuSpec,
    job: Job | None,
    chosen: NetworkChoice | None = None,
    nccl: Mapping[str, str] = MappingProxyType({}),
) -> Network:
    """The network of a job.

    Args:
        gpu: The GPU model, which has a usual fabric.
        job: The job; its nodes are NVLink domains unless the fabric's domains span hosts.
        chosen: What goes before that.
        nccl: NCCL's variables as the run recorded them.

    Raises:
        JobError: There is no such fabric or what-if, the file is not valid, or the GPU lacks the link that a what-if
            changes.
    """
    chosen = NetworkChoice() if chosen is None else chosen
    what_if = None if chosen.what_if is None else read_what_if(chosen.what_if)
    if what_if is not None:
        per_node = what_if.gpus_per_node or chosen.gpus_per_node
        chosen = replace(chosen, fabric=what_if.fabric or chosen.fabric, gpus_per_node=per_node)
    name = chosen.fabric or (job.fabric if job is not None else None) or default_fabric(gpu.like or gpu.name).name
    fabric = find_fabric(name, chosen.gpus_per_node)
    if chosen.gpus_per_node is None and job is not None and not fabric.spans_hosts:
        fabric = find_fabric(name, job.gpus_per_node)
    if what_if is not None:
        fabric = changed_fabric(what_if, fabric, gpu.nvlink_bandwidth)
    return Network(fabric, chosen.interferes, {**nccl, **chosen.nccl}, chosen.moe_imbalance, what_if)


def estimate_times(
    tables: Mapping[str, pd.DataFrame],
    gpu: GpuSpec,
    prices: Prices,
    network: Network | None = None,
    *,
    traced: KernelSource | None = None,
) -> EstimatedTimes:
    """Estimate every table and figure about a step's time.

    Args:
        tables: The tables ``launches`` (not empty), ``work``, ``ranges`` and ``layers``; with a network, ``calls`` and
            ``groups``.
        gpu: The GPU model.
        prices: The model of its kernel times.
        network: What connects the GPUs; None if collectives take no time.
        traced: Where the kernels come from, if a tool traced them; None if they are estimated.

    Raises:
        RunDirectoryError: The tables are damaged.
        JobError: The step lacks the groups of a what-if.
    """
    launches, communication = tables["launches"], None
    if network is not None:
        communication = communication_for(tables, gpu, network)
        if network.what_if is not None:
            launches, communication = changed_launches(network.what_if, launches, communication, tables["groups"])
        prices = ImbalancedPrices(prices, network.moe_imbalance)
    priced = price_step(launches, tables["work"], prices, communication)
    peaks: Peaks | None = Peaks(dict(gpu.peak_flops), gpu.memory_bandwidth)
    rows = closest(gpu, priced.families)
    accuracy = [FamilyAccuracy(row.family, row.gpu, row.median, row.p95) for row in rows]
    source = replace(priced.source, accuracy=accuracy, notes=[*priced.source.notes, *_nccl_notes(network)])
    if traced is not None:
        source = _of_traced(traced, source)
    if source.source == "simulated":
        peaks = None
    times = find_times(priced.kernels, tables["layers"], source, peaks, ranges=tables["ranges"])
    if times.summary is not None:
        path = path_parts(priced.path, {**tables, "launches": launches})
        times = replace(times, summary=replace(times.summary, critical_path=path))
    if times.summary is not None and communication is not None:
        by_group = group_times(timed(priced.kernels), tables["calls"], tables["groups"], communication)
        times = replace(times, summary=replace(times.summary, by_group=by_group))
        spreads = call_spreads(tables["calls"], tables["groups"], communication)
        source = replace(source, uncertain=uncertain_parts(priced, by_group, spreads))
    else:
        source = replace(source, uncertain=uncertain_parts(priced, [], {}))
    return EstimatedTimes(priced.kernels, times, source)


def _of_traced(traced: KernelSource, priced: KernelSource) -> KernelSource:
    """Where the times of a traced step come from, once its collectives are priced."""
    return replace(
        traced,
        step_us=priced.step_us,
        step_low_us=priced.step_low_us,
        step_high_us=priced.step_high_us,
        fabric=priced.fabric,
        notes=[*traced.notes, time_notes.only_collectives_are_estimated(), *priced.notes],
    )


def _nccl_notes(network: Network | None) -> list[Note]:
    variables = {} if network is None else {name: network.nccl[name] for name in TIME_VARIABLES if name in network.nccl}
    return [time_notes.nccl_environment(variables)] if variables else []


def communication_for(tables: Mapping[str, pd.DataFrame], gpu: GpuSpec, network: Network) -> Communication:
    """What the collectives of a step take: of the tables ``launches``, ``calls`` and ``groups``."""
    calls = tables["calls"]
    own = calls[calls["sequence"].isin(tables["launches"]["call"])]
    return communication_of(
        own,
        tables["groups"],
        gpu,
        network.fabric,
        interferes=network.interferes,
        nccl=read_settings(network.nccl),
        moe_imbalance=network.moe_imbalance,
    )


@dataclass(frozen=True)
class Models:
    """The models that a step is priced with.

    Attributes:
        gpu: The GPU model.
        prices: Its kernel times.
        network: What connects the GPUs, and a change of it to price.
    """

    gpu: GpuSpec
    prices: Prices
    network: Network
