"""Parameters that no module has, and a copy of a module's weight that an optimizer updates in its place."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
net = nn.Linear(1024, 1024, device="cuda")
scale = nn.Parameter(torch.ones(2048, 1024, device="cuda"))
leaf = torch.ones(1024, 512, device="cuda", requires_grad=True)
copy = net.weight.detach().clone().requires_grad_()
optimizers = [torch.optim.AdamW([net.bias, scale, leaf]), torch.optim.SGD([copy])]
for _ in range(3):
    (net(torch.ones(8, 1024, device="cuda")) @ scale.t()).sum().backward()
    leaf.sum().backward()
    copy.grad = net.weight.grad
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    net.weight.grad = None
