"""Memory of each communicator, from the calls made on its group."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from fakedist.cost_model.nccl.settings import (
    MIB,
    NOTHING,
    GroupShape,
    Interconnect,
    Network,
    Settings,
    Span,
    Tuner,
    channels_per_peer,
    coll_channels,
    collective_of,
    exactly,
    nvls_channels,
    p2p_channels,
    total,
)

#: ncclSendMem and ncclRecvMem without their buffers: one page each (src/include/comm.h).
_HEADER_BYTES = 4096
#: CUDA_IPC_MIN (src/include/comm.h), and the granularity of cuMemCreate.
STEP_BYTES = 2 * MIB
#: sizeof(ncclDevChannelPeer): four ncclConnInfo of 152 bytes (src/include/device.h).
_PEER_BYTES = 4 * 152
_NVLS_STEPS = 8  # NCCL_STEPS
_SHARED_STEPS = 16  # NCCL_SHARED_STEPS, src/transport/net.cc


def up(size: int, step: int = STEP_BYTES) -> int:
    """``size`` rounded up to a multiple of ``step``."""
    return -(-size // step) * step


@dataclass(frozen=True)
class Pipes:
    """This rank's memory for one connection: ``p2pSendSetup``, ``p2pRecvSetup``, ``sendProxyConnect``.

    ``send`` and ``recv`` are on this node; ``net``, over nodes, is 0 without GPUDirect RDMA (a host buffer).
    """

    send: Span
    recv: Span
    net: Span


def pipes(interconnect: Interconnect, settings: Settings) -> Pipes:
    """The memory of connections. Without NVLink they may go through host memory and take none."""
    of_sender = settings.simple_bytes if interconnect.reads else 0
    of_receiver = settings.ll_bytes + settings.ll128_bytes + (0 if interconnect.reads else settings.simple_bytes)
    net = Span(0, up(settings.ll128_bytes + settings.simple_bytes))
    if not settings.p2p:
        return Pipes(NOTHING, NOTHING, net)
    send, recv = (exactly(up(_HEADER_BYTES + held)) for held in (of_sender, of_receiver))
    return Pipes(send, recv, net) if interconnect.nvlink else Pipes(send.at_least_none(), recv.at_least_none(), net)


def channel_bytes(shape: GroupShape, interconnect: Interconnect, settings: Settings) -> Span:
    """Memory of a communicator before anything connects: ``initChannel``, ``initNvlsChannel``, ``devCommSetup``.

    Three small arrays per channel, and two for the communicator. With cuMem each takes at least 2 MiB: 388 MiB for a
    group of one rank, or 10 MiB with NCCL_MAX_NCHANNELS=1 (measured: sgl-project/sglang#35538).
    """
    coll = coll_channels(shape, interconnect, settings)
    p2p = p2p_channels(coll, settings)
    arrays = (shape.size * _PEER_BYTES, (shape.size + 1 + shape.own) * 8, shape.size * 4)
    if not settings.cumem:
        return Span(*(up(max(pair) * sum(arrays)) for pair in ((coll.low, p2p.low), (coll.high, p2p.high))))
    array_bytes = sum(up(array) for array in arrays)
    memory = Span(*(max(pair) * array_bytes + 2 * STEP_BYTES for pair in ((coll.low, p2p.low), (coll.high, p2p.high))))
    if nvls_channels(shape, interconnect, settings):
        memory += coll * exactly(STEP_BYTES) + exactly(STEP_BYTES)  # and the credits
    return memory


def ring_bytes(shape: GroupShape, interconnect: Interconnect, settings: Settings) -> Span:
    """A ring per channel: a connection to the next rank and one from the previous (``ncclTransportRingConnect``).

    A ring enters and leaves each node once: at this rank in none of the channels, or in up to twice the rank's part of
    them, because NICs are close to only some of the GPUs.
    """
    if shape.size == 1:
        return NOTHING
    coll = coll_channels(shape, interconnect, settings)
    pipe = pipes(interconnect, settings)
    if shape.num_nodes == 1:
        return coll * (pipe.send + pipe.recv)
    if shape.is_rail:
        return coll * (pipe.net + pipe.net)
    ends = [0, min(coll.low, 2 * -(-coll.low // shape.own))]
    low = min((coll.low - num_ends) * (pipe.send + pipe.recv).low + num_ends * 2 * pipe.net.low for num_ends in ends)
    ends = [0, min(coll.high, 2 * -(-coll.high // shape.own))]
    high = max(
        (coll.high - num_ends) * (pipe.send + pipe.recv).high + num_ends * 2 * pipe.net.high for num_ends in ends
    )
    return Span(low, high)


def tree_bytes(shape: GroupShape, interconnect: Interconnect, settings: Settings) -> Span:
    """Memory of trees in addition to rings, whose connections they share (``ncclTransportTreeConnect``).

    Within a node the tree is a chain used in both directions, which adds one direction at its ends and two in between.
    Across nodes, a node has one or three neighbours in a double binary tree, two on average.
    """
    if shape.size == 1 or (shape.num_nodes == 1 and shape.size == 2):
        return NOTHING
    coll = coll_channels(shape, interconnect, settings)
    pipe = pipes(interconnect, settings)
    chain = Span(min(pipe.send.low, pipe.recv.low), (pipe.send + pipe.recv).high)
    if shape.num_nodes == 1:
        return coll * chain
    peers = min(2, shape.num_nodes - 1)
    over = coll.high * peers if shape.is_rail else -(-coll.high * peers // shape.own)
    within = NOTHING if shape.is_rail else coll * chain
    return Span(0, within.high + 2 * over * pipe.net.high)


def pat_bytes(shape: GroupShape, interconnect: Interconnect, settings: Settings) -> Span:
    """PAT, for all_gather and reduce_scatter with one rank per node: a peer at each power of two, minus the ring's."""
    if not shape.is_rail or shape.size < 3:
        return NOTHING
    peers = math.ceil(math.log2(shape.size)) - 1
    coll = coll_channels(shape, interconnect, settings)
    return Span(0, 2 * peers * coll.high * pipes(interconnect, settings).net.high)


def nvls_bytes(shape: GroupShape, interconnect: Interconnect, settings: Settings) -> Span:
    """NVLink SHARP's buffers, one pair per head and channel (``ncclNvlsBufferSetup``).

    A head is a GPU that owns a part of the data: each rank of the node. Across nodes, heads are connected in a tree.
    """
    channels = nvls_channels(shape, interconnect, settings)
    buffers = up(channels * 2 * _NVLS_STEPS * settings.nvls_chunk_bytes * shape.own)
    if shape.num_nodes == 1 or not channels:
        return exactly(buffers)
    peers = min(2, shape.num_nodes - 1)
    return Span(buffers, buffers + channels * peers * 2 * pipes(interconnect, settings).net.high)


def pool_bytes(shape: GroupShape, interconnect: Interconnect, settings: Settings) -> Span:
    """The pool that all sends (or receives) over the network share (``sharedNetBuffersInit``)."""
    chunk = settings.net_chunk_bytes
    if shape.num_nodes == 1:
        chunk = settings.nvlink_chunk_bytes if interconnect.nvlink or shape.size == 1 else settings.pci_chunk_bytes
    chunk = min(chunk, settings.simple_bytes // _NVLS_STEPS)
    return p2p_channels(coll_channels(shape, interconnect, settings), settings) * exactly(_SHARED_STEPS * chunk)


_PEER_OPERATIONS = ("send", "recv")
_TO_ALL = ("all_to_all",)
_ROOTED = ("gather", "scatter")


@dataclass(frozen=True)
class Usage:
    """The calls made on a group.

    Attributes:
        send_local: Ranks on this node that the rank sent to.
        send_remote: Ranks on other nodes that it sent to.
        is_bound: The group was bound to its device, and so had a communicator before any call.
        sizes: Bytes of the whole buffers of each operation's calls; any size for an operation that is not in it.
    """

    operations: frozenset[str] = frozenset()
    send_local: int = 0
    recv_local: int = 0
    send_remote: int = 0
    recv_remote: int = 0
    is_bound: bool = False
    sizes: Mapping[str, frozenset[int]] = field(default_factory=dict)

    def does(self, *prefixes: str) -> bool:
        """Whether any operation's name starts with one of these prefixes."""
        return any(operation.startswith(prefixes) for operation in self.operations)


@dataclass(frozen=True)
class CommunicatorMemory:
    """The memory of one communicator by part that has any: channels, rings, trees, NVLink SHARP, send and receive."""

    channels: Span
    parts: dict[str, Span]

    @property
    def bytes(self) -> Span:
        """Bytes of all parts."""
        return total(self.parts.values())


def communicator_memory(
    shape: GroupShape, usage: Usage, interconnect: Interconnect, settings: Settings, network: Network | None = None
) -> CommunicatorMemory | None:
    """The memory of a group's communicator, or None; the network, by default 400 Gb/s per GPU, decides algorithms."""
    if not usage.operations and not usage.is_bound:
        return None
    parts = {"channels": channel_bytes(shape, interconnect, settings)}
    parts |= (
        _eager(shape, interconnect, settings)
        if not settings.lazy
        else _collectives(shape, usage, interconnect, Tuner(interconnect, network or Network(), settings))
    )
    parts |= _peers(shape, usage, interconnect, settings)
    if "pairs" in parts and all(operation in _PEER_OPERATIONS for operation in usage.operations):
        least = min(parts["channels"].low, channel_bytes(_pair(usage), interconnect, settings).low)
        parts["channels"] = Span(least, parts["channels"].high)  # if no send was batched, only the pairs have channels
    return CommunicatorMemory(
        coll_channels(shape, interconnect, settings), {name: span for name, span in parts.items() if span.high}
    )


def _eager(shape: GroupShape, interconnect: Interconnect, settings: Settings) -> dict[str, Span]:
    """Parts when everything connects at creation, with the pool for sends (``initTransportsRank``)."""
    pool = pool_bytes(shape, interconnect, settings)
    if shape.num_nodes > 1:  # PXN: also the pools of the node's other ranks
        pool += Span(0, (shape.own - 1) * pool.high)
    return {
        "rings": ring_bytes(shape, interconnect, settings),
        "trees": tree_bytes(shape, interconnect, settings),
        "PAT": pat_bytes(shape, interconnect, settings),
        "NVLink SHARP": nvls_bytes(shape, interconnect, settings),
        "network pool": pool,
    }


def _collectives(shape: GroupShape, usage: Usage, interconnect: Interconnect, tuner: Tuner) -> dict[str, Span]:
    """Parts when an algorithm connects on first use: those of all that the tuner may choose for the calls."""
    settings = tuner.settings
    choices = _choices(shape, usage, tuner)
    if not choices or shape.size == 1:
        return {}
    used = frozenset().union(*choices)
    ring, tree = ring_bytes(shape, interconnect, settings), tree_bytes(shape, interconnect, settings)
    all_parts = {
        "rings": ring,
        # Without rings, a tree also has the connections that it would share with them.
        "trees": tree if "rings" in used else ring + tree,
        "NVLink SHARP": nvls_bytes(shape, interconnect, settings),
        "PAT": pat_bytes(shape, interconnect, settings),
    }
    # A tree alone: each rank has at least one neighbour in a chain.
    alone = {name: ring.low if name == "trees" else span.low for name, span in all_parts.items()}
    certain = {name for choice in choices if len(choice) == 1 for name in choice}
    spans = {
        name: Span(span.low if name in certain else 0, span.high) for name, span in all_parts.items() if name in used
    }
    least = max(min(alone[name] for name in choice) for choice in choices)
    return _at_least(spans, least - sum(span.low for span in spans.values()))


_PARTS = {"ring": "rings", "tree": "trees", "nvls": "NVLink SHARP", "nvlstree": "NVLink SHARP", "pat": "PAT"}


def _choices(shape: GroupShape, usage: Usage, tuner: Tuner) -> set[frozenset[str]]:
    """The parts that may serve each call. All that serve its collective may, if the size of the call is not known."""
    choices = set()
    for operation in usage.operations:
        kind = collective_of(operation, 0, 0)[0]
        if kind in ("send", "all_to_all", "gather", "scatter"):
            continue
        if not kind:
            choices.add(frozenset({"rings"}))
            continue
        sizes = usage.sizes.get(operation)
        if sizes is None:
            algorithms = [{candidate.algorithm for candidate in tuner.candidates(kind, 1.0, shape)}]
        else:
            algorithms = [tuner.likely(kind, size, shape) for size in sizes]
        choices |= {frozenset(_PARTS[name] for name in names) for names in algorithms}
    return choices


def _at_least(spans: dict[str, Span], missing: int) -> dict[str, Span]:
    """Spans of parts that may each be absent, but together take ``missing`` more: the first parts are charged."""
    charged: dict[str, Span] = {}
    for name, span in spans.items():
        taken = min(max(missing, 0), span.high - span.low)
        charged[name] = Span(span.low + taken, span.high)
        missing -= taken
    return charged


def _peers(shape: GroupShape, usage: Usage, interconnect: Interconnect, settings: Settings) -> dict[str, Span]:
    """Send, receive and what is built on them: a connection per peer and channel within the node, a pool beyond it."""
    sends = [usage.send_local, usage.send_remote]
    recvs = [usage.recv_local, usage.recv_remote]
    everybody = usage.does(*_TO_ALL)
    if everybody:
        sends = recvs = [shape.own - 1, shape.size - shape.own]
    pipe = pipes(interconnect, settings)
    per_peer = channels_per_peer(shape, interconnect, settings)
    within = per_peer * (exactly(sends[0]) * pipe.send + exactly(recvs[0]) * pipe.recv)
    if usage.does(*_ROOTED):  # the root is not recorded: it connects to every rank, the others only to it
        within += Span(0, (per_peer * (pipe.send + pipe.recv)).high * (shape.own - 1))
    pool = pool_bytes(shape, interconnect, settings)
    over = 0
    if shape.num_nodes > 1:
        over = (shape.own if everybody else 1) * bool(sends[1]) + bool(recvs[1])  # PXN sends for the whole node
        over += 2 * usage.does(*_ROOTED)
    peer_parts = {"send and receive": within, "network pool": Span(0, over * pool.high)}
    unbatched = usage.send_local + usage.recv_local + usage.send_remote + usage.recv_remote
    if unbatched and not usage.is_bound:  # an unbatched send has a communicator for the pair
        pairs = max(usage.send_local + usage.send_remote, usage.recv_local + usage.recv_remote)
        peer_parts["pairs"] = Span(0, pairs * channel_bytes(_pair(usage), interconnect, settings).high)
    return {name: span for name, span in peer_parts.items() if span != NOTHING}


def _pair(usage: Usage) -> GroupShape:
    return GroupShape(2, 1, 2) if usage.send_local + usage.recv_local else GroupShape(2, 2, 1)
