"""Jobs of Megatron-LM's functional tests and of NVIDIA's benchmarks, and how to record them.

They run with examples/megatron_gpt.py, which takes Megatron-LM's own flags, on megatron-core 0.16.1 and Transformer
Engine. Its loop is not pretrain_gpt.py's: docs/accuracy/method.md has what it leaves out on the host.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.accuracy.golden import EXPERTS

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


class Experts(NamedTuple):
    """Sizes of a mixture of experts, which each layer has instead of a perceptron.

    Attributes:
        number: --num-experts.
        chosen: --moe-router-topk.
        inner: Of one expert.
    """

    number: int
    chosen: int
    inner: int


@dataclass(frozen=True)
class Megatron:
    """A GPT of Megatron-LM, without recomputation and gated activations.

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
        experts: Of a mixture of experts; their flags are in ``flags``.
        environment: Environment variables.
        needs: megatron-core, and Transformer Engine, which tests/clients/build_transformer_engine.sh builds.
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
    experts: Experts | None = None
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
        options += ["--gpu-memory", "unlimited", "--steps", "3", "--no-page", "--force", "-o", str(run)]
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
        layer = 2 * self.hidden * self.hidden + 2 * self.hidden * kv
        if self.experts is None:
            layer += 2 * self.hidden * self.inner
        else:
            layer += self.hidden * (self.experts.number + self.experts.chosen * 2 * self.experts.inner)
        products = 3 * 2 * tokens * (self.layers * layer + self.hidden * self.padded_words)
        whole = self.layers * 2 * tokens * self.sequence * self.hidden  # a product of queries and all keys
        if "--attention-backend unfused" in self.flags:
            return Flops((products + (2 + 4) * whole) / self.tensor, 0.0)
        attention = (2 + 5) * whole * (self.sequence + 1) / (2 * self.sequence)
        return Flops(products / self.tensor, attention / self.tensor)


@dataclass(frozen=True)
class LatentExperts(Megatron):
    """The mixture of experts of tests/accuracy/golden.py, whose flags have all sizes."""

    def arguments(self) -> Sequence[str]:
        return ["--max-microbatches", "0", *self.flags.split()]

    def flops(self) -> Flops:
        """The same: multi-latent attention, unfused, 15 of 16 layers with experts, one more that predicts a token."""
        tokens = self.global_batch // self.replicas * self.sequence
        queries, latent, keys, values = 1536, 512, 128 + 64, 128  # ranks of the latents, widths of a head
        attention = self.hidden * (queries + latent + 64 + self.heads * values)
        attention += self.heads * (queries * keys + latent * (128 + values))
        gated, router = 3 * self.hidden * 1024, self.hidden * 32
        with_experts = attention + router + (4 + 1) * gated  # and a shared one
        layers = attention + 3 * self.hidden * self.inner + self.layers * with_experts  # 15 and the one more
        predicts = 2 * self.hidden * self.hidden + 2 * self.hidden * self.padded_words
        scores = (self.layers + 1) * self.sequence * self.heads * (keys + values)
        return Flops(3 * 2 * tokens * (layers + predicts + scores) / self.tensor, 0.0)


_GOLDEN = """
--log-num-zeros-in-grad --untie-embeddings-and-output-weights --transformer-impl transformer_engine --bf16
--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --deterministic-mode
--no-gradient-accumulation-fusion --lr 0.00015 --min-lr 1.0e-5 --weight-decay 1e-2 --clip-grad 1.0
--lr-decay-style cosine
"""
_TINY = """
--log-num-zeros-in-grad --bf16 --no-gradient-accumulation-fusion --lr 0.00015 --min-lr 1.0e-5 --weight-decay 1e-2
--clip-grad 1.0 --lr-decay-style cosine
"""
_TE = "--transformer-impl transformer_engine --attention-softmax-in-fp32"
_EXACT = f"{_TE} --deterministic-mode"
_SHARDED = f"{_EXACT} --use-distributed-optimizer"
_OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
_UNFUSED = "--attention-backend unfused"
_INTERLEAVED = "--num-layers-per-virtual-pipeline-stage 1"
_NO_BIAS = "--disable-bias-linear --no-bias-gelu-fusion"
_EXPERTS = f"""
{_NO_BIAS} --sequence-parallel --expert-model-parallel-size 2 --moe-router-topk 1
--moe-router-load-balancing-type sinkhorn --num-experts"""
_GATHERED = """
--expert-model-parallel-size 8 --num-experts 8 --moe-token-dispatcher-type allgather --moe-router-topk 2
--moe-router-dtype fp32 --moe-ffn-hidden-size 1024 --moe-grouped-gemm
"""
_GOLDEN_ENVIRONMENT = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "NCCL_ALGO": "Ring",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVTE_FWD_LAYERNORM_SM_MARGIN": "16",
    "NVTE_BWD_LAYERNORM_SM_MARGIN": "16",
}
_TINY_ENVIRONMENT = {
    name: _GOLDEN_ENVIRONMENT[name]
    for name in ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NCCL_ALGO", "CUBLAS_WORKSPACE_CONFIG")
}
_NEMOTRON = """
--untie-embeddings-and-output-weights --transformer-impl transformer_engine --bf16 --use-distributed-optimizer
--overlap-grad-reduce --overlap-param-gather --ddp-average-in-collective --ddp-bucket-size 134217728
--sequence-parallel --squared-relu --no-bias-gelu-fusion --disable-bias-linear --apply-layernorm-1p
--position-embedding-type rope --rotary-percent 0.5 --attention-dropout 0.0 --hidden-dropout 0.0
--cross-entropy-loss-fusion --cross-entropy-fusion-impl te --use-precision-aware-optimizer --lr 4.5e-5 --min-lr 4.5e-5
--clip-grad 1.0 --weight-decay 0.1 --tp-comm-overlap
"""


def gpt_7b(*, tensor: int, stages: int, micro_batch: int, flags: str = "") -> Megatron:
    divisor = 128 * tensor
    return Megatron(
        flags=f"{_GOLDEN} {flags}", layers=32, hidden=4096, inner=16_384, heads=32, groups=8, sequence=8192,
        words=131_073, padded_words=-(-131_074 // divisor) * divisor, micro_batch=micro_batch, global_batch=8,
        tensor=tensor, stages=stages, replicas=2, environment=_GOLDEN_ENVIRONMENT,
    )  # fmt: skip


def gpt_tiny(flags: str, tensor: int = 1, stages: int = 1, experts: Experts | None = None) -> Megatron:
    divisor, is_deterministic = 128 * tensor, "--deterministic-mode" in flags
    return Megatron(
        flags=f"{_TINY} {flags}", layers=12, hidden=512, inner=2048, heads=8, groups=8, sequence=1024,
        words=50_257, padded_words=-(-50_258 // divisor) * divisor, micro_batch=4, global_batch=32, tensor=tensor,
        stages=stages, replicas=8 // tensor // stages, experts=experts,
        environment=_TINY_ENVIRONMENT if is_deterministic else {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"},
    )  # fmt: skip


MOE_MLA = LatentExperts(
    flags=EXPERTS, layers=16, hidden=1024, inner=4096, heads=32, groups=32, sequence=4096, words=50_257,
    padded_words=51_712, micro_batch=4, global_batch=32, tensor=2, stages=2, replicas=2,
    environment={
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NCCL_NVLS_ENABLE": "0",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    },
)  # fmt: skip
NEMOTRON_15B = Megatron(
    flags=_NEMOTRON, layers=32, hidden=6144, inner=24_576, heads=48, groups=8, sequence=4096,
    words=256_000, padded_words=256_256, micro_batch=2, global_batch=64, tensor=2, stages=1, replicas=8,
)  # fmt: skip
NEMOTRON_340B = Megatron(
    flags=f"{_NEMOTRON} {_INTERLEAVED} --defer-embedding-wgrad-compute --wgrad-deferral-limit 22",
    layers=96, hidden=18_432, inner=73_728, heads=96, groups=8, sequence=4096,
    words=256_000, padded_words=257_024, micro_batch=1, global_batch=64, tensor=8, stages=8, replicas=4,
)  # fmt: skip


class TinyJob(NamedTuple):
    """A small GPT that the host limits.

    Attributes:
        name: Of the row.
        job: What ran.
        script: What runs.
        h100_s: Seconds of an iteration on 8 H100.
        others_s: The same in other versions of the golden values.
        gb200_s: The same on 8 GB200, of each system where the test ran.
    """

    name: str
    job: str
    script: Megatron
    h100_s: float
    others_s: tuple[float, ...]
    gb200_s: tuple[float, ...]


TINY_JOBS = (
    TinyJob(
        "gpt-tiny", "GPT of 12 layers of 512, DP 8, 1 micro-batch", gpt_tiny(_SHARDED),
        0.05337, (0.0579,), (0.0667, 0.0852),
    ),
    TinyJob(
        "gpt-tiny-unfused", "attention unfused, DP 8, 1 micro-batch", gpt_tiny(f"{_SHARDED} {_UNFUSED}"),
        0.08222, (0.0597,), (0.0768,),
    ),
    TinyJob(
        "gpt-tiny-tp2", "TP 2, 2 micro-batches",
        gpt_tiny(f"{_SHARDED} {_OVERLAP} --num-distributed-optimizer-instances 2", tensor=2),
        0.16581, (0.1155,), (0.1587, 0.1729),
    ),
    TinyJob(
        "gpt-tiny-tp4", "TP 4, attention unfused, 4 micro-batches",
        gpt_tiny(f"{_SHARDED} {_OVERLAP} {_UNFUSED}", tensor=4),
        0.32775, (0.228,), (0.3098,),
    ),
    TinyJob(
        "gpt-tiny-pp4", "PP 4, 4 micro-batches", gpt_tiny(f"{_EXACT} --untie-embeddings-and-output-weights", stages=4),
        0.13664, (0.0914,), (0.122, 0.1411),
    ),
    TinyJob(
        "gpt-tiny-vp3", "PP 4 of 3 stages a GPU, 4 micro-batches",
        gpt_tiny(f"{_SHARDED} --overlap-grad-reduce {_INTERLEAVED}", stages=4),
        0.11246, (0.088,), (0.1048,),
    ),
    TinyJob(
        "gpt-tiny-vp3-unfused", "PP 4 of 3 stages a GPU, attention unfused, 4 micro-batches",
        gpt_tiny(f"{_EXACT} {_UNFUSED} {_INTERLEAVED}", stages=4),
        0.09185, (0.0945,), (0.1054,),
    ),
    TinyJob(
        "gpt-tiny-tp2-pp2", "TP 2, PP 2, 4 micro-batches",
        gpt_tiny(f"{_TE} --cross-entropy-loss-fusion", tensor=2, stages=2),
        0.11941, (0.1149,), (0.1742, 0.1721),
    ),
    TinyJob(
        "moe-tiny-tp2", "8 experts, TP 2, EP 2, 2 micro-batches",
        gpt_tiny(f"{_SHARDED} {_EXPERTS} 8", tensor=2, experts=Experts(8, 1, 2048)),
        0.34586, (0.212,), (0.311, 0.3127),
    ),
    TinyJob(
        "moe-tiny-tp2-pp2", "4 experts, TP 2, PP 2, EP 2, layers without Transformer Engine, 4 micro-batches",
        gpt_tiny(
            f"{_UNFUSED} --transformer-impl local --deterministic-mode {_EXPERTS} 4",
            tensor=2, stages=2, experts=Experts(4, 1, 2048),
        ),
        0.23281, (0.230,), (),
    ),
    TinyJob(
        "moe-tiny-ep8", "8 experts, EP 8, tokens gathered, 1 micro-batch",
        gpt_tiny(f"{_SHARDED} {_NO_BIAS} {_GATHERED}", experts=Experts(8, 2, 1024)),
        0.15501, (0.122,), (0.1632,),
    ),
)  # fmt: skip
