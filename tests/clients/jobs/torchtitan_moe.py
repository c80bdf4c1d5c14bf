"""torchtitan's layers of experts, which exchange tokens over all ranks; prints each layer's counts.

The argument is the number of groups of experts of which a token picks two; without it, there are none.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

EXPERTS, TOP_K, WIDTH, INNER, BATCH, LENGTH = 16, 2, 256, 512, 2, 2048
set_spmd_backend("default")
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = dist.init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("ep",))
groups = {"num_expert_groups": int(sys.argv[1]), "num_limited_groups": 2} if len(sys.argv) > 1 else {}
config = MoE.Config(
    num_experts=EXPERTS,
    router=TokenChoiceTopKRouter.Config(
        num_experts=EXPERTS,
        top_k=TOP_K,
        gate=Linear.Config(in_features=WIDTH, out_features=EXPERTS, bias=False),
        **groups,
    ),
    routed_experts=RoutedExperts.Config(
        inner_experts=GroupedExperts.Config(dim=WIDTH, hidden_dim=INNER, num_experts=EXPERTS // mesh.size()),
        token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K),
    ),
)
with torch.device("cuda"):
    layers = torch.nn.ModuleList([config.build() for _ in range(2)])
for parameter in layers.parameters():
    torch.nn.init.normal_(parameter, std=0.02)
for layer in layers:
    layer.routed_experts.token_dispatcher.wire_meshes(ep_mesh=mesh["ep"])
optimizer = torch.optim.AdamW(layers.parameters(), 1e-3)
for _ in range(3):
    hidden = torch.randn(BATCH, LENGTH, WIDTH, device="cuda", requires_grad=True)
    for layer in layers:
        hidden = hidden + layer(hidden)
    hidden.square().mean().backward()
    print(json.dumps({"counts": [layer.tokens_per_expert_E.long().tolist() for layer in layers]}), flush=True)
    with torch.no_grad():
        for layer in layers:  # as torchtitan's optimizer does
            counts = layer.tokens_per_expert_E
            layer.expert_bias_E.add_(1e-3 * torch.sign(counts.mean() - counts))
            counts.zero_()
    optimizer.step()
    optimizer.zero_grad()
