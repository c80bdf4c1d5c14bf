"""DeepSpeed: ZeRO 0 to 3, gradient accumulation, offload."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

from tests.clients.catalogue.entry import TRAINING, Entry

_JOB = "tests/clients/jobs/deepspeed_zero.py"
_ON_HOST = ("parameter", "gradient", "activation")
_RANKS = (0, 31, 63)


def cuda_of_torch(part: str = "cu13") -> Path:
    """Where PyPI's packages of the CUDA that torch is linked with have a part's headers and libraries."""
    spec = importlib.util.find_spec("nvidia")
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    return next((Path(place, part) for place in places if Path(place, part).is_dir()), Path("/usr/local/cuda"))


def _cudart(directory: Path) -> None:
    """The CUDA runtime under the name that a linker looks for: PyPI's package has the numbered one alone."""
    link = directory / "libcudart.so"
    link.unlink(missing_ok=True)
    link.symlink_to(cuda_of_torch() / "lib/libcudart.so.13")


def _entry(feature: str, *arguments: str, fast: tuple[int, ...] = (), tools: tuple[str, ...] = ()) -> Entry:
    stage = int(arguments[1])
    gathers = () if stage == 0 else ("all_gather",)
    return Entry(
        "DeepSpeed",
        feature,
        _JOB,
        package="deepspeed",
        arguments=arguments,
        world_size=64,
        ranks=_RANKS,
        fast=fast,
        tools=tools,
        # With accumulation there are two forward and backward passes to a step.
        collectives=("reduce_scatter" if stage == 3 else "all_reduce", *gathers),
        categories=_ON_HOST if "--offload" in arguments else TRAINING,
    )


ENTRIES = (
    _entry("bf16 with fp32 master weights, no ZeRO", "--stage", "0"),
    _entry("ZeRO-1", "--stage", "1"),
    _entry("ZeRO-2", "--stage", "2", fast=(31,)),
    _entry("ZeRO-2, gradient accumulation", "--stage", "2", "--accumulate", "3"),
    _entry("ZeRO-3", "--stage", "3", fast=(0, 63)),
    _entry("ZeRO-3, parameters made in parts (zero.Init)", "--stage", "3", "--zero-init", fast=(31,)),
    _entry("ZeRO-2, optimizer offloaded to the host", "--stage", "2", "--offload", tools=("g++", "ninja")),
    _entry("ZeRO-3, parameters and optimizer offloaded to the host", "--stage", "3", "--offload", tools=("g++",)),
    replace(
        _entry(
            "ZeRO-2, FusedAdam of DeepSpeed", "--stage", "2", "--optimizer", "fused", tools=("nvcc", "g++", "ninja")
        ),
        prepare=_cudart,
        environment={"CPATH": str(cuda_of_torch() / "include"), "LIBRARY_PATH": "{directory}"},
        minutes=15,  # the first time it is compiled
    ),
    replace(
        _entry("ZeRO-3, as deepspeed starts it", "--stage", "3"),
        options=("--launcher", "deepspeed"),
    ),
)
