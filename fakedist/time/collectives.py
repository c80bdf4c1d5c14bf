"""How long a collective takes: measured in one NVLink domain, a model fitted to published logs between nodes.

- *One domain* (a node, or an NVL72): nccl-tests on this GPU model, interpolated between message sizes and numbers of
  GPUs (both logarithmic). Beyond the largest message its bus bandwidth holds; beyond the most GPUs, the latency grows
  with the steps of a ring.
- *Between nodes*: a ring takes a latency for each step, and the bytes over the bandwidth of the group's NICs or of
  NVLink, whichever is less. An all_reduce may run on a tree instead, which takes fewer steps. An all_to_all sends its
  remote part over one NIC for each rank. Small messages run on protocols with a shorter latency.
- A send takes one NIC, or NVLink inside a node.

docs/accuracy.md has the logs, and the errors when part of them is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from fakedist.nccl.group_shape import GroupShape
from fakedist.nccl.settings import KIB, MIB, Settings
from fakedist.time.collective_data import load_collectives
from fakedist.time.fabric import Fabric
from fakedist.time.measurements import Floats

#: A GPU model without measurements -> the one whose curves stand for it.
_LIKE = {"a100-40g": "a100-80g", "rtx4090": "l40s"}
#: The sharpness of the change from NICs to NVLink as the limit of a ring: ten nodes of eight H100 reach 324 GB/s where
#: NICs allow 391 and NVLink 362.
_SHARPNESS = 5.0
#: Protocols with less latency and less bandwidth, as NCCL's tuner has them (src/graph/tuning.cc @5067397c): the
#: latency of the call, of a step within and between nodes in microseconds, and the fraction of the bandwidth.
_QUICK = {"ll128": (14.0, 1.9, 4.0, 0.92), "ll": (6.6, 0.6, 2.7, 0.07)}
#: What the tuner's latencies have to be multiplied by to meet ten nodes of eight H100 at 32 MiB.
_TUNER_LATENCY = 3.0
#: An all_to_all between nodes: the call, and each peer (fitted to 10 x 1 to 10 x 8).
_ALL_TO_ALL_US, _PEER_US, _ALL_TO_ALL_ACHIEVED = 75.0, 3.4, 0.93
_LEAST_BYTES = 8.0
#: A send between nodes, by its chunk (NCCL_P2P_NET_CHUNKSIZE): 24.9 GB/s with NCCL's default, 46 to 48 with 2 MiB
#: (xxrjun/nccl-tests-cluster @455de4f8, sendrecv of one GPU a node). In between, interpolated by the logarithm.
_SEND_CHUNKS, _SEND_GAIN = (128 * KIB, 2 * MIB), (1.0, 47.0 / 24.9)
#: GPU models whose all_reduce in one domain never runs in the switches (NVLink SHARP).
_WITHOUT_NVLS = ("a100-80g", "l40s", "rtx-pro-6000")


@dataclass(frozen=True)
class CollectiveTime:
    """What a collective takes.

    Attributes:
        time_us: Microseconds.
        algorithm: What runs it: "measured" in one domain, else ring, tree, pairs or send.
        spread: The 90 % interval, as the size of the logarithm of truth over estimate.
    """

    time_us: float
    algorithm: str
    spread: float


#: 90 % intervals in one domain: as many GPUs as were measured, another number, another GPU model (docs/accuracy.md).
_DOMAIN_SPREAD, _COUNT_SPREAD, _OTHERS_SPREAD = 0.15, 0.3, 0.5
#: Over nodes, messages from this size on were measured. Smaller ones rest on the tuner's latencies.
_MEASURED_BYTES, _SMALL_SPREAD = 32e6, 0.7
#: A send inside a node: the call, and the fraction of NVLink's bandwidth (8 H100, nccl-tests sendrecv: 348 GB/s).
_SEND_US, _SEND_ACHIEVED = 5.0, 0.77


class CollectiveTimes:
    """Estimates collectives of one GPU model on one fabric.

    Args:
        gpu: The GPU model's name, such as "h100-80g".
        fabric: The interconnect.
        nvlink_bandwidth: NVLink bandwidth of the GPU model, bytes per second one way; 0 without NVLink.
        logs: nccl-tests' logs (columns of :func:`load_collectives`); by default the package's.
        nccl: NCCL's settings. What was measured in one domain follows only those that forbid NVLink SHARP.
    """

    def __init__(
        self,
        gpu: str,
        fabric: Fabric,
        nvlink_bandwidth: float = 0.0,
        logs: pd.DataFrame | None = None,
        *,
        nccl: Settings | None = None,
    ) -> None:
        self.fabric = fabric
        self._nccl = nccl = Settings() if nccl is None else nccl
        logs = load_collectives() if logs is None else logs
        known = set(logs["gpu"])
        name = gpu if gpu in known else _LIKE.get(gpu, "h100-80g")
        own = logs[(logs["gpu"] == name) & (logs["nodes"] == 1)]
        self._curves = {str(operation): _Curve(rows) for operation, rows in own.groupby("operation")}
        self._is_own = gpu in known or gpu in _LIKE
        self._is_nvls_off = name not in _WITHOUT_NVLS and not (nccl.nvls and "nvls" in nccl.algorithms)
        self._nvlink = fabric.nvlink_bandwidth or nvlink_bandwidth
        # How much faster than the measured GPU's this NVLink is, if the fabric names its own.
        self._faster = self._nvlink / nvlink_bandwidth if nvlink_bandwidth else 1.0

    def time(self, operation: str, num_bytes: float, shape: GroupShape) -> CollectiveTime:
        """What one call takes.

        Args:
            operation: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, barrier or send.
            num_bytes: Bytes of the whole buffer: what all_gather returns, what reduce_scatter is given; for all_to_all
                what one rank sends.
            shape: Where the group's ranks are.
        """
        if shape.size == 1:
            return CollectiveTime(0.0, "none", 0.0)
        num_bytes = max(float(num_bytes), _LEAST_BYTES)
        if shape.num_nodes == 1:
            return self._in_domain(operation, num_bytes, shape.size)
        time_us, algorithm = self._between(operation, num_bytes, shape)
        is_small = num_bytes < _MEASURED_BYTES and operation != "send"
        return CollectiveTime(time_us, algorithm, max(self.fabric.spread, _SMALL_SPREAD if is_small else 0.0))

    def _in_domain(self, operation: str, num_bytes: float, size: int) -> CollectiveTime:
        # A broadcast or reduce moves the buffer once, as an all_gather or reduce_scatter of it does; a barrier is an
        # all_reduce of one value. Over PCIe, a send moves what an all_to_all of two moves.
        name = {"broadcast": "all_gather", "reduce": "reduce_scatter", "barrier": "all_reduce", "send": "all_to_all"}
        curve = self._curves[name.get(operation, operation)]
        is_measured = curve.has(size) or operation == "send"
        spread = _OTHERS_SPREAD if not self._is_own else _DOMAIN_SPREAD if is_measured else _COUNT_SPREAD
        if operation == "send" and self._nvlink:
            return CollectiveTime(_SEND_US + num_bytes / (self._nvlink * _SEND_ACHIEVED) * 1e6, "send", spread)
        time_us = curve.time_us(2 * num_bytes, 2) if operation == "send" else curve.time_us(num_bytes, size)
        algorithm = "measured"
        if operation in ("all_reduce", "barrier") and self._is_nvls_off:
            time_us = max(time_us, self._two_passes_us(num_bytes, size))
            algorithm, spread = "ring", max(spread, _COUNT_SPREAD)
        if self._faster != 1:
            least = curve.time_us(_LEAST_BYTES, size)
            time_us = least + max(time_us - least, 0.0) / self._faster
        return CollectiveTime(time_us, algorithm, spread)

    def _two_passes_us(self, num_bytes: float, size: int) -> float:
        """An all_reduce in one domain on a ring: a reduce_scatter and an all_gather, with one start."""
        halves = [self._curves[name] for name in ("reduce_scatter", "all_gather")]
        return sum(each.time_us(num_bytes, size) for each in halves) - halves[0].time_us(_LEAST_BYTES, size)

    def _between(self, operation: str, num_bytes: float, shape: GroupShape) -> tuple[float, str]:
        fabric = self.fabric
        if operation == "send":
            return fabric.send_us + num_bytes / self._send_bandwidth() * 1e6, "send"
        if operation == "all_to_all":
            remote = num_bytes * (shape.size - shape.local) / shape.size
            own_nic = fabric.nic_bandwidth * fabric.nics_per_node / fabric.gpus_per_node
            transfer = remote / (own_nic * fabric.achieved * _ALL_TO_ALL_ACHIEVED) * 1e6
            return _ALL_TO_ALL_US + _PEER_US * (shape.size - 1) + transfer, "pairs"
        passes = 2 if operation in ("all_reduce", "barrier") else 1
        ring = self._ring_us(num_bytes, shape, passes)
        if passes == 1:
            return ring, "ring"
        allowed = self._nccl.algorithms & {"ring", "tree"} or {"ring", "tree"}
        tree = self._tree_us(num_bytes, shape) if "tree" in allowed else math.inf
        return (ring, "ring") if ring <= tree and "ring" in allowed else (tree, "tree")

    def _send_bandwidth(self) -> float:
        gain = np.interp(math.log(max(self._nccl.net_chunk_bytes, 1)), np.log(_SEND_CHUNKS), _SEND_GAIN)
        most = max(self.fabric.nic_bandwidth * self.fabric.achieved, self.fabric.send_bandwidth)
        return float(min(self.fabric.send_bandwidth * gain, most))

    def _ring_us(self, num_bytes: float, shape: GroupShape, passes: int) -> float:
        # The second pass of an all_reduce follows the first through the node at once, so it pays the network's steps
        # alone: ten nodes of eight take as long for an all_reduce's steps as for an all_gather's.
        between, within = passes * (shape.num_nodes - 1), shape.size - shape.num_nodes
        transfer = passes * num_bytes * (shape.size - 1) / shape.size / self._bandwidth(shape) * 1e6
        protocols = self._nccl.protocols
        slow = between * self.fabric.hop_us + within * self.fabric.local_hop_us + transfer
        found = [slow] if "simple" in protocols or not protocols else []
        scale = _TUNER_LATENCY * self.fabric.hop_us / 9.0
        for name, (call, local, hop, fraction) in _QUICK.items():
            if name in protocols:
                found.append(scale * (call + within * local + between * hop) + transfer / fraction)
        return min(found)

    def _tree_us(self, num_bytes: float, shape: GroupShape) -> float:
        hops = 2 * math.log2(shape.num_nodes) * self.fabric.tree_hop_us
        within = 2 * (shape.local - 1) * self.fabric.local_hop_us
        # A tree moves each byte up and down: an all_reduce's algorithm bandwidth is half of the links'.
        return hops + within + 2 * num_bytes / (0.8 * self._bandwidth(shape)) * 1e6

    def _bandwidth(self, shape: GroupShape) -> float:
        """Bytes per second of a ring over nodes: the NICs of the node with the fewest ranks, or NVLink."""
        fabric = self.fabric
        nics = max(min(shape.local * fabric.nics_per_node / fabric.gpus_per_node, fabric.nics_per_node), 1.0)
        network = nics * fabric.nic_bandwidth * fabric.achieved
        if shape.local == 1:
            return network
        nvlink = self._curves["all_gather"].bus_bandwidth(shape.local) * self._faster
        return float((network**-_SHARPNESS + nvlink**-_SHARPNESS) ** (-1 / _SHARPNESS))


class _Curve:
    """Measured times of one operation in one NVLink domain.

    Args:
        rows: Columns gpus_per_node, bytes, time_us.
    """

    def __init__(self, rows: pd.DataFrame) -> None:
        self._by_size: dict[int, tuple[Floats, Floats]] = {}
        for size, own in rows.groupby("gpus_per_node"):
            median = own.groupby("bytes")["time_us"].median()
            self._by_size[int(str(size))] = (median.index.to_numpy(np.float64), median.to_numpy(np.float64))
        self._sizes = sorted(self._by_size)

    def has(self, size: int) -> bool:
        """Whether this number of GPUs was measured."""
        return size in self._by_size

    def time_us(self, num_bytes: float, size: int) -> float:
        """Microseconds of a message between ``size`` GPUs."""
        at = int(np.searchsorted(self._sizes, size))
        if at < len(self._sizes) and self._sizes[at] == size:
            return self._measured_us(num_bytes, size)
        if at == 0:
            return self._measured_us(num_bytes, self._sizes[0])
        if at == len(self._sizes):
            return self._beyond_us(num_bytes, size)
        low, high = self._sizes[at - 1], self._sizes[at]
        share = math.log(size / low) / math.log(high / low)
        low_us, high_us = self._measured_us(num_bytes, low), self._measured_us(num_bytes, high)
        return math.exp((1 - share) * math.log(low_us) + share * math.log(high_us))

    def bus_bandwidth(self, size: int) -> float:
        """Bus bandwidth of the largest messages, bytes per second."""
        largest = self._largest
        return largest * (size - 1) / size / self.time_us(largest, size) * 1e6

    @cached_property
    def _largest(self) -> float:
        return float(max(sizes[-1] for sizes, _ in self._by_size.values()))

    def _measured_us(self, num_bytes: float, size: int) -> float:
        sizes, times = self._by_size[size]
        if num_bytes > sizes[-1]:
            return float(times[-1] * num_bytes / sizes[-1])
        found = np.interp(math.log(num_bytes), np.log(sizes), np.log(times))
        return float(math.exp(found))

    def _beyond_us(self, num_bytes: float, size: int) -> float:
        """More GPUs than were measured: the latency of the most, by the steps; the bytes at their bus bandwidth."""
        most = self._sizes[-1]
        least = self._by_size[most][1][0]
        moved = self._measured_us(num_bytes, most) - least
        return float(least * (size - 1) / (most - 1) + max(moved, 0.0) * ((size - 1) / size) / ((most - 1) / most))
