"""The GPU models that fakedist knows by name, and finding the one that ``--gpu`` means.

Sources of ``models/``. Architecture (SMs, clocks, caches): NVIDIA's architecture whitepapers (A100, H100, Ada,
Blackwell). Bandwidth and dense peak FLOP/s: NVIDIA's data sheets, without sparsity. Watts: as each file says.
``memory`` is what CUDA reports. No data sheet gives it: it is smaller than the nominal size by ECC and the driver's
share, and differs by some MiB between drivers. Where it is given to the byte, it and the L2 cache are what CUDA
reported to XLA on that GPU (openxla/xla, xla/backends/gpu/target_config/specs). Elsewhere it is the "total capacity" in
torch's out-of-memory messages on that GPU, to two decimals of GiB. ``--gpu-memory`` overrides it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from fakedist.errors import JobError
from fakedist.gpu_models.files import read_gpu_file
from fakedist.gpu_models.spec import GPU_FILE_ENDING, GpuSpec

_MODELS = Path(__file__).parent / "models"
#: In the order in which they are listed.
_ORDER = (
    "a100-40g",
    "a100-80g",
    "h100-80g",
    "h200",
    "b200",
    "gb200",
    "b300",
    "gb300",
    "rtx-pro-6000",
    "l40s",
    "rtx4090",
)
GPUS: dict[str, GpuSpec] = {name: read_gpu_file(_MODELS / f"{name}{GPU_FILE_ENDING}") for name in _ORDER}

#: Other names of a model, each for the part that is usual.
_ALIASES = {
    "a100": "a100-80g",
    "a100-sxm": "a100-80g",
    "a100-sxm4": "a100-80g",
    "a100-80gb": "a100-80g",
    "a100-40gb": "a100-40g",
    "h100": "h100-80g",
    "h100-sxm": "h100-80g",
    "h100-sxm5": "h100-80g",
    "h100-80gb": "h100-80g",
    "h200-sxm": "h200",
    "b200-sxm": "b200",
    "b300-sxm": "b300",
    "rtx-4090": "rtx4090",
}


def gpu_of_product(product: str) -> GpuSpec | None:
    """The GPU model that CUDA reports by this name; None if fakedist has none."""
    return next((spec for spec in GPUS.values() if spec.product == product), None)


def find_gpu(name: str, power_watts: float | None = None) -> GpuSpec:
    """The GPU model of that name, or of the GPU file at that path.

    Args:
        name: A key of :data:`GPUS`, an alias such as "h100", or the path of a file that ends in ``.toml``.
        power_watts: A power limit that replaces the model's own.

    Raises:
        JobError: fakedist has no such model, or the file is not valid.
    """
    wanted = name.lower()
    spec = GPUS.get(_ALIASES.get(wanted, wanted))
    if spec is None:
        if not wanted.endswith(GPU_FILE_ENDING):
            raise JobError(
                f"fakedist does not know the GPU {name!r}",
                f"it knows {', '.join(GPUS)}; for any other, write a GPU file: --gpu my_gpu{GPU_FILE_ENDING}",
            )
        spec = read_gpu_file(Path(name), GPUS)
    return spec if power_watts is None else dataclasses.replace(spec, watts=float(power_watts))
