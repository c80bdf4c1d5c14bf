"""Fills and empties memory so that segments are left in pieces, and writes down how the allocator sees them.

python held_memory.py SEGMENTS_FILE
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import torch

KIB, MIB = 1 << 10, 1 << 20
SIZES = (3, 513, 40 * KIB, MIB - 1, MIB + 1, 3 * MIB, 9 * MIB + 7, 12 * MIB, 19 * MIB, 33 * MIB)


def main(path: str) -> list[torch.Tensor]:
    """Three hundred tensors on two streams, of which every third and a row of neighbours are freed again."""
    choose = random.Random(1)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    held: list[torch.Tensor] = []
    for number in range(300):
        with torch.cuda.stream(streams[number % 7 == 0]):
            held.append(torch.empty(choose.choice(SIZES), dtype=torch.uint8, device="cuda"))
    del held[::3]
    del held[20:60]
    torch.cuda.empty_cache()
    held += [torch.empty(size, dtype=torch.uint8, device="cuda") for size in SIZES]
    with open(path, "w") as file:
        json.dump([told(segment) for segment in torch.cuda.memory._snapshot()["segments"]], file)
    return held


def told(segment: dict[str, Any]) -> dict[str, Any]:
    """Fields that fakedist's own snapshot must have, too; a free block still has its last request's size in torch's."""
    keys = ("address", "total_size", "allocated_size", "requested_size", "stream", "segment_type", "is_expandable")
    blocks = [
        [
            block["address"],
            block["size"],
            block["requested_size"] if block["state"] != "inactive" else 0,
            block["state"],
        ]
        for block in segment["blocks"]
    ]
    return {**{key: segment[key] for key in keys}, "blocks": blocks}


kept = main(sys.argv[1])  # until the process ends
