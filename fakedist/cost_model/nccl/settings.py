"""Settings from NCCL's environment variables, for its time and its memory. Defaults are those of NCCL 2.28 to 2.30.

Channels that NCCL opens between GPUs of each model. NCCL searches the machine's topology, so these are data.

They come from published logs (NCCL_DEBUG=INFO: "24 coll channels, 16 nvls channels, 32 p2p channels, 32 p2p channels
per peer"). No log was found for groups with one rank per node. Their span begins at what ``ncclTopoPostset`` makes of
one NIC per GPU (one channel found, doubled, and doubled again on Hopper and newer) and ends at twice as many NICs.

NCCL's tuner: the algorithm and protocol that it runs a collective on, and their cost.

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
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fakedist.rundir.environment import number

KIB, MIB = 1 << 10, 1 << 20
MAX_CHANNELS = 64  # MAXCHANNELS, src/include/device.h

#: DEFAULT_LL_BUFFSIZE and its siblings (src/init.cc): 8 lines x 512 threads x 8 steps x 16 B; 120 x 640 x 8 x 8 B.
LL_BYTES = 8 * 512 * 8 * 16
LL128_BYTES = 120 * 640 * 8 * 8
SIMPLE_BYTES = 4 * MIB
#: Variables that the times of collectives follow.
TIME_VARIABLES = (
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_NET_CHUNKSIZE",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS",
    "NCCL_PAT_ENABLE",
)
#: The version whose sources this model follows.
NEWEST = (2, 30)
ALGORITHMS = ("ring", "tree", "nvls", "nvlstree", "pat")
#: NCCL's names of collectives, and ours.
_FUNCTIONS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
}
PROTOCOLS = ("ll", "ll128", "simple")


@dataclass(frozen=True)
class Nccl:
    """NCCL as a job loads it: its variables, and its version ("2.27.5"; empty if not known)."""

    environment: Mapping[str, str] = field(default_factory=dict)
    version: str = ""


@dataclass(frozen=True)
class Settings:
    """The settings that affect memory or time.

    Attributes:
        ll_bytes, ll128_bytes, simple_bytes: Buffers of the protocols, per connection.
        channels: Minimum and maximum for collectives.
        p2p_channels: Minimum and maximum for send and receive.
        per_net_peer: Channels to each peer in another node; None lets NCCL choose.
        net_chunk_bytes: Chunk of send and receive in a group of several nodes.
        nvlink_chunk_bytes: The same over NVLink in one node.
        pci_chunk_bytes: The same over PCIe.
        nvls_channels: None for the GPU's default.
        algorithms: Names that NCCL_ALGO allows, by collective; one that is not in it may use all.
        protocols: The same for NCCL_PROTO.
        p2p: GPUs of one node may access each other's memory.
        cumem: Device memory comes from cuMemCreate, in steps of 2 MiB.
        lazy: An algorithm connects when it is first used (since NCCL 2.22).
        version: NCCL's, major and minor.
    """

    ll_bytes: int = LL_BYTES
    ll128_bytes: int = LL128_BYTES
    simple_bytes: int = SIMPLE_BYTES
    channels: tuple[int, int] = (1, MAX_CHANNELS)
    p2p_channels: tuple[int, int] = (1, MAX_CHANNELS)
    per_net_peer: int | None = None
    net_chunk_bytes: int = 128 * KIB
    nvlink_chunk_bytes: int = 512 * KIB
    pci_chunk_bytes: int = 128 * KIB
    nvls: bool = True
    nvls_channels: int | None = None
    nvls_chunk_bytes: int = 128 * KIB
    algorithms: Mapping[str, frozenset[str]] = field(default_factory=dict)
    protocols: Mapping[str, frozenset[str]] = field(default_factory=dict)
    pat: bool = True
    p2p: bool = True
    cumem: bool = True
    lazy: bool = True
    version: tuple[int, int] = NEWEST

    def algorithms_of(self, collective: str) -> frozenset[str]:
        """Names of the algorithms that may run a collective: all_reduce, all_gather, ..."""
        allowed = self.algorithms.get(collective, frozenset(ALGORITHMS))
        return allowed if self.pat else allowed - {"pat"}

    def protocols_of(self, collective: str) -> frozenset[str]:
        """Names of the protocols that may run a collective."""
        return self.protocols.get(collective, frozenset(PROTOCOLS))


def read_settings(nccl: Nccl) -> Settings:
    """Read the settings from NCCL's variables and version."""
    environment = nccl.environment

    def read(name: str, default: int) -> int:
        value = number(environment, f"NCCL_{name}")
        return default if value is None or value < 0 else value

    cumem = read("CUMEM_ENABLE", 1) != 0
    return Settings(
        ll_bytes=read("LL_BUFFSIZE", LL_BYTES),
        ll128_bytes=read("LL128_BUFFSIZE", LL128_BYTES),
        simple_bytes=read("BUFFSIZE", SIMPLE_BYTES),
        channels=(
            max(read("MIN_NCHANNELS", 1), read("MIN_CTAS", 1), 1),
            max(min(read("MAX_NCHANNELS", MAX_CHANNELS), read("MAX_CTAS", MAX_CHANNELS), MAX_CHANNELS), 1),
        ),
        p2p_channels=(max(read("MIN_P2P_NCHANNELS", 1), 1), max(read("MAX_P2P_NCHANNELS", MAX_CHANNELS), 1)),
        per_net_peer=read("NCHANNELS_PER_NET_PEER", 0) or None,
        net_chunk_bytes=read("P2P_NET_CHUNKSIZE", 128 * KIB),
        nvlink_chunk_bytes=read("P2P_NVL_CHUNKSIZE", 512 * KIB),
        pci_chunk_bytes=read("P2P_PCI_CHUNKSIZE", 128 * KIB),
        nvls=read("NVLS_ENABLE", 2) != 0,
        nvls_channels=read("NVLS_NCHANNELS", 0) or None,
        nvls_chunk_bytes=read("NVLS_CHUNKSIZE", 128 * KIB),
        algorithms=_allowed(environment.get("NCCL_ALGO", ""), ALGORITHMS),
        protocols=_allowed(environment.get("NCCL_PROTO", ""), PROTOCOLS),
        pat=read("PAT_ENABLE", 2) != 0,
        p2p=read("P2P_DISABLE", 0) == 0,
        cumem=cumem,
        lazy=cumem and read("RUNTIME_CONNECT", 1) != 0,
        version=_version(nccl.version),
    )


def _version(text: str) -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", text)
    return NEWEST if numbers is None else (int(numbers[1]), int(numbers[2]))


def _allowed(text: str, known: tuple[str, ...]) -> dict[str, frozenset[str]]:
    """Names by collective, of "Ring,Tree", "^Tree" or "ring;allreduce:tree,nvls" (``parseList``).

    A name that is not known (CollNet's) allows nothing here. A list without any known name counts as not given.
    """
    allowed_by_collective: dict[str, frozenset[str]] = {}
    every = frozenset(known)
    for part in text.lower().split(";"):
        prefix, _, listed = part.rpartition(":")
        names = every & frozenset(re.findall(r"[a-z]+[0-9]*", listed))
        if names:
            allowed = every - names if listed.strip().startswith("^") else names
            collectives = [_FUNCTIONS.get(prefix.strip(), "")] if prefix else list(_FUNCTIONS.values())
            allowed_by_collective |= dict.fromkeys(collectives, allowed)
    return allowed_by_collective


#: The beginning of a call's operation -> the collective that it is, and the side whose bytes are the whole buffer.
#: The first match counts.
_KINDS = (
    ("reduce_scatter", "reduce_scatter", "bytes_in"),
    ("all_gather", "all_gather", "bytes_out"),
    ("allgather", "all_gather", "bytes_out"),
    ("all_reduce", "all_reduce", "bytes_in"),
    ("allreduce", "all_reduce", "bytes_in"),
    ("all_to_all", "all_to_all", "largest"),
    ("alltoall", "all_to_all", "largest"),
    ("deep_ep_layout", "", "largest"),
    ("deep_ep_", "all_to_all", "largest"),
    ("hybrid_ep_dispatch", "all_to_all", "largest"),
    ("hybrid_ep_combine", "all_to_all", "largest"),
    ("broadcast", "broadcast", "largest"),
    ("reduce", "reduce", "largest"),
    ("gather", "gather", "largest"),
    ("scatter", "scatter", "largest"),
    ("send", "send", "largest"),
    ("recv", "send", "largest"),
    ("get", "get", "largest"),
    ("put", "get", "largest"),
    ("barrier", "barrier", "largest"),
    ("monitored_barrier", "barrier", "largest"),
)


#: Kernels of torch.ops.symm_mem and of Transformer Engine's user buffers, which take or write what is in the others'
#: memory, by the algorithm before their names.
_SYMMETRIC = re.compile(r"(?:symm_mem_|userbuffers_)(?:multimem_)?(?:one_shot_|two_shot_)?")
#: Calls through memory that ranks share: NCCL has no part in them.
THROUGH_SHARED_MEMORY = r"get|put|put_wait|symm_mem_\w+|userbuffers_\w+|(deep|hybrid)_ep_\w+"


def collective_of(operation: str, bytes_in: int, bytes_out: int) -> tuple[str, int]:
    """The collective of an operation such as all_gather_into_tensor_coalesced ("": unknown), and its buffer's bytes."""
    sizes = {"bytes_in": bytes_in, "bytes_out": bytes_out, "largest": max(bytes_in, bytes_out)}
    name = _SYMMETRIC.sub("", operation)
    return next(
        ((kind, sizes[side]) for prefix, kind, side in _KINDS if name.startswith(prefix)),
        ("", sizes["largest"]),
    )


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
