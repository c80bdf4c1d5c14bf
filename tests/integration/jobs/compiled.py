"""Trains a compiled model for four steps and prints the allocator's statistics.

python compiled.py MODE    "default", a mode of torch.compile, or "each-layer": layer.compile() of each
"""

from __future__ import annotations

import json
import sys

import torch
from torch import nn

STATISTICS = (
    "allocated_bytes.all.peak",
    "reserved_bytes.all.peak",
    "allocation.all.allocated",
    "segment.all.allocated",
)


def main(mode: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).cuda()
    if mode == "each-layer":
        for each in model.layers:
            each.compile()
        compiled = model
    else:
        compiled = torch.compile(model, mode=mode)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        loss = compiled(torch.randn(8, 256, 256, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
    stats = torch.cuda.memory_stats()
    print("STATS", json.dumps({name: stats[name] for name in STATISTICS}))


main(sys.argv[1])
