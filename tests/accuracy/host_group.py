"""A world that is not faked, with NCCL's use of device memory: process groups whose tensors meet in host memory.

Streams, held tensors and device temporaries are those of :class:`fakedist.world.process_group.RankGroup`, which follows
ProcessGroupNCCL; what arrives comes from the other processes, over gloo. What is left to differ between such a job and
one faked rank is what no faked rank can know: the other ranks' values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from fakedist.patch import patched
from fakedist.world.arrivals import Arrivals, premultiplier
from fakedist.world.checks import Tensors, flat_like, is_even, listed, reduce_op, reduction_name, root
from fakedist.world.group import LedgerLike
from fakedist.world.process_group import Done, RankGroup
from fakedist.world.reroute import _register

_SUMS = ("SUM", "AVG", "PREMUL_SUM")
_OTHERS = {"MAX": torch.maximum, "MIN": torch.minimum, "PRODUCT": torch.mul}


@contextmanager
def real_world(ledger: LedgerLike) -> Iterator[Callable[[], list[str]]]:
    """Every process group that the script asks for is a :class:`HostGroup`; meeting and objects are torch's own."""
    signature = inspect.signature(c10d._new_process_group_helper)  # type: ignore[attr-defined]

    def new_process_group(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        ranks, name = given["global_ranks_in_group"], str(given["group_name"])
        if ranks and dist.get_rank() not in ranks:
            return c10d.GroupMember.NON_GROUP_MEMBER, None
        rank, size = given["group_rank"], given["group_size"]
        store = c10d.PrefixStore(f"{name}/", given["store"])
        transport = dist.ProcessGroupGloo(store, rank, size, given["timeout"])  # type: ignore[attr-defined]
        group = HostGroup(rank, size, backend=str(given["backend"]), transport=transport, ledger=ledger)
        number = ledger.add_group(name, given["group_desc"] or "", ranks or range(size), rank, str(given["backend"]))
        group.named(name, given["group_desc"] or "undefined", number, store)
        if given["device_id"]:
            group.bound_device_id = given["device_id"]
        _register(group, str(given["backend"]), store, given["group_name"], given["pg_tag"])
        return group, store

    with (
        patched(c10d, "_new_process_group_helper", new_process_group),
        patched(c10d, "is_nccl_available", lambda: True),
        patched(dist, "is_nccl_available", lambda: True),
    ):
        yield list


class HostGroup(RankGroup):
    """One process group.

    Args:
        rank: This rank's rank in the group.
        num_ranks: The group's size.
        backend: The backend that the script asked for.
        transport: The gloo group that carries host tensors between the same processes.
        ledger: Where calls are written down.
    """

    def __init__(self, rank: int, num_ranks: int, *, backend: str, transport: Any, ledger: LedgerLike) -> None:
        super().__init__(rank, num_ranks, backend=backend, arrivals=Arrivals(0), ledger=ledger, options=None)
        self._transport = transport
        self._carrier = ThreadPoolExecutor(1)
        self._sent: list[Any] = []
        self._open: list[tuple[Any, torch.Tensor, torch.Tensor]] = []

    # ---- collectives, as RankGroup has them, with another middle

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None) -> Done:
        """Everybody gets the sum on the host; the root keeps it."""
        tensors = listed(tensors)
        mine = root(opts) == self._own_rank
        with self._call("reduce", tensors, tensors if mine else [], opts) as call:
            for tensor in tensors:
                summed = self._reduced(tensor, reduce_op(opts, op))
                if mine:
                    tensor.copy_(summed)
        return call.done(tensors)

    def broadcast(self, tensors: Any, opts: Any = None) -> Done:
        tensors = listed(tensors)
        source = root(opts)
        with self._call("broadcast", *((tensors, []) if source == self._own_rank else ([], tensors)), opts) as call:
            for tensor in tensors:
                tensor.copy_(self._gathered(tensor)[source])
        return call.done(tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:
        slots = list(outputs if isinstance(outputs[0], torch.Tensor) else outputs[0])
        mine = listed(inputs)[0].contiguous()
        flat = flat_like(slots) if is_even(slots) else None
        with self._call("all_gather", [mine], slots, opts) as call:
            for slot, part in zip(slots, self._gathered(mine), strict=True):
                slot.copy_(part)
        work = call.done(slots)
        if getattr(opts, "asyncOp", True):
            work.kept = flat
        return work

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:
        """scatter: my chunk of what the root has."""
        outputs = listed(outputs)
        chunks = inputs[0] if inputs and not isinstance(inputs[0], torch.Tensor) else inputs
        source = root(opts)
        with self._call("scatter", chunks if source == self._own_rank else [], outputs, opts) as call:
            given = (
                [chunk.cpu() for chunk in chunks] if source == self._own_rank else [outputs[0].cpu()] * self._num_ranks
            )
            every = torch.stack(given)
            outputs[0].copy_(self._gathered(every)[source][self._own_rank])
        return call.done(outputs)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:
        """reduce_scatter from a list of tensors."""
        output = listed(outputs)[0]
        chunks = list(inputs if isinstance(inputs[0], torch.Tensor) else inputs[0])
        flat = flat_like(chunks) if is_even(chunks) else None
        with self._call("reduce_scatter", chunks, [output], opts) as call:
            summed = [self._reduced(chunk, reduce_op(opts)) for chunk in chunks]
            output.copy_(summed[self._own_rank])
            call.hold(flat)
        return call.done([output])

    def alltoall_base(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> Done:
        """all_to_all from one tensor into one."""
        with self._call("all_to_all_single", [given], [output], opts) as call:
            arrived = torch.empty(output.shape, dtype=output.dtype)
            sizes = list(map(int, output_sizes)), list(map(int, input_sizes))
            host = given.cpu()
            self._carry(lambda: self._transport.alltoall_base(arrived, host, *sizes, c10d.AllToAllOptions()))
            output.copy_(arrived)
        return call.done([output])

    all_to_all_single = alltoall_base

    # ---- point to point

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Done:
        """Sent when the receiver takes it."""
        with self._peer_call("send", tensors, dst) as call:
            for tensor in tensors:
                host = tensor.cpu()
                self._sent.append((self._transport.send([host], dst, tag), host))
        return call.done(tensors)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Done:
        """Waits for the sender; among others that begin together, when all of them have begun."""
        with self._peer_call("recv", tensors, src) as call:
            for tensor in tensors:
                host = torch.empty(tensor.shape, dtype=tensor.dtype)
                self._open.append((self._transport.recv([host], src, tag), host, tensor))
            if self._coalesced is None:
                self._receive()
        return call.done(tensors)

    def _end_coalescing(self, device: torch.device) -> Done:
        self._receive()
        return super()._end_coalescing(device)

    def _receive(self) -> None:
        opened, self._open = self._open, []
        for work, host, tensor in opened:
            work.wait()
            tensor.copy_(host)

    # ---- inside

    def _reduce_in_place(self, operation: str, tensors: Tensors, opts: Any) -> Done:
        with self._call(operation, tensors, tensors, opts) as call:
            for tensor in tensors:
                tensor.copy_(self._reduced(tensor, reduce_op(opts)))
        return call.done(tensors)

    def _reduce_chunks(self, operation: str, outputs: Tensors, inputs: Tensors, opts: Any) -> Done:
        with self._call(operation, inputs, outputs, opts) as call:
            for output, given in zip(outputs, inputs, strict=True):
                summed = self._reduced(given, reduce_op(opts)).view(self._num_ranks, -1)
                output.copy_(summed[self._own_rank].view(output.shape))
        return call.done(outputs)

    def _gather_evenly(self, operation: str, outputs: Tensors, inputs: Tensors, opts: Any) -> Done:
        with self._call(operation, inputs, outputs, opts) as call:
            for output, mine in zip(outputs, inputs, strict=True):
                output.copy_(torch.stack(self._gathered(mine)).view(output.shape))
        return call.done(outputs)

    def _gathered(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's, on the host."""
        host = mine.cpu()
        parts = [torch.empty_like(host) for _ in range(self._num_ranks)]
        self._carry(lambda: self._transport.allgather([parts], [host], c10d.AllgatherOptions()))
        return parts

    def _carry(self, begin: Callable[[], Any]) -> None:
        """Begin something and wait for it, in a thread of its own.

        Gloo's threads take over what the one that begins has switched on; in torch 2.11 they cannot run an operation
        where that is the recorder's dispatch key.
        """
        self._carrier.submit(lambda: begin().wait()).result()

    def _reduced(self, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        """The reduction over all ranks, on the host, in the order of the ranks."""
        name = reduction_name(op)
        parts = self._gathered(tensor)
        total = parts[0].clone()
        for part in parts[1:]:
            total = total + part if name in _SUMS else _OTHERS[name](total, part)
        if name == "PREMUL_SUM":
            return total * premultiplier(op)
        return total / self._num_ranks if name == "AVG" else total
