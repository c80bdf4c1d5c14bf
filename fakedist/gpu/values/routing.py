"""Which choices by made-up values are a router's: those by which tokens are sent to experts.

A top-5 accuracy picks indices with ``topk`` as a router does, and then compares them with the labels. A router's
indices decide where tokens go: they are counted, sorted or scattered into a mask. So indices are followed, with what is
computed from them, until an operation does that.
"""

from __future__ import annotations

import torch
from torch import arange
from torch._ops import OpOverload

from fakedist.gpu.values.arguments import Arguments, Keywords, device_tensors, plain_tensors, tensor_at
from fakedist.gpu.values.contents import host_view
from fakedist.gpu.values.host import Host
from fakedist.gpu.values.inventions import script_line
from fakedist.gpu.values.known import Choice
from fakedist.gpu.values.operators import Operator
from fakedist.rundir.sources import ROUTED

#: The most experts that a layer may have. Detectors pick among thousands of anchors.
_MOST_EXPERTS = 2048
#: These order, count or move by the indices that they are given.
_DISPATCHING = {
    "sort",
    "argsort",
    "_unique2",
    "unique_consecutive",
    "unique_dim",
    "nonzero",
    "nonzero_static",
    "cumsum",
}
_DISPATCHING |= {"searchsorted", "index_add", "index_copy", "index_put", "_index_put_impl", "index_reduce"}
_DISPATCHING |= {"_grouped_mm", "_scaled_grouped_mm"}
#: These too. But a metric also does so with the one class that it predicts for each pixel.
_DISPATCHING_SEVERAL = {"scatter", "scatter_add", "scatter_reduce", "bincount", "histc"}
#: Of these, what is written where may be indices too: the ends of sequences.
_PUTTING = {"index_put", "_index_put_impl"}
_ORDERING = {"lt", "le", "gt", "ge"}
_COMPARING = {"eq", "ne", *_ORDERING}


class Routing:
    """Follows picked indices until it is known that a router picked them.

    Args:
        host: What is known of device memory.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._routers: set[Choice] = set()
        self.is_on = False

    def picked(self, operator: Operator, args: Arguments, kwargs: Keywords, indices: torch.Tensor) -> None:
        """Indices were picked for the script's current line. Follow them if they may be a router's."""
        source, dim = tensor_at(args, 0), operator.argument("dim", args, kwargs)
        if not isinstance(dim, int) or not source.dim():
            return
        choice = Choice(operator.full_name, *script_line(), source.shape[dim])
        is_sort = indices.dim() == source.dim() and indices.shape[dim] == choice.num_choices
        if not is_sort and choice.num_choices <= _MOST_EXPERTS and choice not in self._routers:
            self._host.storages.make(indices).choice = choice
            self.is_on = True

    def ran(self, func: OpOverload, args: Arguments, kwargs: Keywords, result: object) -> None:
        """An operation ran. Follow what it computed from indices, or take note of what it shows."""
        inputs = [tensor for tensor in plain_tensors((args, tuple(kwargs.values()))) if tensor.is_cuda]
        choice = next((found for tensor in inputs if (found := self._choice_of(tensor)) is not None), None)
        if choice is None:
            return
        name = func._schema.name.rpartition("::")[2].removesuffix("_")
        several = name in _DISPATCHING_SEVERAL and ".topk" in choice.operation
        dispatches = name in _DISPATCHING and (name not in _PUTTING or self._is_indexed(args))
        if several or dispatches or (name == "index" and self._has_mask(args)):
            self._routers.add(choice)
            self._host.inventions.tell(ROUTED, (choice.filename, choice.line))
        elif not (name in _COMPARING and any(self._is_no_expert(tensor, name) for tensor in inputs)):
            for tensor in device_tensors((result,)):
                if name == "_to_copy" or not (tensor.is_floating_point() or tensor.is_complex()):
                    self._host.storages.make(tensor).choice = choice

    def _choice_of(self, tensor: torch.Tensor) -> Choice | None:
        known = self._host.storages.get(tensor)
        return None if known is None or known.choice in self._routers else known.choice

    def _is_indexed(self, args: Arguments) -> bool:
        """Whether the places of an ``index_put`` follow from indices."""
        return any(self._choice_of(place) is not None for place in plain_tensors(args[1:2]) if place.is_cuda)

    def _has_mask(self, args: Arguments) -> bool:
        """Whether elements are selected by a mask that follows from indices."""
        masks = plain_tensors(args[1:])
        return any(mask.dtype == torch.bool and self._choice_of(mask) is not None for mask in masks if mask.is_cuda)

    def _is_no_expert(self, tensor: torch.Tensor, comparison: str) -> bool:
        """Whether indices are compared with something else than the numbers of experts: with labels.

        The positions up to an index are those of a sequence up to its end.
        """
        if self._choice_of(tensor) is not None:
            return False
        if comparison in _ORDERING and tensor.numel() > 1:
            return True
        if not self._host.holds(tensor):
            return True
        values = host_view(tensor).flatten()
        return not torch.equal(values, arange(values.numel(), dtype=values.dtype))
