"""Jobs whose training step others published: torchtitan's, and Megatron-LM's of ``megatron_jobs``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from tests.accuracy import titan
from tests.accuracy.megatron_jobs import MOE_MLA, NEMOTRON_15B, NEMOTRON_340B, ROOT, TINY_JOBS, Flops, gpt_7b


class Script(Protocol):
    """The command that runs."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that are recorded."""

    @property
    def nccl(self) -> Mapping[str, str]:
        """NCCL's variables."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Packages that ``make frameworks`` does not install."""

    def record(self, directory: Path, packages: Path, world_size: int) -> dict[int, Path]:
        """Run the job in a directory; the run directory of each rank.

        Raises:
            subprocess.CalledProcessError: It failed. Its last words are on stderr.
        """

    def flops(self) -> Flops:
        """The FLOPs that the model asks for."""


@dataclass(frozen=True)
class Llama8B:
    """torchtitan's Llama 3.1 8B, FSDP, sequences of 8,192 tokens, every second product recomputed.

    Attributes:
        flags: Of torchtitan.
        batch: Sequences in a rank's step.
        tensor: Tensor parallel size.
        as_then: Flags of torchtitan that take back what changed since then.
        ranks: The rank that is recorded.
        nccl: NCCL's variables: none.
        needs: Nothing more.
    """

    flags: tuple[str, ...]
    batch: int
    tensor: int = 1
    as_then: tuple[str, ...] = titan.AS_THEN
    ranks: tuple[int, ...] = (0,)
    nccl: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()

    def record(self, directory: Path, packages: Path, world_size: int) -> dict[int, Path]:
        """Run rank 0 of the job, after installing torchtitan into ``packages`` if it is missing."""
        titan.install(packages)
        return {0: titan.profile(directory, packages, world_size, self.flags, as_then=self.as_then)}

    def flops(self) -> Flops:
        width, inner, kv = 4096, 14_336, 1024
        recomputed = width * kv + width * inner  # every second product of a layer: wk, wo, w3
        if self.tensor == 1:  # else the sum of wo's result over the ranks is kept
            recomputed += width * width
        return _llama_flops(self, (32, width, inner), recomputed, attentions=2 + 5)


@dataclass(frozen=True)
class Llama70B(Llama8B):
    """torchtitan's Llama 3.1 70B, whose layers are recomputed: all but their last product."""

    def flops(self) -> Flops:
        width, inner, kv = 8192, 28_672, 1024
        return _llama_flops(self, (80, width, inner), 2 * width * (width + kv + inner), attentions=2 + 2 + 5)


def _llama_flops(job: Llama8B, sizes: tuple[int, int, int], recomputed: int, attentions: int) -> Flops:
    """``sizes`` are layers, width and width inside; a layer's ``recomputed`` products are counted in parameters."""
    (layers, width, inner), kv, sequence, words = sizes, 1024, 8192, 128_256
    tokens = job.batch * sequence
    layer = 2 * width * width + 2 * width * kv + 3 * width * inner
    products = 2 * tokens * (3 * (layers * layer + width * words) + layers * recomputed)
    attention = layers * attentions * 2 * tokens * (sequence + 1) / 2 * width
    return Flops(products / job.tensor, attention / job.tensor)


@dataclass(frozen=True)
class Published:
    """A published step.

    Attributes:
        name: The directory of its run.
        job: What ran.
        gpu: What ``--gpu`` takes.
        fabric: What ``find_fabric`` takes.
        world_size: Ranks.
        step_s: The published step, in seconds.
        script: What runs.
        source: Who published it.
        note: What the source leaves open, or differs in ours.
        is_fitted: Whether the parameter is fitted on it.
        is_host_bound: Whether the host sets its pace.
        like: The row whose recorded launches are priced, if it has none of its own.
        others_s: What the same test took in other versions of the same source, in seconds.
    """

    name: str
    job: str
    gpu: str
    fabric: str
    world_size: int
    step_s: float
    script: Script
    source: str
    note: str = ""
    is_fitted: bool = False
    is_host_bound: bool = False
    like: str = ""
    others_s: tuple[float, ...] = ()


META_H100 = ROOT / "bench" / "jobs" / "h100-96g-500w.toml"
ONE = ("--training.local_batch_size", "1")
_TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
_A100 = "torchtitan, docs/performance.md @04133643"
_TITAN_TP = "torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md @c720cb87"
_AWS = "AWS, Efficient pre-training of Llama 3-like model architectures using torchtitan on Amazon SageMaker"
_AO = "torchao, torchao/float8/README.md @36027d82"
NOT_SAID = (
    'only "8 H100" is said; taken as torchtitan\'s, whose table has the same job: 32 GPUs of 700 W ran it in 1.143 s'
)
_MEGATRON = "Megatron-LM, its functional tests' golden values @d98e8a64"
_DGXC = "NVIDIA, dgxc-benchmarking 25.05, nemotron/README.md"
_MEGATRON_NOTE = (
    "the same test took 1.06 to 1.17 s with PP 4 and 1.10 s with TP 4 in other versions of Megatron-LM; dropout and "
    "deterministic algorithms as there"
)
_NEMOTRON_NOTE = (
    "as there, the collectives of tensor parallelism overlap with products, here by Transformer Engine's defaults; "
    "NVIDIA's run also shifts power to the SMs (vboost), which is not modelled"
)
_TITAN_TP_NOTE = "torch was a nightly of June 2025; its RMSNorm was a sequence of operations, as here"
_ASYNC_TP_NOTE = f"{_TITAN_TP_NOTE}. Torch 2.15 fuses all 192 gathers with their products and 64 of 130 reduce-scatters"
_A100_NOTE = "the network is not said, taken as eight HDR NICs a node; RMSNorm was one Triton kernel, here torch's own"


def _titan(flags: tuple[str, ...], batch: int = 2) -> Llama8B:
    return Llama8B(flags + (ONE if batch == 1 else ()), batch)


def _titan_tp8(flags: tuple[str, ...]) -> Llama8B:
    layout = ("--training.local_batch_size", "12", "--parallelism.tensor_parallel_degree", "8")
    return Llama8B((*titan.COMPILE, *layout, *flags), 12, 8, titan.JUNE_2025)


def _titan_70b(flags: tuple[str, ...]) -> Llama70B:
    whole = ("--model.flavor", "70B", "--activation_checkpoint.mode", "full")
    layout = ("--training.local_batch_size", "16", "--parallelism.tensor_parallel_degree", "8")
    return Llama70B((*whole, *titan.COMPILE, *layout, *flags), 16, 8, titan.JUNE_2025)


def _tiny_jobs() -> Iterator[Published]:
    for tiny in TINY_JOBS:
        h100 = Published(
            tiny.name, tiny.job, "h100-80g", "dgx-h100-ndr", 8, tiny.h100_s, tiny.script, _MEGATRON,
            is_host_bound=True, others_s=tiny.others_s,
        )  # fmt: skip
        yield h100
        if tiny.gb200_s:
            seconds = {"step_s": tiny.gb200_s[0], "others_s": tiny.gb200_s[1:]}
            yield replace(h100, name=f"{h100.name}-gb200", gpu="gb200", fabric="gb200-nvl72", like=h100.name, **seconds)


#: Tokens of a sequence of torchtitan's.
_TOKENS = 8192
STEPS = (
    Published(
        "eager-8", "Llama 3.1 8B, FSDP, eager, batch 2, 8 GPUs", str(META_H100), "dgx-h100-ndr",
        8, 2 * _TOKENS / 5762, _titan(()), _TITAN, is_fitted=True,
    ),
    Published(
        "compiled-8", "the same, compiled", str(META_H100), "dgx-h100-ndr",
        8, 2 * _TOKENS / 6667, _titan(titan.COMPILE), _TITAN, is_fitted=True,
    ),
    Published(
        "compiled-8-batch-1", "the same, compiled, batch 1", str(META_H100), "dgx-h100-ndr",
        8, _TOKENS / 6150, _titan(titan.COMPILE, 1), _AO, NOT_SAID, is_fitted=True,
    ),
    Published(
        "eager-128", "eager, batch 2, 128 GPUs", str(META_H100), "dgx-h100-ndr",
        128, 2 * _TOKENS / 5605, _titan(()), _TITAN,
    ),
    Published(
        "compiled-128", "compiled, batch 2, 128 GPUs", str(META_H100), "dgx-h100-ndr",
        128, 2 * _TOKENS / 6514, _titan(titan.COMPILE), _TITAN,
    ),
    Published(
        "eager-32-batch-1", "eager, batch 1, 32 GPUs", "h100-80g", "p5-efa", 32, _TOKENS / 6475, _titan((), 1), _AWS,
    ),
    Published(
        "compiled-32-batch-1", "compiled, batch 1, 32 GPUs", "h100-80g", "p5-efa",
        32, _TOKENS / 7166, _titan(titan.COMPILE, 1), _AWS,
    ),
    Published(
        "eager-64-batch-1-a100", "eager, batch 1, 64 GPUs", "a100-80g", "dgx-a100-hdr",
        64, _TOKENS / 2973, Llama8B(ONE, 1, as_then=titan.EARLY_2024), _A100, _A100_NOTE,
    ),
    Published(
        "compiled-64-tp8", "compiled, FSDP 8, TP 8, batch 12, 64 GPUs", str(META_H100), "dgx-h100-ndr",
        64, 12 * _TOKENS / 8 / 4378, _titan_tp8(()), _TITAN_TP, _TITAN_TP_NOTE,
    ),
    Published(
        "compiled-64-async-tp8", "the same, TP asynchronous", str(META_H100), "dgx-h100-ndr",
        64, 12 * _TOKENS / 8 / 4809.4, _titan_tp8(("--parallelism.enable_async_tensor_parallel",)), _TITAN_TP,
        _ASYNC_TP_NOTE,
    ),
    Published(
        "compiled-256-70b-tp8", "Llama 3.1 70B, compiled, FSDP 32, TP 8, full AC, batch 16, 256 GPUs", str(META_H100),
        "dgx-h100-ndr", 256, 16 * _TOKENS / 8 / 597.3, _titan_70b(()), _TITAN_TP, _TITAN_TP_NOTE,
    ),
    Published(
        "compiled-256-70b-async-tp8", "the same, TP asynchronous", str(META_H100), "dgx-h100-ndr",
        256, 16 * _TOKENS / 8 / 652.4, _titan_70b(("--parallelism.enable_async_tensor_parallel",)), _TITAN_TP,
        _TITAN_TP_NOTE,
    ),
    Published(
        "gpt-7b-tp4", "Megatron-LM GPT 7B, TP 4, batch 8, 8 GPUs", "h100-80g", "dgx-h100-ndr",
        8, 1.11493, gpt_7b(tensor=4, stages=1, micro_batch=2), _MEGATRON, _MEGATRON_NOTE,
    ),
    Published(
        "gpt-7b-pp4", "the same, PP 4 of 8 stages a GPU", "h100-80g", "dgx-h100-ndr",
        8, 1.15105,
        gpt_7b(tensor=1, stages=4, micro_batch=1, flags="--num-layers-per-virtual-pipeline-stage 1"),
        _MEGATRON, _MEGATRON_NOTE,
    ),
    Published(
        "nemotron-15b", "Nemotron-4 15B, TP 2, batch 64, 16 GPUs", "h100-80g", "dgx-h100-ndr",
        16, 2.746, NEMOTRON_15B, _DGXC, _NEMOTRON_NOTE,
    ),
    Published(
        "nemotron-340b", "Nemotron-4 340B, TP 8, PP 8 of 12 stages a GPU, batch 64, 256 GPUs", "h100-80g",
        "dgx-h100-ndr", 256, 4.606, NEMOTRON_340B, _DGXC, _NEMOTRON_NOTE,
    ),
    *_tiny_jobs(),
    Published(
        "moe-mla", "MoE of 16 layers of 1,024, MLA, TP 2, PP 2 of 4 stages a GPU, EP 4, 2 micro-batches", "h100-80g",
        "dgx-h100-ndr", 8, 1.02657, MOE_MLA, _MEGATRON, is_host_bound=True, others_s=(1.25, 1.51),
    ),
)  # fmt: skip
