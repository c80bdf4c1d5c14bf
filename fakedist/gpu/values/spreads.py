"""Bounds and distributions of large tensors, and how often a comparison with them holds.

``rand() * 800 + 1`` lies between 1 and 801, and of 2**28 normal values none is 100 standard deviations away. If
nothing is known about a tensor, its values are taken to be standard normal, as made-up ones are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from fakedist.gpu.values.tensors import Arguments, tensor_at, tensors

#: Of made-up values, fewer than this fraction hardly fulfil a comparison; more than the other fulfil it somewhere.
_HARDLY = 1e-4
_SOMEWHERE = 1e-2
#: Where the values' distribution is known, an answer is certain if an exception is expected less than ... times.
_CERTAIN = 1e-6
#: Or if as many are expected as this: that there is none has the probability exp(-20).
_MANY = 20.0
#: Counts and ids that no kernel computed are not negative, and less than this.
_LARGE_ID = 100
#: The most elements of a known tensor whose bounds are looked up.
_MOST_ELEMENTS = 4_096

COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
#: Operations that make random numbers.
SOURCES = frozenset({"normal", "uniform", "randn", "rand", "randn_like", "rand_like", "exponential"})
#: Operations whose results are parts or permutations of their first argument's values.
_PARTS = frozenset({"index", "index_select", "gather", "repeat", "flip", "roll", "max", "min", "amax", "amin", "mean"})
_UNITED = frozenset({"clone", "_to_copy", "copy_", "cat", "stack", "maximum", "minimum"})
_ARITHMETIC = frozenset({"add", "sub", "mul", "div"})
#: Operations whose results something may be known about if something is known about an argument.
PASSING = _PARTS | _UNITED | _ARITHMETIC | {"neg", "abs", "rsub"}
_UNIT = frozenset({"sigmoid", "softmax", "_softmax"})


@dataclass(frozen=True, eq=False)
class Spread:
    """Where the values of a tensor lie.

    Attributes:
        low: None is less; ``high``: none is more.
        mean: Of a normal distribution; ``std`` its standard deviation. None without one.
        is_uniform: Whether they are evenly distributed between ``low`` and ``high``.
        fraction: Of the values that are distributed so. The others lie in ``rest``.
    """

    low: float = -math.inf
    high: float = math.inf
    mean: float = 0.0
    std: float | None = None
    is_uniform: bool = False
    is_folded: bool = False
    fraction: float = 1.0
    rest: tuple[float, float] = (-math.inf, math.inf)

    @property
    def is_anything(self) -> bool:
        """Return whether nothing is known."""
        return math.isinf(self.low) and math.isinf(self.high) and self.std is None

    def bounds_alone(self) -> Spread:
        """The bounds without the distribution."""
        return Spread(self.low, self.high)

    def below(self, limit: float) -> float | None:
        """The fraction of values below a limit between the bounds; None if the distribution is not known."""
        if self.is_uniform:
            return (limit - self.low) / (self.high - self.low)
        if self.std is None:
            return None
        share = _normal_below((limit - self.mean) / self.std)
        if self.is_folded:
            share = max(share - _normal_below((-limit - self.mean) / self.std), 0.0)
        if self.fraction == 1.0:
            return share
        of_rest = 0.0 if limit <= self.rest[0] else 1.0 if limit >= self.rest[1] else share
        return self.fraction * share + (1 - self.fraction) * of_rest


ANYTHING = Spread()


@dataclass(frozen=True, eq=False)
class Odds:
    """How often a mask is true.

    Attributes:
        fraction: Of the elements that are.
        is_known: Whether it follows from how the values were made; else they are taken to be normal.
        of: The values that were compared, if a constant was compared with them.
        inside: The interval in which a value makes it false.
    """

    fraction: float
    is_known: bool
    of: Spread | None = None
    inside: tuple[float, float] = (-math.inf, math.inf)


#: What is known about a tensor's values: of a mask, odds.
Facts = Spread | Odds | None


class Spreads:
    """Derives spreads. ``facts_of`` has what is known about a tensor, ``seen`` its values if they are on the host."""

    def __init__(
        self, facts_of: Callable[[torch.Tensor], Facts], seen: Callable[[torch.Tensor], torch.Tensor | None]
    ) -> None:
        self._facts_of, self._seen = facts_of, seen

    def of(self, value: object) -> Spread:
        """The spread of an argument."""
        if isinstance(value, (bool, int, float)):
            return Spread(float(value), float(value))
        if not isinstance(value, torch.Tensor):
            return ANYTHING
        if isinstance(facts := self._facts_of(value), Spread):
            return facts
        seen = value if not value.is_cuda and value.numel() == 1 else self._seen(value)
        if seen is None or seen.is_complex() or not 0 < seen.numel() <= _MOST_ELEMENTS:
            return ANYTHING
        low, high = (float(bound) for bound in seen.detach().double().aminmax())
        return ANYTHING if math.isnan(low) or math.isnan(high) else Spread(low, high)

    def follow(self, name: str, args: Arguments, result: torch.Tensor) -> Facts:
        """Derive what is known about an operation's result from its arguments."""
        if result.dtype == torch.bool:
            return self._odds(name, args)
        spread = self._values(name, args)
        if spread is None or spread.is_anything or result.is_complex():
            return None
        if result.is_floating_point():
            return spread
        is_bounded = math.isfinite(spread.low) and math.isfinite(spread.high)
        return Spread(math.floor(spread.low), math.ceil(spread.high)) if is_bounded else None

    def _values(self, name: str, args: Arguments) -> Spread | None:
        if name in SOURCES:
            return _drawn(name, args)
        if name in _UNIT:
            return Spread(0.0, 1.0)
        if name in ("zeros", "zeros_like", "new_zeros", "zero", "ones", "ones_like", "new_ones"):
            return self.of("one" in name)
        if name in ("full", "full_like", "new_full", "fill"):
            return self.of(args[2 if name == "new_full" else 1])
        if name in _PARTS:
            spread = self.of(args[0])
            return spread if name not in ("max", "min", "amax", "amin", "mean") else spread.bounds_alone()
        if name in _UNITED:
            return _united([self.of(value) for value in tensors(args[1:] if name == "copy_" else args)])
        if name == "where" and len(args) == 3:
            return self._mixed(self._facts_of(tensor_at(args, 0)), self.of(args[1]), self.of(args[2]))
        if name == "masked_fill":
            return _united([self.of(args[0]), self.of(args[2])])
        return self._computed(name, args)

    def _computed(self, name: str, args: Arguments) -> Spread | None:
        first = self.of(args[0]) if args else ANYTHING
        second = self.of(args[1]) if len(args) > 1 else ANYTHING
        if name == "rsub":
            name, first, second = "sub", second, first
        if name in _ARITHMETIC:
            return _arithmetic(name, first, second) if len(args) == 2 else None
        if name == "neg":
            return _arithmetic("mul", first, Spread(-1.0, -1.0))
        if name == "abs":
            is_folded = first.std is not None and first.fraction == 1.0
            low = 0.0 if first.low <= 0 <= first.high else min(abs(first.low), abs(first.high))
            high = max(abs(first.low), abs(first.high))
            return Spread(low, high, first.mean, first.std if is_folded else None, is_folded=is_folded)
        if name == "clamp":
            low = self.of(args[1]).low if len(args) > 1 and args[1] is not None else -math.inf
            high = self.of(args[2]).high if len(args) > 2 and args[2] is not None else math.inf
            return Spread(max(low, min(first.low, high)), min(high, max(first.high, low)))
        if name == "relu":
            return Spread(max(first.low, 0.0), max(first.high, 0.0))
        return None

    @staticmethod
    def _mixed(mask: Facts, first: Spread, second: Spread) -> Spread:
        """Values of the first where a mask is true, else of the second: there, none that made the mask true is left."""
        if isinstance(mask, Odds) and mask.of is second and first.std is not None:
            both = _united([first, second])
            return replace(
                first, low=both.low, high=both.high, fraction=mask.fraction * first.fraction, rest=mask.inside
            )
        return _united([first, second])

    def _odds(self, name: str, args: Arguments) -> Odds | None:
        if name in COMPARISONS and len(args) > 1:
            return self._compared(name, tensor_at(args, 0), args[1])
        if name in ("logical_not", "bitwise_not"):
            odds = self._of_mask(args[0])
            return None if odds is None else Odds(1 - odds.fraction, odds.is_known)
        if name in ("bitwise_or", "logical_or", "bitwise_and", "logical_and", "mul") and len(args) > 1:
            first, second = self._of_mask(args[0]), self._of_mask(args[1])
            if first is None or second is None:
                return None
            is_known = first.is_known and second.is_known
            if not name.endswith("_or"):
                return Odds(first.fraction * second.fraction, is_known)
            fraction = first.fraction + second.fraction - first.fraction * second.fraction
            inside = max(first.inside[0], second.inside[0]), min(first.inside[1], second.inside[1])
            return Odds(fraction, is_known, first.of if first.of is second.of else None, inside)
        return self._of_mask(args[0]) if name in ("clone", "_to_copy", "index") else None

    def _of_mask(self, value: object) -> Odds | None:
        facts = self._facts_of(value) if isinstance(value, torch.Tensor) else None
        return facts if isinstance(facts, Odds) else None

    def _compared(self, name: str, first: torch.Tensor, second: object) -> Odds | None:
        mine, other = self.of(first), self.of(second)
        if other.low != other.high:
            certain = _certain(name, mine, other)
            if certain is None and name in ("eq", "ne"):
                return None
            return Odds(0.5, is_known=False) if certain is None else Odds(certain, is_known=True)
        limit = other.low
        fraction = _fraction(name, mine, limit)
        inside = (-math.inf, limit) if name in ("gt", "ge") else (limit, math.inf)
        of = mine if name in ("lt", "le", "gt", "ge") else None
        if fraction is not None:
            return Odds(fraction, is_known=True, of=of, inside=inside)
        fraction = _usual(name, mine, limit, is_whole=not first.is_floating_point())
        return None if fraction is None else Odds(fraction, is_known=False, of=of, inside=inside)


def reduced(name: str, odds: Odds, num_elements: float) -> tuple[bool, bool] | None:
    """The result of ``any`` or ``all`` of so many elements of a mask, and whether it is certain; None if not known."""
    is_any = "any" in name
    fraction = odds.fraction if is_any else 1 - odds.fraction
    expected = fraction * num_elements
    if odds.is_known:
        return (expected >= 0.5) is is_any, expected < _CERTAIN or expected > _MANY
    if fraction < _HARDLY:
        return not is_any, False
    return (is_any, False) if fraction > _SOMEWHERE and expected > 1 else None


def _normal_below(deviations: float) -> float:
    return 0.5 * math.erfc(-deviations / math.sqrt(2.0))


def _drawn(name: str, args: Arguments) -> Spread | None:
    if name in ("randn", "randn_like"):
        return Spread(mean=0.0, std=1.0)
    if name in ("rand", "rand_like"):
        return Spread(0.0, 1.0, is_uniform=True)
    if name == "exponential":
        return Spread(low=0.0)
    numbers = [value for value in args[1:3] if isinstance(value, (int, float))]
    if len(numbers) != len(args[1:3]) or not all(map(math.isfinite, numbers)):
        return None
    first, second = [*map(float, numbers), *(0.0, 1.0)[len(numbers) :]]
    if name == "normal":
        return Spread(mean=first, std=second) if second > 0 else Spread(first, first)
    return Spread(first, second, is_uniform=True) if first < second else Spread(first, first)


def _united(spreads: list[Spread]) -> Spread:
    if not spreads:
        return ANYTHING
    if all(spread is spreads[0] for spread in spreads):
        return spreads[0]
    return Spread(min(spread.low for spread in spreads), max(spread.high for spread in spreads))


def _arithmetic(name: str, first: Spread, second: Spread) -> Spread | None:
    if name == "div":
        if second.low <= 0 <= second.high:
            return None
        name, second = (
            "mul",
            replace(second.bounds_alone(), low=1 / second.high if second.high else 0.0, high=1 / second.low),
        )
    if name == "sub":
        name, second = "add", Spread(-second.high, -second.low, -second.mean, second.std)
    if first.low == first.high and second.low != second.high:
        first, second = second, first
    number = second.low if second.low == second.high else None
    if name == "add":
        low, high = first.low + second.low, first.high + second.high
    else:
        products = [_product(one, other) for one in (first.low, first.high) for other in (second.low, second.high)]
        low, high = min(products), max(products)
    if (
        number is None
        or first.fraction < 1.0
        or first.is_folded
        or math.isinf(number)
        or (name == "mul" and not number)
    ):
        return Spread(low, high)
    if name == "add":
        return replace(first, low=low, high=high, mean=first.mean + number)
    std = None if first.std is None else first.std * abs(number)
    return replace(first, low=low, high=high, mean=first.mean * number, std=std)


def _product(first: float, second: float) -> float:
    return first * second if first and second else 0.0


def _certain(name: str, first: Spread, second: Spread) -> float | None:
    """How often a comparison holds if the bounds alone decide it."""
    if name in ("gt", "ge", "ne"):
        opposite = _certain({"gt": "le", "ge": "lt", "ne": "eq"}[name], first, second)
        return None if opposite is None else 1 - opposite
    if name == "eq":
        apart = first.high < second.low or second.high < first.low
        return 0.0 if apart else 1.0 if first.low == first.high == second.low == second.high else None
    if name == "lt":
        return 0.0 if first.low >= second.high else 1.0 if first.high < second.low else None
    return 0.0 if first.low > second.high else 1.0 if first.high <= second.low else None


def _fraction(name: str, spread: Spread, limit: float) -> float | None:
    """How often a comparison with a constant holds; None if the distribution is not known."""
    certain = _certain(name, spread, Spread(limit, limit))
    if certain is not None or (below := spread.below(limit)) is None:
        return certain
    return {"lt": below, "le": below, "eq": 0.0, "ne": 1.0}.get(name, 1 - below)


def _usual(name: str, spread: Spread, limit: float, *, is_whole: bool) -> float | None:
    """How often a comparison holds for made-up values: standard normal ones; ids and counts, which are whole."""
    if not is_whole:
        return _fraction(name, replace(spread, mean=0.0, std=1.0, is_folded=spread.low >= 0, fraction=1.0), limit)
    if limit < 0 or (limit == 0 and name in ("lt", "ge")):
        return _certain(name, Spread(0.0), Spread(limit, limit))
    return _certain(name, Spread(0.0, _LARGE_ID - 1.0), Spread(limit, limit)) if limit >= _LARGE_ID else None
