"""A replicated model with a static graph: DDP builds its buckets anew in the third step. Prints each step's loss."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(steps: int) -> None:
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).cuda(), static_graph=True)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(steps):
        loss = model(torch.randn(64, 64, device="cuda")).abs().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item(), flush=True)


main(int(sys.argv[1]))
