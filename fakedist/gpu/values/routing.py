"""A router's choices of experts: indices picked by values that no kernel computed, each index equally often.

``topk`` of a router's logits picks experts. If the logits hold no values, the rows pick the indices in turn, so all
experts get the same number of tokens, as a trained router's do on average. The indices are shuffled after each turn, so
the experts of a token are on as many ranks as those of random choices: dispatchers send it once to each rank, or node.

A top-5 accuracy uses ``topk`` too, but compares indices with labels, where a router counts, sorts or scatters them into
a mask. So indices are followed, with all that is computed from them, until an operation shows which it is.
"""

from __future__ import annotations

import functools
import math
import sys
from types import FrameType

import torch
from torch import arange, rand, zeros
from torch._ops import OpOverload

from fakedist.gpu.values.contents import PickedIndices, host_view
from fakedist.gpu.values.host import Host
from fakedist.gpu.values.inventions import script_line
from fakedist.gpu.values.operators import Operator
from fakedist.gpu.values.tensors import Arguments, Keywords, device_tensors, plain_tensors, tensor_at
from fakedist.rundir.sources import ROUTED

#: Operators that return indices.
CHOOSING = {"topk", "argmax", "argmin", "sort", "argsort", "max", "min", "median", "nanmedian", "kthvalue", "mode"}
#: Its kernels write a router's mask, and the dispatcher does not see them.
_FUSED_ROUTER = "transformer_engine.pytorch.router"
_MAX_FRAMES = 32


def choose(operator: Operator, args: Arguments, kwargs: Keywords, indices: torch.Tensor) -> torch.Tensor:
    """An operation's index result as a host tensor, distinct along the dimension picked from. Do not write to it."""
    source, dim = tensor_at(args, 0), operator.argument("dim", args, kwargs)
    if not isinstance(dim, int) or not source.dim():
        return zeros(indices.shape, dtype=torch.int64)
    return _evenly(source.shape, dim, indices.shape)


@functools.lru_cache(maxsize=8)  # a router makes the same choice and the same mask for each layer and micro-batch
def _evenly(source: torch.Size, dim: int, wanted: torch.Size) -> torch.Tensor:
    num_choices = source[dim]
    keeps_dim = len(wanted) == len(source)
    picked = wanted[dim] if keeps_dim else 1
    if picked == num_choices:  # a sort: every index once
        order = arange(picked).view([-1 if axis == dim % len(source) else 1 for axis in range(len(source))])
        return order.expand(wanted)
    if not keeps_dim:
        return (arange(wanted.numel()) % max(1, num_choices)).view(wanted)
    rows_first = [size for axis, size in enumerate(wanted) if axis != dim % len(source)]
    return _shuffled_turns(wanted.numel(), picked, max(1, num_choices)).view([*rows_first, picked]).movedim(-1, dim)


def _shuffled_turns(number: int, picked: int, num_choices: int) -> torch.Tensor:
    """All choices in turn, shuffled differently each time that a row begins with the first one."""
    position = arange(number)
    if picked < 2 or num_choices > _MOST_EXPERTS:
        return position % num_choices
    turn = math.lcm(picked, num_choices)
    orders = rand(-(-number // turn), num_choices, generator=torch.Generator().manual_seed(0)).argsort(1)
    return orders[position // turn, position % num_choices]


def spread_over_experts(size: torch.Size, num_experts: int) -> torch.Tensor:
    """The experts of tokens, [tokens, top-k], as a router's choice among values that no kernel computed."""
    return _evenly(torch.Size([size[0], num_experts]), 1, size)


def routed_fraction(mask: torch.Tensor) -> float | None:
    """Experts per token as a fraction of all, if Transformer Engine's fused router is about to write the mask.

    Its autograd functions have the number in a local variable, next to the logits of the mask's size.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return None
        if frame.f_globals.get("__name__") == _FUSED_ROUTER and frame.f_code.co_name == "forward":
            top_k, logits = frame.f_locals.get("topk"), frame.f_locals.get("logits")
            if isinstance(top_k, int) and isinstance(logits, torch.Tensor) and logits.numel() == mask.numel():
                return top_k / logits.shape[-1]
        frame = frame.f_back
    return None


#: The most experts that a layer may have. Detectors pick among thousands of anchors.
_MOST_EXPERTS = 2048
#: These order, count or move by the indices that they are given.
_DISPATCHING = {
    "sort", "argsort", "_unique2", "unique_consecutive", "unique_dim", "nonzero", "nonzero_static", "cumsum",
}  # fmt: skip
_DISPATCHING |= {"searchsorted", "index_add", "index_copy", "index_put", "_index_put_impl", "index_reduce"}
_DISPATCHING |= {"_grouped_mm", "_scaled_grouped_mm"}
#: These too. But a metric also does so with the one class that it predicts for each pixel.
_DISPATCHING_SEVERAL = {"scatter", "scatter_add", "scatter_reduce", "bincount", "histc"}
#: Of these, what is written where may be indices too: the ends of sequences.
_PUTTING = {"index_put", "_index_put_impl"}
_ORDERING = {"lt", "le", "gt", "ge"}
_COMPARING = {"eq", "ne", *_ORDERING}


class Routing:
    """Follows picked indices until it is known that a router picked them."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._routers: set[PickedIndices] = set()
        self.is_on = False

    def picked(self, operator: Operator, args: Arguments, kwargs: Keywords, indices: torch.Tensor) -> None:
        """Indices were picked for the script's current line. Follow them if they may be a router's."""
        source, dim = tensor_at(args, 0), operator.argument("dim", args, kwargs)
        if not isinstance(dim, int) or not source.dim():
            return
        choice = PickedIndices(operator.full_name, *script_line(), source.shape[dim])
        is_sort = indices.dim() == source.dim() and indices.shape[dim] == choice.num_choices
        if not is_sort and choice.num_choices <= _MOST_EXPERTS and choice not in self._routers:
            self._host.storages.make(indices).choice = choice
            self.is_on = True

    def ran(self, func: OpOverload, args: Arguments, kwargs: Keywords, result: object) -> None:
        """An operation ran. Follow what it computed from indices, or take note of what it shows."""
        inputs = [tensor for tensor in plain_tensors((args, tuple(kwargs.values()))) if tensor.is_cuda]
        choice = next((picked for tensor in inputs if (picked := self._choice_of(tensor)) is not None), None)
        if choice is None:
            return
        name = func._schema.name.rpartition("::")[2].removesuffix("_")
        several = name in _DISPATCHING_SEVERAL and ".topk" in choice.operation
        dispatches = name in _DISPATCHING and (name not in _PUTTING or self._is_indexed(args))
        if several or dispatches or (name == "index" and self._has_mask(args)):
            self._routers.add(choice)
            self._host.inventions.note(ROUTED, (choice.filename, choice.line))
        elif not (name in _COMPARING and any(self._is_no_expert(tensor, name) for tensor in inputs)):
            for tensor in device_tensors((result,)):
                if name == "_to_copy" or not (tensor.is_floating_point() or tensor.is_complex()):
                    self._host.storages.make(tensor).choice = choice

    def read(self, indices: torch.Tensor) -> None:
        """A dispatcher reads indices: they are a router's."""
        if (choice := self._choice_of(indices)) is not None:
            self._routers.add(choice)
            self._host.inventions.note(ROUTED, (choice.filename, choice.line))

    def _choice_of(self, tensor: torch.Tensor) -> PickedIndices | None:
        known = self._host.storages.get(tensor)
        return None if known is None or known.choice in self._routers else known.choice

    def _is_indexed(self, args: Arguments) -> bool:
        return any(self._choice_of(indices) is not None for indices in plain_tensors(args[1:2]) if indices.is_cuda)

    def _has_mask(self, args: Arguments) -> bool:
        masks = plain_tensors(args[1:])
        return any(mask.dtype == torch.bool and self._choice_of(mask) is not None for mask in masks if mask.is_cuda)

    def _is_no_expert(self, tensor: torch.Tensor, comparison: str) -> bool:
        """Indices compared with labels, not numbers of experts; positions up to an index are those of a sequence."""
        if self._choice_of(tensor) is not None:
            return False
        if comparison in _ORDERING and tensor.numel() > 1:
            return True
        if not self._host.holds(tensor):
            return True
        values = host_view(tensor).flatten()
        return not torch.equal(values, arange(values.numel(), dtype=values.dtype))
