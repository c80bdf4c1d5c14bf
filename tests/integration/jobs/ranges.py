"""Training that names its parts: NVTX ranges, record_function, and a backward in a range."""

import torch
from torch import nn
from torch.profiler import record_function

net = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).cuda()
optimizer = torch.optim.AdamW(net.parameters())
given = torch.randn(64, 256, device="cuda")
for _ in range(4):
    torch.cuda.nvtx.range_push("iteration")
    with torch.cuda.nvtx.range("forward"), record_function("net"):
        result = net(given)
    with record_function("backward"):
        result.pow(2).mean().backward()
    handle = torch.cuda.nvtx.range_start("update")
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.nvtx.range_end(handle)
    torch.cuda.nvtx.range_pop()
