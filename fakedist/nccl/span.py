"""An amount known only as a range."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """An amount.

    Attributes:
        low: The least it can be.
        high: The most it can be.
    """

    low: int
    high: int

    def __add__(self, other: Span) -> Span:
        return Span(self.low + other.low, self.high + other.high)

    def __mul__(self, other: Span) -> Span:
        return Span(self.low * other.low, self.high * other.high)

    def at_least_none(self) -> Span:
        """The same span with 0 as its low end."""
        return Span(0, self.high)


NOTHING = Span(0, 0)


def exactly(amount: int) -> Span:
    """An amount that is known exactly."""
    return Span(amount, amount)


def total(spans: Iterable[Span]) -> Span:
    """The sum of spans."""
    return sum(spans, NOTHING)
