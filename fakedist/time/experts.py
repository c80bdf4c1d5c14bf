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
#: Points whose distances to every measurement are in memory at once.
_AT_ONCE = 256
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

    def estimate(
        self, rows: Floats, groups: Floats, n: Floats, k: Floats, roof: ProductRoof
    ) -> tuple[Floats, Floats, Floats]:
        """Microseconds of grouped products, and those that their tiles and their bytes need at least.

        Args:
            rows: Rows of all groups together, evenly shared.
            groups: Groups, one for each expert.
            n: Columns of the result.
            k: Length of the sums.
            roof: The limits of the GPU: the one that was measured, or another of the same architecture.
        """
        # Whether it is a layer's first product (k hidden, n gate and up) or its second (n hidden) is not known: the
        # one that is closer to what was measured.
        first, first_distance = self._nearest(_points(rows, groups, k, np.maximum(n / 2, 1.0)))
        second, second_distance = self._nearest(_points(rows, groups, n, k))
        quotient = np.where(first_distance <= second_distance, first, second)
        compute, memory = _limits_us(rows, groups, n, k, roof)
        return np.asarray(np.exp(quotient) * (_START_US + np.maximum(compute, memory))), compute, memory

    def layer_us(self, rows: Integers, experts: Integers, hidden: Integers, inner: Integers) -> Floats:
        """Microseconds of a gated layer of experts, as it was measured."""
        sizes = [np.asarray(size, np.float64) for size in (rows, experts, hidden, inner)]
        return np.asarray(np.exp(self._nearest(_points(*sizes))[0]) * self._layer_reference_us(*sizes))

    def _layer_reference_us(self, rows: Floats, experts: Floats, hidden: Floats, inner: Floats) -> Floats:
        first = _reference_us(rows, experts, 2 * inner, hidden, self._roof)
        return first + _reference_us(rows, experts, hidden, inner, self._roof)

    def _nearest(self, points: Floats) -> tuple[Floats, Floats]:
        """The quotient at each point, and how far the nearest measurement is (squared, of logarithms)."""
        points, back = np.unique(points, axis=0, return_inverse=True)
        found, distances = np.empty(len(points)), np.empty(len(points))
        lengths = np.square(self._points).sum(axis=1)
        for begin in range(0, len(points), _AT_ONCE):
            some = slice(begin, begin + _AT_ONCE)
            apart = np.square(points[some]).sum(axis=1)[:, None] + lengths - 2 * points[some] @ self._points.T
            number = min(_NEIGHBOURS, apart.shape[1])
            nearest = np.argpartition(apart, number - 1, axis=1)[:, :number]
            distance = np.take_along_axis(apart, nearest, axis=1).clip(0)
            weights = 1 / (distance + _SAME)
            found[some] = (self._quotient[nearest] * weights).sum(axis=1) / weights.sum(axis=1)
            distances[some] = distance.min(axis=1)
        return found[back.ravel()], distances[back.ravel()]


def _points(rows: Floats, groups: Floats, hidden: Floats, inner: Floats) -> Floats:
    """Coordinates in which neighbours are looked for."""
    return np.log(np.stack([rows / groups, groups, hidden, inner], axis=1))


def _limits_us(rows: Floats, groups: Floats, n: Floats, k: Floats, roof: ProductRoof) -> tuple[Floats, Floats]:
    """Tiles of 128 rows and columns on all SMs, and operands and results once."""
    tiles = groups * np.ceil(rows / groups / 128) * np.ceil(n / 128)
    compute = tiles * 2 * 128 * 128 * k / roof.peak_flops * 1e6
    moved = (rows * k + groups * n * k) * roof.element_bytes + rows * n * roof.result_bytes
    return np.asarray(compute), np.asarray(moved / roof.memory_bandwidth * 1e6)


def _reference_us(rows: Floats, groups: Floats, n: Floats, k: Floats, roof: ProductRoof) -> Floats:
    return np.asarray(_START_US + np.maximum(*_limits_us(rows, groups, n, k, roof)))
