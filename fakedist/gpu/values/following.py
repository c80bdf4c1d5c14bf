"""Results of inputs that no kernel computed: small ones from made-up operands, large ones from recipes.

A loss that a large product wrote holds nothing. When the script divides it, adds it or compares it, it gets a value, so
``bool(loss > 0)`` and ``loss.item()`` agree. Large integers and masks may follow from small tensors: from their recipes
(:mod:`fakedist.gpu.values.recipes`), small results are computed, such as the block mask of ``flex_attention``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from weakref import ref

import torch

from fakedist.gpu.values.contents import Taint, covers, host_view, is_small
from fakedist.gpu.values.host import Host
from fakedist.gpu.values.means import FOLLOWED, followed_name
from fakedist.gpu.values.operators import Operator
from fakedist.gpu.values.recipes import Geometry, Recipe, RecipeView, UnknownValueError
from fakedist.gpu.values.routing import Routing
from fakedist.gpu.values.tensors import (
    Arguments,
    Keywords,
    device_tensors,
    distinct,
    is_finite,
    plain_tensors,
    storage_of,
    tensor_at,
)

#: Largest operand that any operation makes up: losses, rewards, statistics of a batch. Making one up and computing
#: with it takes 50 us on the host, too much for the bias gradients of a model with many layers.
FEW = 256
#: Largest operand that comparisons and reductions make up: losses of each token.
MANY = 16_384
#: The most operands made up for one operation. The stacked norms of all gradients have more.
_MAX_OPERANDS = 8
_COMPARE = {"eq", "ne", "lt", "le", "gt", "ge", "isclose", "logical_not", "logical_and", "logical_or", "logical_xor"}
_REDUCE = {
    "sum", "mean", "max", "min", "amax", "amin", "prod", "any", "all", "norm", "linalg_vector_norm", "var", "std",
}  # fmt: skip
_REDUCE |= {"logsumexp", "count_nonzero", "argmax", "argmin", "nansum", "aminmax", "median", "dot"}
#: Comparisons and reductions.
CONDENSING = {*_COMPARE, *_REDUCE}
#: A router picks experts with these. With several rows, each row picks others (:mod:`fakedist.gpu.values.routing`).
_ROUTING = {"topk", "argmax", "argmin", "max"}


class Following:
    """Decides which operands are made up, and keeps the results computed from them sound."""

    def __init__(self, host: Host, routing: Routing) -> None:
        self._host, self._routing = host, routing

    def complete(self, operator: Operator, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Make up missing values of inputs if few. Returns those that taint the result; None if not all hold values."""
        operands: list[torch.Tensor] = []
        missing: list[torch.Tensor] = []
        limit = MANY if operator.name in CONDENSING else FEW
        for tensor in self._host.unlike(inputs):
            if tensor.is_cuda and not self._host.holds(tensor):
                if len(missing) >= _MAX_OPERANDS or not self._can_be_made_up(tensor, limit):
                    return None
                missing.append(tensor)
            operands.append(tensor)
        if missing and operator.name in _ROUTING and self._picks_for_rows(operator, missing[0]):
            return None
        for tensor in missing:
            self._host.complete(tensor)
        return operands

    def _can_be_made_up(self, tensor: torch.Tensor, limit: int) -> bool:
        if tensor.is_quantized:  # all would be zero
            return False
        return tensor.numel() <= limit and is_small(tensor) and self._host.means.of(tensor) is None

    def mark(
        self,
        operator: Operator,
        args: Arguments,
        results: Sequence[torch.Tensor],
        taint: Taint,
        *,
        computed: Sequence[torch.Tensor],
    ) -> None:
        """Taint results computed from values of this taint, unless any values would give the same result.

        ``computed`` has the values that the host wrote to these results; empty if it computed in place.
        """
        for index, result in enumerate(results):
            if index or followed_name(operator.name) not in FOLLOWED:
                self._host.means.forget(result)
            elif self._host.means.is_certain(operator.name, args, result):
                self._host.taints.clear(result)
                continue
            self._stay_finite(args, result, computed[index] if index < len(computed) else None)
            self._host.taints.mark(result, taint)

    def _stay_finite(self, args: Arguments, result: torch.Tensor, computed: torch.Tensor | None) -> None:
        """Keep the root or logarithm of a made-up value, or a quotient, finite, as in a trained model."""
        if not result.is_floating_point() or result.dtype.itemsize == 1:
            return
        if computed is not None and computed.dtype == result.dtype and is_finite(computed):
            return
        values = host_view(result)
        if is_finite(values) or not all(map(_is_finite, args)):
            return
        non_negative = self._host.means.is_non_negative(result)
        self._host.inventions.draw_missing(values, ~torch.isfinite(values), non_negative=non_negative)

    def routes(self, operator: Operator, args: Arguments) -> bool:
        """Return whether an operation picks indices for several rows by made-up values."""
        if operator.name not in _ROUTING:
            return False
        source = tensor_at(args, 0)
        return self._picks_for_rows(operator, source) and source.is_cuda and self._host.taint((source,)) is not None

    def route(self, operator: Operator, args: Arguments, kwargs: Keywords) -> object:
        """Pick indices by the load, and the values at them; the values of ``max`` are the largest."""
        result = operator.func(*args, **kwargs)
        tensors = device_tensors((result,))
        indices = tensors[-1]
        chosen = self._routing.choose(operator, args, kwargs, indices)
        self._host.inventions.count(operator.full_name, indices.numel())
        self._host.write(indices, chosen)
        self._routing.picked(operator, args, kwargs, indices)
        if len(tensors) == 2:
            source, dim = tensor_at(args, 0), operator.argument("dim", args, kwargs)
            assert isinstance(dim, int)
            values = host_view(source)
            picked = values.gather(dim, chosen) if operator.name == "topk" else values.amax(dim)
            self._host.write(tensors[0], picked.view(tensors[0].shape))
            self._host.taints.mark(tensors[0], self._host.taint((source,)) or Taint())
        return result

    def _picks_for_rows(self, operator: Operator, source: torch.Tensor) -> bool:
        if operator.name == "max":  # of an even load, the indices stay those of the largest values: predictions
            return source.dim() > 1 and operator.full_name == "aten.max.dim" and not self._routing.load.is_even
        return source.dim() > 1 and (operator.name == "topk" or source.numel() > 1)


def _is_finite(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, (list, tuple)):
        return all(map(_is_finite, value))
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return True
    values = host_view(value) if value.is_cuda and is_small(value) else value
    return values.is_cuda or is_finite(values)


#: The most host memory that recipes keep. The oldest ones are forgotten first.
MOST_BYTES = 256 << 20
_WHOLE_TYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Large:
    """Keeps the recipes of large tensors, and computes small results of them."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._kept: deque[tuple[ref[Recipe], int]] = deque()
        self._bytes = 0

    def reads(self, operator: Operator, args: Arguments, kwargs: Keywords) -> Reading | None:
        """The operands of an operation, before it runs; None if not all are known, or the result cannot be."""
        if operator.random or operator.dynamic or not operator.is_kernel:
            return None
        values = (*args[(1 if operator.like else 0) :], *kwargs.values())
        tensors = plain_tensors(values)
        ignored = plain_tensors([args[i] for i in operator.written if i < len(args)]) if operator.overwrites else []
        needed = [tensor for tensor in tensors if not any(tensor is other for other in ignored)]
        if not all(map(self._is_known, needed)):
            return None
        parts = [part for tensor in needed if (part := self.part(tensor)) is not None]
        if not tensors and not operator.like and not self._is_made(args, kwargs):
            return None
        taints = [part.recipe.taint for part in parts if part.recipe.taint is not None]
        own = self._host.taint(tensor for tensor in needed if tensor.is_cuda)
        taints += [own] if own is not None else []
        taint = taints[0] if len(set(taints)) == 1 else Taint(tuple(set(taints))) if taints else None
        return Reading({id(tensor) for tensor in ignored}, taint)

    def follow(
        self, operator: Operator, args: Arguments, kwargs: Keywords, outputs: list[torch.Tensor], reading: Reading
    ) -> bool:
        """Keep the recipes of an operation's outputs, compute small ones; returns whether they are known."""
        if not any(output.dtype in _WHOLE_TYPES or is_small(output) for output in outputs):
            return False
        if not all(is_small(output) or covers(output, storage_of(output)[1]) for output in outputs):
            return False  # part of a tensor was written
        try:
            operands = self._operands(operator, args, reading)
            named = {name: self._operand(value, reading) for name, value in kwargs.items()}
            recipes = [
                Recipe(
                    operator,
                    operands,
                    named,
                    result=Geometry.contiguous(output) if is_small(output) else Geometry.of(output),
                    dtype=output.dtype,
                    item=index if len(outputs) > 1 else -1,
                    taint=reading.taint,
                )
                for index, output in enumerate(outputs)
            ]
            values = [
                recipe.value() if is_small(output) else None for recipe, output in zip(recipes, outputs, strict=True)
            ]
        except UnknownValueError:
            return False
        for output, recipe, value in zip(outputs, recipes, values, strict=True):
            if value is None:
                self._keep(output, recipe)
                continue
            self._host.write(output, value)
            self._host.means.forget(output)
            if reading.taint is not None:
                self._host.taints.mark(output, reading.taint)
        return True

    def part(self, tensor: torch.Tensor) -> RecipeView | None:
        """The recipe of a large tensor's values; None if it has none."""
        recipe = self._host.recipe(tensor)
        return None if recipe is None else RecipeView(recipe, Geometry.of(tensor))

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A large tensor's values, if they are known and not too many."""
        part = self.part(tensor)
        if part is None:
            return None
        try:
            return part.recipe.value(part.geometry)
        except UnknownValueError:
            return None

    def _is_known(self, tensor: torch.Tensor) -> bool:
        if not tensor.is_cuda:
            return not self._host.has_no_data(tensor)
        return self._host.holds(tensor) or self._host.recipe(tensor) is not None

    @staticmethod
    def _is_made(args: Arguments, kwargs: Keywords) -> bool:
        dtype = kwargs.get("dtype")
        return dtype in _WHOLE_TYPES or (dtype is None and all(isinstance(value, int) for value in args[:2]))

    def _operands(self, operator: Operator, args: Arguments, reading: Reading) -> Arguments:
        skipped = args[:1] if operator.like else ()
        return (*(None for _ in skipped), *(self._operand(value, reading) for value in args[len(skipped) :]))

    def _operand(self, value: object, reading: Reading) -> object:
        if isinstance(value, (list, tuple)):
            return [self._operand(item, reading) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in reading.ignored:
            return None
        if (part := self.part(value)) is not None and not self._host.holds(value):
            return part
        once = distinct(value.detach())
        if once.nbytes > MOST_BYTES:
            raise UnknownValueError  # its recipe would be forgotten at once
        copy = (host_view(once) if once.is_cuda else once).clone()
        return copy if once.shape == value.shape else copy.expand(value.shape)

    def _keep(self, tensor: torch.Tensor, recipe: Recipe) -> None:
        self._host.know_recipe(tensor, recipe)
        self._kept.append((ref(recipe), recipe.own_bytes))
        self._bytes += recipe.own_bytes
        if self._bytes > MOST_BYTES:
            self._host.sweep()
            self._kept = deque((kept, num_bytes) for kept, num_bytes in self._kept if kept() is not None)
            self._bytes = sum(num_bytes for _, num_bytes in self._kept)
        while self._bytes > MOST_BYTES:
            oldest, num_bytes = self._kept.popleft()
            self._bytes -= num_bytes
            if (forgotten := oldest()) is not None:
                forgotten.forget()


class Reading:
    """Identities of the arguments that an operation writes without reading them, and the taint of those it reads."""

    __slots__ = ("ignored", "taint")

    def __init__(self, ignored: Iterable[int], taint: Taint | None) -> None:
        self.ignored, self.taint = frozenset(ignored), taint
