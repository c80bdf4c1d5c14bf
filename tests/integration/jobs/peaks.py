"""Two training steps of a small transformer; prints the allocator's own peaks at the end."""

import json

import torch
from torch import nn


def main() -> None:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.Embedding(1000, 512), nn.TransformerEncoder(block, 4), nn.Linear(512, 1000)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        tokens = torch.randint(1000, (8, 300), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert not torch.isnan(loss)
    stats = torch.cuda.memory_stats()
    names = ("allocated_bytes.all.peak", "reserved_bytes.all.peak", "allocation.all.allocated", "segment.all.allocated")
    print("STATS", json.dumps([stats[name] for name in names]))


if __name__ == "__main__":
    main()
