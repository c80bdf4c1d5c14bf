"""Transformers and Accelerate: the Trainer and a loop of one's own; DDP, FSDP2, DeepSpeed; random weights."""

from __future__ import annotations

from tests.clients.catalogue.entry import Entry

_JOB = "tests/clients/jobs/transformers_train.py"
_CALLS = {
    "ddp": ("all_reduce",),
    "fsdp1": ("all_gather", "reduce_scatter"),
    "fsdp2": ("all_gather", "reduce_scatter"),
    "zero2": ("all_reduce", "all_gather"),
    "zero3": ("reduce_scatter", "all_gather"),
}
_NAMES = {"ddp": "DDP", "fsdp1": "FSDP1", "fsdp2": "FSDP2", "zero2": "DeepSpeed ZeRO-2", "zero3": "DeepSpeed ZeRO-3"}
_MODELS = {"llama": "Llama", "mixtral": "Mixtral", "qwen3_moe": "Qwen3-MoE"}


def _entry(
    loop: str, model: str, shard: str, *, accumulate: int = 1, launcher: str = "", fast: tuple[int, ...] = ()
) -> Entry:
    more = f", {accumulate} micro-batches" if accumulate > 1 else ""
    if launcher:
        more += f", as {launcher} starts it"
    return Entry(
        "Transformers Trainer" if loop == "trainer" else "Accelerate",
        f"{_MODELS[model]}, {_NAMES[shard]}{more}",
        _JOB,
        package="transformers" if loop == "trainer" else "accelerate",
        requires=(
            "accelerate" if loop == "trainer" else "transformers",
            *(("deepspeed",) if shard.startswith("zero") else ()),
        ),
        arguments=("--loop", loop, "--model", model, "--shard", shard, "--accumulate", str(accumulate)),
        world_size=64,
        ranks=(0, 31, 63),
        fast=fast,
        options=("--launcher", launcher) if launcher else (),
        collectives=_CALLS[shard],
    )


ENTRIES = (
    _entry("trainer", "llama", "ddp", accumulate=2, fast=(31,)),
    _entry("trainer", "llama", "fsdp1"),
    _entry("trainer", "llama", "fsdp2"),
    _entry("trainer", "llama", "zero3"),
    _entry("trainer", "llama", "fsdp2", launcher="accelerate"),
    _entry("trainer", "llama", "zero2", launcher="deepspeed"),
    _entry("trainer", "mixtral", "fsdp2", fast=(63,)),
    _entry("trainer", "mixtral", "zero3"),
    _entry("trainer", "qwen3_moe", "fsdp2"),
    _entry("trainer", "qwen3_moe", "zero2"),
    _entry("trainer", "qwen3_moe", "zero3"),
    _entry("accelerate", "llama", "ddp"),
    _entry("accelerate", "llama", "fsdp1"),
    _entry("accelerate", "llama", "fsdp2", accumulate=2, fast=(31,)),
    _entry("accelerate", "llama", "zero2", accumulate=2),
    _entry("accelerate", "llama", "ddp", launcher="accelerate"),
    _entry("accelerate", "llama", "zero3", launcher="deepspeed", fast=(31,)),
    _entry("accelerate", "mixtral", "fsdp2"),
    _entry("accelerate", "mixtral", "zero3"),
    _entry("accelerate", "qwen3_moe", "fsdp2"),
    _entry("accelerate", "qwen3_moe", "zero3"),
)
