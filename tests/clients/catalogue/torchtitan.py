"""torchtitan, through its own entry point and configurations; tokenizer and texts are small local ones."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.clients.assets import torchtitan_assets
from tests.clients.catalogue.entry import Entry, Refusal

#: Texts and tokenizer of ours; no traces, no validation, and no CUDA graphs, which torchtitan refuses with pipelines.
_LOCAL = (
    "--hf_assets_path", "tests/assets/tokenizer", "--dataloader.dataset", "c4_test", "--profiler.no-enable_profiling",
    "--validator.no-enable", "--training.disable_cuda_graphs",
)  # fmt: skip


def _with_bf16(directory: Path) -> None:
    """The assets, and a configuration of one's own beside them, as torchtitan finds it: a module on the path."""
    torchtitan_assets(directory)
    shutil.copy(Path(__file__).parents[1] / "jobs/llama3_bf16.py", directory)


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
    Entry(
        "torchtitan",
        "Llama 3 405B in bf16, compiled, FSDP 8, TP 8, PP 8",
        "-m torchtitan.train",
        package="torchtitan",
        arguments=(
            *("--module", "llama3_bf16", "--config", "llama3_405b"),
            *("--parallelism.pipeline_parallel_degree", "8", "--training.local_batch_size", "8"),
            *_LOCAL,
        ),
        world_size=512,
        ranks=tuple(range(0, 512, 64)),
        taped=True,
        collectives=("all_gather", "reduce_scatter"),
        prepare=_with_bf16,
        minutes=10,
    ),
    Entry(
        "torchtitan",
        "Llama 3 405B, FSDP 8, TP 8, PP 8, Float8",
        "-m torchtitan.train",
        package="torchtitan",
        arguments=(
            "--module",
            "llama3",
            "--config",
            "llama3_405b",
            "--parallelism.pipeline_parallel_degree",
            "8",
            *_LOCAL,
        ),
        world_size=512,
        prepare=torchtitan_assets,
        refused=Refusal(
            "torchao is not installed",
            "its configuration asks for Float8 of torchao, and with torchao 0.18.0, the newest, torchtitan cannot be "
            "imported on torch 2.15: Triton refuses a kernel there that is tuned by an argument it does not have "
            "(`num_elements`); in bf16 it runs as above",
        ),
    ),
)
