"""Lightning: Fabric, and the Trainer, which steps its optimizers with closures."""

from __future__ import annotations

from collections.abc import Callable

from tests.clients.catalogue.arithmetic import BF16, FP32, Arithmetic, Transformer
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


def _sizes(strategy: str, accumulate: int = 1) -> Callable[[int], Arithmetic]:
    """Four layers of torch's own encoder of 1024, two sequences of 512 tokens that see all of each other."""
    model = Transformer(4, 1024, 4096, 8192, gated=False, biases=True)
    elements = model.parameters - 2 * 1024  # without a norm at the end
    flops = accumulate * model.flops(2, 512, causal=False)
    if strategy == "ddp":
        held = FP32 * elements
        # In addition the buckets, and as much for what AdamW computes in between.
        return lambda rank: Arithmetic(held, held, 2 * held, flops=flops, peak=6 * held)
    # With bf16-true FSDP2 keeps bf16 alone; DeepSpeed's fp32 weights are states in ZeRO-2 and parameters in ZeRO-3.
    states = {"fsdp": 2 * FP32, "fsdp2": 2 * BF16, "zero2": 3 * FP32, "zero3": 2 * FP32}[strategy] * elements / 64
    return lambda rank: Arithmetic(None, None, states, flops=flops)


def _trainer(feature: str, strategy: str, *more: str, fast: tuple[int, ...] = ()) -> Entry:
    return Entry(
        "Lightning Trainer",
        feature,
        "tests/clients/jobs/lightning_trainer.py",
        package="pytorch-lightning",
        requires=("deepspeed",) if strategy.startswith("zero") else (),
        arguments=("--strategy", strategy, *more),
        world_size=64,
        ranks=(0, 31, 63),
        fast=fast,
        collectives=_CALLS[strategy],
        arithmetic=_sizes(strategy, int(more[1]) if more else 1),
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
    _trainer("DDP, gradient accumulation", "ddp", "--accumulate", "2", fast=(31,)),
    _trainer("FSDP2 (ModelParallelStrategy)", "fsdp2"),
    _trainer("DeepSpeed ZeRO-2", "zero2"),
)
