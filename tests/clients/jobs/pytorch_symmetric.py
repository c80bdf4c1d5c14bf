"""Asynchronous tensor parallelism: compiled products that fetch or send parts of a matrix while they compute."""

from __future__ import annotations

import os

import torch
import torch._inductor.config
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

WIDTH, HIDDEN, LAYERS, RANKS = 512, 2048, 2, 8


class Block(nn.Module):
    """A norm of a part of the sequence, and two products of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x and what the block adds to it."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch._inductor.config._micro_pipeline_tp = True
mesh = init_device_mesh("cuda", (RANKS,), mesh_dim_names=("tp",))
with torch.device("cuda"):
    model = nn.Sequential(*[Block() for _ in range(LAYERS)]).to(torch.bfloat16)
for block in model:
    plan = {
        "norm": SequenceParallel(use_local_output=False),
        "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "down": RowwiseParallel(input_layouts=Shard(-1), output_layouts=Shard(1), use_local_output=True),
    }
    parallelize_module(block, mesh["tp"], plan)
    block.compile()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
for _ in range(2):
    model(torch.randn(2, 128, WIDTH, device="cuda", dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
