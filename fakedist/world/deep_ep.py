"""A stand-in of DeepEP's package ``deep_ep``, which cannot connect to ranks that do not exist.

It follows ``Buffer`` of deepseek-ai/DeepEP at :data:`COMMIT` (csrc/legacy/buffer.hpp, config.hpp and
deep_ep/buffers/legacy.py): what it takes, what it returns, streams, events, and where the host waits. The sizes of
buffers are those that the built extension of sgl-deep-ep 0.1.2.post1 gives.

The other ranks are like this one: each sends to this rank's experts what this rank sends to them itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import empty
from torch.utils.weak import WeakTensorKeyDictionary

from fakedist.errors import WorldError
from fakedist.rundir import notes
from fakedist.rundir.notes import Note
from fakedist.world.arrivals import Arrivals
from fakedist.world.process_group import RankGroup

COMMIT = "5996f70a8be8d2e6737fede640a541366801dda7"
#: Ranks that DeepEP takes to share NVLink, whatever the machine.
_NODE = 8
_WORKSPACE_BYTES = 32 << 20
_ALIGNMENT = 128
_MAX_TOPK = _MAX_SCALES = 128
_SOURCE_META_BYTES = 8
#: Where a buffer's barriers are: 8 signals, 8 pointers to buffers and 8 to signals.
_SIGNAL_BYTES = _NODE * (4 + 8 + 8)
#: NVSHMEM's heap grows in these steps (NVSHMEM_CUMEM_GRANULARITY). Its own part is at least 256 MiB, as DeepEP says.
_HEAP_STEP, _HEAP_OWN_BYTES = 1 << 29, 1 << 28

Integers = npt.NDArray[np.int64]


class Device(NamedTuple):
    """What the virtual GPU does for the stand-in.

    ``take(owner, bytes)`` returns the address of memory outside the caching allocator, 0 if none is left; ``free``
    frees it.
    ``routes(indices, num_experts)`` returns the experts of each token on the host, -1 for none, and launches nothing.
    """

    take: Callable[[str, int], int]
    free: Callable[[int], None]
    routes: Callable[[torch.Tensor, int], torch.Tensor]


# ---- sizes


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
        self.num_max_rdma_chunked_recv_tokens = _up(self.num_max_rdma_chunked_recv_tokens, chunk)

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of the buffer for ranks of a node, for tokens of ``hidden_bytes``."""
        channels = self.num_sms // 2 * min(num_ranks, _NODE)
        slots = channels * self.num_max_nvl_chunked_recv_tokens
        token = hidden_bytes + _SOURCE_META_BYTES + _MAX_TOPK * (8 + 4) + _MAX_SCALES * 4
        return _up(channels * (2 * max(num_ranks // _NODE, 1) + 3) * 4 + slots * token, _ALIGNMENT)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of the buffer for other nodes; 0 in one node."""
        if num_ranks <= _NODE:
            return 0
        channels = self.num_sms // 2 * (num_ranks // _NODE)
        slots = channels * self.num_max_rdma_chunked_recv_tokens * 2
        token = hidden_bytes + _SOURCE_META_BYTES + _MAX_TOPK * (8 + 4) + _MAX_SCALES * 4 + 16
        return _up(channels * (_NODE * 2 + 2) * 2 * 4 + slots * token, _ALIGNMENT)


#: Tokens in flight of dispatch and combine, by ranks (``get_dispatch_config``, ``get_combine_config``).
_DISPATCH = {
    **{2: (24, 256, 6, 128), 4: (6, 256, 6, 128), 8: (6, 256, 6, 128), 16: (36, 288, 20, 128)},
    **{24: (32, 288, 8, 128), 32: (32, 288, 8, 128), 48: (32, 288, 8, 128), 64: (32, 288, 8, 128)},
    **{96: (20, 480, 12, 128), 128: (20, 560, 12, 128), 144: (32, 720, 12, 128), 160: (28, 720, 12, 128)},
}
_COMBINE = {
    **{2: (10, 256, 6, 128), 4: (9, 256, 6, 128), 8: (4, 256, 6, 128), 16: (4, 288, 12, 128)},
    **{24: (1, 288, 8, 128), 32: (1, 288, 8, 128), 48: (1, 288, 8, 128), 64: (1, 288, 8, 128)},
    **{96: (1, 480, 8, 128), 128: (1, 560, 8, 128), 144: (2, 720, 8, 128), 160: (2, 720, 8, 128)},
}


def low_latency_bytes(num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """Bytes of the buffer of low-latency kernels (``get_low_latency_rdma_size_hint``)."""
    tokens, scales = num_max_dispatch_tokens_per_rank, hidden // 128
    sent = 16 + max(2 * hidden, hidden + 4 * scales)
    combined = 4 * scales + 2 * hidden
    sending = max(tokens * sent, num_experts * tokens * combined)
    receiving = num_experts * tokens * max(sent, combined)
    whole = 2 * (sending + receiving + _up(num_experts * 4, _ALIGNMENT))
    return (whole + _ALIGNMENT) // _ALIGNMENT * _ALIGNMENT


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


# ---- events


class EventHandle:
    """An event on a stream, by default the current one."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._event = (stream or torch.cuda.current_stream()).record_event()

    def current_stream_wait(self) -> None:
        """Make the current stream wait."""
        torch.cuda.current_stream().wait_event(self._event)

    def before(self, stream: torch.cuda.Stream) -> None:
        """Make a stream wait."""
        stream.wait_event(self._event)


class EventOverlap:
    """An event that may be none, and tensors that live as long; a context after which the current stream waits."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: Sequence[torch.Tensor | None] | None = None):
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Make the current stream wait."""
        assert self.event is not None
        self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        if self.event is not None:
            self.current_stream_wait()


# ---- which tokens go where


class Layout:
    """Where this rank's tokens go, from the experts of each on the host ([tokens, top-k]; -1: none).

    Attributes:
        in_rank: Whether each token goes to each rank, [tokens, ranks].
        per_rank, per_node, per_expert: Tokens that go there.
        mine: The experts of the tokens that go to this rank, as it numbers its own; -1 for others.
        num_received: Tokens that this rank gets from all ranks.
        num_received_by_node: Tokens that this rank gets from its peers in other nodes, or passes on for them.
        received: Tokens that each of this rank's experts gets.
    """

    def __init__(self, experts: Integers, num_experts: int, rank: int, num_ranks: int) -> None:
        per_rank = num_experts // num_ranks
        tokens, first = np.arange(len(experts))[:, None], rank * per_rank
        goes = np.zeros((len(experts), num_ranks + 1), dtype=bool)
        goes[tokens, np.where(experts >= 0, experts // per_rank, num_ranks)] = True
        self.in_rank = goes[:, :num_ranks]
        num_nodes = max(num_ranks // _NODE, 1)
        in_node = self.in_rank.reshape(len(experts), num_nodes, -1).any(axis=2)
        self.per_rank = self.in_rank.sum(axis=0, dtype=np.int64)
        self.per_node = in_node.sum(axis=0, dtype=np.int64)
        self.per_expert = np.bincount(experts[experts >= 0], minlength=num_experts)
        own = experts[self.in_rank[:, rank]] - first
        self.mine = np.where((own >= 0) & (own < per_rank), own, -1)
        self.received = num_ranks * self.per_expert[first : first + per_rank]
        self.num_received = num_ranks * int(self.per_rank[rank])
        self.num_received_by_node = num_nodes * int(self.per_node[rank // _NODE])
        # Over nodes, a token crosses the network once for each node.
        parts, own_part = (self.per_node, rank // _NODE) if num_nodes > 1 else (self.per_rank, rank)
        self._sent = _most_and_all(np.delete(parts, own_part))
        self._sent_by_experts = _most_and_all(np.delete(self.per_expert.reshape(num_ranks, -1).sum(axis=1), rank))

    def exchanged(self, token_bytes: int) -> tuple[int, int]:
        """Bytes to or from other ranks, or over nodes other nodes: the largest part and all."""
        return self._sent[0] * token_bytes, self._sent[1] * token_bytes

    def exchanged_by_experts(self, token_bytes: int) -> tuple[int, int]:
        """The same of low-latency kernels, which send a token to each of its experts."""
        return self._sent_by_experts[0] * token_bytes, self._sent_by_experts[1] * token_bytes


def _most_and_all(parts: Integers) -> tuple[int, int]:
    return int(parts.max(initial=0)), int(parts.sum())


# ---- the buffer


class _Memory:
    """What a buffer takes outside the caching allocator, and DeepEP's C++ object to scripts."""

    def __init__(self, device: Device, rank: int, num_ranks: int, nvl_bytes: int, rdma_bytes: int) -> None:
        self._device = device
        self._rank, self._num_rdma_ranks = rank, max(num_ranks // _NODE, 1)
        self.nvl = self._workspace = self.rdma = 0
        self.stream = torch.cuda.Stream(priority=-1)
        if nvl_bytes:
            self.nvl = self._taken("user buffers", nvl_bytes + _SIGNAL_BYTES)
        self._workspace = self._taken("extensions", _WORKSPACE_BYTES)
        if rdma_bytes:
            self.rdma = self._taken("NVSHMEM heap", _up(rdma_bytes + _HEAP_OWN_BYTES, _HEAP_STEP))

    def _taken(self, owner: str, num_bytes: int) -> int:
        if not (address := self._device.take(owner, num_bytes)):
            raise torch.OutOfMemoryError(f"DeepEP: CUDA out of memory: tried to allocate {num_bytes} bytes")
        return address

    def is_available(self) -> bool:
        """Always true: all ranks have connected."""
        return True

    def get_num_rdma_ranks(self) -> int:
        """Nodes of eight ranks."""
        return self._num_rdma_ranks

    def get_rdma_rank(self) -> int:
        """This rank's node."""
        return self._rank // _NODE

    def get_local_device_id(self) -> int:
        """The current device."""
        return torch.cuda.current_device()

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream that kernels run on."""
        return self.stream

    def destroy(self) -> None:
        """Free it."""
        for address in filter(None, (self.nvl, self._workspace, self.rdma)):
            self._device.free(address)
        self.nvl = self._workspace = self.rdma = 0

    __del__ = destroy


class _Kernels:
    """Kernels of one function on the buffer's stream, after an event or what the current stream did so far."""

    def __init__(self, buffer: Buffer, previous: EventOverlap | None, is_async: bool, allocates_there: bool) -> None:
        event = None if previous is None else previous.event
        if allocates_there and (event is None or not is_async):
            raise RuntimeError("allocate_on_comm_stream needs previous_event and async_finish")
        self._stream, self._compute = buffer.runtime.stream, torch.cuda.current_stream()
        self._is_async, self._allocates_there = is_async, allocates_there
        if event is None:
            self._stream.wait_stream(self._compute)
        else:
            event.before(self._stream)

    def allocating(self) -> AbstractContextManager[object]:
        """The context in which tensors are made."""
        return torch.cuda.stream(self._stream) if self._allocates_there else nullcontext()

    def running(self) -> AbstractContextManager[object]:
        """The context in which they run."""
        return torch.cuda.stream(self._stream)

    def host_waits(self) -> None:
        """The host waits until all ranks have said how many tokens they send."""
        self._stream.synchronize()

    def end(self, tensors: Sequence[torch.Tensor | None]) -> EventOverlap:
        """The event after them; without ``async_finish``, the current stream waits and there is none."""
        if not self._is_async:
            self._compute.wait_stream(self._stream)
            return EventOverlap()
        event = EventHandle(self._stream)
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(self._stream)
                if self._allocates_there:
                    tensor.record_stream(self._compute)
        return EventOverlap(event)


#: Tokens, or tokens in fp8 with their scales.
Tokens = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
_layouts = WeakTensorKeyDictionary()  # by ``is_token_in_rank``, which is in every handle


class Buffer:
    """``deep_ep.Buffer``. Arguments and results are DeepEP's; what the stand-in lacks raises WorldError."""

    num_sms = 20
    device: Device
    used: Callable[[], object]

    def __init__(
        self,
        group: RankGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool | None = None,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: object = None,
    ) -> None:
        if group is None or enable_shrink:
            asked = "enable_shrink" if enable_shrink else "an MPI communicator"
            raise WorldError(f"deep_ep.Buffer with {asked} is not faked", "pass a process group, and no shrink mode")
        type(self).used()
        self.rank, self.group_size, self.group = group.rank(), group.size(), group
        if self.group_size > _NODE and self.group_size % _NODE:
            raise RuntimeError(f"DeepEP: {self.group_size} ranks are not whole nodes of {_NODE}")
        if num_rdma_bytes and self.group_size <= _NODE and not low_latency_mode:
            raise RuntimeError("DeepEP: an RDMA buffer needs several nodes or low_latency_mode")
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        self.enable_shrink = enable_shrink
        self.runtime = _Memory(self.device, self.rank, self.group_size, num_nvl_bytes, num_rdma_bytes)
        told: list[object] = [torch.cuda.current_device(), bytes(64)]
        if self.runtime.get_num_rdma_ranks() > 1 or low_latency_mode:
            told.append(bytes(128))
        for mine in told:  # device, handle of its memory, NVSHMEM's unique identifier
            dist.all_gather_object([None] * self.group_size, mine, group)

    def destroy(self) -> None:
        """Free the buffer's memory."""
        assert self.explicitly_destroy, "`explicitly_destroy` flag must be set"
        self.runtime.destroy()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether it was built for Hopper."""
        return True

    @classmethod
    def set_num_sms(cls, new_num_sms: int) -> None:
        """Set the SMs of normal kernels."""
        assert new_num_sms % 2 == 0, "The SM count must be even"
        cls.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event on the current stream."""
        return EventOverlap(EventHandle())

    get_low_latency_rdma_size_hint = staticmethod(low_latency_bytes)

    @classmethod
    def get_dispatch_config(cls, num_ranks: int) -> Config:
        """DeepEP's choice for so many ranks."""
        assert num_ranks in _DISPATCH, f"Unsupported number of EP ranks: {num_ranks}"
        return Config(cls.num_sms, *_DISPATCH[num_ranks])

    @classmethod
    def get_combine_config(cls, num_ranks: int) -> Config:
        """DeepEP's choice for so many ranks."""
        assert num_ranks in _COMBINE, f"Unsupported number of EP ranks: {num_ranks}"
        return Config(cls.num_sms, *_COMBINE[num_ranks])

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream that kernels run on."""
        return self.runtime.stream

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> torch.Tensor:
        """The buffer's memory from a byte on."""
        address, num_bytes = (
            (self.runtime.rdma, self.num_rdma_bytes) if use_rdma_buffer else (self.runtime.nvl, self.num_nvl_bytes)
        )
        device = torch.device("cuda", torch.cuda.current_device())
        storage = torch._C._construct_storage_from_data_pointer(address + offset, device, num_bytes - offset)
        whole = empty(0, dtype=dtype, device=device).set_(storage)
        return whole if size is None else whole[: size.numel()].view(size)

    # ---- normal kernels

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Count the tokens for each rank, node and expert."""
        kernels = _Kernels(self, previous_event, async_finish, allocate_on_comm_stream)
        num_nodes = self.runtime.get_num_rdma_ranks()
        with kernels.allocating():
            per_rank = self._integers(self.group_size)
            per_expert = self._integers(num_experts)
            in_rank = empty(len(topk_idx), self.group_size, dtype=torch.bool, device=topk_idx.device)
            per_node = self._integers(num_nodes) if num_nodes > 1 else None
        layout = self._layout(topk_idx, num_experts)
        _layouts[in_rank] = layout
        counts = [(per_rank, layout.per_rank), (per_expert, layout.per_expert), (in_rank, layout.in_rank)]
        counts += [] if per_node is None else [(per_node, layout.per_node)]

        def arrive(arrivals: Arrivals) -> None:
            for tensor, values in counts:
                arrivals.put(tensor, torch.from_numpy(values))

        with kernels.running():
            self.group.dispatched("deep_ep_layout", [topk_idx], [per_rank, per_expert, in_rank], arrive)
        event = kernels.end([topk_idx, per_rank, per_expert, in_rank, per_node])
        return per_rank, per_node, per_expert, in_rank, event

    def dispatch(
        self,
        x: Tokens,
        handle: tuple[Any, ...] | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tokens, torch.Tensor | None, torch.Tensor | None, list[int] | None, tuple[Any, ...] | None, EventOverlap]:
        """Send tokens to the ranks of their experts; with a handle, those of an earlier call again."""
        config = config or self.get_dispatch_config(self.group_size)
        tokens, scales = x if isinstance(x, tuple) else (x, None)
        is_over_nodes = self.runtime.get_num_rdma_ranks() > 1
        assert not (is_over_nodes and num_worst_tokens), "Internode dispatch does not support `num_worst_tokens > 0`"
        if handle is not None:
            is_token_in_rank = handle[0] if is_over_nodes else handle[4]
        assert is_token_in_rank is not None
        layout = self._layout_of(is_token_in_rank, topk_idx, num_tokens_per_expert)
        given = [tokens, scales, topk_idx, topk_weights, num_tokens_per_rank, num_tokens_per_rdma_rank]
        given += [num_tokens_per_expert, is_token_in_rank]
        kernels = _Kernels(self, previous_event, async_finish, allocate_on_comm_stream)
        num_received = num_worst_tokens or layout.num_received
        per_expert: list[int] = []
        before: list[torch.Tensor] = []
        with kernels.allocating():
            if handle is None:
                before = self._prefixes(config)
        if handle is None and not num_worst_tokens:
            kernels.host_waits()
            per_expert = [_up(int(count), expert_alignment) for count in layout.received]
        with kernels.allocating():
            received = tokens.new_empty(num_received, tokens.shape[1])
            after: list[torch.Tensor] = []
            if handle is None or not is_over_nodes:  # in one node it makes them each time
                after = self._heads(config, layout, num_received)
            indices = None if topk_idx is None else topk_idx.new_empty(num_received, topk_idx.shape[1])
            weights = None if topk_weights is None else topk_weights.new_empty(num_received, topk_weights.shape[1])
            received_scales = None if scales is None else scales.new_empty(num_received, scales.shape[1])
        again = handle is not None
        handle = handle or self._handle(is_token_in_rank, before, after)

        def arrive(arrivals: Arrivals) -> None:
            for output, mine in ((received, tokens), (received_scales, scales), (weights, topk_weights)):
                if output is not None and mine is not None:
                    arrivals.spread([output], mine)
            if indices is not None and not num_worst_tokens:
                arrivals.repeat(indices, torch.from_numpy(layout.mine))

        inputs = [tensor for tensor in (tokens, scales) if tensor is not None]
        outputs = [tensor for tensor in (received, received_scales) if tensor is not None]
        exchanged = layout.exchanged(sum(tensor.shape[1] * tensor.element_size() for tensor in inputs))
        with kernels.running():
            self.group.dispatched(f"deep_ep_dispatch_{config.num_sms}sms", inputs, outputs, arrive, exchanged)
        event = kernels.end([*given, *outputs, indices, weights, *handle])
        result: Tokens = received if received_scales is None else (received, received_scales)
        if again:
            return result, None, None, None, None, event
        return result, indices, weights, per_expert, handle, event

    def combine(
        self,
        x: torch.Tensor,
        handle: tuple[Any, ...],
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Send tokens back to the ranks that they came from, which add them up."""
        config = config or self.get_combine_config(self.group_size)
        is_token_in_rank = handle[0] if self.runtime.get_num_rdma_ranks() > 1 else handle[4]
        layout = self._layout_of(is_token_in_rank)
        kernels = _Kernels(self, previous_event, async_finish, allocate_on_comm_stream)
        weights = None
        with kernels.allocating():
            if topk_weights is not None:
                weights = topk_weights.new_empty(len(is_token_in_rank), topk_weights.shape[1])
            combined = x.new_empty(len(is_token_in_rank), x.shape[1])

        def arrive(arrivals: Arrivals) -> None:
            arrivals.spread([combined], x)
            if weights is not None and topk_weights is not None:
                arrivals.spread([weights], topk_weights)

        exchanged = layout.exchanged(x.shape[1] * x.element_size())
        with kernels.running():
            operation = f"deep_ep_combine_{config.num_sms}sms"
            self.group.dispatched(operation, [x], [combined], arrive, exchanged)
        biases = bias if isinstance(bias, tuple) else (bias,)
        event = kernels.end([x, topk_weights, *handle, combined, weights, *biases])
        return combined, weights, event

    def internode_dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`dispatch`, which DeepEP's own calls over nodes."""
        return self.dispatch(*args, **kwargs)

    def internode_combine(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`combine`."""
        return self.combine(*args, **kwargs)

    # ---- low-latency kernels

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Do nothing: the buffer holds no signals."""
        self._check_low_latency(num_max_dispatch_tokens_per_rank, hidden, num_experts)

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Tokens, torch.Tensor, tuple[Any, ...], EventOverlap, Callable[[], None] | None]:
        """Send tokens to their experts, which get room for all that could come."""
        hidden, experts = x.shape[1], num_experts // self.group_size
        self._check_low_latency(num_max_dispatch_tokens_per_rank, hidden, num_experts)
        layout = self._layout(topk_idx, num_experts)
        kernels = _Kernels(self, None, async_finish, allocates_there=False)
        slots = self.group_size * num_max_dispatch_tokens_per_rank
        received = x.new_empty(experts, slots, hidden, dtype=torch.float8_e4m3fn if use_fp8 else x.dtype)
        sources = self._integers(experts, slots)
        ranges = empty(experts, self.group_size, dtype=torch.int64, device=x.device)
        count = self._integers(experts)
        scales = None
        if use_fp8:
            columns, dtype = (hidden // 512, torch.int32) if use_ue8m0 else (hidden // 128, torch.float32)
            scales = x.new_empty(experts, columns, slots, dtype=dtype).transpose(1, 2)

        def arrive(arrivals: Arrivals) -> None:
            arrivals.put(count, torch.from_numpy(layout.received))

        exchanged = layout.exchanged_by_experts(hidden * received.element_size())
        with kernels.running():
            self.group.dispatched("deep_ep_low_latency_dispatch", [x], [received], arrive, exchanged)
        event, hook = self._low_latency_end(kernels, return_recv_hook)
        if async_finish:
            event.extra_tensors = (x, topk_idx, received, scales, count, sources, ranges)
        handle = (sources, ranges, num_max_dispatch_tokens_per_rank, hidden, num_experts)
        _layouts[sources] = layout
        return received if scales is None else (received, scales), count, handle, event, hook

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: tuple[Any, ...],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None] | None]:
        """Send tokens back to the ranks that they came from, which add them up by their weights."""
        kernels = _Kernels(self, None, async_finish, allocates_there=False)
        combined = x.new_empty(len(topk_weights), x.shape[2]) if out is None else out
        exchanged = _layouts[handle[0]].exchanged_by_experts(x.shape[2] * x.element_size())

        def arrive(arrivals: Arrivals) -> None:
            arrivals.spread([combined], x)

        with kernels.running():
            self.group.dispatched("deep_ep_low_latency_combine", [x], [combined], arrive, exchanged)
        event, hook = self._low_latency_end(kernels, return_recv_hook)
        if async_finish:
            event.extra_tensors = (x, topk_idx, topk_weights, handle[0], handle[1], combined)
        return combined, event, hook

    def get_next_low_latency_combine_buffer(self, handle: tuple[Any, ...]) -> torch.Tensor:
        """The part of the buffer that the next combine sends from."""
        _, _, tokens, hidden, experts = handle
        shape = torch.Size([experts // self.group_size, self.group_size * tokens, hidden])
        return self.get_local_buffer_tensor(torch.bfloat16, shape, use_rdma_buffer=True)

    # ---- internals

    def _check_low_latency(self, tokens: int, hidden: int, num_experts: int) -> None:
        needed = low_latency_bytes(tokens, hidden, self.group_size, num_experts) - _ALIGNMENT
        if not self.low_latency_mode or needed > self.num_rdma_bytes:
            raise RuntimeError(f"DeepEP: low-latency kernels need low_latency_mode and {needed} bytes of RDMA buffer")

    def _low_latency_end(
        self, kernels: _Kernels, return_recv_hook: bool
    ) -> tuple[EventOverlap, Callable[[], None] | None]:
        """With a hook, the network works beside the current stream, which waits where the hook is called."""
        if not return_recv_hook:
            return kernels.end([]), None
        arrived = EventHandle(self.runtime.stream)
        return EventOverlap(), arrived.current_stream_wait

    def _integers(self, *size: int) -> torch.Tensor:
        return empty(*size, dtype=torch.int32, device=torch.device("cuda", torch.cuda.current_device()))

    def _layout(self, topk_idx: torch.Tensor, num_experts: int) -> Layout:
        experts = self.device.routes(topk_idx, num_experts).numpy().astype(np.int64, copy=False)
        return Layout(experts, num_experts, self.rank, self.group_size)

    def _layout_of(
        self,
        is_token_in_rank: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        per_expert: torch.Tensor | None = None,
    ) -> Layout:
        known: Layout | None = _layouts.get(is_token_in_rank)
        if known is None:
            if topk_idx is None or per_expert is None:
                raise WorldError(
                    "a dispatch of deep_ep with a layout of the script's own has no topk_idx to tell the tokens' ranks",
                    "pass topk_idx, or the result of get_dispatch_layout",
                )
            known = _layouts[is_token_in_rank] = self._layout(topk_idx, per_expert.numel())
        return known

    def _prefixes(self, config: Config) -> list[torch.Tensor]:
        """What a dispatch makes before it knows how many tokens come."""
        channels, ranks, nodes = config.num_sms // 2, self.group_size, self.runtime.get_num_rdma_ranks()
        if nodes == 1:
            return [self._integers(ranks, ranks), self._integers(ranks, channels)]
        return [
            self._integers(nodes, channels),
            self._integers(nodes),
            self._integers(ranks, channels),
            self._integers(ranks),
        ]

    def _heads(self, config: Config, layout: Layout, num_received: int) -> list[torch.Tensor]:
        """What it makes after that, for the combine."""
        channels, ranks, nodes = config.num_sms // 2, self.group_size, self.runtime.get_num_rdma_ranks()
        num_tokens = len(layout.in_rank)
        if nodes == 1:
            sources, channel = self._integers(num_received), self._integers(ranks, channels)
            return [sources, channel, self._integers(num_tokens, ranks)]
        sources = empty(num_received, _SOURCE_META_BYTES, dtype=torch.uint8, device=torch.cuda.current_device())
        return [
            sources,
            self._integers(nodes, channels),
            self._integers(ranks, channels),
            self._integers(num_tokens, nodes),
            self._integers(layout.num_received_by_node, _NODE),
        ]

    def _handle(
        self, in_rank: torch.Tensor, before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        if self.runtime.get_num_rdma_ranks() == 1:
            sources, channel, heads = after
            return (*before, channel, sources, in_rank, heads)
        by_node, node_sums, by_rank, rank_sums = before
        sources, from_node, from_rank, node_heads, rank_heads = after
        return (in_rank, by_node, by_rank, from_node, node_sums, from_rank, rank_sums, sources, node_heads, rank_heads)


# ---- the package


class _Finder:
    """Finds the stand-in as ``deep_ep`` and its submodules, before an installed package."""

    def __init__(self, modules: dict[str, ModuleType]) -> None:
        self._modules = modules

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The spec of one of the stand-in's modules; None for any other."""
        if fullname not in self._modules:
            return None
        return ModuleSpec(fullname, self, origin="fakedist", is_package=fullname == "deep_ep")

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module."""
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: it is complete."""


@contextmanager
def deep_ep(device: Device | None) -> Iterator[Callable[[], list[Note]]]:
    """Import the stand-in as ``deep_ep``. Yields a function that returns the report's notes. None: no virtual GPU."""
    if device is None:
        yield list
        return
    found: list[Note] = []

    def used() -> None:
        if not found:
            found.append(notes.deep_ep_stands_in(COMMIT))

    buffer = type("Buffer", (Buffer,), {"device": device, "used": staticmethod(used), "__module__": "deep_ep.buffer"})
    names = {"Buffer": buffer, "Config": Config, "EventHandle": EventHandle, "EventOverlap": EventOverlap}
    names |= {"topk_idx_t": torch.int64}
    modules = {name: ModuleType(name, __doc__) for name in ("deep_ep", "deep_ep.buffer", "deep_ep.utils")}
    for module in modules.values():
        vars(module).update(names)
    modules["deep_ep"].__getattr__ = _lacking  # type: ignore[method-assign]
    finder: Any = _Finder(modules)
    sys.meta_path.insert(0, finder)
    try:
        yield lambda: found
    finally:
        if finder in sys.meta_path:  # the script may have replaced the list
            sys.meta_path.remove(finder)
        for name in modules:
            sys.modules.pop(name, None)


def _lacking(name: str) -> object:
    if name in ("ElasticBuffer", "HybridEPBuffer"):
        raise ImportError(f"fakedist has no deep_ep.{name}: use deep_ep.Buffer (Megatron-LM: the flex backend deepep)")
    raise AttributeError(f"module 'deep_ep' has no attribute {name!r}")
