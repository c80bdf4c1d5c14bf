"""An amount that is known from a least to a most."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """An amount.

    Attributes:
        low: It is no less.
        high: It is no more.
    """

    low: int
    high: int

    def __add__(self, other: Span) -> Span:
        return Span(self.low + other.low, self.high + other.high)

    def __mul__(self, other: Span) -> Span:
        return Span(self.low * other.low, self.high * other.high)

    def at_least_none(self) -> Span:
        """From nothing to as much."""
        return Span(0, self.high)


NOTHING = Span(0, 0)


def exactly(amount: int) -> Span:
    """An amount that is known."""
    return Span(amount, amount)


def total(spans: Iterable[Span]) -> Span:
    """The sum."""
    return sum(spans, NOTHING)
