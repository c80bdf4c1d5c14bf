"""How large DeepEP's buffers are, and how many tokens go where (deepseek-ai/DeepEP, csrc/legacy/config.hpp)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

#: Ranks that DeepEP takes to share NVLink, whatever the machine.
NODE = 8
ALIGNMENT = 128
SOURCE_META_BYTES = 8
_MAX_TOPK = _MAX_SCALES = 128

Integers = npt.NDArray[np.int64]


@dataclass
class Config:
    """SMs, and tokens in flight, of a normal kernel."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        chunk = self.num_max_rdma_chunked_send_tokens
        self.num_max_rdma_chunked_recv_tokens = rounded_up(self.num_max_rdma_chunked_recv_tokens, chunk)

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of the buffer for ranks of a node, for tokens of ``hidden_bytes``."""
        channels = self.num_sms // 2 * min(num_ranks, NODE)
        slots = channels * self.num_max_nvl_chunked_recv_tokens
        token = hidden_bytes + SOURCE_META_BYTES + _MAX_TOPK * (8 + 4) + _MAX_SCALES * 4
        return rounded_up(channels * (2 * max(num_ranks // NODE, 1) + 3) * 4 + slots * token, ALIGNMENT)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of the buffer for other nodes; 0 in one node."""
        if num_ranks <= NODE:
            return 0
        channels = self.num_sms // 2 * (num_ranks // NODE)
        slots = channels * self.num_max_rdma_chunked_recv_tokens * 2
        token = hidden_bytes + SOURCE_META_BYTES + _MAX_TOPK * (8 + 4) + _MAX_SCALES * 4 + 16
        return rounded_up(channels * (NODE * 2 + 2) * 2 * 4 + slots * token, ALIGNMENT)


#: Tokens in flight by ranks: of dispatch, of combine (``get_dispatch_config``, ``get_combine_config``).
CONFIGS = {
    2: ((24, 256, 6, 128), (10, 256, 6, 128)),
    4: ((6, 256, 6, 128), (9, 256, 6, 128)),
    8: ((6, 256, 6, 128), (4, 256, 6, 128)),
    16: ((36, 288, 20, 128), (4, 288, 12, 128)),
    24: ((32, 288, 8, 128), (1, 288, 8, 128)),
    32: ((32, 288, 8, 128), (1, 288, 8, 128)),
    48: ((32, 288, 8, 128), (1, 288, 8, 128)),
    64: ((32, 288, 8, 128), (1, 288, 8, 128)),
    96: ((20, 480, 12, 128), (1, 480, 8, 128)),
    128: ((20, 560, 12, 128), (1, 560, 8, 128)),
    144: ((32, 720, 12, 128), (2, 720, 8, 128)),
    160: ((28, 720, 12, 128), (2, 720, 8, 128)),
}


def low_latency_bytes(num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """Bytes of the buffer of low-latency kernels (``get_low_latency_rdma_size_hint``)."""
    tokens, scales = num_max_dispatch_tokens_per_rank, hidden // 128
    sent = 16 + max(2 * hidden, hidden + 4 * scales)
    combined = 4 * scales + 2 * hidden
    sending = max(tokens * sent, num_experts * tokens * combined)
    receiving = num_experts * tokens * max(sent, combined)
    whole = 2 * (sending + receiving + rounded_up(num_experts * 4, ALIGNMENT))
    return (whole + ALIGNMENT) // ALIGNMENT * ALIGNMENT


def rounded_up(number: int, step: int) -> int:
    """The next multiple of a step."""
    return -(-number // step) * step


class Layout:
    """Where tokens go, from the experts of each of this rank's on the host ([tokens, top-k]; -1: none).

    ``every`` has those of each rank; None: all send what this one does. ``node``: ranks that share NVLink.

    Attributes:
        in_rank: Whether each token goes to each rank, [tokens, ranks].
        per_rank, per_node, per_expert: Tokens that go there.
        mine: The experts of the tokens that go to this rank, as it numbers its own; -1 for others.
        num_received: Tokens that this rank gets from all ranks.
        num_received_by_node: Tokens that this rank gets from its peers in other nodes, or passes on for them.
        received: Tokens that each of this rank's experts gets.
        received_experts: The experts of all tokens that come, as ``mine``; None: those of ``mine`` from each rank.
    """

    def __init__(
        self,
        experts: Integers,
        num_experts: int,
        rank: int,
        num_ranks: int,
        every: Sequence[Integers] | None = None,
        *,
        node: int = NODE,
    ) -> None:
        per_rank, first = num_experts // num_ranks, rank * (num_experts // num_ranks)
        self.in_rank = _in_rank(experts, per_rank, num_ranks)
        num_nodes = max(num_ranks // node, 1)
        in_node = self.in_rank.reshape(len(experts), num_nodes, -1).any(axis=2)
        self.per_rank = self.in_rank.sum(axis=0, dtype=np.int64)
        self.per_node = in_node.sum(axis=0, dtype=np.int64)
        self.per_expert = np.bincount(experts[experts >= 0], minlength=num_experts)
        self.mine = _own(experts[self.in_rank[:, rank]], first, per_rank)
        self.received = num_ranks * self.per_expert[first : first + per_rank]
        self.num_received = num_ranks * int(self.per_rank[rank])
        self.num_received_by_node = num_nodes * int(self.per_node[rank // node])
        self.received_experts: Integers | None = None
        if every is not None:
            goes = [_in_rank(theirs, per_rank, num_ranks) for theirs in every]
            come = [theirs[to[:, rank]] for theirs, to in zip(every, goes, strict=True)]
            self.received_experts = _own(np.concatenate(come), first, per_rank)
            self.num_received = len(self.received_experts)
            self.received = np.bincount(self.received_experts[self.received_experts >= 0], minlength=per_rank)
            here = slice(rank // node * node, rank // node * node + min(node, num_ranks))
            self.num_received_by_node = sum(int(to[:, here].any(axis=1).sum()) for to in goes[rank % node :: node])
        # Over nodes, a token crosses the network once for each node.
        parts, own_part = (self.per_node, rank // node) if num_nodes > 1 else (self.per_rank, rank)
        self._sent = _most_and_all(np.delete(parts, own_part))
        self._sent_by_experts = _most_and_all(np.delete(self.per_expert.reshape(num_ranks, -1).sum(axis=1), rank))

    def exchanged(self, token_bytes: int) -> tuple[int, int]:
        """Bytes to or from other ranks, or over nodes other nodes: the largest part and all."""
        return self._sent[0] * token_bytes, self._sent[1] * token_bytes

    def exchanged_by_experts(self, token_bytes: int) -> tuple[int, int]:
        """Like `exchanged`, for low-latency kernels, which send a token to each of its experts."""
        return self._sent_by_experts[0] * token_bytes, self._sent_by_experts[1] * token_bytes


def _in_rank(experts: Integers, per_rank: int, num_ranks: int) -> npt.NDArray[np.bool_]:
    goes = np.zeros((len(experts), num_ranks + 1), dtype=bool)
    goes[np.arange(len(experts))[:, None], np.where(experts >= 0, experts // per_rank, num_ranks)] = True
    return goes[:, :num_ranks]


def _own(experts: Integers, first: int, per_rank: int) -> Integers:
    own = experts - first
    return np.where((own >= 0) & (own < per_rank), own, -1)


def _most_and_all(parts: Integers) -> tuple[int, int]:
    return int(parts.max(initial=0)), int(parts.sum())
