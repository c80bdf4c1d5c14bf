"""Times of grouped products: the products of a layer's experts, each with its own rows and weights.

Whole layers of experts were measured (gate, permutation, two grouped products, activation) with balanced routing,
bf16. Their time over a reference, the sum of the two products' tiles and weights, is taken from the nearest measured
layers, weighted by distance, and applied to each grouped product's own reference. So gate and permutation are in it.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from fakedist.time.measurements import Floats, Integers
from fakedist.time.products import ProductRoof

_NEIGHBOURS = 4
_START_US = 4.0
#: Squared distance (of logarithms) within which neighbours count alike.
_SAME = 1e-3


class GroupedTimes:
    """Estimates grouped products on one GPU.

    Args:
        experts: Measured layers of experts (``Measured.experts``).
        measured_on: The limits of the GPU that was measured.
    """

    def __init__(self, experts: pd.DataFrame, measured_on: ProductRoof) -> None:
        self._roof = measured_on
        sizes = [experts[name].to_numpy(np.float64) for name in ("rows", "experts", "hidden", "inner")]
        self._points = _points(*sizes)
        self._quotient = np.log(experts["time_us"].to_numpy() / self._layer_reference_us(*sizes))

    def time_us(
        self, rows: Integers, groups: Integers, n: Integers, k: Integers, roof: ProductRoof | None = None
    ) -> Floats:
        """Microseconds of grouped products, each argument an array of one length.

        Args:
            rows: Rows of all groups together, evenly shared.
            groups: Groups, one for each expert.
            n: Columns of the result.
            k: Length of the sums.
            roof: The limits of another GPU of the same architecture; by default the one that was measured.
        """
        rows_, groups_, n_, k_ = (np.asarray(size, np.float64) for size in (rows, groups, n, k))
        # Whether it is a layer's first product (k hidden, n gate and up) or its second (n hidden) is not known: the
        # one that is closer to what was measured.
        first, first_distance = self._nearest(_points(rows_, groups_, k_, np.maximum(n_ / 2, 1.0)))
        second, second_distance = self._nearest(_points(rows_, groups_, n_, k_))
        quotient = np.where(first_distance <= second_distance, first, second)
        return np.asarray(np.exp(quotient) * _reference_us(rows_, groups_, n_, k_, roof or self._roof))

    def layer_us(self, rows: Integers, experts: Integers, hidden: Integers, inner: Integers) -> Floats:
        """Microseconds of a gated layer of experts, as it was measured."""
        sizes = [np.asarray(size, np.float64) for size in (rows, experts, hidden, inner)]
        return np.asarray(np.exp(self._nearest(_points(*sizes))[0]) * self._layer_reference_us(*sizes))

    def _layer_reference_us(self, rows: Floats, experts: Floats, hidden: Floats, inner: Floats) -> Floats:
        first = _reference_us(rows, experts, 2 * inner, hidden, self._roof)
        return first + _reference_us(rows, experts, hidden, inner, self._roof)

    def _nearest(self, points: Floats) -> tuple[Floats, Floats]:
        """The quotient at each point, and how far the nearest measurement is (squared, of logarithms)."""
        found, distances = np.empty(len(points)), np.empty(len(points))
        for place, point in enumerate(points):
            distance = np.square(self._points - point).sum(axis=1)
            nearest = np.argpartition(distance, min(_NEIGHBOURS, len(distance) - 1))[:_NEIGHBOURS]
            found[place] = np.average(self._quotient[nearest], weights=1 / (distance[nearest] + _SAME))
            distances[place] = distance[nearest].min()
        return found, distances


def _points(rows: Floats, groups: Floats, hidden: Floats, inner: Floats) -> Floats:
    """Coordinates in which neighbours are looked for."""
    return np.log(np.stack([rows / groups, groups, hidden, inner], axis=1))


def _reference_us(rows: Floats, groups: Floats, n: Floats, k: Floats, roof: ProductRoof) -> Floats:
    """Tiles of 128 rows and columns on all SMs, or operands and results once; the longer counts."""
    tiles = groups * np.ceil(rows / groups / 128) * np.ceil(n / 128)
    compute = tiles * 2 * 128 * 128 * k / roof.peak_flops
    moved = (rows * k + groups * n * k) * roof.element_bytes + rows * n * roof.result_bytes
    return np.asarray(_START_US + np.maximum(compute, moved / roof.memory_bandwidth) * 1e6)
