"""How long a kernel takes, estimated: a roofline whose roofs are lowered to what kernels of its kind achieve.

A kernel takes as long as its arithmetic or its memory traffic, whichever is longer, and a fixed time besides. Peaks are
the GPU model's (:mod:`fakedist.gpu.spec`); which fraction of a peak is achieved depends on the family and the size, and
is data: ``efficiency.json`` says for each curve where it is from. ``make calibrate`` measures the curves on a real GPU.
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

#: Outputs of a product are computed in tiles at least this wide, and what is not needed of a tile takes time too.
LEAST_TILE = 64


@dataclass(frozen=True)
class Demand:
    """What a kernel has to do.

    Attributes:
        family: One of ``run.schema.FAMILIES``.
        flops: Floating-point operations; NaN if not known.
        moved_bytes: What it must read and write at least; NaN if not known.
        dtype: What it computes in: a key of ``GpuSpec.peak_flops``.
        curve: The curve of achieved FLOP/s, e.g. "gemm.bf16" or "attention.forward.cudnn"; empty without arithmetic.
        size: Where on that curve: FLOPs of a product, keys of an attention.
        over_host_link: Whether the bytes go between host and GPU.
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
    """Times that depend on nothing, microseconds.

    Attributes:
        kernel: What a kernel takes that does nothing.
        launch: What a launch takes of the host.
        operation: What an operation takes of the host besides its launches.
        graph: What the launch of a CUDA graph takes of the host.
    """

    kernel: float
    launch: float
    operation: float
    graph: float


class Clock:
    """Estimates durations on one GPU model.

    Args:
        spec: The GPU.
        data: What ``efficiency.json`` holds; by default the package's own.

    Attributes:
        fixed: Times that depend on nothing.
        measured_on: The machine that this GPU's curves were measured on; None if they were not.

    Raises:
        SetupError: The data are not of this format.
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
        """Names of the curves that there are for this GPU."""
        return sorted(self._curves)

    def duration(self, demand: Demand) -> tuple[float, str]:
        """Microseconds, and what limits: compute, memory or launch. NaN and nothing where the demand is not known."""
        compute = self._compute_us(demand)
        memory = self._memory_us(demand)
        if math.isnan(compute) or math.isnan(memory):
            return NAN, ""
        fixed = self.fixed.kernel
        bound = "launch" if fixed >= max(compute, memory) else "compute" if compute > memory else "memory"
        return fixed + max(compute, memory), bound

    def fraction(self, curve: str, size: float) -> float:
        """Which fraction of a peak is achieved: straight lines between the curve's points on logarithmic axes."""
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
        while name not in self._curves:  # attention.forward.cudnn is attention.forward where nothing more is known
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
    """What a matrix product has to do.

    Args:
        shape: m, n, k, batch; the product is (m, k) x (k, n), batch times.
        dtype: What it computes in.
        element_bytes: Of the two operands and the result.
    """
    m, n, k, batch = shape
    a, b, d = element_bytes
    padded = 2.0 * max(m, LEAST_TILE) * max(n, LEAST_TILE) * k * batch
    moved = batch * (m * k * a + k * n * b + m * n * d)
    return Demand("gemm", padded, moved, dtype, f"gemm.{dtype}", padded)


def load_efficiency(path: Path = DATA) -> dict[str, Any]:
    """The data of a file like ``efficiency.json``.

    Raises:
        SetupError: It cannot be read.
    """
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SetupError(f"{path} cannot be read: {error}", "make calibrate writes it anew") from error
    if not isinstance(data, dict):
        raise SetupError(f"{path} is no efficiency data", "make calibrate writes it anew")
    return data
