"""A small GPT compiled by torch.compile, in bfloat16 autocast, with AdamW."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 1_024


class Block(nn.Module):
    """Attention and an MLP, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the stream after this block; x: batch, sequence, width."""
        batch, sequence, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, sequence, width))
        return x + self.mlp(self.mlp_norm(x))


def main() -> None:
    """Train for some steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1_000)
    args = parser.parse_args()
    blocks = nn.Sequential(*[Block(args.width, 4) for _ in range(args.layers)])
    model = nn.Sequential(nn.Embedding(VOCABULARY, args.width), blocks, nn.Linear(args.width, VOCABULARY)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    compiled = torch.compile(model)
    for _ in range(args.steps):
        tokens = torch.randint(VOCABULARY, (4, 257), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            logits = compiled(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
