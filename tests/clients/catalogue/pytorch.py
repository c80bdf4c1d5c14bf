"""PyTorch's own ways to train on many GPUs."""

from __future__ import annotations

from tests.clients.catalogue.entry import Entry

ENTRIES = (
    Entry(
        "PyTorch",
        "DDP",
        "examples/ddp_gpt.py",
        arguments=("--model", "debug"),
        world_size=64,
        ranks=(0, 31, 63),
        fast=(0, 31, 63),
        collectives=("all_reduce", "broadcast"),
    ),
    Entry(
        "PyTorch",
        "FSDP2, tensor and sequence parallel",
        "examples/llama_fsdp2.py",
        arguments=("--model", "debug", "--tp", "2", "--checkpoint", "selective", "--loss-parallel"),
        world_size=64,
        ranks=(0, 31, 63),
        fast=(63,),
        collectives=("all_gather", "reduce_scatter", "all_reduce"),
    ),
    Entry(
        "PyTorch",
        "FSDP2, tensor parallel, Llama 70B",
        "examples/llama_fsdp2.py",
        arguments=("--model", "70b", "--tp", "8", "--checkpoint", "full"),
        world_size=1024,
        ranks=(0, 511, 1023),
        collectives=("all_gather", "reduce_scatter", "all_reduce"),
    ),
)
