"""Times of DeepEP's and HybridEP's kernels: measured by bytes, ranks and SMs; low-latency ones scaled from a table.

Bytes are those that a rank sends to other ranks, or over nodes to other nodes. Over more or fewer SMs, ranks or bytes
than were measured the nearest ones hold, with a wider interval. Eight nodes were measured twice as slow as DeepSeek's
own figures say, so the estimate is between them and four nodes.

HybridEP was measured with one number of tokens: on 2 to 8 nodes of H100s, and in one NVLink domain of B200s and GB200s.
Few bytes are taken to need what DeepEP's kernels need at least. In a domain of other GPUs, what takes longer than that
is scaled by their NVLink.
"""

from __future__ import annotations

import math
import re
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from fakedist.cost_model.collectives.collective_times import LibraryTime
from fakedist.cost_model.kernels.measurements import Floats
from fakedist.errors import SetupError
from fakedist.gpu.models.catalogue import GPUS
from fakedist.gpu.models.spec import GpuSpec

TABLE = Path(__file__).with_name("dispatchers.csv")
#: Operations as the stand-ins name them (fakedist.extras.experts.deep_ep and hybrid_ep).
_NORMAL = re.compile(r"deep_ep_(dispatch|combine)_(\d+)sms")
_HYBRID = re.compile(r"(hybrid_ep_(?:dispatch|combine))_(\d+)sms")
_HYBRID_LOCAL = ("hybrid_ep_permute", "hybrid_ep_unpermute", "hybrid_ep_copy")
_LOW_LATENCY = re.compile(r"deep_ep_low_latency_(dispatch|combine)")
#: 90 % intervals: as measured, of other SMs or ranks, of another GPU model, of another network.
_SPREAD, _OTHERS_SPREAD, _MODEL_SPREAD, _NETWORK_SPREAD = 0.3, 0.3, 0.6, 0.2
#: The most ranks whose times agree with DeepSeek's own.
_AGREED_RANKS = 32
#: The network of the measurements, bytes per second and GPU.
_NIC_BANDWIDTH = 50e9
#: Counting tokens is a local kernel without a published time: a guess.
_LAYOUT_US, _LAYOUT_SPREAD = 10.0, math.log(3)
#: The share of the memory's bandwidth that kernels which only move rows reach, and the interval.
_COPY_SHARE, _COPY_SPREAD = 0.8, 0.3
#: Ranks -> microseconds of dispatch and combine on H800, 128 tokens, top 8, hidden 7168 (deepseek-ai/DeepEP
#: docs/legacy.md @0297fc80). How much of it does not depend on bytes is a guess.
_LOW_LATENCY_US = {8: (77, 114), 16: (118, 195), 32: (155, 273), 64: (173, 314), 128: (192, 369), 256: (194, 360)}
_LOW_LATENCY_TOKENS, _LOW_LATENCY_FIXED, _LOW_LATENCY_SPREAD = 128 * 8 * 7168, 0.3, 0.6


class LibraryTimes:
    """Estimates their kernels on a GPU model with so much of a NIC, bytes per second."""

    def __init__(self, gpu: GpuSpec, nic_bandwidth: float, table: pd.DataFrame | None = None) -> None:
        table = load_dispatchers() if table is None else table
        self._gpu = gpu
        known = set(table["gpu"])
        name = next((name for name in (gpu.name, gpu.like) if name in known), "")
        self._is_own = bool(name)
        self._nic_bandwidth = nic_bandwidth
        self._table, self._name = table, name or "h100-80g"

    @cached_property
    def _curves(self) -> _Curves:
        return _curves(self._table[self._table["gpu"] == self._name])

    @cached_property
    def _over_nodes(self) -> _Curves:
        if any(ranks > 8 and len(by_sms) > 3 for (_, ranks), by_sms in self._curves.items()):
            return self._curves
        return _curves(self._table[self._table["gpu"] == "h100-80g"])

    def time(
        self, operation: str, num_bytes: float, num_ranks: int, *, own_bytes: float = 0.0, is_over_nodes: bool
    ) -> LibraryTime | None:
        """The time of a call that sends so many bytes to other ranks, or nodes; None if it is of no such library.

        ``own_bytes`` are those that a kernel reads and writes.
        """
        library = "hybrid_ep" if operation.startswith("hybrid_ep") else "deep_ep"
        if operation in ("deep_ep_layout", "hybrid_ep_layout"):
            return LibraryTime(_LAYOUT_US, _LAYOUT_SPREAD, 0, "a guess", library)
        if operation in _HYBRID_LOCAL:
            time_us = own_bytes / (self._gpu.memory_bandwidth * _COPY_SHARE) * 1e6
            return LibraryTime(time_us, _COPY_SPREAD, 0, "as fast as memory", library)
        if found := _LOW_LATENCY.fullmatch(operation):
            return self._low_latency(found[1] == "combine", num_bytes, num_ranks)
        if found := _HYBRID.fullmatch(operation):
            return self._hybrid(found[1], int(found[2]), num_bytes, num_ranks, is_over_nodes)
        found = _NORMAL.fullmatch(operation)
        return None if found is None else self._normal(found[1], int(found[2]), num_bytes, num_ranks, is_over_nodes)

    def _normal(self, name: str, sms: int, num_bytes: float, num_ranks: int, is_over_nodes: bool) -> LibraryTime:
        curves = self._over_nodes if is_over_nodes else self._curves
        is_own = self._is_own and curves is self._curves
        own = {ranks: by_sms for (operation, ranks), by_sms in curves.items() if operation == name}
        time_us, least_us, is_far = _between(own, sms, num_bytes, num_ranks)
        spread = _SPREAD + (_OTHERS_SPREAD if is_far else 0.0)
        if is_over_nodes and num_ranks > _AGREED_RANKS and _AGREED_RANKS in own:
            agreed_us, _ = _at_sms(own[_AGREED_RANKS], sms, num_bytes)
            spread += abs(math.log(time_us / agreed_us)) / 2
            time_us = math.sqrt(time_us * agreed_us)
        if is_over_nodes and self._nic_bandwidth != _NIC_BANDWIDTH:
            time_us = least_us + max(time_us - least_us, 0) * _NIC_BANDWIDTH / self._nic_bandwidth
            spread += _NETWORK_SPREAD
        spread += 0.0 if is_own else _MODEL_SPREAD
        return LibraryTime(time_us, spread, sms, f"{sms} SMs", "deep_ep")

    def _hybrid(self, name: str, sms: int, num_bytes: float, num_ranks: int, is_over_nodes: bool) -> LibraryTime:
        rows = self._table[self._table["operation"] == name]
        names = ("h100-80g",) if is_over_nodes else (self._gpu.name, self._gpu.like)
        measured = {str(gpu) for gpu in rows["gpu"]} - (set() if is_over_nodes else {"h100-80g"})
        source = next((gpu for gpu in names if gpu in measured), "gb200" if num_ranks > 8 else "b200")
        own = {ranks: by_sms for (_, ranks), by_sms in _curves(rows[rows["gpu"] == source]).items()}
        time_us, least_us, is_far = _between(own, sms, num_bytes, num_ranks)
        spread = _SPREAD + (_OTHERS_SPREAD if is_far else 0.0)
        ratio = _NIC_BANDWIDTH / self._nic_bandwidth
        if not is_over_nodes:
            ratio = GPUS[source].nvlink_bandwidth / (self._gpu.nvlink_bandwidth or self._gpu.host_bandwidth)
        if ratio != 1:
            time_us = least_us + max(time_us - least_us, 0) * ratio
            spread += _NETWORK_SPREAD
        spread += 0.0 if source in (self._gpu.name, self._gpu.like) else _MODEL_SPREAD
        return LibraryTime(time_us, spread, sms, f"{sms} SMs", "hybrid_ep")

    def _low_latency(self, is_combine: bool, num_bytes: float, num_ranks: int) -> LibraryTime:
        sizes = np.log(list(_LOW_LATENCY_US))
        whole_us = float(np.interp(math.log(num_ranks), sizes, [us[is_combine] for us in _LOW_LATENCY_US.values()]))
        measured = _LOW_LATENCY_TOKENS * (2 if is_combine else 1) * (num_ranks - 1) / num_ranks
        time_us = whole_us * (_LOW_LATENCY_FIXED + (1 - _LOW_LATENCY_FIXED) * num_bytes / measured)
        spread = _LOW_LATENCY_SPREAD + (0.0 if self._nic_bandwidth == _NIC_BANDWIDTH else _NETWORK_SPREAD)
        return LibraryTime(time_us, spread, 0, "low latency", "deep_ep")


@cache
def load_dispatchers(path: Path = TABLE) -> pd.DataFrame:
    """The published times, a row for each size.

    Columns: gpu (as ``--gpu`` names it), ranks, sms, operation (dispatch, combine), bytes (sent to other ranks, or over
    nodes to other nodes), time_us, origin.

    Raises:
        SetupError: The table is missing or damaged.
    """
    try:
        return pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise SetupError(f"the measured times of dispatchers cannot be read: {path}", "make measured") from error


#: By operation and ranks, then by SMs: bytes, and microseconds that never fall.
_Curves = dict[tuple[str, int], dict[int, tuple[Floats, Floats]]]


def _curves(rows: pd.DataFrame) -> _Curves:
    curves: _Curves = {}
    for (operation, ranks, sms), own in rows.groupby(["operation", "ranks", "sms"]):
        own = own.sort_values("bytes")
        rising = np.maximum.accumulate(own["time_us"].to_numpy("f8"))
        curves.setdefault((str(operation), int(str(ranks))), {})[int(str(sms))] = (own["bytes"].to_numpy("f8"), rising)
    return curves


def _between(
    own: dict[int, dict[int, tuple[Floats, Floats]]], sms: int, num_bytes: float, num_ranks: int
) -> tuple[float, float, bool]:
    """Microseconds of so many bytes and of one, by ranks, then SMs; and whether others were measured."""
    at = sorted([ranks for ranks in own if (ranks > 8) == (num_ranks > 8)] or own)
    low = max((ranks for ranks in at if ranks <= num_ranks), default=at[0])
    high = min((ranks for ranks in at if ranks >= num_ranks), default=at[-1])
    (low_us, low_far), (high_us, high_far) = (_at_sms(own[ranks], sms, num_bytes) for ranks in (low, high))
    share = math.log(num_ranks / low) / math.log(high / low) if high > low else 0.0
    least_us, _ = _at_sms(own[low], sms, 1)
    return low_us ** (1 - share) * high_us**share, least_us, low_far or high_far or num_ranks not in own


def _at_sms(by_sms: dict[int, tuple[Floats, Floats]], sms: int, num_bytes: float) -> tuple[float, bool]:
    """Microseconds, and whether another number of SMs was measured."""
    counts = sorted(by_sms)
    times = [_at_bytes(*by_sms[count], num_bytes) for count in counts]
    time_us = math.exp(np.interp(math.log(max(sms, 1)), np.log(counts), np.log(times)))
    if sms < counts[0]:  # fewer SMs move fewer bytes
        time_us *= counts[0] / max(sms, 1)
    return time_us, sms not in by_sms


def _at_bytes(sizes: Floats, times: Floats, num_bytes: float) -> float:
    """Linear, as DeepEP's measured times are from one token to 4,096 (within 20 %)."""
    if num_bytes > sizes[-1]:
        return float(times[-1] * num_bytes / sizes[-1])
    return float(np.interp(num_bytes, sizes, times))
