"""Megatron-core: three published jobs, and one feature after the other on the smallest of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tests.clients.catalogue.arithmetic import BF16, FP32, Arithmetic
from tests.clients.catalogue.deepspeed import cuda_of_torch
from tests.clients.catalogue.entry import Entry, Refusal

_ENGINE, _LOCAL = "Megatron-core on Transformer Engine", "Megatron-core on its own layers"
_SCRIPT = "examples/megatron_gpt.py"
_DENSE = "--num-experts none --expert-model-parallel-size 1"
_ROOM = ("--gpu", "h200", "--gpu-memory", "unlimited")

#: The jobs of examples/megatron_presets.py: what they are, and the first, a middle and the last pipeline stage.
_PRESETS = {
    "mixtral-8x7b": ("Mixtral 8x7B: PP 4, EP 8, interleaved 1F1B of 8 stages a rank", 64, (0, 32, 48)),
    "qwen3-235b": ("Qwen3-235B-A22B: TP 2, PP 8, EP 32, 94 layers, norms of queries and keys", 256, (0, 128, 224)),
    "deepseek-v3": (
        "DeepSeek-V3: TP 2, PP 16, EP 64, latent attention, layout by hand, fp8 blockwise",
        1024,
        (0, 512, 960),
    ),
}


def _presets(framework: str, layers: str, requires: tuple[str, ...]) -> tuple[Entry, ...]:
    """The published jobs at their published layouts, on a GPU with room for any."""
    return tuple(
        Entry(
            framework,
            title if requires else title.replace(", fp8 blockwise", ", bf16"),
            _SCRIPT,
            package="megatron-core",
            requires=requires,
            arguments=("--preset", preset, "--transformer-impl", layers, "--exit-interval", "2"),
            world_size=world_size,
            ranks=ranks,
            options=_ROOM,
            collectives=("all_to_all", "reduce_scatter", "all_gather", "send", "recv"),
            prints=("grad norm",),
            minutes=10,
        )
        for preset, (title, world_size, ranks) in _PRESETS.items()
    )


def _feature(feature: str, flags: str, stages: int = 2, **more: Any) -> Entry:
    """Mixtral's sizes, of eight layers, on 64 ranks; the flags given override the preset's."""
    layout = f"--num-layers 8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size {stages}"
    chunks = "" if "virtual" in flags or "layout" in flags else " --num-virtual-stages-per-pipeline-rank none"
    return Entry(
        _ENGINE,
        feature,
        _SCRIPT,
        package="megatron-core",
        requires=("transformer-engine-torch",),
        arguments=tuple(f"--preset mixtral-8x7b --exit-interval 2 {layout} {chunks} {flags}".split()),
        world_size=64,
        options=_ROOM,
        **{"ranks": (0, 31, 63), "collectives": ("reduce_scatter", "all_gather"), "prints": ("grad norm",)} | more,
    )


_MIB = 1 << 20
#: What a product's input of 4,096 tokens takes in bf16, and what their exchange takes: the ranks' flags and counters.
_INPUT, _COUNTERS = 32 * _MIB, 10 * _MIB
#: All products exchange their parts in rings, and those that reduce keep what came from each other rank.
_RINGS = """
proj_fprop: {method: ring_exchange, num_splits: 4}
fc2_fprop: {method: ring_exchange, num_splits: 4}
qkv_fprop: {method: ring_exchange, aggregate: true}
"""


def _nccl(directory: Path) -> None:
    """NCCL under the name that a linker looks for: PyPI's package has the numbered one alone."""
    link = directory / "libnccl.so"
    link.unlink(missing_ok=True)
    link.symlink_to(cuda_of_torch("nccl") / "lib/libnccl.so.2")


def _write_rings(directory: Path) -> None:
    (directory / "rings.yaml").write_text(_RINGS)


_FEATURES = (
    _feature(
        "products that overlap their collectives (--tp-comm-overlap), TP 4: rings, pipelines, bulk, multicast",
        f"{_DENSE} --num-layers 2 --tensor-model-parallel-size 4 --tp-comm-overlap",
        1,
        ranks=(31,),
        collectives=("put", "put_wait", "userbuffers_multimem_all_gather", "userbuffers_multimem_reduce_scatter"),
        prints=("grad norm", f"user buffers take {12 * _INPUT + _COUNTERS:,} bytes"),
    ),
    _feature(
        "the same in fp8, without multicast, rings by a YAML file, set up through gloo",
        f"{_DENSE} --num-layers 2 --tensor-model-parallel-size 4 --tp-comm-overlap --tp-comm-overlap-cfg rings.yaml "
        "--tp-comm-bootstrap-backend gloo --fp8-format hybrid",
        1,
        ranks=(31,),
        collectives=("put", "put_wait", "userbuffers_reduce_scatter"),
        # Eight inputs in fp8, two gradients of them in bf16, and two results: 4 parts of this rank, 3 of the others.
        prints=(
            "grad norm",
            f"user buffers take {8 * _INPUT // 2 + 2 * _INPUT + 2 * _INPUT * 7 // 4 + _COUNTERS:,} bytes",
        ),
        environment={"UB_SKIPMC": "1"},
        prepare=_write_rings,
    ),
    _feature(
        "parameters and gradients in memory of NCCL's allocator (--use-nccl-ub)",
        "--use-nccl-ub",
        tools=("nvcc", "g++", "ninja"),
        prepare=_nccl,
        environment={
            "CUDA_HOME": str(Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc").resolve().parents[1]),
            "CPATH": str(cuda_of_torch("nccl") / "include"),
            "LIBRARY_PATH": "{directory}",
        },
        minutes=10,  # the first time Megatron-core compiles its allocator
    ),
    _feature("layers offloaded to the host", "--cpu-offloading-num-layers 4", 1),
    _feature(
        "optimizer offloaded to the host",
        "--optimizer-cpu-offload --use-precision-aware-optimizer",
        categories=("parameter", "gradient", "activation"),
    ),
    _feature(
        "1F1B with all-to-all overlapped, gradients of weights delayed",
        "--num-virtual-stages-per-pipeline-rank 2 --overlap-moe-expert-parallel-comm --delay-wgrad-compute",
    ),
    _feature(
        "fp8 blockwise, parameters gathered in fp8",
        "--fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather",
    ),
    _feature("CUDA graphs of its own, of dense layers", f"{_DENSE} --cuda-graph-impl local", 1),
    _feature(
        "CUDA graphs of its own, with pipeline parallelism",
        f"{_DENSE} --cuda-graph-impl local",
        ranks=(0,),
        refused=Refusal(
            "counter-productive to free a view of another tensor",
            "0.16.1 returns a layer's output through a node of autograd that hands out a view, and its pipeline frees"
            " none; corrected in NVIDIA/Megatron-LM#6168; Transformer Engine's graphs run",
        ),
    ),
    _feature(
        "CUDA graph of a whole iteration",
        f"{_DENSE} --cuda-graph-impl local --cuda-graph-scope full_iteration "
        "--no-check-for-nan-in-loss-and-grad --cuda-graph-warmup-steps 1",
        1,
    ),
    _feature(
        "CUDA graphs by Transformer Engine, with pipeline parallelism",
        f"{_DENSE} --cuda-graph-impl transformer_engine --cuda-graph-warmup-steps 1",
    ),
    _feature(
        "CUDA graphs by Transformer Engine of attention and router, experts outside",
        "--cuda-graph-impl transformer_engine --cuda-graph-scope attn moe_router --cuda-graph-warmup-steps 1",
    ),
    _feature("experts tensor parallel too (ETP 2)", "--expert-tensor-parallel-size 2"),
    _feature("context parallel (CP 2)", "--context-parallel-size 2"),
    _feature(
        "tokens dispatched by all-gather, full recompute",
        "--moe-token-dispatcher-type allgather --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
    ),
    _feature(
        "pipeline laid out by hand, selective recompute",
        "--pipeline-model-parallel-layout Et|tttt|ttt|L --recompute-granularity selective "
        "--recompute-modules core_attn moe_act layernorm",
    ),
)


def _flex_job(_: int) -> Arithmetic:
    """Two layers of tests/clients/jobs/megatron_flex.py, each with 4 of 64 experts; AdamW with states in bf16."""
    hidden, experts = 1024, 4
    layer = 4 * hidden * hidden + 4 * hidden + 64 * hidden + experts * 2 * 256 * hidden
    held = BF16 * (2 * 32000 * hidden + 2 * layer + 2 * hidden)
    return Arithmetic(held, held, 2 * held)


def _hybrid_ep_bytes() -> int:
    """Bytes that HybridEP takes for these layers on 16 ranks of two nodes, with 2,048 tokens; not a node's first."""
    tokens, hidden, experts, ranks, nodes, sms = 2048, 1024, 4, 8, 2, 16
    all_tokens, probs, scales = tokens * ranks * nodes, experts * ranks * FP32, hidden // 128 * FP32
    mapped = [all_tokens * hidden * BF16, all_tokens * probs, all_tokens * scales, 512, experts * 16 * all_tokens]
    # What the network reads and writes: to dispatch, and to combine, of one other node. Queues have 64 bytes an entry,
    # 3 entries for each token to dispatch, 2 to combine, and one more: 8,192 as a power of two, both times.
    network = [tokens * hidden * BF16] * 4
    small = tokens * probs * (nodes + 1 + 2) + 2 * tokens * scales + 4 * tokens // 128 * 8
    small += 2 * sms * (2 * 8192 * 64 + 4096) + 108 * ranks * 8 + 4096
    return sum(-(-each // (2 << 20)) * (2 << 20) for each in (*mapped, *network, small))


ENTRIES = (
    Entry(
        _ENGINE,
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
    *_presets(_ENGINE, "transformer_engine", ("transformer-engine-torch",)),
    *_FEATURES,
    *_presets(_LOCAL, "local", ()),
    Entry(
        _LOCAL,
        "mixture of experts, EP 16 over two nodes, flex dispatcher with DeepEP",
        "tests/clients/jobs/megatron_flex.py",
        package="megatron-core",
        arguments=("deepep",),
        world_size=16,
        ranks=(0, 9),
        collectives=("deep_ep_dispatch", "deep_ep_combine"),
        # 12 channels: to 8 ranks of 288 slots, to 2 nodes of 140, twice, of 2,048 bytes and what goes with a token.
        prints=("BUFFER 113470080 27689856",),
    ),
    Entry(
        _LOCAL,
        "the same with HybridEP",
        "tests/clients/jobs/megatron_flex.py",
        package="megatron-core",
        arguments=("hybridep",),
        world_size=16,
        ranks=(1, 9),
        collectives=("hybrid_ep_dispatch", "hybrid_ep_permute", "hybrid_ep_combine"),
        prints=(f"OUTSIDE {_hybrid_ep_bytes()}",),
        arithmetic=_flex_job,
    ),
)
