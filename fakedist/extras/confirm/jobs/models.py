"""The models of the jobs, in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

F: Any = torch.nn.functional


class Block(nn.Module):
    """Attention and feed-forward of four times the width, each behind a LayerNorm with a residual connection."""

    def __init__(self, dim: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, dim] to the same."""
        # Heads by size of a head, so that a tensor-parallel rank with a part of qkv's columns has a part of the heads.
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (-1, 3, self.head_dim))
        query, key, value = (each.transpose(1, 2) for each in qkv.unbind(-2))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=self.dropout)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        added: Tensor = self.down(F.gelu(self.up(self.norm_2(x))))
        return x + added

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.qkv.in_features // self.num_heads


class Transformer(nn.Module):
    """An embedding, blocks, a norm and a product with the vocabulary."""

    def __init__(
        self, num_layers: int = 4, dim: int = 1024, num_heads: int = 16, vocab_size: int = 32_000, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, length] to [batch, length, vocabulary]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.output(self.norm(x))
        return logits


class ConvNet(nn.Module):
    """A residual network of bottlenecks, as ResNet has them."""

    def __init__(self, width: int = 64, depth: tuple[int, ...] = (2, 2, 2, 2)) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)
        )
        stages: list[nn.Module] = []
        channels = width
        for stage, number in enumerate(depth):
            for block in range(number):
                stride = 2 if block == 0 and stage > 0 else 1
                stages.append(Bottleneck(channels, width << stage, stride))
                channels = (width << stage) * 4
        self.stages = nn.Sequential(*stages)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))

    def forward(self, images: Tensor) -> Tensor:
        """[batch, 3, height, width] to [batch, classes]."""
        scores: Tensor = self.head(self.stages(self.stem(images)))
        return scores


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions with a residual connection; the middle one is grouped in odd stages."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(True),
            nn.Conv2d(width, width, 3, stride, 1, groups=4 if width == 128 else 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(True),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        same = stride == 1 and channels == 4 * width
        self.skip = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))
        )

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels, height, width] to the same."""
        return torch.relu(self.body(x) + self.skip(x))


def random_tokens(batch: int, length: int, vocab_size: int = 32_000) -> Tensor:
    """Tokens [batch, length] on the GPU, drawn on the host, so that they are the same on every device."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (batch, length), generator=generator).cuda()


def language_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """The mean cross entropy of the next token."""
    loss: Tensor = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
    return loss
