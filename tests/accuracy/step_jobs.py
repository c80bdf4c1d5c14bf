"""Jobs whose training step others published, and how to record them: torchtitan's and Megatron-LM's.

Megatron-LM's jobs run with examples/megatron_gpt.py, which takes Megatron-LM's own flags. They need megatron-core
0.16.1 and Transformer Engine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from tests.accuracy import titan

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 1800


class Flops(NamedTuple):
    """FLOPs of the recorded ranks of a step, by arithmetic.

    Attributes:
        products: Of matrix products.
        attention: Of attention.
    """

    products: float
    attention: float


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
        as_then: Flags of torchtitan that take back what changed since then.
        ranks: The rank that is recorded.
        nccl: NCCL's variables: none.
        needs: Nothing more.
    """

    flags: tuple[str, ...]
    batch: int
    as_then: tuple[str, ...] = titan.AS_THEN
    ranks: tuple[int, ...] = (0,)
    nccl: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()

    def record(self, directory: Path, packages: Path, world_size: int) -> dict[int, Path]:
        """Run rank 0 of the job, after installing torchtitan into ``packages`` if it is missing."""
        titan.install(packages)
        return {0: titan.profile(directory, packages, world_size, self.flags, as_then=self.as_then)}

    def flops(self) -> Flops:
        sequence, layers, width, inner, kv, words = 8192, 32, 4096, 14_336, 1024, 128_256
        tokens = self.batch * sequence
        layer = 2 * width * width + 2 * width * kv + 3 * width * inner
        recomputed = width * kv + width * width + width * inner  # every second product of a layer: wk, wo, w3
        products = 2 * tokens * (3 * (layers * layer + width * words) + layers * recomputed)
        return Flops(products, layers * (2 + 5) * 2 * tokens * (sequence + 1) / 2 * width)


@dataclass(frozen=True)
class Megatron:
    """A GPT of Megatron-LM, without recomputation, gated activations and experts.

    Attributes:
        flags: Megatron-LM's, apart from those of sizes and layout, which follow.
        layers: --num-layers.
        hidden: --hidden-size.
        inner: --ffn-hidden-size.
        heads: --num-attention-heads.
        groups: --num-query-groups.
        sequence: --seq-length.
        words: --vocab-size.
        padded_words: What Megatron-LM pads that to.
        micro_batch: --micro-batch-size.
        global_batch: --global-batch-size.
        tensor: --tensor-model-parallel-size.
        stages: --pipeline-model-parallel-size.
        replicas: Data parallel size.
        environment: Environment variables.
        needs: Transformer Engine, which tests/clients/build_transformer_engine.sh builds.
    """

    flags: str
    layers: int
    hidden: int
    inner: int
    heads: int
    groups: int
    sequence: int
    words: int
    padded_words: int
    micro_batch: int
    global_batch: int
    tensor: int
    stages: int
    replicas: int
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ("transformer-engine-torch",)

    @property
    def ranks(self) -> tuple[int, ...]:
        """One rank of each stage: the first of its replicas."""
        return tuple(stage * self.tensor * self.replicas for stage in range(self.stages))

    @property
    def nccl(self) -> Mapping[str, str]:
        """Those of the environment."""
        return {name: value for name, value in self.environment.items() if name.startswith("NCCL_")}

    def record(self, directory: Path, packages: Path, world_size: int) -> dict[int, Path]:
        """Run the ranks one after the other. Packages must be installed: ``packages`` is not used."""
        return {rank: self._record(directory / f"rank{rank}", world_size, rank) for rank in self.ranks}

    def _record(self, run: Path, world_size: int, rank: int) -> Path:
        options = ["--world-size", str(world_size), "--rank", str(rank), "--device", "virtual", "--gpu", "h100-80g"]
        # Nemotron takes 80.3 GiB: today's fused cross entropy copies the logits, those of 2025 did not.
        options += ["--gpu-memory", "unlimited", "--steps", "3", "--force", "-o", str(run)]
        path = os.pathsep.join([str(ROOT), str(Path(__file__).parent / "megatron_fusion")])
        environment = {**os.environ, **self.environment, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": path}
        script = [str(ROOT / "examples" / "megatron_gpt.py"), *self.arguments()]
        done = subprocess.run(
            [sys.executable, "-m", "fakedist", "profile", *options, *script],
            cwd=run.parent, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S,
        )  # fmt: skip
        if done.returncode:
            print(done.stderr[-3000:], file=sys.stderr)
            done.check_returncode()
        return run

    def arguments(self) -> Sequence[str]:
        sizes = {
            "num-layers": self.layers, "hidden-size": self.hidden, "ffn-hidden-size": self.inner,
            "num-attention-heads": self.heads, "num-query-groups": self.groups, "seq-length": self.sequence,
            "max-position-embeddings": self.sequence, "vocab-size": self.words,
            "micro-batch-size": self.micro_batch, "global-batch-size": self.global_batch,
            "tensor-model-parallel-size": self.tensor, "pipeline-model-parallel-size": self.stages,
        }  # fmt: skip
        named = [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
        return ["--max-microbatches", "0", "--group-query-attention", *named, *self.flags.split()]

    def flops(self) -> Flops:
        """The FLOPs of all stages of a replica, on one of its tensor parallel ranks."""
        tokens = self.global_batch // self.replicas * self.sequence
        kv = self.hidden // self.heads * self.groups
        layer = 2 * self.hidden * self.hidden + 2 * self.hidden * kv + 2 * self.hidden * self.inner
        products = 3 * 2 * tokens * (self.layers * layer + self.hidden * self.padded_words)
        whole = self.layers * 2 * tokens * self.sequence * self.hidden  # a product of queries and all keys
        if "--attention-backend unfused" in self.flags:
            return Flops((products + (2 + 4) * whole) / self.tensor, 0.0)
        attention = (2 + 5) * whole * (self.sequence + 1) / (2 * self.sequence)
        return Flops(products / self.tensor, attention / self.tensor)


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


META_H100 = ROOT / "bench" / "jobs" / "h100-96g-500w.toml"
ONE = ("--training.local_batch_size", "1")
_TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
_A100 = "torchtitan, docs/performance.md @04133643"
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
    "NVIDIA's run overlaps the collectives of tensor parallelism with products and shifts power to the SMs "
    "(vboost); here neither"
)
_A100_NOTE = "the network is not said, taken as eight HDR NICs a node; RMSNorm was one Triton kernel, here torch's own"
_GOLDEN = """
--log-num-zeros-in-grad --untie-embeddings-and-output-weights --transformer-impl transformer_engine --bf16
--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --deterministic-mode
--no-gradient-accumulation-fusion --lr 0.00015 --min-lr 1.0e-5 --weight-decay 1e-2 --clip-grad 1.0
--lr-decay-style cosine
"""
_GOLDEN_TINY = """
--log-num-zeros-in-grad --transformer-impl transformer_engine --bf16 --use-distributed-optimizer --deterministic-mode
--no-gradient-accumulation-fusion --attention-softmax-in-fp32 --lr 0.00015 --min-lr 1.0e-5 --weight-decay 1e-2
--clip-grad 1.0 --lr-decay-style cosine
"""
_OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
_GOLDEN_ENVIRONMENT = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "NCCL_ALGO": "Ring",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVTE_FWD_LAYERNORM_SM_MARGIN": "16",
    "NVTE_BWD_LAYERNORM_SM_MARGIN": "16",
}
_NEMOTRON = """
--untie-embeddings-and-output-weights --transformer-impl transformer_engine --bf16 --use-distributed-optimizer
--overlap-grad-reduce --overlap-param-gather --ddp-average-in-collective --ddp-bucket-size 134217728
--sequence-parallel --squared-relu --no-bias-gelu-fusion --disable-bias-linear --apply-layernorm-1p
--position-embedding-type rope --rotary-percent 0.5 --attention-dropout 0.0 --hidden-dropout 0.0
--cross-entropy-loss-fusion --cross-entropy-fusion-impl te --use-precision-aware-optimizer --lr 4.5e-5 --min-lr 4.5e-5
--clip-grad 1.0 --weight-decay 0.1
"""


def _titan(flags: tuple[str, ...], batch: int = 2) -> Llama8B:
    return Llama8B(flags + (ONE if batch == 1 else ()), batch)


def _golden(*, tensor: int, stages: int, micro_batch: int, flags: str = "") -> Megatron:
    divisor = 128 * tensor
    return Megatron(
        flags=f"{_GOLDEN} {flags}", layers=32, hidden=4096, inner=16_384, heads=32, groups=8, sequence=8192,
        words=131_073, padded_words=-(-131_074 // divisor) * divisor, micro_batch=micro_batch, global_batch=8,
        tensor=tensor, stages=stages, replicas=2, environment=_GOLDEN_ENVIRONMENT,
    )  # fmt: skip


def _tiny(tensor: int, flags: str) -> Megatron:
    divisor = 128 * tensor
    return Megatron(
        flags=f"{_GOLDEN_TINY} {flags}", layers=12, hidden=512, inner=2048, heads=8, groups=8, sequence=1024,
        words=50_257, padded_words=-(-50_258 // divisor) * divisor, micro_batch=4, global_batch=32,
        tensor=tensor, stages=1, replicas=8 // tensor, environment=_GOLDEN_ENVIRONMENT,
    )  # fmt: skip


_NEMOTRON_15B = Megatron(
    flags=_NEMOTRON, layers=32, hidden=6144, inner=24_576, heads=48, groups=8, sequence=4096,
    words=256_000, padded_words=256_256, micro_batch=2, global_batch=64, tensor=2, stages=1, replicas=8,
)  # fmt: skip
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
        64, _TOKENS / 2973, Llama8B(ONE, 1, titan.EARLY_2024), _A100, _A100_NOTE,
    ),
    Published(
        "gpt-7b-tp4", "Megatron-LM GPT 7B, TP 4, batch 8, 8 GPUs", "h100-80g", "dgx-h100-ndr",
        8, 1.11493, _golden(tensor=4, stages=1, micro_batch=2), _MEGATRON, _MEGATRON_NOTE,
    ),
    Published(
        "gpt-7b-pp4", "the same, PP 4 of 8 stages a GPU", "h100-80g", "dgx-h100-ndr",
        8, 1.15105,
        _golden(tensor=1, stages=4, micro_batch=1, flags="--num-layers-per-virtual-pipeline-stage 1"),
        _MEGATRON, _MEGATRON_NOTE,
    ),
    Published(
        "nemotron-15b", "Nemotron-4 15B, TP 2, batch 64, 16 GPUs", "h100-80g", "dgx-h100-ndr",
        16, 2.746, _NEMOTRON_15B, _DGXC, _NEMOTRON_NOTE,
    ),
    Published(
        "gpt-tiny", "GPT of 12 layers of 512, DP 8, 1 micro-batch", "h100-80g", "dgx-h100-ndr",
        8, 0.05337, _tiny(1, ""), _MEGATRON, is_host_bound=True,
    ),
    Published(
        "gpt-tiny-tp2", "the same, TP 2, 2 micro-batches", "h100-80g", "dgx-h100-ndr",
        8, 0.16581, _tiny(2, f"{_OVERLAP} --num-distributed-optimizer-instances 2"), _MEGATRON, is_host_bound=True,
    ),
    Published(
        "gpt-tiny-tp4", "the same, TP 4, attention unfused, 4 micro-batches", "h100-80g", "dgx-h100-ndr",
        8, 0.32775, _tiny(4, f"{_OVERLAP} --attention-backend unfused"), _MEGATRON, is_host_bound=True,
    ),
)  # fmt: skip
