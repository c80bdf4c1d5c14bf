"""Device memory of NCCL's connections and channels, from NCCL's sources (2.28 to 2.30; file names are NCCL's)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fakedist.cost_model.nccl.interconnect import NOTHING, GroupShape, Interconnect, Span, exactly
from fakedist.cost_model.nccl.settings import MAX_CHANNELS, MIB, Settings

_P2P_PER_BATCH = 8  # NCCL_MAX_DEV_WORK_P2P_PER_BATCH


def coll_channels(shape: GroupShape, interconnect: Interconnect, settings: Settings) -> Span:
    """Channels for collectives: what the topology yields (``ncclTopoPostset``), within the environment's limits."""
    found = exactly(MAX_CHANNELS) if shape.size == 1 else interconnect.channels(shape)
    least, most = settings.channels
    return Span(*(min(max(min(channels, most), least), MAX_CHANNELS) for channels in (found.low, found.high)))


def nvls_channels(shape: GroupShape, interconnect: Interconnect, settings: Settings) -> int:
    """Channels of NVLink SHARP; 0 if it is unused: no NVSwitch that supports it, or at most two ranks per node."""
    found = interconnect.nvls[0 if shape.num_nodes == 1 else 1]
    if not settings.nvls or shape.own < 3 or not found:
        return 0
    least, most = settings.channels
    return max(min(settings.nvls_channels or found, most), least)


def p2p_channels(coll: Span, settings: Settings) -> Span:
    """Channels for send and receive: a power of two (``ncclTopoComputeP2pChannels``)."""
    least, most = settings.p2p_channels
    return Span(*(min(_power_of_two(max(min(each, most), least)), MAX_CHANNELS) for each in (coll.low, coll.high)))


def channels_per_peer(shape: GroupShape, interconnect: Interconnect, settings: Settings) -> Span:
    """Channels for send and receive to each peer. Over several nodes, more peers means fewer channels for each."""
    p2p = p2p_channels(coll_channels(shape, interconnect, settings), settings)
    if shape.num_nodes == 1:
        return Span(min(interconnect.per_peer.low, p2p.low), min(interconnect.per_peer.high, p2p.high))
    asked = settings.per_net_peer
    if asked is not None:
        return Span(*(min(_power_of_two(asked), each) for each in (p2p.low, p2p.high)))
    # 2, or one channel per 14 GB/s of NIC bandwidth: 4 with a 400 Gb/s NIC (ncclTopoGetNchannels)
    return Span(*(_shrunk(wanted, shape.size, each) for wanted, each in ((2, p2p.low), (4, p2p.high))))


def _shrunk(per_peer: int, num_ranks: int, p2p: int) -> int:
    while per_peer > 1 and per_peer * -(-num_ranks // _P2P_PER_BATCH) > p2p:
        per_peer //= 2
    return per_peer


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


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

    Attributes:
        send: To a GPU on this node.
        recv: From a GPU on this node.
        net: To or from another node. Without GPUDirect RDMA it takes nothing: the buffer is on the host.
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

    That is three small arrays per channel, and two for the communicator. With cuMem each takes at least 2 MiB: a group
    of one rank takes 388 MiB, or 10 MiB with NCCL_MAX_NCHANNELS=1 (measured: sgl-project/sglang#35538).
    """
    coll = coll_channels(shape, interconnect, settings)
    p2p = p2p_channels(coll, settings)
    arrays = (shape.size * _PEER_BYTES, (shape.size + 1 + shape.own) * 8, shape.size * 4)
    if not settings.cumem:
        return Span(*(up(max(pair) * sum(arrays)) for pair in ((coll.low, p2p.low), (coll.high, p2p.high))))
    each = sum(up(array) for array in arrays)
    found = Span(*(max(pair) * each + 2 * STEP_BYTES for pair in ((coll.low, p2p.low), (coll.high, p2p.high))))
    if nvls_channels(shape, interconnect, settings):
        found += coll * exactly(STEP_BYTES) + exactly(STEP_BYTES)  # and the credits
    return found


def ring_bytes(shape: GroupShape, interconnect: Interconnect, settings: Settings) -> Span:
    """A ring per channel: a connection to the next rank and one from the previous (``ncclTransportRingConnect``).

    Over several nodes, a ring enters and leaves each node once. It may do so at this rank in none of the channels, or
    in up to twice the rank's share of them, because NICs are close to only some of the GPUs.
    """
    if shape.size == 1:
        return NOTHING
    coll, pipe = coll_channels(shape, interconnect, settings), pipes(interconnect, settings)
    if shape.num_nodes == 1:
        return coll * (pipe.send + pipe.recv)
    if shape.is_rail:
        return coll * (pipe.net + pipe.net)
    ends = [0, min(coll.low, 2 * -(-coll.low // shape.own))]
    low = min((coll.low - each) * (pipe.send + pipe.recv).low + each * 2 * pipe.net.low for each in ends)
    ends = [0, min(coll.high, 2 * -(-coll.high // shape.own))]
    high = max((coll.high - each) * (pipe.send + pipe.recv).high + each * 2 * pipe.net.high for each in ends)
    return Span(low, high)


def tree_bytes(shape: GroupShape, interconnect: Interconnect, settings: Settings) -> Span:
    """Memory of trees in addition to rings, whose connections they share (``ncclTransportTreeConnect``).

    Within a node the tree is a chain used in both directions, which adds one direction at its ends and two in between.
    Across nodes, a node has one or three neighbours in a double binary tree, two on average.
    """
    if shape.size == 1 or (shape.num_nodes == 1 and shape.size == 2):
        return NOTHING
    coll, pipe = coll_channels(shape, interconnect, settings), pipes(interconnect, settings)
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
