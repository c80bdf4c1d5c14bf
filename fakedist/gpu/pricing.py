"""Prices a launch: estimates how long a kernel takes, by a roofline lowered to what kernels of its family achieve.

A kernel takes as long as its arithmetic or its memory traffic, whichever is longer, plus a fixed time. The peaks come
from the GPU model (:mod:`fakedist.gpu_models`). The achieved fraction of a peak depends on the family and the size. It
is data: ``efficiency.json`` gives the source of each curve, and ``make calibrate`` measures the curves on a real GPU.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NotRequired, TypedDict, cast

from fakedist.errors import SetupError
from fakedist.gpu_models.spec import GpuSpec
from fakedist.run.launch_records import WorkRow

NAN = float("nan")
DATA = Path(__file__).parent / "efficiency.json"
FORMAT = 1

#: A matrix product computes its output in tiles at least this wide. The unused part of a tile takes time too.
LEAST_TILE = 64


class Constant(TypedDict):
    """A time in microseconds, and where it comes from."""

    value: float
    source: str


class Curve(TypedDict):
    """Points (size, achieved fraction of the peak) by ascending size, and where they come from."""

    points: list[tuple[float, float]]
    source: str


class Efficiency(TypedDict):
    """The contents of an ``efficiency.json``.

    Attributes:
        format: FORMAT.
        rehearsal: Whether nothing was measured.
        measured_on: The machine that curves of the source "measured" come from.
        sources: Each source, in words.
        fixed_us: The fields of :class:`FixedTimes`.
        curves: Curves by name, by compute capability or "default".
    """

    format: int
    rehearsal: NotRequired[bool]
    measured_on: dict[str, str] | None
    sources: dict[str, str]
    fixed_us: dict[str, Constant]
    curves: dict[str, dict[str, Curve]]


@dataclass(frozen=True, slots=True)
class FixedTimes:
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


class Arithmetic(NamedTuple):
    """A launch's arithmetic, and its position among those that were measured.

    Attributes:
        flops: Floating-point operations, including those in the unused part of tiles.
        curve: The curve of achieved FLOP/s, e.g. "gemm.bf16" or "attention.forward.cudnn"; empty without arithmetic.
        size: The position on that curve: FLOPs for a product, keys for an attention.
    """

    flops: float
    curve: str
    size: float


class Roofline:
    """Estimates durations on one GPU model.

    Args:
        spec: The GPU.
        data: The contents of an ``efficiency.json``; by default the package's own.

    Attributes:
        spec: The GPU.
        fixed: The constant times.
        measured_on: The machine that this GPU's curves were measured on; None if they were not measured.

    Raises:
        SetupError: The data have another format, or come from a rehearsal that measured nothing.
    """

    def __init__(self, spec: GpuSpec, data: Efficiency | None = None) -> None:
        data = load_efficiency() if data is None else data
        if data.get("format") != FORMAT:
            raise SetupError(f"{DATA} has format {data.get('format')}, not {FORMAT}", "make calibrate writes it again")
        if data.get("rehearsal"):
            raise SetupError("these data come from a rehearsal: nothing was measured", "run make calibrate on a GPU")
        self.spec = spec
        self.fixed = FixedTimes(**{name: float(entry["value"]) for name, entry in data["fixed_us"].items()})
        major, minor = spec.compute_capability
        own = data["curves"].get(f"{major}.{minor}", {})
        measured = any(entry["source"] == "measured" for entry in own.values())
        self.measured_on = data["measured_on"] if measured else None
        curves = data["curves"]["default"] | own
        self._curves = {name: [(float(x), float(y)) for x, y in entry["points"]] for name, entry in curves.items()}

    @property
    def curves(self) -> list[str]:
        """Names of the curves for this GPU."""
        return sorted(self._curves)

    def duration(self, work: WorkRow) -> tuple[float, str]:
        """Microseconds, and the limit: compute, memory or launch. NaN and an empty string if the work is unknown."""
        compute = self._compute_us(work)
        memory = self._memory_us(work)
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

    def _compute_us(self, work: WorkRow) -> float:
        flops, name, size = arithmetic(work)
        if not name:
            return 0.0
        peak = self.spec.peak_flops.get(work.dtype, NAN)
        while name not in self._curves:  # attention.forward.cudnn falls back to attention.forward
            name = name.rpartition(".")[0]
            if not name:
                return NAN
        return flops / (peak * self.fraction(name, size)) * 1e6

    def _memory_us(self, work: WorkRow) -> float:
        moved = work.moved_bytes
        if work.over_host_link:
            return moved / (self.spec.host_bandwidth * self.fraction("host", moved)) * 1e6
        if not moved > 0:
            return moved
        curve = f"memory.{work.family}"
        known = curve if curve in self._curves else "memory.other"
        return moved / (self.spec.memory_bandwidth * self.fraction(known, moved)) * 1e6


def arithmetic(work: WorkRow) -> Arithmetic:
    """What a launch computes: the whole tiles of a product, the FLOPs of everything else."""
    if work.m and work.n:
        padded = 2.0 * max(work.m, LEAST_TILE) * max(work.n, LEAST_TILE) * work.k * work.batch
        return Arithmetic(padded, f"gemm.{work.dtype}", padded)
    if not work.flops > 0:
        return Arithmetic(0.0, "", 0.0)
    if work.attention:
        library = f".{work.library}" if work.library else ""
        return Arithmetic(work.flops, f"attention.{work.attention}{library}", work.keys)
    return Arithmetic(work.flops, f"gemm.{work.dtype}", work.flops)


def load_efficiency(path: Path = DATA) -> Efficiency:
    """Read a file like ``efficiency.json``.

    Raises:
        SetupError: The file cannot be read.
    """
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SetupError(f"{path} cannot be read: {error}", "make calibrate writes it again") from error
    if not isinstance(data, dict):
        raise SetupError(f"{path} does not contain efficiency data", "make calibrate writes it again")
    return cast(Efficiency, data)
