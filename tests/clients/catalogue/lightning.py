"""Lightning Fabric."""

from __future__ import annotations

from tests.clients.catalogue.entry import Entry

_SHARDED = ("all_gather", "reduce_scatter")


def _entry(feature: str, strategy: str, *more: str, fast: tuple[int, ...] = ()) -> Entry:
    return Entry(
        "Lightning Fabric",
        feature,
        "tests/clients/jobs/fabric.py",
        package="lightning-fabric",
        arguments=("--strategy", strategy, *more),
        world_size=64,
        ranks=(0, 31, 63),
        fast=fast,
        collectives=("all_reduce",) if strategy == "ddp" else _SHARDED,
    )


ENTRIES = (
    _entry("DDP, gradient accumulation", "ddp", "--accumulate", "2", fast=(63,)),
    _entry("FSDP", "fsdp", fast=(31,)),
    _entry("FSDP2", "fsdp2"),
)
