"""A small mixture of experts in Megatron-core whose routers the hook of docs/experts.md logs; EP is the world size."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig

LENGTH, BATCH, EXPERTS = 512, 2, 8
if not hasattr(moe_utils, "HAVE_TE") or not moe_utils.HAVE_TE:
    moe_utils.te_general_gemm = None  # as in examples/megatron_local.py
torch.cuda.set_device(0)
torch.distributed.init_process_group("nccl")
parallel_state.initialize_model_parallel(expert_model_parallel_size=torch.distributed.get_world_size())
model_parallel_cuda_manual_seed(1)
config = TransformerConfig(
    num_layers=3,
    hidden_size=256,
    num_attention_heads=4,
    expert_model_parallel_size=torch.distributed.get_world_size(),
    num_moe_experts=EXPERTS,
    moe_router_topk=2,
    moe_router_load_balancing_type="none",
    moe_token_dispatcher_type="alltoall",
    add_bias_linear=False,
    bf16=True,
    params_dtype=torch.bfloat16,
)
spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
model = GPTModel(config, spec, vocab_size=1024, max_sequence_length=LENGTH).cuda().bfloat16()
iteration = 0
exec(re.findall(r"```python\n(.*?)```", (Path(__file__).parents[3] / "docs" / "experts.md").read_text(), re.DOTALL)[-1])
tokens = torch.randint(1024, (BATCH, LENGTH), device="cuda")
positions = torch.arange(LENGTH, device="cuda").expand(BATCH, -1)
mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device="cuda").triu(1)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
while iteration < 2:
    model(tokens, positions, mask, labels=tokens).mean().backward()
    optimizer.step()
    iteration += 1
