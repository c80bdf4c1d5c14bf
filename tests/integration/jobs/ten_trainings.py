"""Ten small trainings, by name: what their blocks are for is known here, and inferred from their snapshots alone."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

WIDTH, DEPTH, TOKENS, BATCH = 256, 4, 128, 8


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, width] to the same."""
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A small language model."""

    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(1000, WIDTH), nn.Linear(WIDTH, 1000)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.recomputes = recomputes

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[batch, tokens] to [batch, tokens, vocabulary]."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(x)


def perceptron() -> nn.Module:
    """Products and activations alone."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(6)))


def convolutions() -> nn.Module:
    """Convolutions with norms."""
    layers = [
        layer
        for i in range(5)
        for layer in (nn.Conv2d(3 if not i else 64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU())
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def train(kind: str) -> None:
    """Train three steps."""
    torch.manual_seed(0)
    model = {"sgd": perceptron, "momentum": perceptron, "convolutions": convolutions}.get(
        kind, lambda: Transformer(recomputes=kind == "recompute")
    )()
    model = model.cuda()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    if kind == "fsdp":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    if kind in ("sgd", "momentum", "convolutions"):
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.0 if kind == "sgd" else 0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), 0.001, fused=kind == "fused")
    for _ in range(3):
        for _ in range(2 if kind == "accumulate" else 1):
            if kind in ("sgd", "momentum"):
                loss = model(torch.randn(512, 1024, device="cuda")).square().mean()
            elif kind == "convolutions":
                images = torch.randn(16, 3, 64, 64, device="cuda")
                loss = F.cross_entropy(model(images), torch.randint(10, (16,), device="cuda"))
            else:
                tokens = torch.randint(1000, (BATCH, TOKENS), device="cuda")
                with torch.autocast("cuda", torch.bfloat16, enabled=kind == "autocast"):
                    loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
            loss.backward()
        if kind == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    train(sys.argv[1])
    dist.destroy_process_group()
