"""Facts about tensors that hold no values: the mean of a mask, and that nothing is negative.

Nothing is NaN or infinite: scripts end runs on such tests, so they get a healthy run's answer (``torch.isfinite(x)``
reaches a kernel as ``(x == x) * (x.abs() != inf)``). A router's mask of 16,384 tokens and 256 experts has a mean of
8/256 for eight experts per token. That gives tokens per expert, if all experts get the same number.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import arange

from fakedist.gpu.values.contents import Storages
from fakedist.gpu.values.spreads import PASSING, SOURCES, Facts, Odds, Spread, Spreads, reduced
from fakedist.gpu.values.tensors import Arguments, all_true, any_true, has_no_negative, tensor_at, tensors

_ALWAYS = {"isfinite": 1.0, "isnan": 0.0, "isinf": 0.0, "isposinf": 0.0, "isneginf": 0.0}
_ABOVE_ZERO = {"gt": 1.0, "ne": 1.0, "le": 0.0, "eq": 0.0}
_SAME = {"eq": 1.0, "ne": 0.0, "le": 1.0, "ge": 1.0, "lt": 0.0, "gt": 0.0}
#: Operations whose results are zero.
ZEROS = {"zeros", "zeros_like", "new_zeros", "zero_", "zero"}
_ONES = {"ones", "ones_like", "new_ones"}
#: The position of the value among the arguments.
_FULL = {"full": 1, "full_like": 1, "new_full": 2, "fill_": 1, "fill": 1}
_AND, _OR = {"mul", "bitwise_and", "logical_and"}, {"bitwise_or", "logical_or"}
_KEEP = {"clone", "_to_copy", "copy_", "cat", "stack", "mean"}
_NOT = {"logical_not", "bitwise_not"}
#: Operations that count a mask.
COUNTING = {"sum", "count_nonzero"}
_LEAST, _MOST = {"all", "_is_all_true", "min", "amin"}, {"any", "_is_any_true", "max", "amax"}
_SCATTER = {"scatter", "scatter_"}
_PUT = "index_put"
#: Operations whose results are never negative.
NON_NEGATIVE = {"norm", "linalg_vector_norm", "_foreach_norm", "abs", "nll_loss_forward", "mse_loss", "l1_loss", "exp"}
NON_NEGATIVE |= {"nll_loss2d_forward", "binary_cross_entropy", "softplus", "sqrt", "square", "relu", "sigmoid"}
NON_NEGATIVE |= {
    "_softmax", "softmax", "cross_entropy_loss", "nll_loss", "nll_loss_nd", "_cdist_forward", "cdist", "huber_loss",
    "smooth_l1_loss", "var", "std", "logsumexp",
}  # fmt: skip
#: Those whose results are never zero either.
_POSITIVE = {"exp", "softplus", "sigmoid", "_softmax", "softmax"}
_KEEPS_SIGN = {"stack", "cat", "sum", "mean", "_to_copy", "clone", "max", "min", "amax", "amin", "div", "mul", "add"}

#: Operations whose results something may be known about.
FOLLOWED = frozenset(
    {*_ALWAYS, *_SAME, *ZEROS, *_ONES, *_FULL, *_AND, *_OR, *_KEEP, *_NOT, *COUNTING, *_LEAST, *_MOST, *_SCATTER, _PUT}
    | {*NON_NEGATIVE, *_KEEPS_SIGN, *SOURCES, *PASSING, "pow", "clamp", "masked_fill", "where"}
)


#: Of those, the ones whose result nothing is known about if nothing is known about any argument.
FOLLOWING = frozenset(
    {*_KEEP, *_AND, *_OR, *_NOT, *COUNTING, *_LEAST, *_MOST, *_KEEPS_SIGN, *PASSING, "masked_fill"}
    - NON_NEGATIVE
    - {"clamp"}
)


def followed_name(name: str) -> str:
    """The operation's name in FOLLOWED: ``add_`` becomes ``add``."""
    return name if name in FOLLOWED else name.removesuffix("_")


class Means:
    """Means of masks and counts without values, and tensors that are not negative. ``seen`` reads host values."""

    def __init__(self, seen: Callable[[torch.Tensor], torch.Tensor | None], storages: Storages) -> None:
        self._seen = seen
        self._storages = storages
        self._spreads = Spreads(self._facts_of, seen)

    def of(self, tensor: torch.Tensor) -> float | None:
        """The mean of all elements, of a mask the fraction of ones; None if unknown."""
        known = self._storages.get(tensor)
        return None if known is None else known.mean

    def is_assumed(self, tensor: torch.Tensor) -> bool:
        """Return whether the mean of all elements is made up, and with it all that follows."""
        known = self._storages.get(tensor)
        return known is not None and known.is_assumed

    def is_non_negative(self, tensor: torch.Tensor) -> bool:
        """Return whether values made up for the tensor must not be negative."""
        known = self._storages.get(tensor)
        return known is not None and known.is_positive is not None

    def _facts_of(self, tensor: torch.Tensor) -> Facts:
        known = self._storages.get(tensor)
        if known is None:
            return None
        if isinstance(known.spread, (Spread, Odds)):
            return known.spread
        if known.mean in (0.0, 1.0) and tensor.dtype == torch.bool and not known.is_assumed:
            return Odds(float(known.mean or 0.0), is_known=True)
        return None if known.is_positive is None else Spread(low=0.0)

    def confine(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Put made-up values of a tensor between its bounds."""
        spread = self._facts_of(tensor)
        if isinstance(spread, Spread) and values.is_floating_point() and values.dtype.itemsize > 1:
            # Bounds are Python's numbers: one may be beyond what the type holds.
            most = torch.finfo(values.dtype).max
            low, high = (math.copysign(math.inf, x) if abs(x) > most else x for x in (spread.low, spread.high))
            values.clamp_(low, high)

    def _is_positive(self, tensor: torch.Tensor) -> bool:
        known = self._storages.get(tensor)
        return known is not None and bool(known.is_positive)

    def _has_no_negative(self, value: object) -> bool:
        if not isinstance(value, torch.Tensor):
            return isinstance(value, (int, float)) and value >= 0
        if self.is_non_negative(value):
            return True
        values = self._seen(value)
        return values is not None and has_no_negative(values)

    def _is_all(self, mask: torch.Tensor, value: bool) -> bool:
        values = self._seen(mask)
        if values is None:
            return self.of(mask) == float(value)
        return all_true(values) if value else not any_true(values)

    def forget(self, tensor: torch.Tensor) -> None:
        """Forget what is known about a tensor that was written to."""
        self._remember(tensor, None, None)

    def _remember(
        self,
        tensor: torch.Tensor,
        mean: float | None,
        is_positive: bool | None,
        *,
        is_assumed: bool = False,
        spread: Facts = None,
    ) -> None:
        if mean is not None or is_positive is not None or spread is not None:
            known = self._storages.make(tensor)
            known.mean, known.is_positive, known.is_assumed = mean, is_positive, is_assumed
            known.spread = spread
        elif (known_before := self._storages.get_moved(tensor)) is not None:
            known_before.mean = known_before.is_positive = known_before.spread = None
            known_before.is_assumed = False
            self._storages.tidy(known_before)

    def follow(self, name: str, args: Arguments, result: torch.Tensor, *, is_plain: bool = True) -> float | None:
        """Derive what is known about an operation's result from its arguments. Return its mean, if known.

        ``is_plain``: no option changes what the operation computes (``alpha``).
        """
        name = followed_name(name)
        mean = self._mean(name, args, result)
        is_assumed = mean is not None and any(map(self.is_assumed, tensors(args)))
        spread = self._spreads.follow(name, args, result) if is_plain else None
        if mean is None and name in _SAME and len(args) > 1:
            mean, is_assumed = _mean_of(spread)
        if mean is None and (name in _LEAST or name in _MOST) and result.dtype == torch.bool:
            mean, is_assumed = self._reduced(name, tensor_at(args, 0), result)
        self._remember(result, mean, self._sign(name, args), is_assumed=is_assumed, spread=spread)
        return mean

    def _reduced(self, name: str, mask: torch.Tensor, result: torch.Tensor) -> tuple[float | None, bool]:
        """The result of ``any`` or ``all`` of a mask, and whether that is assumed."""
        odds = self._facts_of(mask)
        if not isinstance(odds, Odds):
            return None, False
        answer = reduced(name, odds, mask.numel() / max(1, result.numel()))
        return (None, False) if answer is None else (float(answer[0]), not answer[1])

    def is_certain(self, name: str, args: Arguments, result: torch.Tensor) -> bool:
        """Return whether any made-up arguments give the same result (``isnan``, ``norm < 0``). Remembers its sign."""
        name = followed_name(name)
        mean = self._mean(name, args, result) if name in _ALWAYS or name in _SAME else None
        self._remember(result, None, self._sign(name, args))
        return mean in (0.0, 1.0)

    def _sign(self, name: str, args: Arguments) -> bool | None:
        return _is_positive(name, args) if self._stays_non_negative(name, args) else None

    def know(self, tensor: torch.Tensor, mean: float, *, writes_to_come: float = 0.0) -> None:
        """Record the mean of all elements: now, or as soon as the next kernel has written them."""
        known = self._storages.make(tensor)
        known.mean, known.is_assumed = mean, False
        known.writes_to_come = writes_to_come

    def know_non_negative(self, tensor: torch.Tensor) -> None:
        """Record that nothing in the tensor is negative."""
        self._storages.make(tensor).is_positive = False

    def know_loss(self, storage: int, address: int) -> None:
        """Record that nothing in a storage is negative. A weak reference to it is left here."""
        self._storages.make_at(storage, address).is_positive = False

    def _mean(self, name: str, args: Arguments, result: torch.Tensor) -> float | None:
        if name in _ALWAYS:
            return _ALWAYS[name]
        if name in ZEROS or name in _ONES:
            return float(name in _ONES)
        if name in _FULL:
            value = args[_FULL[name]]
            return float(value) if isinstance(value, (bool, int, float)) else None
        if name in _SCATTER:
            return self._scattered(args)
        if name == _PUT:
            return self._put(args)
        if name in _SAME and len(args) > 1:
            return self._compared(name, tensor_at(args, 0), args[1])
        if name in COUNTING and (mask := tensor_at(args, 0)).dtype == torch.bool and self.of(mask) is None:
            self._storages.make(mask).is_assumed = True
            self._storages.make(mask).mean = 0.5  # as where a mask decides the size of a selection
        means: list[float] = []
        for value in tensors(args[1:] if name == "copy_" else args):
            if (mean := self.of(value)) is None:
                return None
            means.append(mean)
        return _combined(name, means, args, result) if means else None

    def _scattered(self, args: Arguments) -> float | None:
        target, index, value = tensor_at(args, 0), tensor_at(args, 2), args[3]
        before = self.of(target)
        if before is None or not isinstance(value, (int, float)) or not target.numel():
            return None
        return before + (float(value) - before) * min(1.0, float(index.numel() / target.numel()))

    def _put(self, args: Arguments) -> float | None:
        """The mean after the same value was put at single elements, as a token's experts are marked."""
        target, value = tensor_at(args, 0), tensor_at(args, 2)
        before, seen = self.of(target), self._seen(value)
        indices = [index for index in args[1] if isinstance(index, torch.Tensor)] if isinstance(args[1], list) else []
        are_elements = len(indices) == target.dim() and all(index.dtype == torch.int64 for index in indices)
        if before is None or seen is None or value.numel() != 1 or not are_elements or args[3:4] == (True,):
            return None
        return before + (float(seen) - before) * min(
            1.0, max(index.numel() for index in indices) / max(target.numel(), 1)
        )

    def _compared(self, name: str, first: torch.Tensor, second: object) -> float | None:
        if isinstance(second, torch.Tensor):
            return _SAME[name] if first is second or _is_same(first, second) else None
        if isinstance(second, float) and math.isinf(second):
            return {"eq": 0.0, "ne": 1.0}.get(name)
        if second == 0 and name in ("lt", "ge") and self.is_non_negative(first):
            return _SAME[name]
        if second == 0 and name in _ABOVE_ZERO and self._is_positive(first):
            return _ABOVE_ZERO[name]
        mean = self.of(first)
        if mean is None or first.is_floating_point() or not 0 <= mean <= 1:
            return None
        if (name, second) in (("gt", 0), ("ne", 0), ("eq", 1), ("ge", 1)):
            return mean
        return 1 - mean if (name, second) in (("eq", 0), ("le", 0), ("ne", 1), ("lt", 1)) else None

    def _stays_non_negative(self, name: str, args: Arguments) -> bool:
        if name in NON_NEGATIVE or name in ZEROS or name in _ONES:
            return True
        if name in _FULL:
            return self._has_no_negative(args[_FULL[name]])
        if name == "pow":
            exponent = args[1]
            return isinstance(exponent, (int, float)) and (exponent % 2 == 0 or self._has_no_negative(args[0]))
        if name == "masked_fill":
            mask = tensor_at(args, 1)
            return self._has_no_negative(args[0]) and (self._is_all(mask, False) or self._has_no_negative(args[2]))
        if name == "where" and len(args) == 3:
            mask = tensor_at(args, 0)
            return all(self._is_all(mask, side == 2) or self._has_no_negative(args[side]) for side in (1, 2))
        if name == "clamp":
            low, high = (args[position] if position < len(args) else None for position in (1, 2))
            if isinstance(low, (int, float)) and low >= 0:
                return True
            if isinstance(low, torch.Tensor) or isinstance(high, torch.Tensor):
                return False
            if isinstance(high, (int, float)) and high < 0:
                return False
            args = args[:1]
        elif name not in _KEEPS_SIGN or any(isinstance(value, (int, float)) and value < 0 for value in args[1:2]):
            return False
        return all(map(self._has_no_negative, tensors(args)))


def _mean_of(odds: Facts) -> tuple[float, bool]:
    """The mean of a comparison's mask, and whether that is assumed."""
    if isinstance(odds, Odds) and odds.is_known:
        return odds.fraction, odds.fraction not in (0.0, 1.0)
    return 0.5, True  # a count of zero would divide losses by zero


def _is_positive(name: str, args: Arguments) -> bool:
    if name in _POSITIVE:
        return True
    if name not in ("add", "clamp") or len(args) < 2:
        return False
    return isinstance(args[1], (int, float)) and args[1] > 0


def _combined(name: str, means: list[float], args: Arguments, result: torch.Tensor) -> float | None:
    if name in _KEEP:
        return means[0] if len(set(means)) == 1 else None
    if name in _NOT:
        return 1 - means[0] if result.dtype == torch.bool else None
    if name in _AND or name in _OR:
        if len(means) < 2:
            return None
        both = means[0] * means[1]
        return both if name in _AND else means[0] + means[1] - both
    if name in COUNTING:
        return means[0] * float(tensor_at(args, 0).numel() / max(1, result.numel()))
    if name in _LEAST or name in _MOST:
        return means[0] if means[0] in (0.0, 1.0) else None
    return None


def _is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.data_ptr() == second.data_ptr() and first.stride() == second.stride() and first.shape == second.shape


@functools.lru_cache(maxsize=8)
def spread(shape: torch.Size, mean: float) -> torch.Tensor:
    """A host mask with this mean: as many in every row, each row's after those of the previous. Do not write to it."""
    columns = shape[-1]
    rows = arange(shape.numel() // columns)
    ends = torch.round((rows + 1) * mean * columns).long()
    begins = torch.round(rows * mean * columns).long()
    positions = (arange(columns) - begins[:, None]) % columns
    return (positions < (ends - begins)[:, None]).view(shape)
