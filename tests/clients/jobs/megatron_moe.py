"""A mixture of experts in Megatron-core on Transformer Engine, TP 2, EP 8: ``megatron_moe.py [fused] [fp8]``."""

from __future__ import annotations

import sys

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

TENSOR, EXPERT, EXPERTS = 2, 8, 16
fused, fp8 = "fused" in sys.argv, "fp8" in sys.argv
torch.cuda.set_device(0)
torch.distributed.init_process_group("nccl")
parallel_state.initialize_model_parallel(
    tensor_model_parallel_size=TENSOR, expert_model_parallel_size=EXPERT, expert_tensor_parallel_size=1
)
model_parallel_cuda_manual_seed(1)
precision = {"bf16": True, "params_dtype": torch.bfloat16}
config = TransformerConfig(
    num_layers=4,
    hidden_size=2048,
    ffn_hidden_size=5632,
    num_attention_heads=16,
    num_query_groups=4,
    pipeline_dtype=torch.bfloat16,
    tensor_model_parallel_size=TENSOR,
    sequence_parallel=True,
    expert_model_parallel_size=EXPERT,
    expert_tensor_parallel_size=1,
    num_moe_experts=EXPERTS,
    moe_router_topk=2,
    moe_ffn_hidden_size=1408,
    moe_grouped_gemm=True,
    moe_token_dispatcher_type="alltoall",
    moe_permute_fusion=fused,
    moe_router_fusion=fused,
    moe_router_load_balancing_type="aux_loss",
    moe_aux_loss_coeff=1e-2,
    add_bias_linear=False,
    gated_linear_unit=True,
    activation_func=torch.nn.functional.silu,
    normalization="RMSNorm",
    hidden_dropout=0.0,
    attention_dropout=0.0,
    fp8="hybrid" if fp8 else None,
    fp8_recipe="blockwise" if fp8 else "delayed",
    gradient_accumulation_fusion=False,
    bias_activation_fusion=False,
    **precision,
)
layers = get_gpt_layer_with_transformer_engine_spec(num_experts=EXPERTS, moe_grouped_gemm=True)
model = GPTModel(config, layers, vocab_size=32000, max_sequence_length=4096, position_embedding_type="rope").cuda()
reduction = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True)
model = DistributedDataParallel(config, reduction, model)
options = OptimizerConfig(optimizer="adam", lr=1e-4, use_distributed_optimizer=True, clip_grad=1.0, **precision)
optimizer = get_megatron_optimizer(options, [model])
tokens = torch.randint(0, 32000, (2, 4096), device="cuda")
positions = torch.arange(4096, device="cuda").expand(2, -1)
for _ in range(2):
    model.zero_grad_buffer()
    optimizer.zero_grad()
    model(tokens, positions, None, labels=tokens).mean().backward()
    finalize_model_grads([model])
    done, norm, _ = optimizer.step()
    print("NORM", done, norm, flush=True)
