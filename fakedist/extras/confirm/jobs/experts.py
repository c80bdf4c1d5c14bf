"""Jobs: mixtures of experts, with a capacity and without."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fakedist.extras.confirm.jobs import dense
from fakedist.extras.confirm.jobs.models import random_tokens
from fakedist.extras.confirm.jobs.reading import reading

F: Any = torch.nn.functional

DIM, HIDDEN, NUM_EXPERTS, TOP = 1024, 2048, 8, 2


def _train(layer: nn.Module, tokens: Tensor) -> None:
    embedding, output = nn.Embedding(4_000, DIM).cuda(), nn.Linear(DIM, 4_000).cuda()
    modules = nn.ModuleList((embedding, layer, output))
    optimizer = torch.optim.AdamW(modules.parameters())
    for _ in range(dense.STEPS):
        with torch.autocast("cuda", torch.bfloat16):
            logits = output(layer(embedding(tokens), tokens))
        F.cross_entropy(logits.float(), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


class _Capacity(nn.Module):
    """A router of its own; every expert takes equally many tokens, so no size depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, NUM_EXPERTS)
        self.up = nn.Parameter(torch.zeros(NUM_EXPERTS, DIM, HIDDEN))
        self.down = nn.Parameter(torch.zeros(NUM_EXPERTS, HIDDEN, DIM))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        capacity = x.shape[0] * TOP // NUM_EXPERTS
        scores = self.router(x).softmax(-1)
        weights, chosen = scores.t().topk(capacity)  # every expert chooses its tokens
        inputs = x.index_select(0, chosen.flatten()).view(NUM_EXPERTS, capacity, DIM)
        outputs = torch.bmm(F.silu(torch.bmm(inputs, self.up)), self.down)
        outputs = outputs * weights.unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, chosen.flatten(), outputs.flatten(0, 1).to(x.dtype))


def capacity() -> None:
    """Experts that choose their tokens."""
    _train(_Capacity().cuda(), random_tokens(4, 1024, 4_000).flatten())


class _Dropless(nn.Module):
    """A token's number says its experts, so that routes are the same whatever the weights are; sizes follow them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(NUM_EXPERTS, DIM, HIDDEN))
        self.down = nn.Parameter(torch.zeros(NUM_EXPERTS, HIDDEN, DIM))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        with reading():
            experts = tokens % NUM_EXPERTS
            order = experts.argsort(stable=True)
            counts = (experts[:, None] == torch.arange(NUM_EXPERTS, device="cuda")).sum(0)
            ends = counts.cumsum(0).to(torch.int32)
            sizes = counts.tolist()
        rows = x.index_select(0, order).to(torch.bfloat16)
        hidden = F.silu(torch._grouped_mm(rows, self.up.to(torch.bfloat16), offs=ends))
        grouped = torch._grouped_mm(hidden, self.down.to(torch.bfloat16), offs=ends)
        parts = [part * 2 for part in grouped.split(sizes)]
        return torch.zeros_like(x).index_add(0, order, torch.cat(parts).to(x.dtype))


def dropless() -> None:
    """Give each expert a row for every token that takes it: the script reads the counts back."""
    with reading():
        tokens = random_tokens(1, 2048, 4_000).flatten()
    _train(_Dropless().cuda(), tokens)
