"""DeepSpeed's layers of experts; prints each layer's counts. The arguments are experts a token, and drop or keep."""

import json
import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

EXPERTS, WIDTH, TOKENS = 16, 256, 2048
top_k, drops = int(sys.argv[1]), sys.argv[2] == "drop"
deepspeed.init_distributed("nccl")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        expert = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
        )
        options = {"num_experts": EXPERTS, "ep_size": dist.get_world_size(), "k": top_k, "drop_tokens": drops}
        self.layers = torch.nn.ModuleList([MoE(WIDTH, expert, **options) for _ in range(2)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            out, loss, counts = layer(hidden)
            print(json.dumps({"counts": counts.tolist()}), flush=True)
            hidden = hidden + out
        return hidden.float().square().mean() + loss


model = Model()
groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
config = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
for _ in range(2):
    engine.backward(engine(torch.randn(1, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)))
    engine.step()
