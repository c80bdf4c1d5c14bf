"""Communication and computing at once: what each takes from the other, and what of it the step waits for.

A collective's kernel holds some SMs and moves its bytes through the GPU's memory. While it runs

- a product has fewer SMs, so its tiles take more waves (a product of exactly 132 tiles on an H100 reaches 80 % of the
  peak alone and 47 % next to an all_gather of 24 blocks: one wave more);
- any other kernel with arithmetic has as many fewer SMs;
- a kernel that memory limits loses the bandwidth that the collective uses;
- a collective on another stream shares the links. Two that each keep them busy half of the time do not slow each other.

The collective itself keeps its time (arXiv:2507.03114 measured 19 % for kernels on average, at most 40 %).

Kernels that arithmetic limits share the SMs: the experts' products on Transformer Engine's four streams each fill the
GPU, so they take as long as one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

Floats = npt.NDArray[np.float64]


def exposed_us(starts: Floats, ends: Floats, busy_starts: Floats, busy_ends: Floats) -> Floats:
    """Microseconds of each interval that no busy interval covers; busy ones may overlap."""
    begins, until = union(busy_starts, busy_ends)
    covered = np.concatenate([[0.0], np.cumsum(until - begins)])
    exposed: Floats = (ends - starts) - (_covered(ends, begins, covered) - _covered(starts, begins, covered))
    return np.maximum(exposed, 0.0)


def shared_us(starts: Floats, ends: Floats, busy_starts: Floats, busy_ends: Floats) -> Floats:
    """Microseconds for which each interval overlaps others; arguments as for :func:`exposed_us`."""
    return (ends - starts) - exposed_us(starts, ends, busy_starts, busy_ends)


def union(starts: Floats, ends: Floats) -> tuple[Floats, Floats]:
    """Disjoint intervals, in order, that together cover what the given ones cover. Empty ones are left out."""
    keep = ends > starts
    starts, ends = starts[keep], ends[keep]
    if not len(starts):
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    reach = np.maximum.accumulate(ends[order])
    first = np.concatenate([[True], starts[1:] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return starts[first], reach[last]


def union_us(starts: Floats, ends: Floats) -> float:
    """Time that at least one of some intervals covers, in microseconds."""
    begins, until = union(starts, ends)
    return float((until - begins).sum())


def _covered(at: Floats, begins: Floats, covered: Floats) -> Floats:
    index = np.searchsorted(begins, at, side="right")
    before = np.maximum(index - 1, 0)
    if not len(begins):
        return np.zeros(len(at))
    lengths = np.diff(covered)
    inside = np.minimum(at - begins[before], lengths[before])
    return np.where(index > 0, covered[before] + np.maximum(inside, 0.0), 0.0)


Flags = npt.NDArray[np.bool_]

#: Output tile of a product (rows, columns) as cuBLAS cuts it on Hopper.
_TILE = (128, 256)
#: How much slower a product is during a collective if its tiles are not known.
_UNKNOWN_TILES = 1.2
#: A collective's kernels read and write each byte that they send.
_TRAFFIC = 2.0
#: Of a kernel's rate, this much is left to it at least.
_LEAST_RATE = 0.4
#: Starts settle within this many rounds: a round changes when kernels overlap, and so how long they take.
_MOST_ROUNDS = 5
_SETTLED = 1e-3


@dataclass(frozen=True)
class Contender:
    """The resources that a collective uses while it runs: SMs, and the bytes per second that it sends."""

    sms: int
    bus_bandwidth: float


def rates_with(work: pd.DataFrame, bounds: Floats, sms: int, memory_bandwidth: float, other: Contender) -> Floats:
    """The rate that each kernel keeps while a collective runs: 1 is undisturbed.

    ``work`` has columns kind, m, n, batch; ``bounds`` is 1 where memory limits a row, else 0.
    """
    left = max(sms - other.sms, 1)
    m, n = work["m"].to_numpy("f8"), work["n"].to_numpy("f8")
    tiles = np.ceil(m / _TILE[0]) * np.ceil(n / _TILE[1]) * np.maximum(work["batch"].to_numpy("f8"), 1.0)
    waves, fewer = np.ceil(tiles / sms), np.ceil(tiles / left)
    is_product = (work["kind"] == "product").to_numpy(bool)
    with np.errstate(divide="ignore", invalid="ignore"):
        of_product = np.where(tiles > 0, waves / fewer, 1 / _UNKNOWN_TILES)
    of_memory = max(1 - _TRAFFIC * other.bus_bandwidth / memory_bandwidth, 0.0)
    rates = np.where(bounds > 0, of_memory, np.where(is_product, of_product, left / sms))
    return np.clip(rates, _LEAST_RATE, 1.0)


@dataclass(frozen=True)
class SharedLinks:
    """Collectives (``members``) that share links, and what they do to kernels.

    Attributes:
        rates: The rate that every launch keeps while one of them runs; their own are ignored.
        shares: The fraction of its time for which each launch keeps the links busy; others' are ignored.
    """

    members: Flags
    rates: Floats
    shares: Floats


def filled_sms(work: pd.DataFrame, sms: int) -> Floats:
    """The fraction of the SMs that each kernel fills if arithmetic limits it: by tiles (m, n, batch, groups) or all."""
    m, n = work["m"].to_numpy("f8"), work["n"].to_numpy("f8")
    number = np.maximum(work["batch"].to_numpy("f8"), work["groups"].to_numpy("f8"))
    tiles = np.ceil(m / _TILE[0]) * np.ceil(n / _TILE[1]) * np.maximum(number, 1.0)
    filled: Floats = np.where(tiles > 0, np.minimum(tiles / sms, 1.0), 1.0)
    return filled


def settle(
    starts_of: Callable[[Floats], Floats], alone_us: Floats, groups: list[SharedLinks], filled: Floats | None = None
) -> Floats:
    """Find durations that agree with the overlaps that they lead to, in microseconds.

    A launch of which a fraction s runs during a collective, at rate r, takes 1 / (1 - s (1 - r)) times as long as
    alone. That changes when launches begin, and so the fractions: rounds are repeated until the durations settle.

    Args:
        starts_of: Returns when launches of given durations begin. Its last call is for the durations that are found.
        groups: Collectives, by the links that they share.
        filled: The fraction of the SMs that each arithmetic-limited launch needs, else 0. None if no two run at once.
    """
    durations = alone_us
    starts = starts_of(durations)
    for _ in range(_MOST_ROUNDS if groups or filled is not None else 0):
        rates = np.clip(1 - _lost_rates(starts, durations, groups), _LEAST_RATE, 1.0)
        if filled is not None:
            rates = rates * (1 - _lost_to_kernels(starts, durations, filled))
        changed = alone_us / rates
        is_settled = np.abs(changed - durations).sum() <= _SETTLED * durations.sum()
        durations = changed
        starts = starts_of(durations)
        if is_settled:
            break
    return durations


def _lost_rates(starts: Floats, durations: Floats, groups: list[SharedLinks]) -> Floats:
    ends = starts + durations
    lost = np.zeros(len(starts))
    every_call = np.logical_or.reduce([shared.members for shared in groups]) if groups else np.zeros(len(starts), bool)
    for links in groups:
        members, rates = links.members, links.rates
        kernels = ~every_call & (durations > 0)
        overlap = shared_us(starts[kernels], ends[kernels], starts[members], ends[members])
        lost[kernels] += overlap / durations[kernels] * (1 - rates[kernels])
        sharing = members & (durations > 0)
        lost[sharing] += _lost_us(starts[sharing], ends[sharing], links.shares[sharing]) / durations[sharing]
    return lost


def _lost_to_kernels(starts: Floats, durations: Floats, filled: Floats) -> Floats:
    """The part of its rate that each launch loses to kernels of other streams that need the same SMs."""
    lost = np.zeros(len(starts))
    own = (filled > 0) & (durations > 0)
    lost[own] = _lost_us(starts[own], (starts + durations)[own], filled[own]) / durations[own]
    return lost


def _lost_us(starts: Floats, ends: Floats, shares: Floats) -> Floats:
    """The time that each of some launches loses because together they ask for more than there is: links, or SMs."""
    if len(starts) < 2:
        return np.zeros(len(starts))
    moments = np.unique(np.concatenate([starts, ends]))
    first, last = np.searchsorted(moments, starts), np.searchsorted(moments, ends)
    change = np.zeros(len(moments) + 1)
    np.add.at(change, first, shares)
    np.add.at(change, last, -shares)
    asked = np.maximum(np.cumsum(change)[: len(moments) - 1], 1.0)
    total = np.concatenate([[0.0], np.cumsum(np.diff(moments) * (1 - 1 / asked))])
    lost: Floats = total[last] - total[first]
    return lost
