"""How many channels a group's communicator opens, by NCCL's sources (2.28 to 2.30)."""

from __future__ import annotations

from fakedist.nccl.group_shape import GroupShape
from fakedist.nccl.interconnect import Interconnect
from fakedist.nccl.settings import MAX_CHANNELS, Settings
from fakedist.nccl.span import Span, exactly

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
