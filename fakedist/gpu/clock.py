"""Estimates how long a kernel takes: a roofline, lowered to what kernels of the same family achieve.

A kernel takes as long as its arithmetic or its memory traffic, whichever is longer, plus a fixed time. The peaks come
from the GPU model (:mod:`fakedist.gpu.spec`). The achieved fraction of a peak depends on the family and the size. It is
data: ``efficiency.json`` gives the source of each curve, and ``make calibrate`` measures the curves on a real GPU.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fakedist.errors import SetupError
from fakedist.gpu.spec import GpuSpec

DATA = Path(__file__).parent / "efficiency.json"
FORMAT = 1
NAN = float("nan")

#: A matrix product computes its output in tiles at least this wide. The unused part of a tile takes time too.
LEAST_TILE = 64


@dataclass(frozen=True)
class Demand:
    """The work of one kernel.

    Attributes:
        family: One of ``run.schema.FAMILIES``.
        flops: Floating-point operations; NaN if unknown.
        moved_bytes: The fewest bytes it must read and write; NaN if unknown.
        dtype: The type it computes in, a key of ``GpuSpec.peak_flops``.
        curve: The curve of achieved FLOP/s, e.g. "gemm.bf16" or "attention.forward.cudnn"; empty without arithmetic.
        size: The position on that curve: FLOPs for a product, keys for an attention.
        over_host_link: Whether the bytes cross the link between host and GPU.
    """

    family: str
    flops: float = 0.0
    moved_bytes: float = 0.0
    dtype: str = "bf16"
    curve: str = ""
    size: float = 0.0
    over_host_link: bool = False


@dataclass(frozen=True)
class Fixed:
    """Constant times, in microseconds.

    Attributes:
        kernel: An empty kernel.
        launch: Host time of a launch.
        operation: Host time of an operation, not counting its launches.
        graph: Host time of launching a CUDA graph.
    """

    kernel: float
    launch: float
    operation: float
    graph: float


class Clock:
    """Estimates durations on one GPU model.

    Args:
        spec: The GPU.
        data: The contents of an ``efficiency.json``; by default the package's own.

    Attributes:
        fixed: The constant times.
        measured_on: The machine that this GPU's curves were measured on; None if they were not measured.

    Raises:
        SetupError: The data have another format, or come from a rehearsal that measured nothing.
    """

    def __init__(self, spec: GpuSpec, data: dict[str, Any] | None = None) -> None:
        data = load_efficiency() if data is None else data
        if data.get("format") != FORMAT:
            raise SetupError(f"{DATA} has format {data.get('format')}, not {FORMAT}", "make calibrate writes it anew")
        if data.get("rehearsal"):
            raise SetupError("these efficiency data are a rehearsal's: nothing was measured", "make calibrate on a GPU")
        self.spec = spec
        self.fixed = Fixed(**{name: float(entry["value"]) for name, entry in data["fixed_us"].items()})
        major, minor = spec.compute_capability
        own = data["curves"].get(f"{major}.{minor}", {})
        measured = any(entry["source"] == "measured" for entry in own.values())
        self.measured_on: dict[str, Any] | None = data["measured_on"] if measured else None
        curves = data["curves"]["default"] | own
        self._curves = {name: [(float(x), float(y)) for x, y in entry["points"]] for name, entry in curves.items()}

    @property
    def curves(self) -> list[str]:
        """Names of the curves for this GPU."""
        return sorted(self._curves)

    def duration(self, demand: Demand) -> tuple[float, str]:
        """Microseconds, and the limit: compute, memory or launch. NaN and an empty string if the demand is unknown."""
        compute = self._compute_us(demand)
        memory = self._memory_us(demand)
        if math.isnan(compute) or math.isnan(memory):
            return NAN, ""
        fixed = self.fixed.kernel
        bound = "launch" if fixed >= max(compute, memory) else "compute" if compute > memory else "memory"
        return fixed + max(compute, memory), bound

    def fraction(self, curve: str, size: float) -> float:
        """The achieved fraction of the peak, interpolated linearly between the curve's points on logarithmic axes."""
        points = self._curves[curve]
        if size <= points[0][0]:
            return points[0][1]
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            if size <= x1:
                return float(y0 * (y1 / y0) ** (math.log(size / x0) / math.log(x1 / x0)))
        return points[-1][1]

    def _compute_us(self, demand: Demand) -> float:
        if not demand.curve:
            return 0.0
        peak = self.spec.peak_flops.get(demand.dtype, NAN)
        name = demand.curve
        while name not in self._curves:  # attention.forward.cudnn falls back to attention.forward
            name = name.rpartition(".")[0]
            if not name:
                return NAN
        return demand.flops / (peak * self.fraction(name, demand.size)) * 1e6

    def _memory_us(self, demand: Demand) -> float:
        moved = demand.moved_bytes
        if demand.over_host_link:
            return moved / (self.spec.host_bandwidth * self.fraction("host", moved)) * 1e6
        if not moved > 0:
            return moved
        curve = f"memory.{demand.family}"
        known = curve if curve in self._curves else "memory.other"
        return moved / (self.spec.memory_bandwidth * self.fraction(known, moved)) * 1e6


def product_demand(shape: tuple[int, int, int, int], dtype: str, element_bytes: tuple[float, float, float]) -> Demand:
    """The demand of a matrix product.

    Args:
        shape: m, n, k, batch. The product is (m, k) x (k, n), batch times.
        dtype: The type it computes in.
        element_bytes: Bytes per element of the two operands and the result.
    """
    m, n, k, batch = shape
    a, b, d = element_bytes
    padded = 2.0 * max(m, LEAST_TILE) * max(n, LEAST_TILE) * k * batch
    moved = batch * (m * k * a + k * n * b + m * n * d)
    return Demand("gemm", padded, moved, dtype, f"gemm.{dtype}", padded)


def load_efficiency(path: Path = DATA) -> dict[str, Any]:
    """Read a file like ``efficiency.json``.

    Raises:
        SetupError: The file cannot be read.
    """
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SetupError(f"{path} cannot be read: {error}", "make calibrate writes it anew") from error
    if not isinstance(data, dict):
        raise SetupError(f"{path} is no efficiency data", "make calibrate writes it anew")
    return data
