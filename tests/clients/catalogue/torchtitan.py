"""torchtitan, through its own entry point and configurations; tokenizer and texts are small local ones."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from tests.clients.assets import torchtitan_assets
from tests.clients.catalogue.arithmetic import FP32, Arithmetic, Transformer
from tests.clients.catalogue.entry import Entry, Refusal

#: Texts and tokenizer of ours; no traces, no validation, and no CUDA graphs, which torchtitan refuses with pipelines.
_LOCAL = (
    "--hf_assets_path", "tests/assets/tokenizer", "--dataloader.dataset", "c4_test", "--profiler.no-enable_profiling",
    "--validator.no-enable", "--training.disable_cuda_graphs",
)  # fmt: skip


def _with_bf16(directory: Path) -> None:
    """The assets, and a configuration of one's own next to them, as torchtitan finds it: a module on the path."""
    torchtitan_assets(directory)
    shutil.copy(Path(__file__).parents[1] / "jobs/llama3_bf16.py", directory)


def _llama_8b(rank: int) -> Arithmetic:
    """One sequence of 8192, a 64th of the states; a layer's second and fourth product run again in backward.

    Queries, keys and values are one product. FlexAttention counts every key: what its mask leaves out is not known.
    """
    model = Transformer(32, 4096, 14_336, 128_256, keys=1024)
    again = 32 * (4096 * 4096 + 4096 * 14_336)
    states = 2 * FP32 * model.parameters / 64
    return Arithmetic(optimizer_states=states, flops=model.flops(1, 8192, causal=False) + 8192 * 2 * again)


def _llama_405b(how: str, module: str) -> Entry:
    """405B through all stages of its pipeline; as many micro-batches as stages."""
    return Entry(
        "torchtitan",
        f"Llama 3 405B {how}, FSDP 8, TP 8, PP 8",
        "-m torchtitan.train",
        package="torchtitan",
        arguments=(
            *("--module", module, "--config", "llama3_405b"),
            *("--parallelism.pipeline_parallel_degree", "8", "--training.local_batch_size", "8"),
            *_LOCAL,
        ),
        world_size=512,
        ranks=tuple(range(0, 512, 64)),
        taped=True,
        collectives=("all_gather", "reduce_scatter"),
        prepare=_with_bf16,
        minutes=10,
    )


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
    Entry(
        "torchtitan",
        "Llama 3 8B, FSDP, CUDA graphs as it makes them by itself",
        "-m torchtitan.train",
        package="torchtitan",
        arguments=("--module", "llama3", "--config", "llama3_8b", *_LOCAL[:-1]),
        world_size=64,
        ranks=(0, 31, 63),
        collectives=("all_gather", "reduce_scatter"),
        prepare=torchtitan_assets,
        arithmetic=_llama_8b,
        steps=4,
        minutes=10,
    ),
    Entry(
        "torchtitan",
        "Llama 3 70B, FSDP 8, TP 8, PP 4",
        "-m torchtitan.train",
        package="torchtitan",
        arguments=(
            "--module",
            "llama3",
            "--config",
            "llama3_70b",
            "--parallelism.pipeline_parallel_degree",
            "4",
            *_LOCAL,
        ),
        world_size=256,
        ranks=(0, 64, 128, 192),
        taped=True,
        collectives=("all_gather", "reduce_scatter"),
        prepare=torchtitan_assets,
        minutes=10,
    ),
    _llama_405b("in bf16, compiled", "llama3_bf16"),
    replace(
        _llama_405b("as published: Float8, compiled, asynchronous TP asked for and none fused", "llama3"),
        exactly={"torchao": "0.18.0", "triton": "3.8.0"},
    ),
    replace(
        _llama_405b("as published, in the environment of all others", "llama3"),
        ranks=(0,),
        refused=Refusal(
            "torchao is not installed",
            "it asks for Float8 of torchao, and Triton 3.9.0, which torch 2.15 comes with, refuses a kernel of torchao "
            "0.18.0, the newest: it is tuned by an argument that it does not have (`num_elements`). With Triton 3.8.0 "
            "(`pip install triton==3.8.0 torchao==0.18.0`) it runs as above",
        ),
    ),
)
