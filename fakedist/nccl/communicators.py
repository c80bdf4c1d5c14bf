"""Memory of each communicator, from the calls made on its group."""

from __future__ import annotations

from dataclasses import dataclass

from fakedist.nccl.connections import (
    channel_bytes,
    channels_per_peer,
    coll_channels,
    nvls_bytes,
    nvls_channels,
    pat_bytes,
    pipes,
    pool_bytes,
    ring_bytes,
    tree_bytes,
)
from fakedist.nccl.group_shape import GroupShape
from fakedist.nccl.interconnect import Interconnect
from fakedist.nccl.settings import Settings
from fakedist.nccl.span import NOTHING, Span, exactly, total

_PEER_OPERATIONS = ("send", "recv")
_TO_ALL = ("all_to_all",)
_ROOTED = ("gather", "scatter")
#: Collectives that trees and NVLink SHARP can serve too. All others run on rings.
_TREES = ("all_reduce", "barrier")
_HALVES = ("all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Usage:
    """The calls made on a group.

    Attributes:
        operations: Names of the operations.
        send_local: Number of ranks on this node that the rank sent to.
        recv_local: Number of ranks on this node that it received from.
        send_remote: Number of ranks on other nodes that it sent to.
        recv_remote: Number of ranks on other nodes that it received from.
        is_bound: Whether the group was bound to its device, and so had a communicator before any call.
    """

    operations: frozenset[str] = frozenset()
    send_local: int = 0
    recv_local: int = 0
    send_remote: int = 0
    recv_remote: int = 0
    is_bound: bool = False

    def does(self, *prefixes: str) -> bool:
        """Whether any operation's name starts with one of these prefixes."""
        return any(operation.startswith(prefixes) for operation in self.operations)


@dataclass(frozen=True)
class CommunicatorMemory:
    """The memory of one communicator.

    Attributes:
        channels: Channels for collectives.
        parts: Bytes by part: channels, rings, trees, NVLink SHARP, send and receive. Parts without memory are left out.
    """

    channels: Span
    parts: dict[str, Span]

    @property
    def bytes(self) -> Span:
        """Bytes of all parts."""
        return total(self.parts.values())


def communicator_memory(
    shape: GroupShape, usage: Usage, interconnect: Interconnect, settings: Settings
) -> CommunicatorMemory | None:
    """The memory of a group's communicator; None if the group has none.

    Args:
        shape: Where the group's ranks are.
        usage: The calls made on the group.
        interconnect: The interconnect of its GPUs.
        settings: NCCL's settings.
    """
    if not usage.operations and not usage.is_bound:
        return None
    parts = {"channels": channel_bytes(shape, interconnect, settings)}
    parts |= (
        _eager(shape, interconnect, settings)
        if not settings.lazy
        else _collectives(shape, usage, interconnect, settings)
    )
    parts |= _peers(shape, usage, interconnect, settings)
    if "pairs" in parts and all(operation in _PEER_OPERATIONS for operation in usage.operations):
        least = min(parts["channels"].low, channel_bytes(_pair(usage), interconnect, settings).low)
        parts["channels"] = Span(least, parts["channels"].high)  # if no send was batched, only the pairs have channels
    return CommunicatorMemory(
        coll_channels(shape, interconnect, settings), {name: each for name, each in parts.items() if each.high}
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


def _collectives(shape: GroupShape, usage: Usage, interconnect: Interconnect, settings: Settings) -> dict[str, Span]:
    """Parts when an algorithm connects on first use. NCCL chooses by size: at least one algorithm, perhaps all."""
    allowed = settings.algorithms or frozenset({"ring"})
    ring, tree = ring_bytes(shape, interconnect, settings), tree_bytes(shape, interconnect, settings)
    is_collective = bool(usage.operations) and any(
        not operation.startswith((*_PEER_OPERATIONS, *_TO_ALL, *_ROOTED)) for operation in usage.operations
    )
    if not is_collective or shape.size == 1:
        return {}
    found: dict[str, Span] = {}
    alone: list[int] = []
    halves_by_nvls = shape.num_nodes == 1 and usage.does(*_HALVES)
    nvls = "nvls" in allowed if shape.num_nodes == 1 else "nvlstree" in allowed
    if nvls and nvls_channels(shape, interconnect, settings) and (usage.does(*_TREES) or halves_by_nvls):
        found["NVLink SHARP"] = nvls_bytes(shape, interconnect, settings)
        alone.append(found["NVLink SHARP"].low)
    if usage.does(*_TREES) and "tree" in allowed:
        # Without rings, a tree also has the connections that it would share with them.
        found["trees"] = tree if "ring" in allowed else ring + tree
        alone.append(ring.low)  # each rank has at least one neighbour in a chain
    if usage.does(*_HALVES) and "pat" in allowed and shape.is_rail:
        found["PAT"] = pat_bytes(shape, interconnect, settings)
    if "ring" in allowed or not found or _needs_rings(usage):
        found["rings"] = ring
        alone.append(ring.low)
    least = ring.low if _needs_rings(usage) else min(alone)
    return _at_least(found, least)


def _needs_rings(usage: Usage) -> bool:
    """Whether there was a call that only rings serve: broadcast, reduce."""
    other = (*_TREES, *_HALVES, *_PEER_OPERATIONS, *_TO_ALL, *_ROOTED)
    return any(not operation.startswith(other) for operation in usage.operations)


def _at_least(found: dict[str, Span], least: int) -> dict[str, Span]:
    """Spans of parts that may each be absent but together take ``least``, which the first parts are charged with."""
    order = ("rings", "trees", "NVLink SHARP", "PAT")
    spans: dict[str, Span] = {}
    for name in order:
        if name in found:
            taken = min(least, found[name].high)
            spans[name] = Span(taken, found[name].high)
            least -= taken
    return spans


def _peers(shape: GroupShape, usage: Usage, interconnect: Interconnect, settings: Settings) -> dict[str, Span]:
    """Send, receive and what is built on them: a connection per peer and channel within the node, a pool beyond it."""
    sends = [usage.send_local, usage.send_remote]
    recvs = [usage.recv_local, usage.recv_remote]
    everybody = usage.does(*_TO_ALL)
    if everybody:
        sends = recvs = [shape.own - 1, shape.size - shape.own]
    pipe, per_peer = pipes(interconnect, settings), channels_per_peer(shape, interconnect, settings)
    within = per_peer * (exactly(sends[0]) * pipe.send + exactly(recvs[0]) * pipe.recv)
    if usage.does(*_ROOTED):  # the root is not recorded: it connects to every rank, the others only to it
        within += Span(0, (per_peer * (pipe.send + pipe.recv)).high * (shape.own - 1))
    pool, over = pool_bytes(shape, interconnect, settings), 0
    if shape.num_nodes > 1:
        over = (shape.own if everybody else 1) * bool(sends[1]) + bool(recvs[1])  # PXN sends for the whole node
        over += 2 * usage.does(*_ROOTED)
    found = {"send and receive": within, "network pool": Span(0, over * pool.high)}
    unbatched = usage.send_local + usage.recv_local + usage.send_remote + usage.recv_remote
    if unbatched and not usage.is_bound:  # an unbatched send has a communicator for the pair
        pairs = max(usage.send_local + usage.send_remote, usage.recv_local + usage.recv_remote)
        found["pairs"] = Span(0, pairs * channel_bytes(_pair(usage), interconnect, settings).high)
    return {name: each for name, each in found.items() if each != NOTHING}


def _pair(usage: Usage) -> GroupShape:
    """The shape of the two ranks of a send or receive."""
    return GroupShape(2, 1, 2) if usage.send_local + usage.recv_local else GroupShape(2, 2, 1)
