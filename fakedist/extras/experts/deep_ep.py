"""A stand-in of DeepEP's package ``deep_ep``, which cannot connect to ranks that do not exist.

It follows ``Buffer`` of deepseek-ai/DeepEP at :data:`COMMIT` (csrc/legacy/buffer.hpp, config.hpp and
deep_ep/buffers/legacy.py): what it takes, what it returns, streams, events, and where the host waits. The sizes of
buffers are those that the built extension of sgl-deep-ep 0.1.2.post1 gives.

The other ranks are like this one, and each sends to this rank's experts what this rank sends to them itself; unless a
load of experts draws what each rank sends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import empty
from torch.utils.weak import WeakTensorKeyDictionary

from fakedist.errors import WorldError
from fakedist.extras.experts.deep_ep_sizes import (
    ALIGNMENT,
    CONFIGS,
    NODE,
    SOURCE_META_BYTES,
    Config,
    Layout,
    low_latency_bytes,
    rounded_up,
)
from fakedist.extras.experts.dispatchers import OutsideMemory, layout_of, tensor_at
from fakedist.world.arrivals import Arrivals
from fakedist.world.process_group import RankGroup
from fakedist.world.reroute import Device

COMMIT = "5996f70a8be8d2e6737fede640a541366801dda7"
_WORKSPACE_BYTES = 32 << 20
#: Where a buffer's barriers are: 8 signals, 8 pointers to buffers and 8 to signals.
_SIGNAL_BYTES = NODE * (4 + 8 + 8)
#: NVSHMEM's heap grows in these steps (NVSHMEM_CUMEM_GRANULARITY). Its own part is at least 256 MiB, as DeepEP says.
_HEAP_STEP, _HEAP_OWN_BYTES = 1 << 29, 1 << 28


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


# ---- the buffer


class _Memory:
    """Memory that a buffer takes outside the caching allocator, and DeepEP's C++ object to scripts."""

    def __init__(self, device: Device, rank: int, num_ranks: int, nvl_bytes: int, rdma_bytes: int) -> None:
        self._memory = memory = OutsideMemory(device, "DeepEP")
        self._rank, self._num_rdma_ranks = rank, max(num_ranks // NODE, 1)
        self.nvl = self.rdma = 0
        self.stream = torch.cuda.Stream(priority=-1)
        if nvl_bytes:
            self.nvl = memory.take("user buffers", nvl_bytes + _SIGNAL_BYTES)
        memory.take("extensions", _WORKSPACE_BYTES)
        if rdma_bytes:
            self.rdma = memory.take("NVSHMEM heap", rounded_up(rdma_bytes + _HEAP_OWN_BYTES, _HEAP_STEP))

    def is_available(self) -> bool:
        """Always true: all ranks have connected."""
        return True

    def get_num_rdma_ranks(self) -> int:
        """Nodes of eight ranks."""
        return self._num_rdma_ranks

    def get_rdma_rank(self) -> int:
        """This rank's node."""
        return self._rank // NODE

    def get_local_device_id(self) -> int:
        """The current device."""
        return torch.cuda.current_device()

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream that kernels run on."""
        return self.stream

    def destroy(self) -> None:
        """Free it."""
        self._memory.free()


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
        """The host waits until all ranks have sent how many tokens they send."""
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


class _Sent(NamedTuple):
    """The tensors of a dispatch."""

    x: torch.Tensor
    scales: torch.Tensor | None
    indices: torch.Tensor | None
    weights: torch.Tensor | None

    @property
    def token_bytes(self) -> int:
        """Bytes of a token and its scales."""
        return sum(tensor.shape[1] * tensor.element_size() for tensor in self.moved())

    def moved(self) -> list[torch.Tensor]:
        """The tokens, and their scales."""
        return [tensor for tensor in (self.x, self.scales) if tensor is not None]

    def made(self, received: torch.Tensor) -> _Sent:
        """Make the others of the received tensors."""
        others = (
            None if tensor is None else tensor.new_empty(len(received), tensor.shape[1])
            for tensor in (self.indices, self.weights, self.scales)
        )
        indices, weights, scales = others
        return _Sent(received, scales, indices, weights)

    def filler(self, sent: _Sent, layout: Layout) -> Callable[[Arrivals], None]:
        """Return what fills these, which are received; rows beyond those that come (``num_worst_tokens``) get -1."""

        def fill(arrivals: Arrivals) -> None:
            for output, mine in ((self.x, sent.x), (self.scales, sent.scales), (self.weights, sent.weights)):
                if output is not None and mine is not None:
                    arrivals.spread([output], mine)
            if self.indices is None:
                return
            if layout.received_experts is not None:
                padded = np.full(tuple(self.indices.shape), -1)
                padded[: layout.num_received] = layout.received_experts[: len(padded)]
                arrivals.put(self.indices, torch.from_numpy(padded))
            elif len(self.indices) == layout.num_received:
                arrivals.repeat(self.indices, torch.from_numpy(layout.mine))
            else:
                padded = np.full(tuple(self.indices.shape), -1)
                whole = np.tile(layout.mine, (layout.num_received // max(len(layout.mine), 1), 1))[: len(padded)]
                padded[: len(whole)] = whole
                arrivals.put(self.indices, torch.from_numpy(padded))

        return fill


def _reused(handle: tuple[Any, ...], is_over_nodes: bool) -> tuple[torch.Tensor, int]:
    """The tokens' ranks of a handle, and how many come."""
    in_rank, sources = (handle[0], handle[7]) if is_over_nodes else (handle[4], handle[3])
    return in_rank, len(sources)


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
        *,
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
        if self.group_size > NODE and self.group_size % NODE:
            raise RuntimeError(f"DeepEP: {self.group_size} ranks are not whole nodes of {NODE}")
        if num_rdma_bytes and self.group_size <= NODE and not low_latency_mode:
            raise RuntimeError("DeepEP: an RDMA buffer needs several nodes or low_latency_mode")
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        self.enable_shrink = enable_shrink
        self.runtime = _Memory(self.device, self.rank, self.group_size, num_nvl_bytes, num_rdma_bytes)
        sent: list[object] = [torch.cuda.current_device(), bytes(64)]
        if self.runtime.get_num_rdma_ranks() > 1 or low_latency_mode:
            sent.append(bytes(128))
        for mine in sent:  # device, handle of its memory, NVSHMEM's unique identifier
            gathered: list[object] = [None] * self.group_size
            dist.all_gather_object(gathered, mine, group)

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
        assert num_ranks in CONFIGS, f"Unsupported number of EP ranks: {num_ranks}"
        return Config(cls.num_sms, *CONFIGS[num_ranks][0])

    @classmethod
    def get_combine_config(cls, num_ranks: int) -> Config:
        """DeepEP's choice for so many ranks."""
        assert num_ranks in CONFIGS, f"Unsupported number of EP ranks: {num_ranks}"
        return Config(cls.num_sms, *CONFIGS[num_ranks][1])

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
        whole = tensor_at(address + offset, num_bytes - offset, dtype)
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
        layout = layout_of(self.device, topk_idx, num_experts, self.group)
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
        *,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        """Send tokens to the ranks of their experts; with a handle, those of an earlier call again."""
        config = config or self.get_dispatch_config(self.group_size)
        tokens, scales = x if isinstance(x, tuple) else (x, None)
        is_over_nodes = self.runtime.get_num_rdma_ranks() > 1
        assert not (is_over_nodes and num_worst_tokens), "Internode dispatch does not support `num_worst_tokens > 0`"
        if handle is not None:
            is_token_in_rank, num_worst_tokens = _reused(handle, is_over_nodes)
        assert is_token_in_rank is not None
        layout = self._layout_of(is_token_in_rank, topk_idx, num_tokens_per_expert)
        sent = _Sent(tokens, scales, topk_idx, topk_weights)
        given = [*sent, num_tokens_per_rank, num_tokens_per_rdma_rank, num_tokens_per_expert, is_token_in_rank]
        kernels = _Kernels(self, previous_event, async_finish, allocate_on_comm_stream)
        per_expert, before, after = list[int](), list[torch.Tensor](), list[torch.Tensor]()
        if handle is None:
            with kernels.allocating():
                before = self._prefixes(config)
            if not num_worst_tokens:
                kernels.host_waits()
                per_expert = [rounded_up(int(count), expert_alignment) for count in layout.received]
        num_received = num_worst_tokens or layout.num_received
        with kernels.allocating():
            received = tokens.new_empty(num_received, tokens.shape[1])
            if handle is None or not is_over_nodes:  # in one node it makes them each time
                after = self._heads(config, layout, num_received)
            got = sent.made(received)
        exchanged = layout.exchanged(sent.token_bytes)
        with kernels.running():
            operation = f"deep_ep_dispatch_{config.num_sms}sms"
            self.group.dispatched(operation, sent.moved(), got.moved(), got.filler(sent, layout), exchanged)
        made = handle or self._handle(is_token_in_rank, before, after)
        event = kernels.end([*given, *got, *made, *after])
        result = got.x if got.scales is None else (got.x, got.scales)
        if handle is not None:
            return result, None, None, None, None, event
        return result, got.indices, got.weights, per_expert, made, event

    def combine(
        self,
        x: torch.Tensor,
        handle: tuple[Any, ...],
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        config: Config | None = None,
        *,
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
        """Dispatch over nodes, which :meth:`dispatch` does, too; DeepEP calls this one there."""
        return self.dispatch(*args, **kwargs)

    def internode_combine(self, *args: Any, **kwargs: Any) -> Any:
        """Combine over nodes, like :meth:`combine`."""
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
        *,
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
        layout = layout_of(self.device, topk_idx, num_experts, self.group)
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
        *,
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
        needed = low_latency_bytes(tokens, hidden, self.group_size, num_experts) - ALIGNMENT
        if not self.low_latency_mode or needed > self.num_rdma_bytes:
            raise RuntimeError(f"DeepEP: low-latency kernels need low_latency_mode and {needed} bytes of RDMA buffer")

    def _low_latency_end(
        self, kernels: _Kernels, return_recv_hook: bool
    ) -> tuple[EventOverlap, Callable[[], None] | None]:
        """With a hook, the network works while the current stream does; it waits where the hook is called."""
        if not return_recv_hook:
            return kernels.end([]), None
        arrived = EventHandle(self.runtime.stream)
        return EventOverlap(), arrived.current_stream_wait

    def _integers(self, *size: int) -> torch.Tensor:
        return empty(*size, dtype=torch.int32, device=torch.device("cuda", torch.cuda.current_device()))

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
            known = _layouts[is_token_in_rank] = layout_of(self.device, topk_idx, per_expert.numel(), self.group)
        return known

    def _prefixes(self, config: Config) -> list[torch.Tensor]:
        """Make the tensors of a dispatch before it knows how many tokens come."""
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
        """Make those after that, for the combine."""
        channels, ranks, nodes = config.num_sms // 2, self.group_size, self.runtime.get_num_rdma_ranks()
        num_tokens = len(layout.in_rank)
        if nodes == 1:
            sources, channel = self._integers(num_received), self._integers(ranks, channels)
            return [sources, channel, self._integers(num_tokens, ranks)]
        sources = empty(num_received, SOURCE_META_BYTES, dtype=torch.uint8, device=torch.cuda.current_device())
        return [
            sources,
            self._integers(nodes, channels),
            self._integers(ranks, channels),
            self._integers(num_tokens, nodes),
            self._integers(layout.num_received_by_node, NODE),
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
