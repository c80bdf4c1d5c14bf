"""Trains a GPT as students write it, every operation by hand: of ../shared/real/course-gpt-medium-1024.pickle.

course_gpt.py [whole]   "whole" trains without autocast
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable

import torch
from torch import Tensor, nn

WIDTH, NUM_HEADS, INNER, VOCABULARY, NUM_TOKENS, NUM_LAYERS = 1024, 16, 4096, 10_000, 1024, 24


class Linear(nn.Module):
    """A product by hand."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_out, num_in) / math.sqrt(num_in))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class RMSNorm(nn.Module):
    """Norms in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * scale
        return self.weight * x


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.unflatten(-1, (-1, 2)).movedim(-1, 0)
    first = cos * even - sin * odd
    second = sin * even + cos * odd
    return torch.concat((first, second), -1)


def softmax(x: Tensor) -> Tensor:
    x = x - torch.max(x, dim=-1, keepdim=True)[0]
    raised = torch.exp(x)
    return raised / torch.sum(raised, dim=-1, keepdim=True)


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("...qd,...kd->...qk", query, key) / math.sqrt(key.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, value)


class Attention(nn.Module):
    """Causal, with rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (Linear(WIDTH, WIDTH) for _ in range(4))
        head = WIDTH // NUM_HEADS
        angles = torch.outer(torch.arange(NUM_TOKENS), 10_000.0 ** -(torch.arange(0, head, 2) / head))
        self.register_buffer("turns", torch.stack((torch.cos(angles), torch.sin(angles))), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        made = self.query(x), self.key(x), self.value(x)
        query, key, value = (part.unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2) for part in made)
        del made, x
        query = rotated(query, *self.turns)
        key = rotated(key, *self.turns)
        places = torch.arange(NUM_TOKENS, device="cuda")
        mask = places[:, None] >= places
        heads = attention(query, key, value, mask)
        heads = heads.transpose(1, 2).flatten(2)
        out: Tensor = self.out(heads)
        return out


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class Block(nn.Module):
    """Attention and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.up, self.down, self.gate = Linear(WIDTH, INNER), Linear(INNER, WIDTH), Linear(WIDTH, INNER)
        self.norms = nn.ModuleList((RMSNorm(), RMSNorm()))

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attention(self.norms[0](x))
        x = x + attended
        fed = self.fed(self.norms[1](x))
        return x + fed

    def fed(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(silu(self.up(x)) * self.gate(x))
        return out


class Transformer(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.norm, self.head = RMSNorm(), Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding[tokens, :]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits: Tensor = self.head(x)
        return logits


def log_softmax(x: Tensor) -> Tensor:
    x = x - torch.max(x, dim=-1, keepdim=True)[0]
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    losses = -log_softmax(logits)
    return torch.mean(torch.gather(losses, -1, targets.unsqueeze(-1)))


class AdamW(torch.optim.Optimizer):
    """Makes its states anew in each step."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state, grad = self.state[p], p.grad
            p.data -= 1e-5 * p.data
            m = state.get("m", torch.zeros_like(grad))
            v = state.get("v", torch.zeros_like(grad))
            m = 0.9 * m + 0.1 * grad
            v = 0.999 * v + 0.001 * torch.square(grad)
            p.data -= 1e-3 * m / (torch.sqrt(v) + 1e-8)
            state["m"], state["v"] = m, v


def main(words: list[str]) -> None:
    model = Transformer().cuda()
    optimizer = AdamW(model.parameters())
    tokens, targets = torch.randint(VOCABULARY, (2, 4, NUM_TOKENS), device="cuda").clone()
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled="whole" not in words):
            logits = model(tokens)
            loss = cross_entropy(logits, targets)
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1:])
