"""Megatron-core."""

from __future__ import annotations

from tests.clients.catalogue.entry import Entry

#: The jobs of examples/megatron_presets.py: what they are, and the first, a middle and the last pipeline stage.
_PRESETS = {
    "mixtral-8x7b": ("Mixtral 8x7B: PP 4, EP 8, interleaved 1F1B of 8 stages a rank", 64, (0, 32, 48)),
    "deepseek-v3": (
        "DeepSeek-V3: TP 2, PP 16, EP 64, latent attention, layout by hand, fp8 blockwise",
        1024,
        (0, 512, 960),
    ),
}


def _presets() -> tuple[Entry, ...]:
    """The published jobs at their published layouts, on a GPU with room for any."""
    return tuple(
        Entry(
            "Megatron-core on Transformer Engine",
            title,
            "examples/megatron_gpt.py",
            package="megatron-core",
            requires=("transformer-engine-torch",),
            arguments=("--preset", preset, "--transformer-impl", "transformer_engine", "--exit-interval", "2"),
            world_size=world_size,
            ranks=ranks,
            options=("--gpu", "h200", "--gpu-memory", "unlimited"),
            collectives=("all_to_all", "reduce_scatter", "all_gather", "send", "recv"),
            prints=("grad norm",),
            minutes=10,
        )
        for preset, (title, world_size, ranks) in _PRESETS.items()
    )


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
    *_presets(),
)
