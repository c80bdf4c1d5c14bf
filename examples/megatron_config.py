"""Turns Megatron-LM's flags into megatron-core's configurations, by Megatron-LM's own rules."""

from __future__ import annotations

import argparse
import importlib.util
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel import layers as tensor_parallel_layers
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron_flags import only_for_latent_attention, settings_of

_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings", "lr")


@dataclass(frozen=True)
class Job:
    """A job, as its flags describe it.

    Attributes:
        args: The flags.
        model: Configuration of the transformer.
        optimizer: Configuration of the optimizer.
        reduction: Configuration of Megatron's DistributedDataParallel.
        use_te: Whether layers are Transformer Engine's.
        vocab_size: Size of the vocabulary, padded.
        data_parallel_size: Replicas of the model, with those of context parallelism taken apart.
        num_microbatches: Microbatches of a step of the whole job on one rank.
        notes: What is otherwise than the flags say, and why.
    """

    args: argparse.Namespace
    model: TransformerConfig
    optimizer: OptimizerConfig
    reduction: DistributedDataParallelConfig
    use_te: bool
    vocab_size: int
    data_parallel_size: int
    num_microbatches: int
    notes: list[str]


def build(args: argparse.Namespace, world_size: int) -> Job:
    """Configurations of one rank of a job of so many ranks.

    Raises:
        SystemExit: Flags that are missing or do not fit together.
    """
    missing = [f"--{name.replace('_', '-')}" for name in _REQUIRED if getattr(args, name, None) is None]
    if missing:
        raise SystemExit(f"missing: {' '.join(missing)}; or start from a preset: --preset mixtral-8x7b")
    has_te = importlib.util.find_spec("transformer_engine") is not None
    notes: list[str] = []
    if args.transformer_impl == "transformer_engine" and not has_te and args.preset is None:
        raise SystemExit(
            "--transformer-impl transformer_engine: Transformer Engine is not installed; take local or auto"
        )
    use_te = has_te and args.transformer_impl != "local"
    if not use_te:
        notes += _without_transformer_engine(args)
    args.transformer_impl = "transformer_engine" if use_te else "local"
    notes += _parallelism(args)
    _hybrid(args)
    _precision_and_activation(args)
    model = _transformer_config(args)
    divisor = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    model_parallel_size = (
        args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    )
    data_parallel_size = max(1, world_size // model_parallel_size)
    return Job(
        args,
        model,
        OptimizerConfig(**settings_of(OptimizerConfig, args)),
        DistributedDataParallelConfig(**settings_of(DistributedDataParallelConfig, args)),
        use_te,
        math.ceil((args.vocab_size + 1) / divisor) * divisor,  # NullTokenizer's end of document is one more
        data_parallel_size,
        _num_microbatches(args, data_parallel_size),
        notes,
    )


def microbatches_run(job: Job) -> int:
    """How many microbatches a step runs: all, or as many as bring the pipeline to its steady state."""
    stages = job.args.pipeline_model_parallel_size
    limit = job.args.max_microbatches
    if limit is None:
        limit = 2 * stages if stages > 1 else 2
    return min(job.num_microbatches, limit) if limit else job.num_microbatches


def _num_microbatches(args: argparse.Namespace, data_parallel_size: int) -> int:
    at_once = args.micro_batch_size * data_parallel_size
    total = args.global_batch_size if args.global_batch_size is not None else at_once
    if total % at_once:
        raise SystemExit(
            f"global batch size ({total}) is not divisible by micro-batch size ({args.micro_batch_size}) times data "
            f"parallel size ({data_parallel_size})"
        )
    return int(total // at_once)


def _without_transformer_engine(args: argparse.Namespace) -> list[str]:
    """Take back what only Transformer Engine or Apex has; what was taken back."""
    taken = []
    for name, value in {
        "fp8": None, "fp8_param": False, "moe_permute_fusion": False, "moe_grouped_gemm": False,
        "apply_rope_fusion": False, "persist_layer_norm": False, "moe_router_fusion": False,
    }.items():  # fmt: skip
        if getattr(args, name, value) != value:
            setattr(args, name, value)
            taken.append(name)
    if args.masked_softmax_fusion and importlib.util.find_spec("scaled_upper_triang_masked_softmax_cuda") is None:
        args.masked_softmax_fusion = False
        taken.append("masked_softmax_fusion")
    modules = getattr(args, "recompute_modules", None) or []
    # megatron-core 0.16.1 recomputes these (CheckpointWithoutOutput) with Transformer Engine's help only.
    needing = [name for name in ("moe_act", "layernorm", "mla_up_proj") if name in modules]
    if needing:
        args.recompute_modules = [each for each in modules if each not in needing]
        taken.append(f"recompute of {' and '.join(needing)}")
    return [f"layers of megatron-core, not Transformer Engine's: without {', '.join(taken)}"] if taken else []


def _parallelism(args: argparse.Namespace) -> list[str]:
    """Sizes of all axes, and switches that only some of them have."""
    notes = []
    for axis in ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel", "expert_model_parallel"):
        setattr(args, f"{axis}_size", getattr(args, f"{axis}_size", 1))
    if getattr(args, "expert_tensor_parallel_size", None) is None:
        args.expert_tensor_parallel_size = args.tensor_model_parallel_size
    if args.tensor_model_parallel_size == 1 and getattr(args, "sequence_parallel", False):
        args.sequence_parallel = False
        notes.append("--sequence-parallel has no part in a tensor parallel size of 1")
    args.virtual_pipeline_model_parallel_size = virtual = _virtual_stages(args)
    if virtual is None:
        args.overlap_p2p_comm = args.align_param_gather = False
    args.batch_p2p_comm = not args.overlap_p2p_comm
    if args.gradient_accumulation_fusion and not tensor_parallel_layers._grad_accum_fusion_available:
        args.gradient_accumulation_fusion = False
        notes.append("gradients are not accumulated inside of GEMMs: Apex, whose extension does that, is not installed")
    return notes


def _virtual_stages(args: argparse.Namespace) -> int | None:
    """Model chunks of a rank, where the pipeline is interleaved."""
    stages = args.pipeline_model_parallel_size
    layout = getattr(args, "pipeline_model_parallel_layout", None)
    if layout is not None:
        chunks = PipelineParallelLayerLayout.get_num_stages_from_str(layout)
        if chunks % stages:
            raise SystemExit(f"--pipeline-model-parallel-layout has {chunks} stages, not a multiple of {stages}")
        return chunks // stages if chunks > stages else None
    if args.num_layers_per_virtual_pipeline_stage is not None:
        layers = args.num_layers + sum(
            getattr(args, f"account_for_{end}_in_pipeline_split", False) for end in ("embedding", "loss")
        )
        chunk = args.num_layers_per_virtual_pipeline_stage
        if layers % (stages * chunk):
            raise SystemExit(f"{layers} layers are not a multiple of {stages} stages of chunks of {chunk} layers")
        return int(layers // stages // chunk) or None
    virtual = args.num_virtual_stages_per_pipeline_rank
    return virtual if stages > 1 and virtual is not None and virtual > 1 else None


def _hybrid(args: argparse.Namespace) -> None:
    """Settings of a model with Mamba layers; refused are those that its layers do not have."""
    args.is_hybrid_model = args.hybrid_override_pattern is not None
    if not args.is_hybrid_model:
        return
    if args.transformer_impl == "local":
        raise SystemExit("--hybrid-override-pattern: needs Transformer Engine, whose layers megatron-core's Mamba has")
    if args.virtual_pipeline_model_parallel_size is not None:
        raise SystemExit("--hybrid-override-pattern: megatron-core's Mamba models have no virtual pipeline stages")


def _precision_and_activation(args: argparse.Namespace) -> None:
    """Types and fusions that follow from ``--bf16``, ``--swiglu`` and the like."""
    args.params_dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    args.pipeline_dtype = args.params_dtype
    args.deallocate_pipeline_outputs = getattr(args, "cuda_graph_impl", "none") == "none"  # graphs return views
    if args.bf16 and not args.grad_reduce_in_bf16 and not hasattr(args, "main_grads_dtype"):
        args.grad_reduce_in_fp32 = True
    args.fp8_param_gather = getattr(args, "fp8_param", False)
    args.add_bias_linear = not args.disable_bias_linear
    args.bias_activation_fusion = args.bias_swiglu_fusion if args.swiglu else args.bias_gelu_fusion
    if args.swiglu or args.quick_geglu:
        args.gated_linear_unit = True
    if args.swiglu or args.quick_geglu or args.squared_relu:
        args.activation_func = F.silu if args.swiglu else quick_gelu if args.quick_geglu else squared_relu
    if getattr(args, "ffn_hidden_size", None) is None:
        args.ffn_hidden_size = int(args.hidden_size * 8 / 3) // 64 * 64 if args.swiglu else 4 * args.hidden_size
    if not args.group_query_attention:
        args.num_query_groups = None
    if args.recompute_activations:
        args.recompute_granularity = "selective"
    if getattr(args, "cpu_offloading_num_layers", 0):
        args.cpu_offloading = True
    if not getattr(args, "num_moe_experts", None):
        args.moe_ffn_hidden_size = None


def _transformer_config(args: argparse.Namespace) -> TransformerConfig:
    latent = getattr(args, "multi_latent_attention", False)
    if not latent and (given := list(only_for_latent_attention(args))):
        raise SystemExit(f"{' '.join(given)}: needs --multi-latent-attention")
    kind = MLATransformerConfig if latent else TransformerConfig
    try:
        return kind(**settings_of(kind, args))
    except (AssertionError, ValueError) as error:
        raise SystemExit(f"megatron-core refuses these flags: {error}") from error
