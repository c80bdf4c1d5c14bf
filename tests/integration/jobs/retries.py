"""Trains a layer, with 300 MiB on one stream and 500 MiB on another for a moment of each step.

python retries.py COUNTS_FILE [empty_cache]

The allocator keeps a cache for each stream, so a GPU with less than both has it give one back for the other.
"""

from __future__ import annotations

import json
import sys

import torch

MIB = 1 << 20


def main(counts: str, *how: str) -> None:
    """Six steps; the retries of each go to a file."""
    layer = torch.nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters(), 1e-3)
    side = torch.cuda.Stream()
    retries = []
    for _ in range(6):
        before = torch.cuda.memory_stats()["num_alloc_retries"]
        loss = layer(torch.ones(64, 1024, device="cuda")).sum()
        with torch.cuda.stream(side):
            torch.empty(300 * MIB, dtype=torch.uint8, device="cuda").zero_()
        torch.empty(500 * MIB, dtype=torch.uint8, device="cuda").zero_()
        if "empty_cache" in how:
            torch.cuda.empty_cache()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        retries.append(torch.cuda.memory_stats()["num_alloc_retries"] - before)
    with open(counts, "w") as file:
        json.dump({"retries": retries, "free": torch.cuda.mem_get_info()}, file)


main(*sys.argv[1:])
