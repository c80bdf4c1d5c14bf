"""Lightning Fabric."""

from __future__ import annotations

from tests.clients.catalogue.entry import Entry

_CALLS = {
    "ddp": ("all_reduce",),
    "fsdp": ("all_gather", "reduce_scatter"),
    "fsdp2": ("all_gather", "reduce_scatter"),
    "zero2": ("all_reduce", "all_gather"),
    "zero3": ("reduce_scatter", "all_gather"),
}


def _entry(feature: str, strategy: str, *more: str, launcher: str = "", fast: tuple[int, ...] = ()) -> Entry:
    return Entry(
        "Lightning Fabric",
        feature,
        "tests/clients/jobs/fabric.py",
        package="lightning-fabric",
        requires=("deepspeed",) if strategy.startswith("zero") else (),
        options=("--launcher", launcher) if launcher else (),
        arguments=("--strategy", strategy, *more),
        world_size=64,
        ranks=(0, 31, 63),
        fast=fast,
        collectives=_CALLS[strategy],
    )


ENTRIES = (
    _entry("DDP, gradient accumulation", "ddp", "--accumulate", "2", fast=(63,)),
    _entry("FSDP", "fsdp", fast=(31,)),
    _entry("FSDP2", "fsdp2"),
    _entry("DeepSpeed ZeRO-2", "zero2"),
    _entry("DeepSpeed ZeRO-3", "zero3"),
    _entry("DDP, as SLURM starts it", "ddp", launcher="slurm"),
    _entry("FSDP, as accelerate starts it", "fsdp", launcher="accelerate"),
    _entry("DeepSpeed ZeRO-3, as deepspeed starts it", "zero3", launcher="deepspeed"),
)
