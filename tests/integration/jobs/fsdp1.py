"""Four steps of two linear layers in one flat parameter of FSDP1, with AdamW."""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

torch.distributed.init_process_group("nccl")
torch.cuda.set_device(0)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).cuda()
sharded = FullyShardedDataParallel(model, use_orig_params=False)
optimizer = torch.optim.AdamW(sharded.parameters())
for _ in range(4):
    sharded(torch.randn(64, 256, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
