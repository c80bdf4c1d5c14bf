"""Divides an operation among kernels that do not share it alike: one computes, or some have their own bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fakedist.gpu.demand.kernel_parts import Part
from fakedist.gpu.demand.operation_demand import NAN, Demand

#: How the names of the functions begin that factorise one matrix or solve one system.
_SOLVERS = ("cusolverDn", "cublas")


class Division:
    """How an operation is divided among its launches.

    Args:
        demand: What the operation has to do, without its copies, fills and products.
        weights: Its launches by their position in the log, and how many threads each has.
        names: Their names.
        computing: Those that may do its arithmetic. The one with the most threads does all of what is of one kernel,
            such as an attention; otherwise they share it. Steps that follow one another are that one's, too.
    """

    def __init__(
        self, demand: Demand, weights: Mapping[int, float], names: Mapping[int, str], computing: Sequence[int]
    ) -> None:
        self._demand, self._weights = demand, weights
        self._parts = {number: _part_of(name, demand.parts) for number, name in names.items()}
        sharing = [number for number in computing if self._parts[number] is None] or list(computing)
        self._main = max(sharing, key=lambda number: weights[number], default=-1)
        #: The launches that do the arithmetic: the main one; several alike if nothing says which it is.
        self._computing = {self._main} if demand.is_of_one_kernel else set(sharing)
        #: The launches that do all steps: a solver that is called for each matrix of a batch does them each time.
        self._stepping = {self._main}
        if names.get(self._main, "").startswith(_SOLVERS):
            self._stepping |= {number for number in self._computing if names[number] == names[self._main]}
        self._shared = sum(weights[number] for number in self._computing)
        self._totals: dict[Part | None, float] = {}
        for number, part in self._parts.items():
            self._totals[part] = self._totals.get(part, 0.0) + weights[number]

    def of(self, number: int) -> Demand:
        """What one launch has to do."""
        demand, part = self._demand, self._parts[number]
        total, weight = self._totals[part], self._weights[number]
        if total:
            share = weight / total
        else:  # kernels next to a library's, which has all of the weight
            share = 0.0 if part is None else 1.0 / sum(1 for each in self._parts.values() if each == part)
        moved = (demand.moved_bytes if part is None else part.moved_bytes) * share
        if not total and part is None and demand.moved_bytes != demand.moved_bytes:
            moved = NAN
        if number in self._computing:
            flops = demand.flops * (weight / self._shared if self._shared else 1.0 / len(self._computing))
            steps = demand.steps if number in self._stepping else 0
            return demand._replace(flops=flops, moved_bytes=moved, steps=steps)
        flops = 0.0 if demand.flops == demand.flops else NAN
        alone = demand._replace(flops=flops, moved_bytes=moved, attention=None, product=None, quantized=(0, 0))
        return alone._replace(steps=0, is_bounded=demand.is_bounded and part is not None)


def _part_of(name: str, parts: Sequence[Part]) -> Part | None:
    return next((part for part in parts if any(word in name for word in part.words)), None)
