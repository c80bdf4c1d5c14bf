"""Language models as they are trained from Hugging Face: run_clm, TRL, LoRA, Liger's kernels; random weights."""

from __future__ import annotations

from collections.abc import Callable

from tests.clients.catalogue.arithmetic import FP32, Arithmetic, Transformer
from tests.clients.catalogue.entry import TRAINING, Entry

_JOB = "tests/clients/jobs/transformers_clm.py"
_CALLS = {"ddp": ("all_reduce", "broadcast"), "fsdp": ("all_gather", "reduce_scatter")}
_LLAMA = Transformer(4, 1024, 2816, 8192, keys=256)


def _whole(rank: int) -> Arithmetic:
    """Every rank holds all of it in fp32; rotary frequencies are buffers; two blocks of 512 tokens."""
    held = FP32 * _LLAMA.parameters
    return Arithmetic(held, held, 2 * held, flops=_LLAMA.flops(2, 512))


def _sharded(rank: int) -> Arithmetic:
    """A 64th of everything; FLOPs are those of DDP."""
    return Arithmetic(None, None, 2 * FP32 * _LLAMA.parameters / 64, flops=_LLAMA.flops(2, 512))


def _sharded_context(rank: int) -> Arithmetic:
    """A 64th of the states, for context parallelism shards over its ranks too."""
    return Arithmetic(None, None, 2 * FP32 * _LLAMA.parameters / 64)


def _answers(rank: int) -> Arithmetic:
    """As DDP of run_clm, but that the output layer sees answers alone, and runs again in backward: TRL's chunked loss.

    A question is 301 tokens; of 512 the other 211 are the answer.
    """
    held, head = FP32 * _LLAMA.parameters, 8192 * 1024
    flops = _LLAMA.flops(2, 512) + 2 * head * (8 * 211 - 6 * 512)
    return Arithmetic(held, held, 2 * held, flops=flops)


def _entry(
    framework: str, feature: str, arguments: str, arithmetic: Callable[[int], Arithmetic], fast: tuple[int, ...] = ()
) -> Entry:
    requires = ["transformers", "accelerate"]
    requires += ["peft"] if "--lora" in arguments else []
    requires += ["liger_kernel"] if "--liger" in arguments and framework != "Liger" else []
    package = {"Transformers run_clm": "transformers", "TRL": "trl", "Liger": "liger_kernel"}[framework]
    return Entry(
        framework,
        feature,
        _JOB,
        package=package,
        requires=tuple(name for name in requires if name != package),
        arguments=tuple(arguments.split()),
        world_size=64,
        ranks=(0, 31, 63),
        fast=fast,
        categories=TRAINING,
        collectives=_CALLS["fsdp" if "fsdp" in arguments else "ddp"],
        arithmetic=arithmetic,
    )


ENTRIES = (
    _entry("Transformers run_clm", "Llama, DDP", "--trainer clm --shard ddp", _whole),
    _entry("Transformers run_clm", "Llama, FSDP2", "--trainer clm --shard fsdp", _sharded),
    _entry("TRL", "SFT of conversations, loss of the answers alone, DDP", "--trainer sft --shard ddp", _answers),
    _entry(
        "TRL",
        "SFT, FSDP2 over 16, context parallelism over four",
        "--trainer sft --shard fsdp --context 4",
        _sharded_context,
    ),
    _entry("Liger", "Llama patched, FSDP2", "--trainer clm --shard fsdp --liger", _sharded),
)
