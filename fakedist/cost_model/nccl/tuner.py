"""NCCL's tuner: the algorithm and protocol that it runs a collective on, and their cost.

A candidate costs latency + bytes / bandwidth; the cheapest runs. Formulas and constants are those of NCCL 2.28 to 2.30,
src/graph/tuning.cc (NVIDIA/nccl @5067397c; since then in src/tuning, @12df1a11), Apache-2.0: ``ncclTopoTuneModel``,
``ncclTopoGetAlgoTime``. For hosts with Intel's CPUs.

NCCL searches the machine's topology for bandwidths. Here they follow from the interconnect: rings reach 0.8 of NVLink's
bandwidth in a node (18 channels of 20 GB/s on H100), the heads of NVLink SHARP share 0.824 (18 links of 20.6), a GPU
behind PCIe 0.76 (24 GB/s of 31.5), and a node's rings 0.96 of its NICs (a channel of 48 for each). NCCL 2.27.5 logged
190 latencies and bandwidths of groups on 2 to 32 nodes of H100, and the model meets all of them.

NCCL tunes neither all_to_all nor sends. They are candidates with the same latencies, to carry measurements over to
other links. The environment's number of channels does not change NCCL's choice. It limits what a call reaches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fakedist.cost_model.nccl.settings import GroupShape, Interconnect, Settings, nvls_channels

#: Latencies in microseconds by protocol (LL, LL128, Simple): of the call, and of a step over NVLink, PCIe and network.
_BASE = {"ring": (6.6, 14.0, 8.4), "tree": (6.8, 14.0, 8.4)}
_NVLINK = {"ring": (0.6, 1.9, 3.4), "tree": (0.6, 1.25, 4.0)}
_PCIE = {"ring": (1.0, 2.5, 5.7), "tree": (1.0, 1.9, 4.0)}
_NETWORK = {"ring": (2.7, 4.0, 14.0), "tree": (5.0, 8.5, 14.0)}
#: Before NCCL 2.28 the trees of NVLink SHARP had other latencies, and no limit but the links.
_NVLS_US, _NVLS_TREE_NETWORK_US, _OLD_NVLS_TREE_NETWORK_US = 25.0, 20.9, 14.0
_NVLS_TREE_LIMITED = (2, 28)
_OLD_NVLS_TREE_FACTOR = 5 / 6
#: What Hopper's and newer GPUs' trees over nodes, which are plain ones, lose to balanced ones.
_PLAIN_TREE = 0.85
#: A channel below the first is never doubled by NCCL's search; from Hopper on, neither is one of more than four below
#: the second (``ncclTopoDupChannels``), GB/s.
_DOUBLED_FROM, _ALL_DOUBLED_FROM, _FEW_CHANNELS = 25.0, 50.0, 4
_PAT_BASE_US, _PAT_NETWORK_US, _PAT_RANK_US = 8.0, 14.0, 2.8
#: What the host adds to each step of a ring over nodes; three times that with Simple.
_NETWORK_OVERHEAD_US = 1.0
#: GB/s by generation (Ampere, Hopper, Blackwell) and number of nodes (1, 2, more).
_LL_MOST = ((87.7, 39.0, 20.4), (141.0, 39.0, 20.4), (282.0, 39.0, 20.4))
_RING_LL128_CHANNEL = (20.0, 36.7, 40.0)
_TREE_LL128_CHANNEL = ((20.0, 20.0, 20.0), (36.7, 36.7, 29.0), (55.6, 31.67, 20.0))
_TREE_CHANNEL = ((24.0, 23.6, 17.8), (38.7, 41.4, 36.0), (70.0, 42.8, 24.0))
_NVLS_TREE_CHANNEL = ((math.inf, math.inf, math.inf), (math.inf, 57.7, 45.5), (math.inf, 96.0, 80.0))
_NVLS_EFFICIENCY = (0.0, 0.85, 0.74)
#: GB/s that the search tries for each head of NVLink SHARP: a GPU that owns a part of the data (src/graph/search.cc).
_NVLS_SPEEDS = ((), (60.0, 50.0, 40.0, 30.0, 24.0, 20.0, 15.0), (90.0, 80.0, 70.0, 60.0, 50.0, 45.0, 40.0, 30.0, 24.0))
#: Factors on a tree's bandwidth, for messages from 64 B in powers of two.
_TREE_CORRECTION = (
    (1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0, 1.0, 1.0),
    (1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1.0, 1.0),
    (0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
)
_PROTOCOLS = ("ll", "ll128", "simple")
_SIMPLE = _PROTOCOLS.index("simple")
#: Simple's ring over nodes reaches a plateau from this many bytes a rank and channel.
_PLATEAU_BYTES, _PLATEAU = 64, 1.4
#: Fractions of the links' bandwidths that NCCL's search finds, see the head of this file.
_NVLINK_FOUND, _NVLS_FOUND, _PCIE_FOUND, _NIC_FOUND = 0.8, 0.824, 0.76, 0.96
#: NVLink SHARP reaches this many ranks of a node (NCCL_MAX_NVLS_ARITY), except for all_reduce.
_NVLS_RANKS = 32
_PAIR_US = 0.4
_GB = 1e9
_DEFAULT = Settings()
#: By how much the cost of a candidate may be off, as a factor: NCCL's search is only approximated.
DOUBT = 1.3


@dataclass(frozen=True)
class Network:
    """The NICs between nodes: bytes per second of one, one way, and NICs for each GPU."""

    nic_bandwidth: float = 50e9
    nics_per_gpu: float = 1.0


class Candidate(NamedTuple):
    """An algorithm (ring, tree, nvls, nvlstree, pat; untuned: pairs, send), and a protocol (ll, ll128, simple)."""

    algorithm: str
    protocol: str
    time_us: float


class Tuner:
    """Chooses what collectives run on; with ``counts_channels``, costs follow the channels that the settings allow."""

    def __init__(
        self, interconnect: Interconnect, network: Network, settings: Settings, *, counts_channels: bool = False
    ) -> None:
        self._interconnect, self._network, self.settings = interconnect, network, settings
        self._counts_channels = counts_channels
        self._generation = {8: 0, 9: 1}.get(interconnect.capability, 2 if interconnect.capability > 9 else 0)

    @property
    def channel_bandwidth(self) -> float:
        """Bytes per second that a channel moves at most."""
        return _RING_LL128_CHANNEL[self._generation] * _GB

    def choose(self, kind: str, num_bytes: float, shape: GroupShape) -> Candidate:
        """The cheapest candidate for a kind of collective (or send), of so many bytes in the whole buffer."""
        return min(self.candidates(kind, num_bytes, shape), key=lambda candidate: candidate.time_us)

    def likely(self, kind: str, num_bytes: float, shape: GroupShape) -> set[str]:
        """The algorithms that may run a collective, if the costs of any two are off by a factor of ``DOUBT``."""
        candidates = self.candidates(kind, num_bytes, shape)
        least = min(candidate.time_us for candidate in candidates)
        return {candidate.algorithm for candidate in candidates if candidate.time_us <= DOUBT * least}

    def cost_us(self, chosen: Candidate, kind: str, num_bytes: float, shape: GroupShape) -> float:
        """The cost here of a candidate that another tuner chose."""
        costs = {candidate[:2]: candidate.time_us for candidate in self.candidates(kind, num_bytes, shape)}
        return costs[chosen[:2]]

    def candidates(self, kind: str, num_bytes: float, shape: GroupShape) -> list[Candidate]:
        """The ways to run a collective that the settings allow; a ring if they allow none."""
        kind = "all_reduce" if kind == "barrier" else kind
        if kind in ("all_to_all", "gather", "scatter", "send"):
            return [self._pairs(kind, num_bytes, shape)]
        allowed, protocols = self.settings.algorithms_of(kind), self.settings.protocols_of(kind)
        possible = list(self._possible(kind, num_bytes, shape))
        left = [
            candidate for candidate in possible if candidate.algorithm in allowed and candidate.protocol in protocols
        ]
        rings = [candidate for candidate in possible if candidate.algorithm == "ring"]
        return left or [candidate for candidate in rings if candidate.protocol in protocols] or rings

    def _possible(self, kind: str, num_bytes: float, shape: GroupShape) -> Iterator[Candidate]:
        for index, protocol in enumerate(_PROTOCOLS):
            if protocol == "ll128" and not self._interconnect.nvlink:
                continue
            yield Candidate("ring", protocol, self._ring_us(kind, num_bytes, shape, index))
            if kind == "all_reduce":
                yield Candidate("tree", protocol, self._tree_us(num_bytes, shape, index))
        nvls = self._nvls_us(kind, num_bytes, shape)
        if nvls is not None:
            yield Candidate("nvls" if shape.num_nodes == 1 else "nvlstree", "simple", nvls)
        if kind in ("all_gather", "reduce_scatter") and shape.is_rail:
            # A peer at each power of two, and a part that grows with the ranks.
            steps = int(math.log2(shape.num_nodes)) * _PAT_NETWORK_US / 3.5
            latency = _PAT_BASE_US + steps + shape.size * _PAT_RANK_US
            yield Candidate("pat", "simple", latency + num_bytes / (0.75 * self._bus(shape) * 1e3))

    def _bus(self, shape: GroupShape) -> float:
        """GB/s of all rings of a group together."""
        bandwidths = _NVLINK_FOUND if self._interconnect.nvlink else _PCIE_FOUND
        within = bandwidths * self._interconnect.bandwidth / _GB
        if shape.num_nodes == 1:
            return within
        nics = max(shape.local * self._network.nics_per_gpu, 1.0)
        between = _NIC_FOUND * nics * self._network.nic_bandwidth / _GB
        if shape.local == 1:
            return between
        return min(self._interconnect.bandwidth / _GB if self._interconnect.nvlink else within, between)

    def _channels(self, shape: GroupShape) -> int:
        """Channels that the search finds: over nodes one for each NIC, doubled where they are few or fast."""
        if shape.num_nodes == 1:
            return self._interconnect.channels(shape).high
        nics = max(round(shape.local * self._network.nics_per_gpu), 1)
        found = _NIC_FOUND * self._network.nic_bandwidth / _GB
        is_few = self._generation == 0 or nics <= _FEW_CHANNELS
        return nics * (2 if found >= _DOUBLED_FROM and (is_few or found >= _ALL_DOUBLED_FROM) else 1)

    def _limited(self, bus: float) -> float:
        """The bandwidth that as many channels as the settings allow move, each as much as LL128 does at most."""
        if not self._counts_channels:
            return bus
        return min(bus, self.settings.channels[1] * _RING_LL128_CHANNEL[self._generation])

    def _ring_us(self, kind: str, num_bytes: float, shape: GroupShape, index: int) -> float:
        bus = self._bus(shape)
        size = shape.size
        nodes = shape.num_nodes
        if _PROTOCOLS[index] == "ll":
            bus = min(_LL_MOST[self._generation][min(nodes, 3) - 1], 0.5 * bus)
        if _PROTOCOLS[index] == "ll128":
            bus = min(0.92 * bus, self._channels(shape) * _RING_LL128_CHANNEL[self._generation])
        bus = self._limited(bus)
        hop = (_NVLINK if self._interconnect.nvlink else _PCIE)["ring"][index]
        # With one rank a node, the network's latency is as exposed as in a tree.
        over = _NETWORK["tree" if shape.is_rail else "ring"][index]
        latency = _BASE["ring"][index]
        if kind in ("broadcast", "reduce"):
            return latency + (hop if nodes == 1 else _NETWORK["ring"][index]) + num_bytes / (bus * 1e3)
        passes = 2 if kind == "all_reduce" else 1
        steps, between = passes * (size - 1), passes * (nodes - 1)
        if nodes > 1:
            hop = max(hop, _NETWORK_OVERHEAD_US * (3 if index == _SIMPLE else 1))
        latency += (steps - between) * hop + between * over
        is_long = num_bytes / (self._interconnect.channels(shape).high * size) >= _PLATEAU_BYTES
        if index == _SIMPLE and nodes > 1 and kind == "all_reduce" and is_long:
            latency *= _PLATEAU
        return latency + num_bytes * steps / size / (bus * 1e3)

    def _tree_us(self, num_bytes: float, shape: GroupShape, index: int) -> float:
        channels = self._channels(shape)
        scale = min(shape.num_nodes, 3) - 1
        bus = min(0.92 * self._tree_bus(shape), channels * _TREE_CHANNEL[self._generation][scale])
        if _PROTOCOLS[index] == "ll":
            bus = min(bus / 3.8, _LL_MOST[self._generation][scale])
        if _PROTOCOLS[index] == "ll128":
            fraction = 7 / 9 if shape.num_nodes == 1 else 120 / 128
            bus = min(fraction * bus, channels * _TREE_LL128_CHANNEL[self._generation][scale])
        if shape.num_nodes > 1 and self._generation > 0:
            bus *= _PLAIN_TREE
        octave = int(math.log2(max(num_bytes / 64, 1.0)))
        if octave < len(_TREE_CORRECTION[index]):
            bus *= _TREE_CORRECTION[index][octave]
        hop = (_NVLINK if self._interconnect.nvlink else _PCIE)["tree"][index]
        depth = int(math.log2(shape.num_nodes))
        latency = 2 * ((shape.size // shape.num_nodes - 1) * hop + depth * _NETWORK["tree"][index])
        return _BASE["tree"][index] + latency + 2 * num_bytes / (self._limited(bus) * 1e3)

    def _tree_bus(self, shape: GroupShape) -> float:
        """GB/s of all trees together: on two nodes those within a node, before Blackwell; else of the slower links."""
        if shape.num_nodes != 2 or self._generation > 1:
            return self._bus(shape)
        return math.inf if shape.local == 1 else self._bus(GroupShape(shape.local, 1, shape.local))

    def _nvls_us(self, kind: str, num_bytes: float, shape: GroupShape) -> float | None:
        """NVLink SHARP in one node, or its trees over nodes (all_reduce only); None where it cannot run."""
        is_all_reduce = kind == "all_reduce"
        over_nodes = shape.num_nodes > 1
        channels = nvls_channels(shape, self._interconnect, self.settings)
        unlimited = nvls_channels(shape, self._interconnect, _DEFAULT)
        if not channels or kind not in ("all_reduce", "all_gather", "reduce_scatter"):
            return None
        if not is_all_reduce and (over_nodes or shape.local > _NVLS_RANKS):
            return None  # over nodes only with SHARP in the network
        heads = shape.local
        is_old = self.settings.version < _NVLS_TREE_LIMITED
        most = _NVLS_FOUND * self._interconnect.bandwidth / _GB / heads
        speed = next((listed for listed in _NVLS_SPEEDS[self._generation] if listed <= most), most)
        bus = heads * speed * _NVLS_EFFICIENCY[self._generation] * (heads - 1) / heads
        bus *= 2 if is_all_reduce else (heads - 1) / heads
        latency = _NVLS_US
        factor = shape.size / (2 * (shape.size - 1)) if is_all_reduce else 1.0
        if over_nodes and is_old:
            bus = min(heads * speed, self._bus(shape) / (1 if shape.num_nodes == 2 else 2))
            factor = _OLD_NVLS_TREE_FACTOR
            latency += 2 * int(math.log2(shape.num_nodes)) * _OLD_NVLS_TREE_NETWORK_US
        elif over_nodes:
            most = _NVLS_TREE_CHANNEL[self._generation][min(shape.num_nodes, 3) - 1]
            between = self._bus(shape) * (2 if shape.num_nodes == 2 else 1)
            bus = min(bus, between, most * heads)
            latency += 2 * int(math.log2(shape.num_nodes)) * _NVLS_TREE_NETWORK_US
        if self._counts_channels:
            bus *= min(channels / unlimited, 1.0)
        return latency + num_bytes / (bus * factor * 1e3)

    def _pairs(self, kind: str, num_bytes: float, shape: GroupShape) -> Candidate:
        """Collectives made of sends, which NCCL does not tune."""
        hop = (_NVLINK if self._interconnect.nvlink else _PCIE)["ring"][_SIMPLE]
        latency = _BASE["ring"][_SIMPLE] + (hop if shape.num_nodes == 1 else _NETWORK["ring"][_SIMPLE])
        bus = self._limited(self._bus(shape))
        if kind == "send":
            return Candidate("send", "simple", latency + num_bytes / (bus * 1e3))
        peers = shape.size - 1
        return Candidate("pairs", "simple", latency + _PAIR_US * peers + num_bytes * peers / shape.size / (bus * 1e3))
