"""Operations on small tensors that no kernel computed: their inputs are made up first, and the result is computed.

A loss that a large product wrote holds nothing. When the script divides it, compares it with a limit or adds it to a
sum, the loss itself gets a value, so ``bool(loss > 0)`` and ``loss.item()`` agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fakedist.gpu.values.arguments import Arguments, Keywords, device_tensors, tensor_at
from fakedist.gpu.values.choices import choose
from fakedist.gpu.values.contents import host_view, is_small
from fakedist.gpu.values.host import Host
from fakedist.gpu.values.known import Taint
from fakedist.gpu.values.operators import Operator
from fakedist.gpu.values.routing import Routing
from fakedist.gpu.values.scans import is_finite
from fakedist.gpu.values.shares import FOLLOWED, followed_name

#: Largest operand that any operation makes up: losses, rewards, statistics of a batch. Making one up and computing
#: with it takes 50 us on the host, too much for the bias gradients of a model with many layers.
FEW = 256
#: Largest operand that comparisons and reductions make up: losses of each token.
MANY = 16_384
#: The most operands made up for one operation. The stacked norms of all gradients have more.
_MAX_OPERANDS = 8
_COMPARE = {"eq", "ne", "lt", "le", "gt", "ge", "isclose", "logical_not", "logical_and", "logical_or", "logical_xor"}
_REDUCE = {
    "sum",
    "mean",
    "max",
    "min",
    "amax",
    "amin",
    "prod",
    "any",
    "all",
    "norm",
    "linalg_vector_norm",
    "var",
    "std",
}
_REDUCE |= {"logsumexp", "count_nonzero", "argmax", "argmin", "nansum", "aminmax", "median", "dot"}
#: Comparisons and reductions.
CONDENSING = {*_COMPARE, *_REDUCE}
#: A router picks experts with these. With several rows, each row picks others (:mod:`fakedist.gpu.values.choices`).
_ROUTING = {"topk", "argmax", "argmin"}


class Following:
    """Decides which operands are made up, and keeps the results computed from them sound.

    Args:
        host: The device memory's values.
    """

    def __init__(self, host: Host, routing: Routing) -> None:
        self._host, self._routing = host, routing

    def complete(self, operator: Operator, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Make up the missing values of inputs, if they are few. Return the inputs whose taints decide the result's.

        None if not all inputs hold values.
        """
        found: list[torch.Tensor] = []
        missing: list[torch.Tensor] = []
        limit = MANY if operator.name in CONDENSING else FEW
        for tensor in self._host.unlike(inputs):
            if tensor.is_cuda and not self._host.holds(tensor):
                if len(missing) >= _MAX_OPERANDS or not self._can_be_made_up(tensor, limit):
                    return None
                missing.append(tensor)
            found.append(tensor)
        if missing and operator.name in _ROUTING and _picks_for_rows(operator, missing[0]):
            return None
        for tensor in missing:
            self._host.complete(tensor)
        return found

    def _can_be_made_up(self, tensor: torch.Tensor, limit: int) -> bool:
        if tensor.is_quantized:  # all would be zero
            return False
        return tensor.numel() <= limit and is_small(tensor) and self._host.shares.of(tensor) is None

    def mark(
        self,
        operator: Operator,
        args: Arguments,
        results: Sequence[torch.Tensor],
        taint: Taint,
        *,
        computed: Sequence[torch.Tensor],
    ) -> None:
        """Mark results computed from made-up values as tainted too, unless any values would give the same result.

        Args:
            operator: What computed them.
            args: Its arguments.
            results: Device tensors.
            taint: The arguments' taint.
            computed: What the host computed and wrote to these results; empty if it computed in place.
        """
        for index, result in enumerate(results):
            if index or followed_name(operator.name) not in FOLLOWED:
                self._host.shares.forget(result)
            elif self._host.shares.is_certain(operator.name, args, result):
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
        non_negative = self._host.shares.is_non_negative(result)
        self._host.inventions.draw_missing(values, ~torch.isfinite(values), non_negative=non_negative)

    def routes(self, operator: Operator, args: Arguments) -> bool:
        """Whether an operation picks indices for several rows by made-up values."""
        if operator.name not in _ROUTING:
            return False
        source = tensor_at(args, 0)
        return _picks_for_rows(operator, source) and source.is_cuda and self._host.taint((source,)) is not None

    def route(self, operator: Operator, args: Arguments, kwargs: Keywords) -> object:
        """Pick each index equally often, and the values at those indices."""
        result = operator.func(*args, **kwargs)
        tensors = device_tensors((result,))
        indices = tensors[-1]
        chosen = choose(operator, args, kwargs, indices)
        self._host.inventions.count(operator.full_name, indices.numel())
        self._host.write(indices, chosen)
        self._routing.picked(operator, args, kwargs, indices)
        if len(tensors) == 2:
            source, dim = tensor_at(args, 0), operator.argument("dim", args, kwargs)
            assert isinstance(dim, int)
            self._host.write(tensors[0], host_view(source).gather(dim, chosen))
            self._host.taints.mark(tensors[0], self._host.taint((source,)) or Taint())
        return result


def _picks_for_rows(operator: Operator, source: torch.Tensor) -> bool:
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
