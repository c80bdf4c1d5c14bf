"""Times of attention in decoding: one query for each sequence, over the keys and values that are kept of it.

vLLM's kernels were measured, by batch and context, for many combinations of heads, keys' heads and width. The reference
reads the KV cache once at the achieved bandwidth. The ratio of the measured time to it is interpolated over the
logarithms of batch and context, for the nearest measured combinations weighted by their distance. Beyond the table, the
ratio at its nearest edge holds. No time is below that of the cache's bytes at the peak bandwidth.

A KV cache that fits into the L2 cache counts as no faster than one that does not: the collector reads one cache again
and again, and between the layers of a model the weights pass through.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from fakedist.cost_model.kernels.measurements import Floats
from fakedist.cost_model.kernels.moving import beyond_cache
from fakedist.cost_model.kernels.products import fill_gaps, interpolate
from fakedist.gpu.models.spec import GpuSpec

_START_US = 4.0
_ELEMENT_BYTES = 2.0
_ACHIEVED_BANDWIDTH = 0.9
#: What one unit (logarithm) of width, keys' heads and queries for each of these heads counts as distance: kernels are
#: compiled for a width.
_WIDTH, _KV_HEADS, _GROUP = 4.0, 1.0, 1.0
_NEIGHBOURS = 3
#: Squared distance within which neighbours count alike.
_SAME = 1e-3
_SHAPE = ["heads", "kv_heads", "width"]


@dataclass(frozen=True)
class DecodingShape:
    """One layer's attention, of one rank: query heads, heads of keys and values, width of a head."""

    heads: int
    kv_heads: int
    width: int

    def cache_bytes(self, tokens: Floats) -> Floats:
        """Bytes of the keys and values of so many tokens in bf16."""
        return np.asarray(2.0 * _ELEMENT_BYTES * self.kv_heads * self.width * tokens)

    def point(self) -> Floats:
        """Where it lies among others."""
        group = self.heads / self.kv_heads
        return np.array([_WIDTH * np.log(self.width), _KV_HEADS * np.log(self.kv_heads), _GROUP * np.log(group)])


class DecodingTimes:
    """Estimates attention of decoding on the GPU that was measured, or one of its architecture.

    Args:
        table: The rows of ``Measured.decoding``, of which there is at least one.
        measured_on: Their GPU.
    """

    def __init__(self, table: pd.DataFrame, measured_on: GpuSpec) -> None:
        self._bandwidth = measured_on.memory_bandwidth
        rows = beyond_l2(table, measured_on)
        shapes, of_row = np.unique(rows[_SHAPE].to_numpy("i8"), axis=0, return_inverse=True)
        self._shapes = [DecodingShape(*map(int, shape)) for shape in shapes]
        self._points = np.stack([shape.point() for shape in self._shapes])
        order = np.argsort(of_row.ravel(), kind="stable")
        self._rows = rows[["batch", "context", "time_us"]].to_numpy(np.float64)[order]
        self._begins = np.searchsorted(of_row.ravel()[order], np.arange(len(shapes) + 1))

    def _grid(self, at: int) -> tuple[list[Floats], Floats]:
        """The logarithm of one combination's time over its reference, over the logarithms of batch and context."""
        batch, context, time_us = self._rows[self._begins[at] : self._begins[at + 1]].T
        (batches, in_batch), (contexts, in_context) = (
            np.unique(axis, return_inverse=True) for axis in (batch, context)
        )
        grid = np.full((len(batches), len(contexts)), np.nan)
        grid[in_batch, in_context] = np.log(time_us / _reference_us(self._shapes[at], batch, context, self._bandwidth))
        return [np.log(batches), np.log(contexts)], fill_gaps(grid)

    def time_us(
        self,
        shape: DecodingShape,
        batch: Floats,
        context: Floats,
        bandwidth: float | None = None,
        *,
        without: DecodingShape | None = None,
    ) -> Floats:
        """Microseconds of attention of ``batch`` sequences with ``context`` keys each, on average.

        Args:
            shape: The combination of heads and width.
            batch: Sequences.
            context: Keys of each, on average.
            bandwidth: The peak of another GPU of the architecture; None for the one that was measured.
            without: A measured combination that is left out, to judge how well the others estimate it.
        """
        bandwidth = self._bandwidth if bandwidth is None else bandwidth
        distances = np.square(self._points - shape.point()).sum(axis=1)
        if without is not None:
            distances[[own == without for own in self._shapes]] = np.inf
        nearest = np.argsort(distances, kind="stable")[:_NEIGHBOURS]
        if distances[nearest[0]] == 0:
            nearest = nearest[:1]
        weights = 1 / (distances[nearest] + _SAME)
        points = [np.log(np.maximum(batch, 1.0)), np.log(np.maximum(context, 1.0))]
        ratio = np.zeros(len(batch))
        for at, weight in zip(nearest.tolist(), weights / weights.sum(), strict=True):
            axes, grid = self._grid(at)
            ratio += weight * interpolate(axes, grid, points)
        time_us = np.exp(ratio) * _reference_us(shape, batch, context, bandwidth)
        return np.asarray(np.maximum(time_us, self.floor_us(shape, batch, context, bandwidth)))

    @staticmethod
    def floor_us(shape: DecodingShape, batch: Floats, context: Floats, bandwidth: float) -> Floats:
        """Microseconds of the cache's bytes at the peak bandwidth."""
        return np.asarray(shape.cache_bytes(batch * context) / bandwidth * 1e6)


def beyond_l2(table: pd.DataFrame, gpu: GpuSpec) -> pd.DataFrame:
    """The rows of ``Measured.decoding`` with what they take at least if the L2 cache of the GPU holds nothing."""
    moved = 2.0 * _ELEMENT_BYTES * table["kv_heads"] * table["width"] * table["batch"] * table["context"]
    least_us = moved / (gpu.memory_bandwidth * _ACHIEVED_BANDWIDTH) * 1e6
    fits = ~beyond_cache(moved.to_numpy(np.float64), gpu.l2_bytes)
    return table.assign(time_us=np.where(fits, np.maximum(table["time_us"], least_us), table["time_us"]))


def _reference_us(shape: DecodingShape, batch: Floats, context: Floats, bandwidth: float) -> Floats:
    return np.asarray(_START_US + shape.cache_bytes(batch * context) / (bandwidth * _ACHIEVED_BANDWIDTH) * 1e6)
