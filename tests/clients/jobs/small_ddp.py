"""Three blocks under DistributedDataParallel, the second one checkpointed; ends as its argument says."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if number == 1 else block(x)
        out: torch.Tensor = self.head(x)
        return out


def main(end: str) -> None:
    dist.init_process_group("nccl")
    model = nn.parallel.DistributedDataParallel(Net().cuda())
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(10):
        model(torch.randn(4, 64, device="cuda")).square().mean().backward()
        if step == 2 and end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()


main(sys.argv[1] if len(sys.argv) > 1 else "")
