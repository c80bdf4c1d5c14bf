"""Times of kernels that are limited by memory: bytes over the bandwidth that such kernels were measured to reach.

The achieved fraction of the peak bandwidth is interpolated over the bytes (logarithmic); more bytes never take less
time. Each kind of kernel has its curve:

- ``elementwise``: quantisation from bf16 to fp8 by a given scale, which streams two bytes in and one out, measured on
  every GPU but A100 in 1,628 sizes. Sizes that fit the L2 cache count with no more than the fraction of larger ones:
  the collector repeats one kernel on one buffer, a step does not.
- norms, forward and backward, PyTorch's eager and compiled: measured on H200, GB200 and (LayerNorm) H100. Eager norms
  of narrow rows, such as a head's, have curves of their own: they are many times slower. LayerNorm was measured in one
  size on H200 and GB200, 1,024 rows of 12,288, where it takes 31 us on both. Of other sizes it takes as much longer
  than RMSNorm as there: kept at one fraction of the bandwidth, a B200 would be slower than an H100 at 1 GiB.

A GPU without a curve takes that of the most similar GPU. A kernel below the measured sizes takes a fixed start and its
bytes at the best rate; one above keeps the fraction of the largest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from fakedist.cost_model.kernels.measurements import Floats, Measured
from fakedist.gpu.models.spec import GpuSpec

ELEMENTWISE = "elementwise"
_NORM_BACKENDS = {"pytorch": "", "torch_compile": ".compiled"}
#: Eager norms of narrower rows have curves of their own.
WIDE_ROW = 1024
#: Of Liger's table, only kernels that move this much: the host sets the pace of smaller ones.
_LEAST_LIGER_BYTES = 1 << 26
#: Sizes from this many times the L2 cache on say what memory achieves.
_BEYOND_CACHE = 1.5
#: Measured sizes within a quarter of an octave share a point of the curve.
_POINTS_PER_OCTAVE = 4
#: Bytes an element that a kernel of Liger's table reads and writes, by kernel, provider and direction. The table's
#: "backward" of SwiGLU takes as long as its "full", so it is not a backward alone and not here; nor is its RMSNorm of
#: PyTorch, whose backward is of another release than those that were measured on H200 and GB200.
_LIGER_BYTES = {
    ("relu_squared", "liger", "forward"): ("elementwise.liger", 4),
    ("relu_squared", "liger", "backward"): ("elementwise.liger", 6),
    ("megatron_swiglu", "liger", "forward"): ("elementwise.liger", 6),
    ("layer_norm", "huggingface", "forward"): ("layer_norm.forward", 8),
    ("layer_norm", "huggingface", "backward"): ("layer_norm.backward", 12),
}


@dataclass(frozen=True)
class Moved:
    """Measured kernels of one GPU that memory limits (columns kind, bytes, time_us), and its peak bytes per second."""

    rows: pd.DataFrame
    bandwidth: float
    cache_bytes: int
    name: str = ""


@dataclass(frozen=True)
class _BandwidthCurve:
    """Fractions of the peak bandwidth over bytes, both as logarithms; whose they are, and if of another kind."""

    sizes: Floats
    fractions: Floats
    name: str
    is_like_another: bool = False

    def like(self, other: _BandwidthCurve) -> _BandwidthCurve:
        """The other's curve through the only point of this one."""
        shift = self.fractions[0] - np.interp(self.sizes[0], other.sizes, other.fractions)
        return _BandwidthCurve(other.sizes, np.minimum(other.fractions + shift, 0.0), self.name, is_like_another=True)


class MovingTimes:
    """Estimates kernels that are limited by memory, each kind by the first table that has it."""

    def __init__(self, tables: list[Moved]) -> None:
        self._curves: dict[str, _BandwidthCurve] = {}
        for table in tables:
            for kind, rows in table.rows.groupby("kind"):
                if str(kind) not in self._curves:
                    self._curves[str(kind)] = _curve(str(kind), rows, table)
        for kind, curve in self._curves.items():
            other = self._curves.get(kind.replace("layer_norm", "rms_norm"), curve)
            if len(curve.sizes) == 1 < len(other.sizes) and other.name == curve.name:
                self._curves[kind] = curve.like(other)

    @property
    def kinds(self) -> list[str]:
        """Kinds that were measured."""
        return sorted(self._curves)

    def measured_on(self, kind: str) -> str:
        """The name of the table that a kind's curve is from."""
        return self._curves[kind].name

    def is_like_another(self, kind: str) -> bool:
        """Whether a kind was measured in one size, so that others follow from another kind."""
        return self._curves[kind].is_like_another

    def time_us(self, kind: str, moved_bytes: Floats, bandwidth: float) -> Floats:
        """Microseconds of kernels of one of :attr:`kinds`, by the bytes that each reads and writes."""
        curve = self._curves[kind]
        at = np.clip(np.log(np.maximum(moved_bytes, 1.0)), curve.sizes[0], curve.sizes[-1])
        inside = moved_bytes / (bandwidth * np.exp(np.interp(at, curve.sizes, curve.fractions)))
        # Below the smallest size, what is not the bytes' own time at the best rate is the kernel's start.
        rest = moved_bytes / (bandwidth * np.exp(curve.fractions.max()))
        below = moved_bytes < np.exp(curve.sizes[0])
        return np.asarray(np.where(below, self.start_us(kind, bandwidth) + rest * 1e6, inside * 1e6))

    def start_us(self, kind: str, bandwidth: float) -> float:
        """Microseconds that a kernel of a kind takes with no bytes to speak of."""
        curve = self._curves[kind]
        smallest = np.exp(curve.sizes[0]) / bandwidth
        return float(max(smallest / np.exp(curve.fractions[0]) - smallest / np.exp(curve.fractions.max()), 0.0) * 1e6)


def measured_moves(measured: Measured, spec: GpuSpec) -> Moved:
    """The memory-bound kernels among a GPU's measurements."""
    parts = [
        _quantise_rows(measured.quantise),
        _norm_rows(measured.training_norms),
        _liger_rows(measured.training_other),
    ]
    known = [part for part in parts if len(part)]
    rows = pd.concat(known, ignore_index=True) if known else pd.DataFrame(columns=["kind", "bytes", "time_us"])
    return Moved(rows, spec.memory_bandwidth, spec.l2_bytes, measured.name)


def beyond_cache(moved_bytes: Floats, cache_bytes: int) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Mask of the kernels that move so much that the L2 cache does not matter."""
    return np.asarray(moved_bytes >= _BEYOND_CACHE * cache_bytes)


def _curve(kind: str, rows: pd.DataFrame, table: Moved) -> _BandwidthCurve:
    moved = rows["bytes"].to_numpy(np.float64)
    fraction = np.log(moved / (table.bandwidth * rows["time_us"].to_numpy() * 1e-6))
    point = np.round(np.log2(moved) * _POINTS_PER_OCTAVE)
    points = pd.DataFrame({"size": np.log(moved), "fraction": fraction}).groupby(point).median()
    sizes, fractions = points["size"].to_numpy(np.float64), points["fraction"].to_numpy(np.float64)
    if kind == ELEMENTWISE:
        large = beyond_cache(np.exp(sizes), table.cache_bytes)
        fractions = np.where(large, fractions, np.minimum(fractions, fractions[large][0] if large.any() else 0.0))
    times = np.maximum.accumulate(sizes - fractions)  # logarithms
    return _BandwidthCurve(sizes, sizes - times, table.name)


def _quantise_rows(table: pd.DataFrame) -> pd.DataFrame:
    moved = 3.0 * table["m"] * table["k"]
    return pd.DataFrame({"kind": ELEMENTWISE, "bytes": moved, "time_us": table["time_us"]})


def _norm_rows(norms: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for row in norms.to_dict("records"):
        suffix = _NORM_BACKENDS.get(row["backend"])
        if suffix is None or not np.isfinite(row["fwd_time_ms"]):
            continue
        if row["C"] < WIDE_ROW:
            if suffix:
                continue  # compiled norms of narrow rows are as fast as wide ones, and were measured in few sizes
            suffix = ".narrow"
        for direction, column in (("forward", "fwd"), ("backward", "bwd")):
            time_us = row[f"{column}_time_ms"] * 1e3
            moved = row[f"{column}_gbps"] * 1e9 * time_us * 1e-6
            rows.append({"kind": f"{row['norm_type']}.{direction}{suffix}", "bytes": moved, "time_us": time_us})
    return pd.DataFrame(rows)


def _liger_rows(table: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for row in table.to_dict("records"):
        bytes_of = _LIGER_BYTES.get((row["kernel_name"], row["kernel_provider"], row["mode"]))
        if bytes_of is None:
            continue
        kind, element_bytes = bytes_of
        sizes = dict(setting.split(":") for setting in row["cfg"].split(";"))
        elements = row["x_value"] * int(sizes.get("M", 1)) * int(sizes.get("S", 1)) * int(sizes.get("B", 1))
        if (moved := float(elements * element_bytes)) >= _LEAST_LIGER_BYTES:
            rows.append({"kind": kind, "bytes": moved, "time_us": row["ms"] * 1e3})
    return pd.DataFrame(rows)
