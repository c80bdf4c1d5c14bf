"""A mixture of experts in Megatron-core with the flex dispatcher: EP over all ranks, no Transformer Engine.

megatron_flex.py deepep|hybridep
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe import fused_a2a, moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig

TOKENS, HIDDEN, EXPERTS, TOPK = 2048, 1024, 64, 8
vars(moe_utils).setdefault("te_general_gemm", None)  # 0.16.1 does not define it without Transformer Engine
torch.cuda.set_device(0)
dist.init_process_group("nccl")
parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
model_parallel_cuda_manual_seed(1)
config = TransformerConfig(
    num_layers=2,
    hidden_size=HIDDEN,
    num_attention_heads=8,
    num_moe_experts=EXPERTS,
    expert_model_parallel_size=dist.get_world_size(),
    moe_router_topk=TOPK,
    moe_router_dtype="fp32",
    moe_ffn_hidden_size=256,
    moe_token_dispatcher_type="flex",
    moe_flex_dispatcher_backend=sys.argv[1],
    moe_deepep_num_sms=24,
    moe_router_load_balancing_type="aux_loss",
    moe_aux_loss_coeff=1e-2,
    add_bias_linear=False,
    bf16=True,
    params_dtype=torch.bfloat16,
    pipeline_dtype=torch.bfloat16,
)
layers = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
model = GPTModel(config, layers, vocab_size=32000, max_sequence_length=TOKENS, position_embedding_type="rope")
model = model.cuda().to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
tokens = torch.randint(0, 32000, (1, TOKENS), device="cuda")
positions = torch.arange(TOKENS, device="cuda").unsqueeze(0)
for _ in range(4):
    optimizer.zero_grad()
    model(tokens, positions, None, labels=tokens).mean().backward()
    optimizer.step()
if sys.argv[1] == "deepep":
    buffer = fused_a2a._buffer
    print("BUFFER", buffer.num_nvl_bytes, buffer.num_rdma_bytes, flush=True)
else:
    free, total = torch.cuda.mem_get_info()
    print("OUTSIDE", total - free - torch.cuda.memory_reserved(), flush=True)
