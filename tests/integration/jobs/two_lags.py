"""A step whose side stream first has too little to do to lag, and then more than its host waits for."""

from __future__ import annotations

import torch
from torch import nn

MIB, BLOCKS = 1 << 20, 5


def keep(side: torch.cuda.Stream, size: int, work: torch.Tensor) -> None:
    """Have the allocator keep some blocks of a size until a side stream is done with each."""
    for _ in range(BLOCKS):
        block = torch.empty(size, dtype=torch.uint8, device="cuda")
        with torch.cuda.stream(side):
            work @ work
        block.record_stream(side)
        del block


def main() -> None:
    """Three steps."""
    side, model = torch.cuda.Stream(), nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    small, large = (torch.empty(size, size, dtype=torch.bfloat16, device="cuda") for size in (16, 8192))
    for _ in range(3):
        keep(side, 200 * MIB, small)
        torch.cuda.synchronize()
        keep(side, 300 * MIB, large)
        model(torch.ones(8, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()


main()
