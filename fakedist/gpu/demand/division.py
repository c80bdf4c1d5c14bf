"""Divides an operation among kernels that do not share it alike: one computes, or some have their own bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fakedist.gpu.demand.kernel_parts import Part
from fakedist.gpu.demand.operation_demand import NAN, Demand


class Division:
    """How an operation is divided among its launches.

    Args:
        demand: What the operation has to do, without its copies, fills and products.
        weights: Its launches by their position in the log, and how many threads each has.
        names: Their names.
        computing: Those that may do its arithmetic. The one with the most threads does all of it.
    """

    def __init__(
        self, demand: Demand, weights: Mapping[int, float], names: Mapping[int, str], computing: Sequence[int]
    ) -> None:
        self._demand, self._weights = demand, weights
        self._parts = {number: _part_of(name, demand.parts) for number, name in names.items()}
        sharing = [number for number in computing if self._parts[number] is None] or list(computing)
        self._main = max(sharing, key=lambda number: weights[number], default=-1)
        self._totals: dict[Part | None, float] = {}
        for number, part in self._parts.items():
            self._totals[part] = self._totals.get(part, 0.0) + weights[number]

    def of(self, number: int) -> Demand:
        """What one launch has to do."""
        demand, part = self._demand, self._parts[number]
        total, weight = self._totals[part], self._weights[number]
        moved = (demand.moved_bytes if part is None else part.moved_bytes) * (weight / total if total else 0.0)
        if not total and part is None and demand.moved_bytes != demand.moved_bytes:
            moved = NAN
        if number == self._main:
            return demand._replace(moved_bytes=moved)
        flops = 0.0 if demand.flops == demand.flops else NAN
        return demand._replace(flops=flops, moved_bytes=moved, attention=None, product=None, quantized=(0, 0))


def _part_of(name: str, parts: Sequence[Part]) -> Part | None:
    return next((part for part in parts if any(word in name for word in part.words)), None)
