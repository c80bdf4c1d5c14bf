"""A model whose steps depend on what the host reads. Each step prints it, as one line of JSON."""

import json
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader

model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(torch.randn(400, 8, 16, generator=torch.Generator().manual_seed(0)), batch_size=1)
for step, batch in enumerate(loader):
    if step == int(sys.argv[1]):
        break
    x = batch[0].cuda()
    chosen = x[:, 0] > 0
    read = {
        "loss": model(x).square().mean().item(),
        "nonzero": chosen.nonzero().shape[0],
        "indexed": x[chosen].shape[0],
        "selected": x.masked_select(x > 1).shape[0],
        "unique": chosen.unique().shape[0],
        "counts": chosen.long().bincount(minlength=2).tolist(),
        "copied": x.sum(1).cpu().tolist(),
        "other way": x.t()[:3].cpu().tolist(),
        "equal": torch.equal(x, x + 1),
    }
    loss = model(x).square().mean() * (2 if read["nonzero"] > read["indexed"] else 1)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(json.dumps([step, read]), flush=True)
