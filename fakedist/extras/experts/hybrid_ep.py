"""A stand-in of HybridEP (the branch hybrid-ep of DeepEP), which cannot connect to ranks that do not exist.

It follows ``deep_ep.HybridEPBuffer`` of deepseek-ai/DeepEP at :data:`COMMIT` (csrc/hybrid_ep: hybrid_ep.cu,
executor/executor.cu, buffer/intranode.cu and internode.cu, extension/allgather.cu): the memory that it takes, the
tensors that it makes, in their order, and where the host waits. Its Python, extension/permute.cu and
allocator/allocator.cu are those of the nearest commits that could be read. All kernels run on the current stream.

The other ranks are like this one, and each sends to this rank's experts what this rank sends to them itself; unless a
load of experts draws what each rank sends.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import empty, zeros
from torch import tensor as new_tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fakedist.extras.experts.deep_ep_sizes import Layout, rounded_up
from fakedist.extras.experts.dispatchers import OutsideMemory, layout_of, tensor_at
from fakedist.world.arrivals import Arrivals
from fakedist.world.process_group import RankGroup
from fakedist.world.reroute import Device

COMMIT = "2540b8abfc7551597b259c05132ef1d995f0885f"
#: The least tokens of a buffer, and what they are a multiple of.
_LEAST_TOKENS, _TOKENS_STEP = 512, 16
#: Blocks of permute_processing_kernel (extension/permute.cu).
_BLOCK = 256
#: Bytes of a slot of a queue, and of a queue's page (doca_gpunetio_high_level.cpp of DOCA GPUNetIO).
_QUEUE_ENTRY, _PAGE = 64, 4096
#: From here on an allocation has granules of its own.
_SHARES = 1 << 20
#: Bytes that a rank sends the others: of its buffers, and of all ranks' memory before (allocator.cuh's MemHandle).
_HANDLE_BYTES = 512


@dataclass
class BufferConfig:
    """The sizes that a buffer follows, as HybridEP names them."""

    hidden_dim: int
    max_num_of_tokens_per_rank: int
    num_of_experts_per_rank: int
    num_of_ranks_per_node: int
    num_of_nodes: int
    num_of_blocks_dispatch_api: int
    num_of_blocks_combine_api: int
    num_of_blocks_preprocessing_api: int = 108
    num_of_tokens_per_chunk_dispatch_api: int = 128
    num_of_tokens_per_chunk_combine_api: int = 128
    use_fp8: bool = False

    def is_valid(self) -> bool:
        """Whether its kernels run."""
        return (
            self.num_of_experts_per_rank * self.num_of_ranks_per_node % 4 == 0 and self.num_of_ranks_per_node % 2 == 0
        )

    @property
    def max_num_of_tokens(self) -> int:
        """Tokens that a rank may receive."""
        return self.max_num_of_tokens_per_rank * self.num_of_ranks_per_node * self.num_of_nodes

    def shared(self, local_rank: int, *, is_one_buffer: bool) -> list[int]:
        """Bytes of each buffer that ranks of a node map: tokens and their probabilities first, then all others.

        ``is_one_buffer``: dispatch and combine have these in common.
        """
        slots, ranks = self.max_num_of_tokens, self.num_of_ranks_per_node * self.num_of_nodes
        tokens, probs = (
            slots * self.hidden_dim * 2,
            slots * self.num_of_experts_per_rank * self.num_of_ranks_per_node * 4,
        )
        own = [] if is_one_buffer else [tokens // 2 if self.use_fp8 else tokens, probs]
        flags = [] if local_rank else [4, 4] if self.num_of_nodes > 1 else [4, 4, 8]
        test, routing = 128 * 4, self.num_of_experts_per_rank * ranks * slots
        return [tokens, probs, *own, slots * (self.hidden_dim // 128) * 4, *flags, test, routing]

    def between_nodes(self) -> list[int]:
        """Bytes of each buffer that the network reads and writes, then of each queue pair and its completions."""
        others, tokens = self.num_of_nodes - 1, self.max_num_of_tokens_per_rank
        if not others:
            return []
        token, scales = tokens * self.hidden_dim * 2, tokens * (self.hidden_dim // 128) * 4
        probs = tokens * self.num_of_experts_per_rank * self.num_of_ranks_per_node * 4
        dispatched = [token, probs * self.num_of_nodes, scales, others * token, others * probs, others * scales]
        combined = [others * token, others * probs] * 2
        flags, queues = list[int](), list[int]()
        for chunk, blocks, per_token in (
            (self.num_of_tokens_per_chunk_dispatch_api, self.num_of_blocks_dispatch_api, 3),
            (self.num_of_tokens_per_chunk_combine_api, self.num_of_blocks_combine_api, 2),
        ):
            flags += [-(-tokens // chunk) * others * 8] * 2
            ring = (1 << (per_token * tokens).bit_length()) * _QUEUE_ENTRY  # per_token * tokens + 1 entries, or more
            queues += [ring, ring + _PAGE] * (others * blocks)
        return [*dispatched, *combined, *flags, *queues]

    def small(self) -> int:
        """Bytes of what else it takes."""
        return self.num_of_blocks_preprocessing_api * self.num_of_ranks_per_node * 8 + _PAGE


class _Exchange(NamedTuple):
    """The exchange that a handle stands for."""

    layout: Layout
    config: BufferConfig


_exchanges = WeakTensorKeyDictionary()  # by ``sparse_to_dense_map``, which is in every handle


class HybridEPBuffer:
    """``deep_ep.HybridEPBuffer``. Arguments and results are HybridEP's."""

    device: Device
    used: Callable[[], object]

    def __init__(
        self,
        group: RankGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        *,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
    ) -> None:
        type(self).used()
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        here = group.ranks[self.rank] // self.device.gpus_per_node
        detected = sum(rank // self.device.gpus_per_node == here for rank in group.ranks)
        per_domain = int(os.getenv("NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN", detected))
        assert self.group_size % per_domain == 0, f"{self.group_size} ranks are not whole domains of {per_domain}"
        self.num_of_hybrid_ep_ranks_per_nvlink_domain = per_domain
        self.local_rank, self.node_rank = self.rank % per_domain, self.rank // per_domain
        self.num_of_nodes, self.use_fp8 = self.group_size // per_domain, use_fp8
        least_sms = 32 if self.num_of_nodes == 1 else 8
        self.config = BufferConfig(
            hidden_dim,
            max(max_num_of_tokens_per_rank, _LEAST_TOKENS),
            num_local_experts,
            per_domain,
            self.num_of_nodes,
            num_sms_dispatch_api or least_sms,
            num_sms_combine_api or least_sms,
            num_sms_preprocessing_api or BufferConfig.num_of_blocks_preprocessing_api,
            int(os.getenv("NUM_OF_TOKENS_PER_CHUNK_DISPATCH_API", "128")),
            int(os.getenv("NUM_OF_TOKENS_PER_CHUNK_COMBINE_API", "128")),
            use_fp8=use_fp8,
        )
        if not self.config.is_valid():
            raise ValueError("The buffer config is not valid.")
        self._is_one_buffer = use_shared_buffer
        self._allocate()

    def _allocate(self) -> None:
        """Take the memory, and send its handles to the other ranks."""
        self.runtime = memory = OutsideMemory(self.device, "HybridEP")
        shared = self.config.shared(self.local_rank, is_one_buffer=self._is_one_buffer)
        self._tokens, self._probs = (memory.take("user buffers", num_bytes) for num_bytes in shared[:2])
        for num_bytes in shared[2:]:
            memory.take("user buffers", num_bytes)
        own = [self.config.small(), *self.config.between_nodes()]  # allocations of less than 1 MiB share granules
        for num_bytes in (sum(each for each in own if each < _SHARES), *(each for each in own if each >= _SHARES)):
            memory.take("extensions", num_bytes)
        mine = zeros(_HANDLE_BYTES, dtype=torch.uint8, device="cuda")
        for _ in range(4 if self.num_of_nodes > 1 else 3):  # of all memory, of dispatch's, of combine's; queue pairs
            dist.all_gather([torch.empty_like(mine) for _ in range(self.group_size)], mine, self.group)

    def empty_jit_cache(self) -> None:
        """Do nothing: no kernels are compiled."""

    def update_template_config(
        self,
        hidden_dim: int | None = None,
        num_of_tokens_per_rank: int | None = None,
        num_local_experts: int | None = None,
        use_fp8: bool | None = None,
    ) -> BufferConfig:
        """The configuration of a call. A buffer that is too small for it is freed and taken anew."""
        before = self.config
        tokens = rounded_up(num_of_tokens_per_rank or before.max_num_of_tokens_per_rank, _TOKENS_STEP)
        experts = num_local_experts or before.num_of_experts_per_rank
        hidden = hidden_dim or before.hidden_dim
        self.config = replace(
            before,
            hidden_dim=max(hidden, before.hidden_dim),
            max_num_of_tokens_per_rank=max(tokens, before.max_num_of_tokens_per_rank),
            num_of_experts_per_rank=max(experts, before.num_of_experts_per_rank),
        )
        if self.config != before:
            self.runtime.free()
            self._allocate()
        is_fp8 = self.use_fp8 if use_fp8 is None else use_fp8
        return replace(self.config, hidden_dim=hidden, num_of_experts_per_rank=experts, use_fp8=is_fp8)

    # ---- without permutation

    def dispatch(
        self,
        hidden: torch.Tensor,
        scaling_factor: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        num_of_experts: int | None = None,
        *,
        probs: torch.Tensor | None = None,
        routing_map: torch.Tensor | None = None,
        num_dispatched_tokens_tensor: torch.Tensor | None = None,
        num_dispatched_tokens: int | None = None,
        handle: tuple[Any, ...] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, tuple[Any, ...]]:
        """Send tokens to the ranks of their experts; with a handle, those of an earlier call again."""
        choices = routing_map
        if routing_map is None and topk_idx is not None:
            assert num_of_experts is not None, "The number of experts should be provided on index-based routing."
            choices = topk_idx
            routing_map, probs = _map(topk_idx, topk_weights, num_of_experts)
        if handle is None:
            assert routing_map is not None, "The handle and routing_map should not be both None"
            assert choices is not None
            config = self.update_template_config(hidden.shape[1], len(hidden))
            handle = (*self._preprocessed(config, routing_map, choices, on_device=False), len(hidden), config)
        if num_dispatched_tokens is None:
            torch.cuda.current_stream().synchronize()
        self._copied_to_network(hidden, scaling_factor, probs)
        exchange: _Exchange = _exchanges[handle[0]]
        sent = [tensor for tensor in (hidden, scaling_factor, probs) if tensor is not None]
        buffers = self._dispatched(exchange, hidden, scaling_factor, probs)
        number = exchange.layout.num_received
        got = [empty(number, *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device) for tensor in buffers]
        self._moved("hybrid_ep_copy", buffers, got, sent)
        results = iter(got)
        tokens, scales, probs = (None if each is None else next(results) for each in (hidden, scaling_factor, probs))
        assert tokens is not None
        return tokens, probs, scales, handle

    def combine(
        self, hidden: torch.Tensor, probs: torch.Tensor | None = None, handle: tuple[Any, ...] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Send tokens back to the ranks that they came from, which add them up."""
        assert handle is not None, "The handle is necessary for combine."
        return self._combined("hybrid_ep_copy", hidden, probs, handle[0], handle[5])

    # ---- with permutation

    def dispatch_with_permute(
        self,
        *,
        hidden: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: torch.Tensor | None = None,
        probs: torch.Tensor | None = None,
        scaling_factor: torch.Tensor | None = None,
        num_permuted_tokens: int | None = None,
        pad_multiple: int | None = None,
        handle: tuple[Any, ...] | None = None,
        non_blocking: bool = False,
        num_dispatched_tokens: int | None = None,
        use_host_meta: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, tuple[Any, ...]]:
        """Send tokens to the ranks of their experts, which get them expert by expert."""
        if use_host_meta is not None:
            non_blocking = not use_host_meta
        choices = routing_map
        if routing_map is None and topk_idx is not None:
            assert num_of_experts is not None, "The number of experts should be provided on index-based routing."
            choices = topk_idx
            routing_map, probs = _map(topk_idx, topk_weights, num_of_experts)
        assert not non_blocking or num_permuted_tokens is not None, "non_blocking needs num_permuted_tokens"
        per_expert = None
        if handle is None:
            assert routing_map is not None, "The handle and routing_map should not be both None"
            assert choices is not None
            config = self.update_template_config(hidden.shape[1], len(hidden), num_of_experts_per_rank, use_fp8)
            maps = self._preprocessed(config, routing_map, choices, on_device=non_blocking)
            self._copied_to_network(hidden, scaling_factor, probs)
            rows, per_expert, overflow = self._rows(maps[0], pad_multiple or 0, on_device=non_blocking)
            handle = (*maps, rows, len(hidden), config, overflow)
        else:
            if handle[6] != len(hidden):
                warnings.warn("This handle could be invalid.", stacklevel=2)
            self._copied_to_network(hidden, scaling_factor, probs)
        exchange: _Exchange = _exchanges[handle[0]]
        number = (
            sum(_padded(exchange.layout, pad_multiple or 0)) if num_permuted_tokens is None else num_permuted_tokens
        )
        sent = [tensor for tensor in (hidden, scaling_factor, probs) if tensor is not None]
        buffers = self._dispatched(exchange, hidden, scaling_factor, probs)
        tokens = hidden.new_empty(int(number), hidden.shape[1])
        scales = None if scaling_factor is None else scaling_factor.new_empty(int(number), scaling_factor.shape[1])
        weights = None if probs is None else probs.new_empty(int(number))
        self._moved("hybrid_ep_permute", buffers, [got for got in (tokens, scales, weights) if got is not None], sent)
        return tokens, weights, scales, per_expert, handle

    def combine_with_unpermute(
        self,
        *,
        hidden: torch.Tensor,
        probs: torch.Tensor | None = None,
        handle: tuple[Any, ...] | None = None,
        pad_multiple: int | None = None,
        num_dispatched_tokens: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Add up each token's results, and send them back to the ranks that they came from."""
        assert handle is not None, "The handle is necessary in the combine pass."
        return self._combined("hybrid_ep_unpermute", hidden, probs, handle[0], handle[6])

    # ---- internals

    def _preprocessed(
        self, config: BufferConfig, routing_map: torch.Tensor, choices: torch.Tensor, *, on_device: bool
    ) -> tuple[torch.Tensor, ...]:
        """Gather what all ranks route, and make the maps of a handle."""
        tokens, num_experts = routing_map.shape
        nodes, per_node = config.num_of_nodes, config.num_of_ranks_per_node
        every = empty(tokens * self.group_size, num_experts, dtype=torch.bool, device=routing_map.device)
        dist.all_gather_into_tensor(every, routing_map.contiguous(), self.group)
        layout = layout_of(self.device, choices, num_experts, self.group, per_node)
        maps = [
            self._integers(tokens * nodes, per_node),
            self._flags(rounded_up(tokens, _TOKENS_STEP), nodes),
            self._flags(tokens, nodes - 1),
            self._number(1, torch.int32, on_device=on_device),
            self._flags(tokens * self.group_size, config.num_of_experts_per_rank),
        ]
        self._found([every], [maps[0], maps[1], maps[4]], maps[3], [layout.num_received])
        _exchanges[maps[0]] = _Exchange(layout, config)
        return tuple(maps)

    def _rows(
        self, sparse_to_dense_map: torch.Tensor, pad_multiple: int, *, on_device: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Find where each token goes among those of the experts; the host waits for its copy of their numbers."""
        exchange: _Exchange = _exchanges[sparse_to_dense_map]
        experts, slots = exchange.config.num_of_experts_per_rank, self.config.max_num_of_tokens
        rows = self._integers(slots + pad_multiple, experts)
        per_expert = self._number(experts, torch.int64, on_device=on_device)
        overflow = self._integers(1)
        blocks = -(-slots // _BLOCK)
        work = [self._integers(blocks, experts), self._integers(-(-blocks // _BLOCK), experts)]
        self._found([sparse_to_dense_map], [rows, *work], per_expert, _padded(exchange.layout, pad_multiple))
        if not on_device:
            torch.cuda.current_stream().synchronize()
        return rows, per_expert, overflow

    def _dispatched(
        self,
        exchange: _Exchange,
        hidden: torch.Tensor,
        scaling_factor: torch.Tensor | None,
        probs: torch.Tensor | None,
    ) -> list[torch.Tensor]:
        """Send tokens. Returns what of the buffer they fill here: tokens, scales, probabilities."""
        layout, config = exchange
        number, width = layout.num_received, hidden.shape[1] * hidden.element_size()
        filled = [tensor_at(self._tokens, number * width, hidden.dtype).view(number, hidden.shape[1])]
        token_bytes = width
        if scaling_factor is not None:
            filled.append(scaling_factor.new_empty(0).expand(0, scaling_factor.shape[1]))
            token_bytes += scaling_factor.shape[1] * 4
        if probs is not None:
            columns = config.num_of_experts_per_rank * config.num_of_ranks_per_node
            filled.append(tensor_at(self._probs, number * columns * 4, torch.float32).view(number, columns))
            token_bytes += columns * 4
        operation = f"hybrid_ep_dispatch_{config.num_of_blocks_dispatch_api}sms"
        sent = [tensor for tensor in (hidden, scaling_factor, probs) if tensor is not None]
        self.group.dispatched(operation, sent, filled, _nothing, layout.exchanged(token_bytes))
        return filled

    def _combined(
        self,
        move: str,
        hidden: torch.Tensor,
        probs: torch.Tensor | None,
        sparse_to_dense_map: torch.Tensor,
        tokens: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        layout, config = _exchanges[sparse_to_dense_map]
        number, columns = layout.num_received, config.num_of_experts_per_rank * config.num_of_ranks_per_node
        combined = hidden.new_empty(tokens, hidden.shape[1])
        weights = None if probs is None else probs.new_empty(tokens, columns * config.num_of_nodes)
        width = hidden.shape[1] * hidden.element_size()
        buffers = [tensor_at(self._tokens, number * width, hidden.dtype).view(number, hidden.shape[1])]
        token_bytes = width
        if probs is not None:
            buffers.append(tensor_at(self._probs, number * columns * 4, torch.float32).view(number, columns))
            token_bytes += columns * 4
        given = [tensor for tensor in (hidden, probs) if tensor is not None]
        self._moved(move, given, buffers, [])
        results = [tensor for tensor in (combined, weights) if tensor is not None]

        def arrive(arrivals: Arrivals) -> None:
            for output, mine in zip(results, given, strict=True):
                arrivals.spread([output], mine)

        operation = f"hybrid_ep_combine_{config.num_of_blocks_combine_api}sms"
        self.group.dispatched(operation, buffers, results, arrive, layout.exchanged(token_bytes))
        return combined, weights

    def _copied_to_network(self, *sent: torch.Tensor | None) -> None:
        """Copy what is sent to the memory that the network reads, with several nodes."""
        if self.num_of_nodes > 1:
            tensors = [tensor for tensor in sent if tensor is not None]
            self._moved("hybrid_ep_copy", tensors, tensors, [])

    def _found(
        self, read: list[torch.Tensor], written: list[torch.Tensor], numbers: torch.Tensor, values: Sequence[int]
    ) -> None:
        """A kernel that counts tokens."""

        def arrive(arrivals: Arrivals) -> None:
            arrivals.put(numbers, new_tensor(values, dtype=numbers.dtype))

        self.group.dispatched("hybrid_ep_layout", read, written, arrive)

    def _moved(
        self,
        operation: str,
        read: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
    ) -> None:
        """A kernel that moves this rank's own memory; ``values`` are those that what is written gets."""

        def arrive(arrivals: Arrivals) -> None:
            for output, mine in zip(written, values, strict=True):
                arrivals.spread([output], mine)

        self.group.dispatched(operation, list(read), list(written), arrive if values else _nothing)

    def _number(self, count: int, dtype: torch.dtype, *, on_device: bool) -> torch.Tensor:
        """Numbers on the device, or in pinned memory."""
        device = torch.device("cuda", torch.cuda.current_device())
        return empty(count, dtype=dtype, device=device) if on_device else empty(count, dtype=dtype, pin_memory=True)

    def _integers(self, *size: int) -> torch.Tensor:
        return empty(*size, dtype=torch.int32, device=torch.device("cuda", torch.cuda.current_device()))

    def _flags(self, *size: int) -> torch.Tensor:
        return empty(*size, dtype=torch.bool, device=torch.device("cuda", torch.cuda.current_device()))


def _nothing(_: Arrivals) -> None:
    """Write nothing: no script reads it."""


def _padded(layout: Layout, pad_multiple: int) -> list[int]:
    return [rounded_up(int(count), max(pad_multiple, 1)) for count in layout.received]


def _map(
    topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, num_of_experts: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The mask of experts, and their weights (``indices_to_map``)."""
    where, shape = topk_idx.to(torch.int64), (len(topk_idx), num_of_experts)
    mask = zeros(shape, device="cuda", dtype=torch.bool).scatter(1, where, 1).bool()
    if topk_weights is None:
        return mask, None
    return mask, zeros(shape, device="cuda", dtype=torch.float32).scatter(1, where, topk_weights)
