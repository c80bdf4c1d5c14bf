"""Training whose arithmetic is known by hand: four equal Llama blocks under DistributedDataParallel."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WIDTH, HIDDEN, HEADS, LAYERS, WORDS, BATCH, TOKENS = 512, 1536, 8, 4, 4096, 2, 1024


class Block(nn.Module):
    """Attention and a gated feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Words to words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.output = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = (
                torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
                if "checkpoint" in sys.argv
                else layer(x)
            )
        return self.output(x)


def main() -> None:
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = nn.parallel.DistributedDataParallel(Llama().cuda().bfloat16())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(4):
        words = torch.randint(0, WORDS, (BATCH, TOKENS + 1)).cuda()
        loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()


if __name__ == "__main__":
    main()
