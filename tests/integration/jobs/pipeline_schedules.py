"""A pipeline of equal stages by a schedule of torch.distributed.pipelining: SCHEDULE MICRO_BATCHES [WIDTH]."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

ROWS = 256  # of a micro-batch


class Block(nn.Module):
    """Two products, whose input needs a gradient in the first stage, too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(width))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x + self.shift)))


def main(name: str, micro_batches: int, width: int) -> None:
    dist.init_process_group("nccl")
    torch.cuda.set_device(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    schedule = getattr(pipelining, f"Schedule{name}")
    if name in ("GPipe", "1F1B"):
        mine = [rank]
    else:
        mine = [rank, 2 * ranks - 1 - rank] if "V" in name else [rank, rank + ranks]
    num_stages = ranks * len(mine)
    example = torch.empty(ROWS, width, device="cuda")
    modules = [Block(width).cuda() for _ in mine]
    stages: list[Any] = [
        pipelining.PipelineStage(
            module,
            stage,
            num_stages,
            torch.device("cuda", 0),
            input_args=(example.clone().requires_grad_(stage > 0),),
            output_args=(example.clone().requires_grad_(),),
        )
        for stage, module in zip(mine, modules, strict=True)
    ]
    made = schedule(
        stages if len(mine) > 1 else stages[0], micro_batches, loss_fn=lambda out, target: (out * target).sum()
    )
    optimizer = torch.optim.SGD([each for module in modules for each in module.parameters()], lr=0.1)
    batch = torch.randn(ROWS * micro_batches, width, device="cuda")
    for _ in range(3):
        last = num_stages - 1 in mine
        made.step(*((batch,) if 0 in mine else ()), target=batch if last else None, losses=[] if last else None)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 2048)
