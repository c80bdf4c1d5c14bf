"""Threads that count, train and choose with small tensors, each its own, as one thread does."""

import sys
import threading
from typing import Any

import torch
from torch import nn

NUM_STEPS, NUM_EXPERTS, NUM_TOKENS = 12, 8, 64


def steps(seed: int) -> list[Any]:
    """Counters, histograms and weights of each step."""
    drawn = torch.Generator().manual_seed(seed)
    count, number = torch.zeros(NUM_EXPERTS, dtype=torch.int64, device="cuda"), torch.zeros((), device="cuda")
    weight = nn.Parameter(torch.tensor([1.0, 2.0], device="cuda"))
    optimizer = torch.optim.SGD([weight], 0.1, momentum=0.9, fused=True)
    rows: list[Any] = []
    for _ in range(NUM_STEPS):
        chosen = torch.randint(NUM_EXPERTS, (NUM_TOKENS,), generator=drawn).cuda()
        count += torch.bincount(chosen, minlength=NUM_EXPERTS)
        number += 1
        (weight * torch.tensor([1.0, 3.0], device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        order = torch.sort(chosen, stable=True)[1]
        rows.append((number.item(), count.tolist(), weight.tolist(), order.tolist(), (chosen == 3).nonzero().tolist()))
    return rows


def train(seed: int, rows: dict[int, list[Any]]) -> None:
    """The same after a module has run."""
    nn.Linear(2, 2).cuda()(torch.ones(1, 2, device="cuda"))
    rows[seed] = steps(seed)


if __name__ == "__main__":
    alone = {seed: steps(seed) for seed in range(3)}
    sys.setswitchinterval(1e-5)
    at_once: dict[int, list[Any]] = {}
    threads = [threading.Thread(target=train, args=(seed, at_once)) for seed in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("alike:", at_once == alone)
