"""Which GPU model each table of measurements is from, and its limits."""

from __future__ import annotations

from fakedist.gpu_models.known import GPUS
from fakedist.gpu_models.spec import GpuSpec
from fakedist.time.products import ProductRoof

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

#: A product's type in the tables -> the key of ``GpuSpec.peak_flops``, bytes of an operand's element.
_PRODUCT_TYPES = {"bf16": ("bf16", 2.0), "fp8": ("fp8", 1.0), "fp8_block": ("fp8", 1.0)}


def measured_spec(name: str) -> GpuSpec:
    """The GPU model that a table was measured on."""
    return GPUS[MEASURED_GPUS[name]]


def product_roof(spec: GpuSpec, kind: str) -> ProductRoof:
    """A GPU's limits for products of one type: "bf16", "fp8" or "fp8_block"."""
    dtype, element_bytes = _PRODUCT_TYPES[kind]
    return ProductRoof(spec.sms, spec.peak_flops[dtype], spec.memory_bandwidth, element_bytes)
