"""The torch.distributed backend: a process group in which only this rank runs, and its finished calls.

``dist.*`` calls these methods directly; C++ callers (DDP's reducer, functional collectives) reach those that torch's
PyProcessGroup.hpp forwards. Names differ between torch 2.11 and 2.15 (``_allgather_base``, ``all_gather_single``); both
are defined. Streams, tensors kept alive and temporaries from the caching allocator follow
torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (docs/backend-contract.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import wraps
from types import FunctionType, SimpleNamespace
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, Work

from fakedist.rundir.rows import NO_TERMS, CallTerms
from fakedist.rundir.tape import ANY_RANK
from fakedist.world import checks
from fakedist.world.arrivals import Arrivals, Slot, on_host_alone
from fakedist.world.checks import (
    ODD_OPS,
    CheckedGroup,
    Exchanged,
    Lists,
    Reduction,
    Tensors,
    check_dense,
    check_device,
    check_gathered_into,
    check_scattered_from,
    exchanged,
    flat_like,
    is_even,
    listed,
    only_list,
    reduce_op,
    reduction_name,
    root,
)
from fakedist.world.group import BareGroup, LedgerLike
from fakedist.world.tapes import Where

profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled
#: c10d's operations write below autograd: they add no history, and saved tensors keep their version.
_BelowAutograd: type[AbstractContextManager[None]] = torch._C._AutoDispatchBelowADInplaceOrView

_Kind = TypeVar("_Kind", bound=type)
#: Functions of a group that torch calls for collectives although their names are private.
_CALLED = {"_allgather_base", "_reduce_scatter_base", "_start_coalescing", "_end_coalescing"}
#: What surrounds each call of a group and of its finished calls, the outermost last: its begin and its end.
_AROUND: list[tuple[Callable[[], object], Callable[[], object]]] = []


def _surrounded(kind: _Kind) -> _Kind:
    """Have a class's calls begin and end what is in ``_AROUND``."""

    def around(original: Callable[..., object]) -> Callable[..., object]:
        @wraps(original)
        def call(*args: object, **kwargs: object) -> object:
            surrounding = tuple(_AROUND)
            for begin, _ in reversed(surrounding):
                begin()
            try:
                return original(*args, **kwargs)
            finally:
                for _, end in surrounding:
                    end()

        return call

    for name, function in list(vars(kind).items()):
        if isinstance(function, FunctionType) and (name in _CALLED or not name.startswith("_")):
            setattr(kind, name, around(function))
    return kind


@_surrounded
class Done(Work):
    """A finished call. Behaves like WorkNCCL in torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp.

    :func:`done` fills it in: an ``__init__`` would be a tenth of a tiny call. It holds ``outputs`` and ``kept`` as long
    as it lives; ``source`` is the group rank that a receive came from. ``calls`` are the ledger's numbers of its calls,
    of which the first wait is recorded; none if they were done when they returned.
    """

    outputs: Tensors = ()
    _stash: object = None
    _stream: torch.cuda.Stream | None = None
    _event: torch.cuda.Event | None = None
    kept: object = None
    source = 0
    calls: Sequence[int] = ()
    ledger: LedgerLike | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait for the call; the host does not wait."""
        if self.calls and self.ledger is not None:
            self.ledger.awaited(self.calls, None if self._stream is None else self._stream.device)
            self.calls = ()
        if self._event is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._event)
            self._event = None
        self._stash = None
        return True

    def synchronize(self) -> None:
        """Same as :meth:`wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """Same as :meth:`wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Always true."""
        return True

    def is_success(self) -> bool:
        """Always true."""
        return True

    def exception(self) -> None:
        """Always None: a call never fails."""

    def source_rank(self) -> int:
        """Group rank that a receive came from; from any rank and without a tape, the first other rank."""
        return self.source

    _source_rank = source_rank

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return list(self.outputs)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A completed future of the output tensors. Waiting for it waits for the call's stream."""
        if self._stream is None:
            future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
            future.set_result(self.result())
            return future
        future = torch.futures.Future(devices=[self._stream.device])
        with torch.cuda.stream(self._stream):
            future.set_result(self.result())
        return future

    getFuture = get_future  # noqa: N815 (C++ callers look it up by this name)


def done(outputs: Tensors, stash: object = None, stream: torch.cuda.Stream | None = None) -> Done:
    """Make a finished call. ``stash`` is held until a stream waits for it; ``stream`` None is the current one."""
    work = Done()
    work.outputs = outputs
    if stash is not None:
        work._stash = stash
    if stream is not None:
        work._stream, work._event = stream, stream.record_event()
    return work


class Coalesced:
    """Calls that are waited for as one."""

    def __init__(self) -> None:
        self.done: list[Done] = []

    def end(self) -> Done:
        """Return one finished call that stands for all of them."""
        streams = {work._stream.cuda_stream: work._stream for work in self.done if work._stream is not None}
        whole = done([], [work._stash for work in self.done], next(iter(streams.values()), None))
        whole.kept = [work.kept for work in self.done]
        whole.calls = [call for work in self.done for call in work.calls]
        whole.ledger = self.done[0].ledger if self.done else None
        return whole


class CallDescription(NamedTuple):
    """The description of a call, with the coalesced calls that it belongs to and a context that times it, if any.

    ``number`` is its number in the ledger; -1 if it is done when it returns.
    """

    operation: str
    tensors: object
    is_async: bool
    coalesced: Coalesced | None
    timed: AbstractContextManager[None] | None = None
    ledger: LedgerLike | None = None
    number: int = -1


class RunningCall:
    """A call in progress: a context in which arriving values are written, below autograd.

    As in ``ProcessGroupNCCL::collective`` since torch 2.8, asynchronous calls run on the group's stream and hold their
    tensors until a stream waits; synchronous ones run on the current stream (``stream`` None) and hold nothing.
    """

    __slots__ = ("_description", "_inside", "_stream")
    _inside: AbstractContextManager[object]

    def __init__(self, description: CallDescription, stream: torch.cuda.Stream | None) -> None:
        self._description = description
        self._stream = stream

    def __enter__(self) -> RunningCall:
        stream = self._stream
        with ExitStack() as inside:
            if profiler_enabled():
                inside.enter_context(torch.profiler.record_function(f"fakedist::{self._description.operation}"))
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(stream.device))
                inside.enter_context(torch.cuda.stream(stream))
            if self._description.timed is not None:
                inside.enter_context(self._description.timed)
            inside.enter_context(_BelowAutograd())
            self._inside = inside.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._inside.__exit__(None, None, None)

    def hold(self, more: object) -> None:
        """Hold something in addition to the tensors."""
        self._description = self._description._replace(tensors=[self._description.tensors, more])

    def done(self, outputs: Tensors) -> Done:
        """Return the finished call."""
        description = self._description
        work = done(outputs, description.tensors if description.is_async else None, self._stream)
        if description.number >= 0:
            work.calls = (description.number,)
            work.ledger = description.ledger
        if description.coalesced is not None:
            description.coalesced.done.append(work)
        return work


class PlainCall(RunningCall):
    """A synchronous, unprofiled call. A tiny one must not cost more than it does on torch's own fake backend."""

    __slots__ = ()

    def __init__(self) -> None:
        self._inside = _BelowAutograd()

    def __enter__(self) -> RunningCall:
        self._inside.__enter__()
        return self

    def hold(self, more: object) -> None:
        """A synchronous call holds nothing."""

    def done(self, outputs: Tensors) -> Done:
        """Return one shared work: ProcessGroupNCCL returns none at all for synchronous calls."""
        return _OVER


_OVER = Done()


@_surrounded
class RankGroup(BareGroup):
    """One process group. Arguments as :class:`BareGroup`; ``arrivals`` makes what others send.

    In a ``Join``, ``join`` returns that term of the next call, as in :class:`CallTerms`.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        *,
        backend: str,
        arrivals: Arrivals,
        ledger: LedgerLike,
        options: object,
        store: Store | None = None,
    ) -> None:
        super().__init__(rank, num_ranks, backend=backend, ledger=ledger, options=options, store=store)
        self._arrivals = arrivals
        self._streams: dict[tuple[torch.device, int], torch.cuda.Stream] = {}
        self._coalesced: Coalesced | None = None
        self._num_batches = 0
        self.join: Callable[[], str] | None = None

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = Coalesced()
        self._num_batches += 1

    def _end_coalescing(self, device: torch.device) -> Done:
        coalesced, self._coalesced = self._coalesced, None
        return coalesced.end() if coalesced is not None else done([])

    # ---- collectives

    def allreduce(self, tensors: torch.Tensor | Tensors, opts: object = None) -> Done:
        """all_reduce, in place."""
        return self._reduce_in_place("all_reduce", tensors if type(tensors) is list else listed(tensors), opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: object = None) -> Done:
        """all_reduce of several tensors."""
        return self._reduce_in_place("all_reduce_coalesced", tensors, opts)

    def reduce(self, tensors: torch.Tensor | Tensors, opts: object = None, op: Reduction | None = None) -> Done:
        """Reduce: the root gets the result; the other ranks keep their tensors."""
        tensors = listed(tensors)
        checks.check_root(self._checked(tensors[0]), "reduce", root(opts))
        mine, op = root(opts) == self._own_rank, self._op(opts, tensors, op)
        with self._call(
            "reduce", tensors, tensors if mine else [], opts, terms=CallTerms(reduction_name(op), root(opts))
        ) as call:
            if mine:
                for tensor in tensors:
                    self._arrivals.reduced(tensor, self._num_ranks, op)
        return call.done(tensors)

    def broadcast(self, tensors: torch.Tensor | Tensors, opts: object = None) -> Done:
        """Broadcast."""
        tensors = listed(tensors)
        checks.check_root(self._checked(tensors[0]), "broadcast", root(opts))
        mine, rooted = root(opts) == self._own_rank, CallTerms(root=root(opts))
        with self._call("broadcast", tensors if mine else [], [] if mine else tensors, opts, terms=rooted) as call:
            where = self._where("broadcast", root(opts))
            if mine:
                self._arrivals.tapes.send(where, tensors)
            else:
                self._arrivals.receive(where, tensors, self._arrivals.finite)
        return call.done(tensors)

    def allgather(self, outputs: Lists, inputs: torch.Tensor | Tensors, opts: object = None) -> Done:
        """all_gather into a list of tensors."""
        slots = only_list(outputs)
        mine = listed(inputs)[0]
        checks.check_gathered(self._checked(mine), slots, mine)
        flat = None
        if is_even(slots):  # torch gathers uneven slots by broadcasts, without a buffer
            mine, flat = mine.contiguous(), flat_like(slots)
        with self._call("all_gather", [mine], slots, opts, terms=CallTerms(received_parts=_uneven(slots))) as call:
            if not self._arrivals.routed(slots, mine, Slot(self.ranks)):
                self._arrivals.spread(slots, mine)
        work = call.done(slots)
        if getattr(opts, "asyncOp", True):
            work.kept = flat
        return work

    def allgather_coalesced(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: object = None) -> Done:
        """all_gather of several tensors into lists."""
        flat = [tensor for listed in output_lists for tensor in listed]
        terms = CallTerms(parts=_coalesced(inputs))
        with self._call("all_gather_coalesced", inputs, flat, opts, terms=terms) as call:
            for slots, mine in zip(zip(*output_lists, strict=True), inputs, strict=True):
                self._arrivals.spread(slots, mine)
        return call.done(flat)

    def _allgather_base(self, output: torch.Tensor, mine: torch.Tensor, opts: object = None) -> Done:
        return self._gather_evenly("all_gather_into_tensor", [output], [mine], opts)

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: object = None) -> Done:
        """all_gather of several tensors, each into one output tensor."""
        return self._gather_evenly("all_gather_into_tensor_coalesced", outputs, inputs, opts)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def gather(self, outputs: Lists, inputs: torch.Tensor | Tensors, opts: object = None) -> Done:
        """gather: the root gets every rank's tensor."""
        inputs = listed(inputs)
        slots = only_list(outputs)
        checks.check_root(self._checked(inputs[0]), "gather", root(opts))
        mine = root(opts) == self._own_rank
        if mine:
            checks.check_slots(self._checked(inputs[0]), "gather", slots, inputs[0])
        with self._call("gather", inputs, slots if mine else [], opts, terms=CallTerms(root=root(opts))) as call:
            if mine:
                self._arrivals.spread(slots, inputs[0])
        return call.done(slots if mine else inputs)

    def gather_single(self, output: torch.Tensor, mine: torch.Tensor, opts: object = None) -> Done:
        """Gather into one tensor."""
        if root(opts) == self._own_rank:
            return self._gather_evenly("gather_into_tensor", [output], [mine], opts, CallTerms(root=root(opts)))
        with self._call("gather_into_tensor", [mine], [], opts, terms=CallTerms(root=root(opts))) as call:
            pass
        return call.done([mine])

    gather_into_tensor = gather_single

    def scatter(self, outputs: torch.Tensor | Tensors, inputs: Lists, opts: object = None) -> Done:
        """scatter: this rank gets its chunk of the root's tensors."""
        outputs = listed(outputs)
        chunks = only_list(inputs)
        checks.check_root(self._checked(outputs[0]), "scatter", root(opts))
        mine = root(opts) == self._own_rank
        if mine:
            checks.check_slots(self._checked(outputs[0]), "scatter", chunks, outputs[0])
        with self._call("scatter", chunks if mine else [], outputs, opts, terms=CallTerms(root=root(opts))) as call:
            where = self._where("scatter", root(opts))
            if mine:
                self._arrivals.tapes.send(where, chunks)
                self._arrivals.spread(outputs, chunks[self._own_rank])
            else:
                self._arrivals.receive(where, outputs[:1], self._arrivals.invent, self._own_rank)
        return call.done(outputs)

    def reduce_scatter(self, outputs: torch.Tensor | Tensors, inputs: Lists, opts: object = None) -> Done:
        """reduce_scatter from a list of tensors."""
        output = listed(outputs)[0]
        chunks = only_list(inputs)
        checks.check_scattered(self._checked(output), output, chunks, self._own_rank)
        flat, op = flat_like(chunks) if is_even(chunks) else None, self._op(opts, [output])  # uneven: one by one
        terms = CallTerms(reduction_name(op), sent_parts=_uneven(chunks))
        with self._call("reduce_scatter", chunks, [output], opts, terms=terms) as call:
            self._arrivals.reduced_into(output, chunks[self._own_rank], self._num_ranks, op)
            call.hold(flat)
        return call.done([output])

    def _reduce_scatter_base(self, output: torch.Tensor, source: torch.Tensor, opts: object = None) -> Done:
        return self._reduce_chunks("reduce_scatter_tensor", [output], [source], opts)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: object = None) -> Done:
        """reduce_scatter of several tensors."""
        return self._reduce_chunks("reduce_scatter_tensor_coalesced", outputs, inputs, opts)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def alltoall_base(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: object = None,
    ) -> Done:
        """all_to_all between two tensors; sizes count rows and may be NumPy arrays, empty ones mean equal parts."""
        for tensor, sizes in ((source, input_sizes), (output, output_sizes)):
            checks.check_splits(self._checked(tensor), tensor, sizes)
        if len(input_sizes):
            start = int(sum(input_sizes[: self._own_rank]))
            mine = source[start : start + int(input_sizes[self._own_rank])]
        else:
            mine = self._my_chunk(source)
        parts = self._exchanged(source, input_sizes).most(self._exchanged(output, output_sizes))
        terms = CallTerms(sent_parts=self._parts(source, input_sizes), received_parts=self._parts(output, output_sizes))
        with self._call("all_to_all_single", [source], [output], opts, parts=parts, terms=terms) as call:
            is_even = len({*input_sizes, *output_sizes}) < 2  # torch's functional one names them
            if is_even and self._arrivals.routed(output, source, Slot(self.ranks, self._own_rank)):
                pass
            elif len(set(output_sizes)) > 1:
                self._arrivals.spread(output.split_with_sizes([int(size) for size in output_sizes]), mine)
            else:
                self._arrivals.spread_evenly(output, mine, self._own_rank, self._num_ranks)
        return call.done([output])

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: object = None) -> Done:
        """all_to_all between lists of tensors."""
        checks.check_lists(self._checked(outputs[0]), inputs, outputs)
        sent, received = (
            exchanged([tensor.nbytes for tensor in tensors], self._own_rank) for tensors in (inputs, outputs)
        )
        terms = CallTerms(sent_parts=_uneven(inputs), received_parts=_uneven(outputs))
        with self._call("all_to_all", inputs, outputs, opts, parts=sent.most(received), terms=terms) as call:
            self._arrivals.spread(outputs, inputs[self._own_rank])
        return call.done(outputs)

    # ---- point to point

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Done:
        """send: no rank receives it, but it goes onto the tape."""
        checks.check_peer(self._num_ranks, dst)
        with self._peer_call("send", tensors, dst, tag) as call:
            self._arrivals.tapes.send(self._peer(self._own_rank, dst, tensors[0].device, tag), tensors)
        return call.done(tensors)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Done:
        """Recv; a source of -1 means any rank."""
        if src == self._own_rank and self.backend_of(tensors[0].device.type) != "nccl":  # in a batch, NCCL does it
            raise ValueError(
                "Invalid source rank: source rank should not be the same as the rank of the current process."
            )
        checks.check_peer(self._num_ranks, src)
        where = self._peer(src, self._own_rank, tensors[0].device, tag)
        if src < 0 and (sender := self._arrivals.tapes.sender(where)) is not None:
            where, src = where._replace(source=sender), self.ranks.index(sender)
        with self._peer_call("recv", tensors, src, tag) as call:
            self._arrivals.receive(where, tensors, self._arrivals.invent)
        work = call.done(tensors)
        work.source = src if src >= 0 else min(1, self._num_ranks - 1) if self._own_rank == 0 else 0
        return work

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Done:
        """Receive from any rank."""
        if (backend := self.backend_of(tensors[0].device.type)) == "nccl":
            raise RuntimeError(f"Backend {backend} does not support recvAnysource")
        return self.recv(tensors, -1, tag)

    # ---- barriers

    def barrier(self, opts: object = None, timeout: timedelta | None = None) -> Done:
        """barrier: every rank has already arrived. On NCCL it is an all_reduce of one float."""
        device = self._barrier_device(opts)
        # Stays below Python, as NCCL does, so that `torch.cuda.is_initialized()` does not change.
        tensors = [] if device is None else [torch.ops.aten.zeros.default([1], device=device)]
        with self._call("barrier", tensors, tensors, opts) as call:
            pass
        return call.done([])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """barrier: every rank has already arrived."""
        with self._call("monitored_barrier", [], [], None):
            pass

    def _barrier_device(self, opts: object) -> torch.device | None:
        """The device that ``ProcessGroupNCCL::barrier`` would use; None if the barrier does not run on NCCL."""
        asked = getattr(opts, "device", None)
        kind = asked.type if asked is not None else "cpu" if "cpu" in self._by_device else "cuda"
        if self.backend_of(kind) != "nccl" or kind == "cpu" or not torch.cuda.is_available():
            return None
        if device_ids := getattr(opts, "device_ids", None):
            return torch.device("cuda", device_ids[0])
        if self.bound_device_id is not None:
            return torch.device(self.bound_device_id)
        used = next((device for device, _ in self._streams), None)
        return used or torch.device("cuda", dist.get_rank() % torch.cuda.device_count())

    def symmetric(
        self,
        operation: str,
        run: Callable[[], torch.Tensor],
        mine: torch.Tensor,
        written: torch.Tensor,
        *,
        splits_last: bool = False,
    ) -> torch.Tensor:
        """A collective through symmetric memory, on the current stream: ``run`` launches torch's own kernel.

        ``written`` is as large as its result. ``splits_last``: ranks get parts along the last dimension.
        """
        with self._call(operation, [mine], [written], SimpleNamespace(asyncOp=False)):
            result = run()
            if "all_gather" in operation:
                self._arrivals.spread_evenly(result, mine, self._own_rank, self._num_ranks)
            elif "reduce_scatter" in operation:
                chunk = mine.chunk(self._num_ranks, -1 if splits_last else 0)[self._own_rank]
                self._arrivals.reduced_into(result, chunk, self._num_ranks, dist.ReduceOp.SUM)
            elif result.data_ptr() == mine.data_ptr():
                self._arrivals.reduced(result, self._num_ranks, dist.ReduceOp.SUM)
            else:
                self._arrivals.reduced_into(result, mine, self._num_ranks, dist.ReduceOp.SUM)
        return result

    def symmetric_barrier(self, run: Callable[[], object]) -> None:
        """A kernel in which the ranks wait for each other, through symmetric memory."""
        self._ledger.write("symm_mem_barrier", self.number, [], [], moved=(0, 0))
        with self._ledger.timed("symm_mem_barrier") or nullcontext():
            run()

    def dispatched(
        self,
        operation: str,
        inputs: Tensors,
        outputs: Tensors,
        arrive: Callable[[Arrivals], object],
        exchanged: tuple[int, int] = (0, 0),
    ) -> None:
        """A kernel that sends tokens to their experts, or back, on the current stream; ``arrive`` writes what comes."""
        with self._call(operation, inputs, outputs, SimpleNamespace(asyncOp=False), parts=exchanged):
            arrive(self._arrivals)

    # ---- internals

    def _checked(self, tensor: torch.Tensor) -> CheckedGroup:
        return CheckedGroup(self.backend_of(tensor.device.type), self._num_ranks)

    def _op(self, opts: object, tensors: Tensors, op: Reduction | None = None) -> Reduction:
        op = reduce_op(opts, op)
        if hash(op) in ODD_OPS:
            checks.check_op(self._checked(tensors[0]), op, tensors[0].dtype)
        return op

    def _where(self, operation: str, root: int) -> Where:
        return Where(operation, self.channel, self.ranks[root], sequence=self._sequence)

    def _peer(self, source: int, to: int, device: torch.device, tag: int) -> Where:
        """Identify the call on the tape. NCCL has no tags."""
        sender, receiver = (self.ranks[group_rank] if group_rank >= 0 else ANY_RANK for group_rank in (source, to))
        counted = None if self.backend_of(device.type) == "nccl" else tag
        return Where("send", self.channel, sender, receiver, tag=counted)

    def _exchanged(self, tensor: torch.Tensor, sizes: Sequence[int]) -> Exchanged:
        """Other ranks' parts; sizes count rows, and none mean equal parts."""
        if not len(sizes):
            part, others = tensor.nbytes // self._num_ranks, self._num_ranks - 1
            return Exchanged(part, others * part) if others else Exchanged()
        return exchanged(sizes, self._own_rank, tensor.nbytes // max(tensor.shape[0], 1))

    def _parts(self, tensor: torch.Tensor, sizes: Sequence[int]) -> tuple[int, ...]:
        """Bytes of each rank's part; nothing if they are equal. Sizes count rows."""
        if len(set(sizes)) < 2:
            return ()
        row_bytes = tensor.nbytes // max(tensor.shape[0], 1)
        return tuple([int(size) * row_bytes for size in sizes])

    def _call(
        self,
        operation: str,
        inputs: Tensors,
        outputs: Tensors,
        opts: object,
        *,
        parts: tuple[int, int] = (0, 0),
        terms: CallTerms = NO_TERMS,
    ) -> RunningCall:
        is_async = getattr(opts, "asyncOp", True)  # the default of c10d/Types.hpp
        some = outputs or inputs
        if some:
            check_device(self._by_device, some[0].device)
            if self._asked == "nccl":
                check_dense(inputs, outputs)
        self._sequence += 1
        if self._coalesced is not None:
            terms = terms._replace(batch=self._num_batches)
        if self.join is not None:
            terms = terms._replace(join=self.join())
        number = self._ledger.write(
            operation, self.number, inputs, outputs, is_async=is_async, exchanged=parts, terms=terms
        )
        stream = timed = None
        if some and some[0].is_cuda:
            timed = self._ledger.timed(operation)
            # NCCL takes its stream below Python. torch.cuda.Stream would initialise torch.cuda just for a barrier.
            if is_async or torch.cuda.is_initialized():
                stream = self._stream(some[0].device, -1)
        if not is_async and self._coalesced is None and timed is None and not profiler_enabled():
            return PlainCall()
        number = number if is_async else -1
        tensors = [inputs, outputs]
        description = CallDescription(operation, tensors, is_async, self._coalesced, timed, self._ledger, number)
        return RunningCall(description, stream if is_async else None)

    def _peer_call(self, operation: str, tensors: Tensors, peer: int, tag: int) -> RunningCall:
        """Begin a send or receive. On CUDA it always runs on its own stream, which the allocator records."""
        check_device(self._by_device, tensors[0].device)
        inputs, outputs = (tensors, []) if operation == "send" else ([], tensors)
        terms = CallTerms(tag=tag, batch=0 if self._coalesced is None else self._num_batches)
        number = self._ledger.write(operation, self.number, inputs, outputs, peer=peer, terms=terms)
        description = CallDescription(operation, None, False, self._coalesced, None, self._ledger, number)
        if not tensors[0].is_cuda:
            return RunningCall(description, None)
        shared = self._coalesced is not None or self.bound_device_id is not None
        stream = self._stream(tensors[0].device, -1 if shared else peer)
        for tensor in tensors:
            tensor.record_stream(stream)
        return RunningCall(description._replace(timed=self._ledger.timed(operation)), stream)

    def _stream(self, device: torch.device, peer: int) -> torch.cuda.Stream:
        """Stream of a communicator, from the pool. NCCL creates one communicator for each unbatched peer."""
        stream = self._streams.get((device, peer))
        if stream is None:
            stream = self._streams[device, peer] = torch.cuda.Stream(device)
        return stream

    def _my_chunk(self, source: torch.Tensor) -> torch.Tensor:
        part = source.numel() // self._num_ranks
        return source.reshape(-1)[self._own_rank * part : (self._own_rank + 1) * part]

    def _reduce_in_place(self, operation: str, tensors: Tensors, opts: object) -> Done:
        op = self._op(opts, tensors)
        terms = CallTerms(reduction_name(op), parts=_coalesced(tensors))
        with self._call(operation, tensors, tensors, opts, terms=terms) as call:
            reduced = self._arrivals.reduced
            for tensor in tensors:
                if not self._arrivals.routed_sum(tensor, self.ranks, op):
                    reduced(tensor, self._num_ranks, op)
        return call.done(tensors)

    def _reduce_chunks(self, operation: str, outputs: Tensors, inputs: Tensors, opts: object) -> Done:
        for output, source in zip(outputs, inputs, strict=True):
            check_scattered_from(self._checked(source), output, source)
        op = self._op(opts, inputs)
        terms = CallTerms(reduction_name(op), parts=_coalesced(outputs))
        with self._call(operation, inputs, outputs, opts, terms=terms) as call:
            for output, source in zip(outputs, inputs, strict=True):
                self._arrivals.reduced_into(output, self._my_chunk(source), self._num_ranks, op)
        return call.done(outputs)

    def _gather_evenly(
        self, operation: str, outputs: Tensors, inputs: Tensors, opts: object, terms: CallTerms = NO_TERMS
    ) -> Done:
        for output, mine in zip(outputs, inputs, strict=True):
            check_gathered_into(self._checked(mine), output, mine)
        if len(inputs) > 1:
            terms = terms._replace(parts=_coalesced(inputs))
        with self._call(operation, inputs, outputs, opts, terms=terms) as call:
            for output, mine in zip(outputs, inputs, strict=True):
                if not self._arrivals.routed(output, mine, Slot(self.ranks)):
                    self._arrivals.spread_evenly(output, mine, self._own_rank, self._num_ranks)
        return call.done(outputs)


def _uneven(tensors: Tensors) -> tuple[int, ...]:
    """Bytes of each tensor; nothing if they are equal."""
    parts = tuple([tensor.nbytes for tensor in tensors])
    return parts if len(set(parts)) > 1 else ()


def _coalesced(tensors: Tensors) -> tuple[str, ...]:
    """Dtype and bytes of each of several tensors; nothing for one, of which the ledger has them."""
    if len(tensors) < 2:
        return ()
    return tuple([f"{str(tensor.dtype)[6:]} {tensor.nbytes}" for tensor in tensors])


@contextmanager
def around_calls(begin: Callable[[], object], end: Callable[[], object]) -> Iterator[None]:
    """Call ``begin`` and ``end`` around the groups' calls and what is made of them."""
    surrounding = begin, end
    _AROUND.append(surrounding)
    try:
        yield
    finally:
        _AROUND.remove(surrounding)


@contextmanager
def still_calls(stop: Callable[[], object], go: Callable[[int], object]) -> Iterator[None]:
    """Have the host's clock stand still in the groups' calls and in what is made of them: call ``stop`` and ``go(0)``.

    NCCL's own time on the host is another figure. Values arrive on the host alone: those on the device are stale.
    """
    with on_host_alone(), around_calls(stop, lambda: go(0)):
        yield
