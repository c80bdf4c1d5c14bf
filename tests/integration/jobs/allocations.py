"""Allocates and frees at random, in every way that makes the caching allocator decide; writes down what it counted.

python allocations.py SEED STATISTICS_FILE
"""

from __future__ import annotations

import contextlib
import json
import random
import sys

import torch

KIB, MIB = 1 << 10, 1 << 20
#: Around every border that c10/cuda/CUDACachingAllocator.cpp knows: 512 B, 1 MiB, 10 MiB, 20 MiB, the 32 MiB that a
#: test sets as the limit of splits, and far above.
RANGES = (
    (1, 600),
    (KIB, 900 * KIB),
    (MIB - 600, MIB + 600),
    (MIB, 10 * MIB),
    (10 * MIB - 9, 21 * MIB),
    (30 * MIB, 200 * MIB),
)
STATISTICS = ("allocated_bytes.all.peak", "reserved_bytes.all.peak", "allocated_bytes.all.current")
COUNTS = ("reserved_bytes.all.current", "num_alloc_retries", "num_ooms")


def move(choose: random.Random, streams: list[torch.cuda.Stream], held: list[torch.Tensor]) -> None:
    """Allocate or free something; seldom, empty the cache, free many at once, or ask for more than there is."""
    if choose.random() < (0.75 if len(held) < 60 else 0.35) or not held:
        with torch.cuda.stream(choose.choice(streams)):
            held.append(torch.empty(choose.randint(*choose.choice(RANGES)), dtype=torch.uint8, device="cuda"))
    else:
        tensor = held.pop(choose.randrange(len(held)))
        if choose.random() < 0.2:
            tensor.record_stream(choose.choice(streams))
    if choose.random() < 0.002:
        torch.cuda.empty_cache()
    if choose.random() < 0.002:
        del held[choose.randrange(len(held) + 1) :]
    if choose.random() < 0.001:
        with contextlib.suppress(torch.OutOfMemoryError):
            torch.empty(1 << 41, dtype=torch.uint8, device="cuda")


def main(seed: int, statistics: str) -> None:
    """Some thousand random moves."""
    choose = random.Random(seed)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    held: list[torch.Tensor] = []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [torch.zeros(size, dtype=torch.uint8, device="cuda") for size in (KIB, 3 * MIB, 30 * MIB)]
        del captured[1]
    for _ in range(3_000):
        with contextlib.suppress(torch.OutOfMemoryError):
            move(choose, streams, held)
    stats = torch.cuda.memory_stats()
    found = {name: stats[name] for name in (*STATISTICS, *COUNTS)} | {"segments": torch.cuda.memory_snapshot()}
    with open(statistics, "w") as file:
        json.dump(found, file)


main(int(sys.argv[1]), sys.argv[2])
