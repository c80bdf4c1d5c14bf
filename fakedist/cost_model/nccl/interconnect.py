"""Channels that NCCL opens between GPUs of each model. NCCL searches the machine's topology, so these are data.

They come from published logs (NCCL_DEBUG=INFO: "24 coll channels, 16 nvls channels, 32 p2p channels, 32 p2p channels
per peer"). No log was found for groups with one rank per node. Their span begins at what ``ncclTopoPostset`` makes of
one NIC per GPU (one channel found, doubled, and doubled again on Hopper and newer) and ends at twice as many NICs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fakedist.cost_model.nccl.settings import MAX_CHANNELS, Settings


@dataclass(frozen=True)
class Span:
    """An amount."""

    low: int
    high: int

    def __add__(self, other: Span) -> Span:
        return Span(self.low + other.low, self.high + other.high)

    def __mul__(self, other: Span) -> Span:
        return Span(self.low * other.low, self.high * other.high)

    def at_least_none(self) -> Span:
        """Lower the low end of the span to 0."""
        return Span(0, self.high)


NOTHING = Span(0, 0)


def exactly(amount: int) -> Span:
    """An amount that is known exactly."""
    return Span(amount, amount)


def total(spans: Iterable[Span]) -> Span:
    """The sum of spans."""
    return sum(spans, NOTHING)


@dataclass(frozen=True)
class GroupShape:
    """The distribution of a group's ranks over nodes, which are NVLink domains.

    Attributes:
        num_nodes: Nodes that have any of them.
        local: Ranks in the node that has the fewest: its NICs set the pace.
        own: Ranks in this rank's node; 0 stands for as many as ``local``.
    """

    size: int
    num_nodes: int
    local: int
    own: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "own", self.own or self.local)

    @staticmethod
    def of(ranks: Sequence[int], gpus_per_node: int, group_rank: int | None = None) -> GroupShape:
        """The shape of a group, in nodes of consecutive ranks; ``group_rank`` is this rank's index in it."""
        counts = Counter(rank // gpus_per_node for rank in ranks)
        own = 0 if group_rank is None else counts[ranks[group_rank] // gpus_per_node]
        return GroupShape(len(ranks), len(counts), min(counts.values()), own)

    @property
    def is_rail(self) -> bool:
        """Whether the group has several ranks, one on each node."""
        return self.size > 1 and self.num_nodes == self.size


@dataclass(frozen=True)
class Interconnect:
    """The interconnect of a GPU model, with channels by kind of group.

    Attributes:
        capability: The compute capability's first number.
        bandwidth: Of one GPU, bytes per second one way.
        node: Channels for collectives within one node.
        nodes: The same over several nodes, with several ranks on each.
        rails: The same over several nodes, with one rank on each.
        per_peer: Channels for send and receive to each peer within one node.
        nvls: Channels of NVLink SHARP, within one node and over several; (0, 0) without it.
        reads: The receiver reads from the sender, which then holds the buffer of protocol Simple.
    """

    name: str
    capability: int
    bandwidth: float
    node: Span
    nodes: Span
    rails: Span
    per_peer: Span
    nvls: tuple[int, int] = (0, 0)
    reads: bool = False
    nvlink: bool = True

    def channels(self, shape: GroupShape) -> Span:
        """Channels for collectives of a group, without the environment's limits."""
        return self.rails if shape.is_rail else self.node if shape.num_nodes == 1 else self.nodes


#: node: nccl-tests#100 ("Channel 23/24" on an HGX A100). nodes: NCCL#1412 ("Channel 00/08", 2 nodes of 8), 16 with a
#: NIC for each GPU. per_peer: 32 through NVSwitch, 8 with four GPUs connected directly (ncclTopoGetNchannels: twice the
#: links of the path). reads: ncclTopoCheckP2p, only for compute capability 8.0 with NVLink.
AMPERE = Interconnect("NVLink 3", 8, 300e9, exactly(24), Span(8, 16), Span(2, 4), Span(8, 32), reads=True)
#: node: logs of nccl-tests on 8 H100 (24 coll, 16 nvls, 32 p2p, 32 per peer), NCCL#1685 (32 per peer). nodes: NCCL#1453
#: ("Channel 00/16", 3 nodes of 8), NCCL#1713 (8 trees, 2 nodes of 2). nvls: NVLS_NCHANNELS_SM90.
HOPPER = Interconnect("NVLink 4", 9, 450e9, exactly(24), Span(8, 16), Span(2, 8), exactly(32), nvls=(16, 16))
#: node: logs on B200 and B300 (32 coll, 24 nvls, 32 p2p, 32 per peer). nvls: NVLS_NCHANNELS_SM100_NVL and _SM100.
#: No log of several nodes was found: the spans begin at Hopper's and allow more channels, for nodes as many as in one
#: node.
BLACKWELL = Interconnect("NVLink 5", 10, 900e9, exactly(32), Span(8, 32), Span(2, 16), exactly(32), nvls=(24, 32))
#: NCCL#1706 (4 coll, 4 p2p, 2 per peer), NCCL#1189.
PCIE = Interconnect("PCIe", 8, 31.5e9, Span(2, 4), Span(2, 4), Span(2, 4), exactly(2), nvlink=False)

_INTERCONNECTS = (
    (r"A100-SXM", AMPERE),
    (r"H100 80GB HBM3|H200\b(?! NVL)", HOPPER),
    (r"NVIDIA B200|NVIDIA B300", BLACKWELL),
    (r"\bL40S?\b|GeForce RTX (3060|40\d\d)|\bL4\b|\bA10\b", PCIE),
)


def find_interconnect(gpu_name: str) -> Interconnect | None:
    """The interconnect of the GPU that CUDA calls ``gpu_name``; None if it is unknown.

    GB200 is unknown: its NVLink connects up to 72 GPUs of many nodes, depending on the cluster. So are cards that a
    bridge may connect in pairs (H100 NVL, RTX A6000) and GPUs with fewer links (H800, A800).
    """
    return next((interconnect for pattern, interconnect in _INTERCONNECTS if re.search(pattern, gpu_name)), None)


def interconnect_like(gpu_name: str, capability: int, nvlink_bandwidth: float, host_bandwidth: float) -> Interconnect:
    """A GPU's interconnect, or its generation's at the bandwidth of its links, in bytes per second one way."""
    same = {8: AMPERE, 9: HOPPER}.get(capability, BLACKWELL if capability > 9 else AMPERE)
    base = find_interconnect(gpu_name) or (same if nvlink_bandwidth else PCIE)
    return replace(base, capability=capability, bandwidth=nvlink_bandwidth or host_bandwidth)


_P2P_PER_BATCH = 8  # NCCL_MAX_DEV_WORK_P2P_PER_BATCH


def coll_channels(shape: GroupShape, interconnect: Interconnect, settings: Settings) -> Span:
    """Channels for collectives: what the topology yields (``ncclTopoPostset``), within the environment's limits."""
    topology = exactly(MAX_CHANNELS) if shape.size == 1 else interconnect.channels(shape)
    least, most = settings.channels
    return Span(*(min(max(min(channels, most), least), MAX_CHANNELS) for channels in (topology.low, topology.high)))


def nvls_channels(shape: GroupShape, interconnect: Interconnect, settings: Settings) -> int:
    """Channels of NVLink SHARP; 0 if it is unused: no NVSwitch that supports it, or at most two ranks on any node.

    A communicator has as many of its channels as the node with the fewest (``initTransportsRank``).
    """
    default = interconnect.nvls[0 if shape.num_nodes == 1 else 1]
    if not settings.nvls or shape.local < 3 or not default:
        return 0
    least, most = settings.channels
    return max(min(settings.nvls_channels or default, most), least)


def p2p_channels(coll: Span, settings: Settings) -> Span:
    """Channels for send and receive: a power of two (``ncclTopoComputeP2pChannels``)."""
    least, most = settings.p2p_channels
    return Span(
        *(min(_power_of_two(max(min(channels, most), least)), MAX_CHANNELS) for channels in (coll.low, coll.high))
    )


def channels_per_peer(shape: GroupShape, interconnect: Interconnect, settings: Settings) -> Span:
    """Channels for send and receive to each peer. Over several nodes, more peers means fewer channels for each."""
    p2p = p2p_channels(coll_channels(shape, interconnect, settings), settings)
    if shape.num_nodes == 1:
        return Span(min(interconnect.per_peer.low, p2p.low), min(interconnect.per_peer.high, p2p.high))
    asked = settings.per_net_peer
    if asked is not None:
        return Span(*(min(_power_of_two(asked), channels) for channels in (p2p.low, p2p.high)))
    # 2, or one channel per 14 GB/s of NIC bandwidth: 4 with a 400 Gb/s NIC (ncclTopoGetNchannels)
    return Span(*(_shrunk(wanted, shape.size, channels) for wanted, channels in ((2, p2p.low), (4, p2p.high))))


def _shrunk(per_peer: int, num_ranks: int, p2p: int) -> int:
    while per_peer > 1 and per_peer * -(-num_ranks // _P2P_PER_BATCH) > p2p:
        per_peer //= 2
    return per_peer


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
