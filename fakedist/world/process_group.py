"""The torch.distributed backend: a process group of which this rank is the only one there.

``dist.*`` calls these methods directly; C++ callers (DDP's reducer, functional collectives) reach those that torch's
PyProcessGroup.hpp forwards. Names changed between torch 2.11 and 2.15 (``_allgather_base`` became
``all_gather_single`` and so on); both are defined.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fakedist.world.arrivals import Arrivals
from fakedist.world.group import Group
from fakedist.world.ledger import LedgerLike
from fakedist.world.work import HERE, Call, Done

Tensors = Sequence[torch.Tensor]


class RankGroup(Group):
    """One process group.

    Args:
        place: This rank's place in it, and how many ranks it has.
        backend: The backend that the script asked for, "nccl" or "cpu:gloo,cuda:nccl".
        arrivals: What arrives; None moves nothing at all.
        ledger: Where calls are written down.
        options: The backend options that the script gave.
    """

    def __init__(
        self, place: tuple[int, int], backend: str, arrivals: Arrivals | None, ledger: LedgerLike, options: object
    ) -> None:
        super().__init__(place, backend, ledger, options)
        self._arrivals = arrivals
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    # ---- collectives

    def allreduce(self, tensors: Any, opts: Any = None) -> Done:
        """all_reduce, in place."""
        tensors = _listed(tensors)
        self._write("all_reduce", tensors, tensors, opts)
        return self._reduce(tensors, tensors, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Done:
        """all_reduce of several tensors."""
        self._write("all_reduce_coalesced", tensors, tensors, opts)
        return self._reduce(tensors, tensors, opts)

    def reduce(self, tensors: Any, root: Any = None, op: Any = None) -> Done:
        """Reduce: the root gets the sum, the others keep theirs."""
        tensors = _listed(tensors)
        opts = root if hasattr(root, "rootRank") else None
        at = opts.rootRank if opts is not None else int(root or 0)
        self._write("reduce", tensors, tensors if at == self._place else [], opts)
        if at != self._place:
            return Done(tensors)
        return self._reduce(tensors, tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> Done:
        """Broadcast."""
        tensors = _listed(tensors)
        root = getattr(opts, "rootRank", opts if isinstance(opts, int) else 0)
        mine = root == self._place
        self._write("broadcast", tensors if mine else [], [] if mine else tensors, opts)
        if mine or self._arrivals is None:
            return Done(tensors)
        with self._on_stream(tensors) as done:
            for tensor in tensors:
                self._arrivals.finite(tensor)
        return done(tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:
        """all_gather into a list of tensors."""
        if isinstance(outputs[0], torch.Tensor):
            outputs, inputs = [outputs], _listed(inputs)
        flat = [tensor for listed in outputs for tensor in listed]
        self._write("all_gather", inputs, flat, opts)
        # ProcessGroupNCCL gathers equal tensors into one flat buffer (newLikeFlat), uneven ones with broadcasts.
        held = [_flat_like(listed) for listed in outputs if listed[0].is_cuda and _even(listed)]
        return self._gather(list(zip(outputs, inputs, strict=True)), flat, held)

    def allgather_coalesced(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Done:
        """all_gather of several tensors into lists."""
        flat = [tensor for listed in output_lists for tensor in listed]
        self._write("all_gather_coalesced", inputs, flat, opts)
        return self._gather(
            [(list(slots), mine) for slots, mine in zip(zip(*output_lists, strict=True), inputs, strict=True)], flat
        )

    def _allgather_base(self, output: torch.Tensor, mine: torch.Tensor, opts: Any = None) -> Done:
        """all_gather into one tensor."""
        self._write("all_gather_into_tensor", [mine], [output], opts)
        return self._gather_evenly([output], [mine])

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Done:
        """all_gather of several tensors, each into one."""
        self._write("all_gather_into_tensor_coalesced", inputs, outputs, opts)
        return self._gather_evenly(outputs, inputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:
        """gather: the root gets everybody's."""
        inputs = _listed(inputs)
        listed = outputs[0] if outputs and not isinstance(outputs[0], torch.Tensor) else outputs
        mine = getattr(opts, "rootRank", opts) == self._place
        self._write("gather", inputs, listed if mine else [], opts)
        return self._gather([(listed, inputs[0])], list(listed)) if mine else Done(inputs)

    def gather_single(self, output: torch.Tensor, mine: torch.Tensor, opts: Any = None) -> Done:
        """Gather into one tensor."""
        at_root = getattr(opts, "rootRank", opts) == self._place
        self._write("gather_into_tensor", [mine], [output] if at_root else [], opts)
        return self._gather_evenly([output], [mine]) if at_root else Done([mine])

    gather_into_tensor = gather_single

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:
        """scatter: my chunk of what the root has."""
        outputs = _listed(outputs)
        listed = inputs[0] if inputs and not isinstance(inputs[0], torch.Tensor) else inputs
        mine = getattr(opts, "rootRank", opts) == self._place
        self._write("scatter", listed if mine else [], outputs, opts)
        if mine:
            return self._gather([(outputs, listed[self._place])], outputs)
        return self._arrive(outputs)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:
        """reduce_scatter from a list of tensors."""
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        flat = [tensor for listed in inputs for tensor in listed]
        self._write("reduce_scatter", flat, outputs, opts)
        held = [_flat_like(listed) for listed in inputs if listed[0].is_cuda and _even(listed)]
        return self._reduce(outputs, [listed[self._place] for listed in inputs], opts, held)

    def _reduce_scatter_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Done:
        """reduce_scatter from one tensor."""
        self._write("reduce_scatter_tensor", [given], [output], opts)
        return self._reduce([output], [self._my_chunk(given)], opts, [given])

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Done:
        """reduce_scatter of several tensors."""
        self._write("reduce_scatter_tensor_coalesced", inputs, outputs, opts)
        return self._reduce(outputs, [self._my_chunk(given) for given in inputs], opts, inputs)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def alltoall_base(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> Done:
        """all_to_all from one tensor into one; sizes count rows, none means equal parts."""
        self._write("all_to_all_single", [given], [output], opts)
        if self._arrivals is None:
            return Done([output])
        if input_sizes:
            start = sum(input_sizes[: self._place])
            mine = given[start : start + input_sizes[self._place]]
        else:
            mine = self._my_chunk(given)
        with self._on_stream([output]) as done:
            if output_sizes:
                self._arrivals.spread(torch.split(output, list(output_sizes)), mine)
            else:
                self._arrivals.spread_evenly(output, mine, (self._place, self._num_ranks))
        return done([output], given)

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Done:
        """all_to_all between lists of tensors."""
        self._write("all_to_all", inputs, outputs, opts)
        return self._gather([(outputs, inputs[self._place])], list(outputs))

    # ---- point to point

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Done:
        """send: nobody listens."""
        self._ledger.write("send", self.number, tensors, [], (False, dst))
        self._sequence += 1
        return Done(tensors)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Done:
        """Recv."""
        self._ledger.write("recv", self.number, [], tensors, (False, src))
        self._sequence += 1
        return self._arrive(tensors)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Done:
        """Receive from any rank."""
        return self.recv(tensors, -1, tag)

    # ---- barriers

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Done:
        """barrier: nobody is late."""
        self._write("barrier", [], [], opts)
        return Done([])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """barrier: nobody is late."""
        self._write("monitored_barrier", [], [], None)

    # ---- inside

    def _write(self, operation: str, inputs: Tensors, outputs: Tensors, opts: Any) -> None:
        self._ledger.write(operation, self.number, inputs, outputs, (bool(getattr(opts, "asyncOp", False)), -1))
        self._sequence += 1

    def _my_chunk(self, given: torch.Tensor) -> torch.Tensor:
        """My part of a tensor that holds one for every rank."""
        part = given.numel() // self._num_ranks
        return given.reshape(-1)[self._place * part : (self._place + 1) * part]

    def _reduce(self, outputs: Tensors, chunks: Tensors, opts: Any, held: Any = None) -> Done:
        if self._arrivals is None:
            return Done(outputs)
        op = getattr(opts, "reduceOp", None) or (opts if opts is not None else dist.ReduceOp.SUM)
        with self._on_stream(outputs) as done:
            for output, chunk in zip(outputs, chunks, strict=True):
                if output is not chunk:
                    output.view(-1).copy_(chunk.reshape(-1))
                self._arrivals.reduced(output, self._num_ranks, op)
        return done(outputs, held)

    def _gather(self, pairs: Sequence[tuple[Tensors, torch.Tensor]], outputs: Tensors, held: Any = None) -> Done:
        if self._arrivals is None:
            return Done(outputs)
        with self._on_stream(outputs) as done:
            for slots, mine in pairs:
                self._arrivals.spread(slots, mine)
        return done(outputs, (held, [mine for _, mine in pairs]))

    def _gather_evenly(self, outputs: Tensors, inputs: Tensors) -> Done:
        if self._arrivals is None:
            return Done(outputs)
        with self._on_stream(outputs) as done:
            for output, mine in zip(outputs, inputs, strict=True):
                self._arrivals.spread_evenly(output, mine, (self._place, self._num_ranks))
        return done(outputs, inputs)

    def _arrive(self, tensors: Tensors) -> Done:
        if self._arrivals is None:
            return Done(tensors)
        with self._on_stream(tensors) as done:
            for tensor in tensors:
                self._arrivals.invent(tensor)
        return done(tensors)

    def _on_stream(self, tensors: Tensors) -> Call:
        """Run on the group's own stream, after what the current one has in it."""
        if not tensors or not tensors[0].is_cuda:
            return HERE
        device = tensors[0].device
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return Call(stream)


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _even(tensors: Tensors) -> bool:
    return all(tensor.numel() == tensors[0].numel() for tensor in tensors)


def _flat_like(tensors: Tensors) -> torch.Tensor:
    """The buffer that ProcessGroupNCCL takes for a list of equal tensors (newLikeFlat)."""
    return tensors[0].new_empty((len(tensors), *tensors[0].shape))
