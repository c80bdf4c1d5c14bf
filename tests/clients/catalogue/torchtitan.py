"""torchtitan, through its own entry point and configurations; tokenizer and texts are small local ones."""

from __future__ import annotations

from tests.clients.assets import torchtitan_assets
from tests.clients.catalogue.entry import Entry

ENTRIES = (
    Entry(
        "torchtitan",
        "Llama 3 debug model, FSDP",
        "-m torchtitan.train",
        package="torchtitan",
        arguments=("--module", "llama3", "--config", "llama3_debugmodel"),
        world_size=64,
        ranks=(0, 31, 63),
        fast=(31,),
        collectives=("all_gather", "reduce_scatter"),
        prepare=torchtitan_assets,
    ),
)
