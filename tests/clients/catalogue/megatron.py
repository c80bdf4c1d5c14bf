"""Megatron-core."""

from __future__ import annotations

from tests.clients.catalogue.entry import Entry

ENTRIES = (
    Entry(
        "Megatron-core on Transformer Engine",
        "mixture of experts, TP 2, EP 8, distributed optimizer, fused routing, fp8 blockwise",
        "tests/clients/jobs/megatron_moe.py",
        package="megatron-core",
        requires=("transformer-engine-torch",),
        arguments=("fused", "fp8"),
        world_size=64,
        ranks=(0, 31, 63),
        collectives=("all_to_all", "reduce_scatter", "all_gather"),
        prints=("NORM True",),
    ),
)
