"""Times of kernels that are limited by memory: bytes over the bandwidth that such kernels were measured to reach.

The achieved fraction of the peak bandwidth is interpolated over the bytes (logarithmic). Norms were measured on H200
and GB200 (PyTorch eager and compiled), elementwise kernels and LayerNorm on an H100. A GPU without measurements of a
kind takes those of another GPU. A smaller kernel than any measured takes a fixed start and its bytes at the best rate;
a larger one keeps the fraction of the largest measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from fakedist.time.measurements import Floats, Measured, load_measured

#: Where a kind was measured, most trusted first.
_MEASURED_ON = ("h200-sxm", "gb200", "h100-sxm")
_NORM_BACKENDS = {"pytorch": "", "torch_compile": ".compiled"}
#: Norms of narrower rows are another matter: they are a head's, and eager PyTorch is many times slower on them.
_LEAST_WIDTH = 1024
#: Of Liger's table, only kernels that move this much: the host sets the pace of smaller ones.
_LEAST_LIGER_BYTES = 1 << 26
#: Bytes an element that a kernel of Liger's table reads and writes, by kernel, provider and direction. The table's
#: "backward" of SwiGLU takes as long as its "full", so it is no backward alone and not here.
_LIGER_BYTES = {
    ("relu_squared", "liger", "forward"): ("elementwise", 4),
    ("relu_squared", "liger", "backward"): ("elementwise", 6),
    ("megatron_swiglu", "liger", "forward"): ("elementwise", 6),
    ("layer_norm", "huggingface", "forward"): ("layer_norm.forward", 8),
    ("layer_norm", "huggingface", "backward"): ("layer_norm.backward", 12),
    ("megatron_rms_norm", "torch", "forward"): ("rms_norm.forward", 4),
    ("megatron_rms_norm", "torch", "backward"): ("rms_norm.backward", 6),
}


@dataclass(frozen=True)
class Moved:
    """Measured kernels that are limited by memory: columns kind, bytes, time_us; and the GPU's peak bandwidth."""

    rows: pd.DataFrame
    bandwidth: float


class MovingTimes:
    """Estimates kernels that are limited by memory.

    Args:
        tables: Measured kernels, those of the GPU itself first. A kind is taken from the first table that has it.
    """

    def __init__(self, tables: list[Moved]) -> None:
        self._curves: dict[str, tuple[Floats, Floats]] = {}
        for table in tables:
            for kind, rows in table.rows.groupby("kind"):
                if str(kind) not in self._curves:
                    fraction = np.log((rows["bytes"] / (table.bandwidth * rows["time_us"] * 1e-6)).to_numpy())
                    median = pd.Series(fraction).groupby(np.log(rows["bytes"].to_numpy())).median()
                    self._curves[str(kind)] = (median.index.to_numpy(np.float64), median.to_numpy())

    @property
    def kinds(self) -> list[str]:
        """Kinds that were measured."""
        return sorted(self._curves)

    def time_us(self, kind: str, moved_bytes: Floats, bandwidth: float) -> Floats:
        """Microseconds of kernels of one kind.

        Args:
            kind: One of :attr:`kinds`.
            moved_bytes: The bytes that each reads and writes.
            bandwidth: The GPU's peak memory bandwidth, bytes per second.
        """
        sizes, fractions = self._curves[kind]
        at = np.clip(np.log(np.maximum(moved_bytes, 1.0)), sizes[0], sizes[-1])
        smallest = np.exp(sizes[0])
        # Below the smallest size, what is not the bytes' own time at the best rate is the kernel's start.
        best = bandwidth * np.exp(fractions.max())
        start = max(smallest / (bandwidth * np.exp(fractions[0])) - smallest / best, 0.0)
        inside = moved_bytes / (bandwidth * np.exp(np.interp(at, sizes, fractions)))
        return np.asarray(np.where(moved_bytes < smallest, start + moved_bytes / best, inside) * 1e6)


def measured_moves(measured: Measured, bandwidth: float) -> Moved:
    """The memory-bound kernels among a GPU's measurements."""
    parts = [_norm_rows(measured.training_norms), _liger_rows(measured.training_other)]
    found = [part for part in parts if len(part)]
    empty = pd.DataFrame(columns=["kind", "bytes", "time_us"])
    return Moved(pd.concat(found, ignore_index=True) if found else empty, bandwidth)


def nearest_moves(name: str, bandwidths: dict[str, float]) -> list[Moved]:
    """The memory-bound kernels of every GPU model that has them, those of the model itself first.

    Args:
        name: The measurements' name, such as "h100-sxm".
        bandwidths: Peak memory bandwidth of each measured GPU model, bytes per second.
    """
    order = sorted(_MEASURED_ON, key=lambda each: (each != name, _MEASURED_ON.index(each)))
    return [measured_moves(load_measured(each), bandwidths[each]) for each in order]


def _norm_rows(norms: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for row in norms.to_dict("records"):
        suffix = _NORM_BACKENDS.get(row["backend"])
        if suffix is None or not np.isfinite(row["fwd_time_ms"]) or row["C"] < _LEAST_WIDTH:
            continue
        for direction, column in (("forward", "fwd"), ("backward", "bwd")):
            time_us = row[f"{column}_time_ms"] * 1e3
            moved = row[f"{column}_gbps"] * 1e9 * time_us * 1e-6
            rows.append({"kind": f"{row['norm_type']}.{direction}{suffix}", "bytes": moved, "time_us": time_us})
    return pd.DataFrame(rows)


def _liger_rows(table: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for row in table.to_dict("records"):
        found = _LIGER_BYTES.get((row["kernel_name"], row["kernel_provider"], row["mode"]))
        if found is None:
            continue
        kind, element_bytes = found
        sizes = dict(each.split(":") for each in row["cfg"].split(";"))
        elements = row["x_value"] * int(sizes.get("M", 1)) * int(sizes.get("S", 1)) * int(sizes.get("B", 1))
        if (moved := float(elements * element_bytes)) >= _LEAST_LIGER_BYTES:
            rows.append({"kind": kind, "bytes": moved, "time_us": row["ms"] * 1e3})
    return pd.DataFrame(rows)
