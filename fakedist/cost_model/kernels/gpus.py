"""The GPU model of each table of measurements, and the table that estimates a GPU that was not measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fakedist.cost_model.kernels.attention import AttentionRoof
from fakedist.cost_model.kernels.measurements import ProductRoof
from fakedist.gpu.models.catalogue import GPUS
from fakedist.gpu.models.spec import GpuSpec

#: The table's name -> the GPU model that was measured.
MEASURED_GPUS = {
    "a100-sxm": "a100-80g",
    "h100-sxm": "h100-80g",
    "h200-sxm": "h200",
    "b200-sxm": "b200",
    "b300-sxm": "b300",
    "gb200": "gb200",
    "gb300": "gb300",
    "l40s": "l40s",
    "rtx-pro-6000": "rtx-pro-6000",
}

#: What an element of 4 bits takes with a scale of a byte for 16.
NVFP4_BYTES = 9 / 16
#: A product's type in the tables -> the key of ``GpuSpec.peak_flops``, by how much its peak is higher, bytes of an
#: operand's element. NVFP4 has at least twice the peak of fp8: a scale for measured times, not a bound.
_PRODUCT_TYPES = {
    "bf16": ("bf16", 1.0, 2.0),
    "fp8": ("fp8", 1.0, 1.0),
    "fp8_block": ("fp8", 1.0, 1.0),
    "nvfp4": ("fp8", 2.0, NVFP4_BYTES),
}


@dataclass(frozen=True)
class NearestTable:
    """The GPU whose measurements estimate another, which takes over its fractions of the peaks unless ``is_own``."""

    name: str
    measured_on: GpuSpec
    is_own: bool


def measured_spec(name: str) -> GpuSpec:
    """The GPU model that a table was measured on."""
    return GPUS[MEASURED_GPUS[name]]


def nearest_table(gpu: GpuSpec) -> NearestTable:
    """The table of a GPU, of the one that its file is like, or of the most similar one of its compute capability."""
    for name, model in MEASURED_GPUS.items():
        if model in (gpu.name, gpu.like):
            measured = GPUS[model]
            return NearestTable(name, measured, _limits(gpu) == _limits(measured))
    name = min(MEASURED_GPUS, key=lambda candidate: _unlikeness(gpu, measured_spec(candidate)))
    return NearestTable(name, measured_spec(name), is_own=False)


def product_roof(spec: GpuSpec, kind: str) -> ProductRoof:
    """A GPU's limits for products of one type: "bf16", "fp8", "fp8_block" or "nvfp4"."""
    dtype, higher, element_bytes = _PRODUCT_TYPES[kind]
    return ProductRoof(spec.sms, higher * spec.peak_flops[dtype], spec.memory_bandwidth, element_bytes)


def attention_roof(spec: GpuSpec) -> AttentionRoof:
    """A GPU's limits for attention."""
    return AttentionRoof(spec.peak_flops["bf16"], spec.memory_bandwidth)


def _limits(spec: GpuSpec) -> tuple[object, ...]:
    return spec.sms, spec.clock_khz, spec.memory_bandwidth, spec.compute_capability, sorted(spec.peak_flops.items())


def _unlikeness(gpu: GpuSpec, measured: GpuSpec) -> tuple[float, float]:
    """First by generation (compute capability), then by balance of peak and bandwidth."""
    generation = abs(10 * gpu.compute_capability[0] + gpu.compute_capability[1]) - (
        10 * measured.compute_capability[0] + measured.compute_capability[1]
    )
    size = abs(math.log(gpu.memory_bandwidth / measured.memory_bandwidth))
    return float(abs(generation)), size + abs(math.log(gpu.peak_flops["bf16"] / measured.peak_flops["bf16"]))
