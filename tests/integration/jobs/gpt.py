"""Trains a small GPT of the shape of nanoGPT's for three steps.

gpt.py MODE    words joined by "-": eager, whole, blocks, ddp, fsdp, checkpoint, graphs
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    """Causal, one product for queries, keys and values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (each.unflatten(2, (4, -1)).transpose(1, 2) for each in self.c_attn(x).chunk(3, dim=2))
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: torch.Tensor = self.c_proj(y.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(width), Attention(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        out: torch.Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT(nn.Module):
    """Two blocks, and a head that shares the embedding's weights."""

    def __init__(self, recomputes: bool, width: int = 256, vocabulary: int = 2048) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.h = nn.ModuleList(Block(width) for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight
        self.recomputes = recomputes

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens)
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return F.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), tokens.flatten())


def main(words: set[str]) -> None:
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    model = GPT("checkpoint" in words).cuda()
    if "fsdp" in words:
        for block in model.h:
            fully_shard(block)
        fully_shard(model)
    if "blocks" in words:
        for block in model.h:
            block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    run: nn.Module = model
    if words & {"whole", "graphs"}:
        run = torch.compile(model, mode="reduce-overhead" if "graphs" in words else None)
    if "ddp" in words:  # small buckets: the compiled graph is cut
        run = DistributedDataParallel(run, device_ids=[local], bucket_cap_mb=2)
    for _ in range(3):
        tokens = torch.randint(2048, (8, 256), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


main(set(sys.argv[1].split("-")))
