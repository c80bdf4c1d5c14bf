"""Times of attention in decoding: one query for each sequence, over the keys and values that are kept of it.

vLLM's kernels were measured, by batch and context, for many combinations of heads, keys' heads and width. The reference
reads the KV cache once at the achieved bandwidth. The ratio of the measured time to it is interpolated over the
logarithms of batch and context, for the nearest measured combinations weighted by their distance. Beyond the table, the
ratio at its nearest edge holds. No time is below that of the cache's bytes at the peak bandwidth.

A KV cache that fits into the L2 cache counts as no faster than one that does not: the collector reads one cache again
and again, and between the layers of a model the weights pass through.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class DecodingTimes:
    """Estimates attention of decoding on the GPU that was measured, or one of its architecture.

    Attributes:
        bandwidth: The peak of the GPU that was measured, bytes per second.
    """

    bandwidth: float
    _shapes: tuple[DecodingShape, ...]
    _grids: tuple[tuple[list[Floats], Floats], ...]

    @classmethod
    def of(cls, table: pd.DataFrame, measured_on: GpuSpec) -> DecodingTimes:
        """From the rows of ``Measured.decoding``, of which there is at least one."""
        shapes, grids, bandwidth = [], [], measured_on.memory_bandwidth
        for _, rows in beyond_l2(table, measured_on).groupby(_SHAPE, sort=True):
            shape = DecodingShape(*(int(rows[name].iloc[0]) for name in _SHAPE))
            batch, context = (rows[name].to_numpy(np.float64) for name in ("batch", "context"))
            ratio = np.log(rows["time_us"].to_numpy() / _reference_us(shape, batch, context, bandwidth))
            grid = pd.DataFrame({"batch": batch, "context": context, "ratio": ratio}).pivot_table(
                index="batch", columns="context", values="ratio"
            )
            axes = [np.log(axis.to_numpy(np.float64)) for axis in (grid.index, grid.columns)]
            shapes.append(shape)
            grids.append((axes, fill_gaps(grid.to_numpy())))
        return cls(bandwidth, tuple(shapes), tuple(grids))

    def without(self, shape: DecodingShape) -> DecodingTimes:
        """Without a measured combination, to judge how well it is estimated from the others."""
        kept = [at for at, own in enumerate(self._shapes) if own != shape]
        return replace(
            self, _shapes=tuple(self._shapes[at] for at in kept), _grids=tuple(self._grids[at] for at in kept)
        )

    def time_us(self, shape: DecodingShape, batch: Floats, context: Floats, bandwidth: float | None = None) -> Floats:
        """Microseconds of attention of ``batch`` sequences with ``context`` keys each, on average.

        ``bandwidth`` is the peak of another GPU of the architecture.
        """
        bandwidth = self.bandwidth if bandwidth is None else bandwidth
        own = shape.point()
        distances = np.array([np.square(other.point() - own).sum() for other in self._shapes])
        nearest = np.argsort(distances, kind="stable")[:_NEIGHBOURS]
        if distances[nearest[0]] == 0:
            nearest = nearest[:1]
        weights = 1 / (distances[nearest] + _SAME)
        points = [np.log(np.maximum(batch, 1.0)), np.log(np.maximum(context, 1.0))]
        ratio = np.zeros(len(batch))
        for at, weight in zip(nearest.tolist(), weights / weights.sum(), strict=True):
            axes, grid = self._grids[at]
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
