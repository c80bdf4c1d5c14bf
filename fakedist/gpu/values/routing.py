"""A router's choices of experts: indices picked by values that no kernel computed, as often as ``--router-load`` says.

``topk`` of a router's logits picks experts. If the logits hold no values and the load is even, the rows pick the
indices in turn, so all experts get the same number of tokens. The indices are shuffled after each turn, so the experts
of a token are on as many ranks as those of random choices: dispatchers send it once to each rank, or node. With another
load, the choices are drawn for the layer, the micro-batch and the rank, and so are known of the other ranks too.

A top-5 accuracy uses ``topk`` too, but compares indices with labels, where a router counts, sorts or scatters them into
a mask. So indices are followed, with all that is computed from them, until an operation shows which it is.
"""

from __future__ import annotations

import functools
import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import NamedTuple

import torch
from torch import arange, from_numpy, rand, zeros
from torch._ops import OpOverload

from fakedist.gpu.values.contents import PickedIndices, host_view
from fakedist.gpu.values.host import Host
from fakedist.gpu.values.inventions import script_line
from fakedist.gpu.values.operators import Operator
from fakedist.gpu.values.tensors import Arguments, Keywords, device_tensors, plain_tensors, tensor_at
from fakedist.options.expert_loads import EVEN, RouterLoadError
from fakedist.router_load import RouterLoad, RouterPass
from fakedist.rundir.rows import RouterPassRow
from fakedist.rundir.sources import ROUTED
from fakedist.rundir.summary import RouterLoadFacts

#: Operators that return indices.
CHOOSING = {"topk", "argmax", "argmin", "sort", "argsort", "max", "min", "median", "nanmedian", "kthvalue", "mode"}
#: Its kernels write a router's mask, and the dispatcher does not see them.
_FUSED_ROUTER = "transformer_engine.pytorch.router"
_MAX_FRAMES = 32


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


def experts_of_mask(mask: torch.Tensor) -> torch.Tensor:
    """The experts of tokens, [tokens, top-k], -1 for none, by a mask on the host, [tokens, experts]."""
    counts = mask.sum(1, keepdim=True)
    top_k = int(counts.max()) if len(mask) else 0
    first = mask.argsort(dim=1, descending=True, stable=True)[:, :top_k]
    return first.where(arange(top_k) < counts, -1)


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


#: Operations by which routers pick experts.
_ROUTING = {"topk", "argmax", "max"}
#: Calls of routers among whose choices those that a rank sends are looked for.
_RECENT = 4
#: The most calls of a layer's router of which it is known what ranks received.
_MOST_PASSES = 256

#: Makes values of a rank's choices like the given ones; None if no such values are of that shape.
_View = Callable[[RouterLoad, RouterPass, int, torch.Tensor], torch.Tensor | None]


def _mask(load: RouterLoad, router: RouterPass, rank: int) -> torch.Tensor:
    mask = zeros(router.tokens, router.num_experts, dtype=torch.bool)
    return mask.scatter_(1, from_numpy(load.experts(router, rank)), True)


def _counts(load: RouterLoad, router: RouterPass, rank: int, like: torch.Tensor) -> torch.Tensor | None:
    counts = from_numpy(load.counts(router, rank))
    return counts.view(like.shape) if like.numel() == router.num_experts else None


def _counts_up_to_capacity(load: RouterLoad, router: RouterPass, rank: int, like: torch.Tensor) -> torch.Tensor | None:
    counts = _counts(load, router, rank, like)
    return None if counts is None else counts.clamp(max=int(like.max()))


def _counts_by_rank(load: RouterLoad, router: RouterPass, rank: int, like: torch.Tensor) -> torch.Tensor | None:
    if like.dim() != 1 or not 1 < len(like) < router.num_experts or router.num_experts % len(like):
        return None
    return from_numpy(load.counts(router, rank)).view(len(like), -1).sum(1)


def _experts(load: RouterLoad, router: RouterPass, rank: int, like: torch.Tensor) -> torch.Tensor | None:
    if like.numel() != router.tokens * router.top_k:
        return None
    return from_numpy(load.experts(router, rank)).reshape(like.shape)


def _mask_like(load: RouterLoad, router: RouterPass, rank: int, like: torch.Tensor) -> torch.Tensor | None:
    if like.numel() != router.tokens * router.num_experts:
        return None
    return _mask(load, router, rank).view(like.shape)


def _largest(load: RouterLoad, router: RouterPass, rank: int, like: torch.Tensor) -> torch.Tensor | None:
    return from_numpy(load.counts(router, rank)).max().view(like.shape) if like.numel() == 1 else None


_VIEWS: tuple[_View, ...] = (_counts, _counts_up_to_capacity, _counts_by_rank, _experts, _mask_like, _largest)

#: The most experts that a layer may have. Detectors pick among thousands of anchors.
_MOST_EXPERTS = 2048
#: These order, count or move by the indices that they are given.
_DISPATCHING = {
    "sort", "argsort", "_unique2", "unique_consecutive", "unique_dim", "nonzero", "nonzero_static", "cumsum",
}  # fmt: skip
_DISPATCHING |= {"searchsorted", "index_add", "index_copy", "index_put", "_index_put_impl", "index_reduce"}
_DISPATCHING |= {"_grouped_mm", "_scaled_grouped_mm"}
#: These too. But a metric also does so with the one class that it predicts for each pixel.
_COUNTING = {"bincount", "histc"}
#: These make a mask of several. It may also be the target of a loss, or keep a few words of a vocabulary, until it
#: counts the rows of each choice, or multiplies rows.
_MASKING = {"scatter", "scatter_add", "scatter_reduce"}
_MULTIPLYING = {"mm", "bmm", "addmm", "baddbmm"}
#: Of these, what is written where may be indices too: the ends of sequences.
_PUTTING = {"index_put", "_index_put_impl"}
_ORDERING = {"lt", "le", "gt", "ge"}
_COMPARING = {"eq", "ne", *_ORDERING}


class RunningLayer(NamedTuple):
    """Where an operation runs: the number of its layer (-1: outside of any), whether in a backward, the step, and the
    number of the operation.
    """

    layer: int = -1
    in_backward: bool = False
    step: int = 0
    op: int = -1


@dataclass
class _Calls:
    """The calls of one layer's router: how many there were, and those of this step that no backward has repeated."""

    step: int = -1
    number: int = 0
    waiting: deque[int] = field(default_factory=deque)

    def next(self, now: RunningLayer) -> int:
        """The number of the call that runs. A backward repeats those of its step in their order (recomputation)."""
        if now.in_backward and self.number:
            return self.waiting.popleft() if self.waiting else self.number - 1
        if now.step != self.step:
            self.step = now.step
            self.waiting.clear()
        self.waiting.append(self.number)
        self.number += 1
        return self.number - 1


class _Groups(NamedTuple):
    """Groups of experts that tokens have picked, before they pick experts of them."""

    layer: int
    tokens: int
    groups: int
    top_groups: int
    num_experts: int


class Routing:
    """Picks indices, and follows them until it is known that a router picked them.

    Attributes:
        load: How many tokens each expert gets.
        rank: This rank.
        whereabouts: Says where the running operation is.
        passes: The calls of each layer's router whose choices were drawn.
        groups: The ranks that exchange a layer's tokens, or their counts.
        fused: Lines where a kernel of Transformer Engine's picked experts.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._routers: set[PickedIndices] = set()
        self.is_on = False
        self.load, self.rank = RouterLoad(EVEN), 0
        self.whereabouts: Callable[[], RunningLayer] = RunningLayer
        self._layers: dict[object, int] = {}
        self._calls: dict[tuple[int, int, int], _Calls] = {}
        self._recent: deque[RouterPass] = deque(maxlen=_RECENT)
        self._last_shape = torch.Size()
        self._first_of_two: tuple[int, int, tuple[str, int]] | None = None
        self._lines: dict[tuple[int, int, int], tuple[str, int]] = {}
        self._groups: _Groups | None = None
        self._is_checked = False
        self.fused: set[tuple[str, int]] = set()
        self.passes: dict[int, list[RouterPass]] = {}
        self._ran: list[RouterPassRow] = []
        self._lines_of: dict[int, set[tuple[str, int]]] = {}
        self.groups: dict[int, tuple[int, ...]] = {}

    def choose(self, operator: Operator, args: Arguments, kwargs: Keywords, indices: torch.Tensor) -> torch.Tensor:
        """An operation's index result on the host, distinct along the dimension picked from. Do not write to it.

        Raises:
            RouterLoadError: The load's file is for another job.
        """
        source, dim = tensor_at(args, 0), operator.argument("dim", args, kwargs)
        if not isinstance(dim, int) or not source.dim():
            return zeros(indices.shape, dtype=torch.int64)
        may_route = self._may_route(operator, source, dim)
        if may_route and operator.name == "argmax" and (second := self._second(source)) is not None:
            return second.reshape(indices.shape)
        draw = self._draws(source.shape, dim % source.dim(), indices) if may_route else None
        is_first = draw is not None and operator.name == "argmax"
        self._first_of_two = (source.data_ptr(), self.whereabouts().layer, script_line()) if is_first else None
        if draw is None or self.load.is_even:
            return _evenly(source.shape, dim, indices.shape)
        return draw().reshape(indices.shape)

    def _may_route(self, operator: Operator, source: torch.Tensor, dim: int) -> bool:
        """Whether an operation may be a router's. A loss takes the ``max`` of logits, over as many words as it has."""
        if source.stride(dim) != 1 and dim % source.dim():  # transposed: experts pick tokens
            return False
        in_file = self.load.experts_in_file()
        return operator.name == "topk" or (operator.name in _ROUTING and in_file in (None, source.shape[dim]))

    def _draws(self, source: torch.Size, dim: int, indices: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """Note a router's call. Returns what draws its choices; None: no router's."""
        num_choices = source[dim]
        picked = indices.shape[dim] if indices.dim() == len(source) else 1
        if dim == 0 and len(source) == 2 and picked < num_choices:
            return self._kept(source, picked)
        tokens = source.numel() // max(num_choices, 1)
        if dim != len(source) - 1 or tokens < 2 or not 0 < picked < num_choices <= _MOST_EXPERTS:
            return None
        if (again := self._picked_before(source, picked)) is not None:
            self._lines_of[again.layer].add(script_line())
            return partial(self._experts_of, again)
        now = self.whereabouts()
        self._check_layers(now)
        layer = self._layers.setdefault(now.layer if now.layer >= 0 else script_line(), len(self._layers))
        number = self._calls.setdefault((layer, len(source), num_choices), _Calls()).next(now)
        router = RouterPass(layer, number, max(now.step - 1, 0), tokens, num_choices, picked)
        before, self._last_shape = self._last_shape, source
        if before[:-1] == source and len(before) > 2:  # the best experts of each group have told how good it is
            self._forget_best(layer, before)
            router = router._replace(num_experts=num_choices * before[-1], groups=num_choices, top_groups=picked)
            self._groups = _Groups(layer, tokens, num_choices, picked, router.num_experts)
            return lambda: from_numpy(self.load.groups(router, self.rank))
        router = self._in_groups(router)
        if self._recent and self._recent[-1].top_k == 1:
            self.load.check_top_k(self._recent[-1])
        self._recent.append(router)
        self._ran.append(RouterPassRow(now.op, *router))
        if not now.in_backward and len(passes := self.passes.setdefault(layer, [])) < _MOST_PASSES:
            self._lines_of.setdefault(layer, set()).add(script_line())
            passes.append(router)
        return partial(self._experts_of, router)

    def _second(self, source: torch.Tensor) -> torch.Tensor | None:
        """The second choices, if another line of the layer has just picked the first ones, of other scores."""
        if self._first_of_two is None or not self._recent:
            return None
        first, (scores, layer, line) = self._recent[-1], self._first_of_two
        if source.data_ptr() == scores or script_line() == line or self.whereabouts().layer != layer:
            return None
        if source.shape[-1] != first.num_experts or source.numel() != first.tokens * first.num_experts:
            return None
        self._first_of_two = None
        both = self._recent[-1] = first._replace(top_k=2, in_turn=True)
        self._ran[-1] = RouterPassRow(self._ran[-1].op, *both)
        if first in (passes := self.passes[first.layer])[-1:]:
            passes[-1] = both
        if self.load.is_even:
            return (arange(first.tokens) + 1) % first.num_experts
        return self._experts_of(both)[:, 1]

    def _experts_of(self, router: RouterPass) -> torch.Tensor:
        return from_numpy(self.load.experts(router, self.rank))

    def _forget_best(self, layer: int, source: torch.Size) -> None:
        """Forget the call that picked the best experts of each group, which sends no tokens."""
        if self._ran and (self._ran[-1].layer, self._ran[-1].num_experts) == (layer, source[-1]):
            self._ran.pop()
        for calls in (self._recent, self.passes.get(layer, [])):
            if calls and (calls[-1].layer, calls[-1].num_experts) == (layer, source[-1]):
                calls.pop()

    def _picked_before(self, source: torch.Size, picked: int) -> RouterPass | None:
        """The router's call whose choices a dispatcher picks again from a matrix of probabilities, in another line."""
        line, last = script_line(), self._recent[-1] if self._recent else None
        first = self._lines.setdefault((len(source), source[-1], picked), line)
        if line == first or last is None or len(source) != 2 or (*source, picked) != last[3:6]:
            return None
        return last

    def _check_layers(self, now: RunningLayer) -> None:
        """Compare the layers with those of a file once the first step has ended.

        Raises:
            RouterLoadError: The file has others.
        """
        if now.step < 2 or self._is_checked or now.in_backward:
            return
        self._is_checked = True
        in_file = self.load.layers_in_file()
        if in_file not in (None, len(self._layers)):
            raise RouterLoadError(
                f"{self.load.text} has {in_file} layers of experts, and the rank runs {len(self._layers)}"
            )

    def _in_groups(self, router: RouterPass) -> RouterPass:
        groups, self._groups = self._groups, None
        if groups is None or (groups.layer, groups.tokens, groups.num_experts) != router[0:1] + router[3:5]:
            return router
        if router.top_k % groups.top_groups:
            return router
        return router._replace(groups=groups.groups, top_groups=groups.top_groups)

    def _kept(self, source: torch.Size, capacity: int) -> Callable[[], torch.Tensor] | None:
        """The tokens that each expert keeps, [capacity, experts]: its own first. None: no router picked among these."""
        if not self._recent or source != (self._recent[-1].tokens, self._recent[-1].num_experts):
            return None
        mask = partial(_mask, self.load, self._recent[-1], self.rank)
        return lambda: mask().argsort(dim=0, descending=True, stable=True)[:capacity]

    def _layers_reached(self) -> list[int]:
        """The layers whose picked indices sent tokens."""
        lines = {(choice.filename, choice.line) for choice in self._routers}
        return [layer for layer in self.passes if self._lines_of[layer] & lines]

    def calls(self) -> list[RouterPassRow]:
        """The calls of routers whose load it was, also those that a backward repeated, in order."""
        layers = set(self._layers_reached())
        return [row for row in self._ran if row.layer in layers]

    def facts(self) -> RouterLoadFacts | None:
        """The routers that picked by generated values, and their load; None without any."""
        layers = self._layers_reached()
        unknown = [] if self.load.is_even else [f"{name}:{line}" for name, line in sorted(self.fused)]
        if not layers:
            return RouterLoadFacts(self.load.text, 0, 0, 0, 0, unknown=unknown) if unknown else None
        first = self.passes[layers[0]][0]
        ranks = next((self.groups[layer] for layer in layers if layer in self.groups), ())
        same = [layer for layer in layers if ranks and self.groups.get(layer) == ranks]
        received = [self.load.received(router, ranks) for layer in same for router in self.passes[layer]]
        return RouterLoadFacts(
            self.load.text,
            len(layers),
            first.num_experts,
            first.top_k,
            first.tokens,
            list(ranks),
            [sum(column) for column in zip(*(tokens.tolist() for tokens in received), strict=True)],
            sum(int(tokens.max()) for tokens in received),
            unknown,
        )

    def of_ranks(self, mine: torch.Tensor, ranks: Sequence[int]) -> list[torch.Tensor] | None:
        """Each rank's values for this rank's, on the host, if these follow from its choices of experts; else None.

        Found by comparing them: the experts of tokens, a mask of them, counts by expert or by rank, the largest count.
        """
        if self.load.is_even or not mine.numel():
            return None
        for router in reversed(self._recent):
            for view in _VIEWS:
                own = view(self.load, router, self.rank, mine)
                if own is not None and torch.equal(own.to(mine.dtype), mine):
                    self.groups[router.layer] = tuple(ranks)
                    theirs = [view(self.load, router, rank, mine) for rank in ranks]
                    return [values.to(mine.dtype) for values in theirs if values is not None]
        return None

    def experts_of_ranks(self, experts: torch.Tensor, ranks: Sequence[int]) -> list[torch.Tensor] | None:
        """The experts of each rank's tokens, if this rank's are these, [tokens, top-k]."""
        for router in reversed(self._recent):
            own = self._experts_of(router)
            if own.shape == experts.shape and torch.equal(own.sort(1)[0], experts.sort(1)[0]):
                self.groups[router.layer] = tuple(ranks)
                return [from_numpy(self.load.experts(router, rank)) for rank in ranks]
        return None

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
        if choice is None or self.whereabouts().in_backward:
            return  # a backward puts the gradient of picked rows where they were, whatever picked them
        name = func._schema.name.rpartition("::")[2].removesuffix("_")
        several = ".topk" in choice.operation
        dispatches = name in _DISPATCHING and (name not in _PUTTING or self._is_indexed(args))
        dispatches = dispatches or (name == "index" and self._has_mask(args))
        if several and not dispatches:
            dispatches = name in _COUNTING or self._uses_mask(name, choice, result)
        if dispatches:
            self._reached(choice)
        elif not (name in _COMPARING and any(self._is_no_expert(tensor, name) for tensor in inputs)):
            follows = name == "_to_copy" or func.is_view or (name in _MASKING and several)
            for tensor in device_tensors((result,)):
                if follows or not (tensor.is_floating_point() or tensor.is_complex()):
                    self._host.storages.make(tensor).choice = choice

    def _reached(self, choice: PickedIndices) -> None:
        """A choice sends rows: it is a router's."""
        self._routers.add(choice)
        self._host.inventions.note(ROUTED, (choice.filename, choice.line))

    def _uses_mask(self, name: str, choice: PickedIndices, result: object) -> bool:
        """Whether an operation counts the rows of each choice by a mask, or multiplies rows by one."""
        if name in _MULTIPLYING:
            return True
        counts = next(iter(device_tensors((result,))), None)
        return name == "sum" and counts is not None and 1 < counts.numel() == choice.num_choices

    def read(self, indices: torch.Tensor) -> None:
        """A dispatcher reads indices: they are a router's."""
        if (choice := self._choice_of(indices)) is not None:
            self._reached(choice)

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
