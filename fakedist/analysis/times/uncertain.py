"""Which estimates make a step's interval as wide as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from fakedist.analysis.topology import read_groups
from fakedist.run.step_time import GroupTime, UncertainPart
from fakedist.time.communication import Communication
from fakedist.time.step import PricedStep

_NUM_PARTS = 3


def call_spreads(
    calls: pd.DataFrame, groups: pd.DataFrame, communication: Communication
) -> dict[tuple[str, str], float]:
    """How much longer than estimated collectives may take, relative to their time, by group and operation.

    Args:
        calls: The table ``calls``.
        groups: The table ``groups``.
        communication: What the calls take.
    """
    labels = [group.label for group in read_groups(groups)]
    own = calls[calls["sequence"].isin(communication.calls.index)]
    prices = communication.calls.loc[own["sequence"].to_numpy("i8"), ["time_us", "high_us"]].set_axis(own.index)
    keys = [own["group"].map(lambda number: labels[int(number)]).astype(str), own["operation"].astype(str)]
    sums = prices.groupby(keys, observed=True).sum()
    found = {}
    for (label, operation), time_us, high_us in zip(sums.index, sums["time_us"], sums["high_us"], strict=True):
        found[str(label), str(operation)] = float(high_us / time_us - 1) if time_us else 0.0
    return found


def uncertain_parts(
    priced: PricedStep, by_group: Sequence[GroupTime], spreads: Mapping[tuple[str, str], float]
) -> list[UncertainPart]:
    """The largest parts of a step's variance.

    Kernels share theirs as the families' errors do. Collectives, whose errors go together, share theirs as what each
    group and operation could add to the exposed time.

    Args:
        priced: The step.
        by_group: Its communication.
        spreads: The result of :func:`call_spreads`.
    """
    interval = priced.interval
    whole = interval.kernels_us**2 + interval.calls_us**2 + interval.host_us**2
    if interval.high_us is None or not whole:
        return []
    found = [UncertainPart("host", "the host", "", 0, interval.host_us, interval.host_us**2 / whole)]
    of_kernels = sum(priced.variances.values())
    for family, variance in priced.variances.items():
        share = variance / of_kernels if of_kernels else 0.0
        part = interval.kernels_us**2 * share
        found.append(UncertainPart("kernels", family, "", 0, part**0.5, part / whole))
    weights = [row.exposed_us * spreads.get((row.group, row.operation), 0.0) for row in by_group]
    for row, weight in zip(by_group, weights, strict=True):
        share = weight / sum(weights) if weight else 0.0
        part = interval.calls_us**2 * share
        half_us = interval.calls_us * share
        found.append(UncertainPart("collectives", row.operation, row.group, row.num_nodes, half_us, part / whole))
    found = [part for part in found if part.half_width_us > 0]
    return sorted(found, key=lambda part: -part.share)[:_NUM_PARTS]
