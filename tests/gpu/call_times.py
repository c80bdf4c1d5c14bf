"""How long the host takes in torch's operations whose calls of CUDA return at once: on a real GPU and a virtual one.

    python tests/gpu/call_times.py RESULT.json [--device virtual --gpu h200 --gpu-memory BYTES]

CUDA's own calls take next to nothing on the virtual GPU, so the differences are what they take on a real one. Bursts
are shorter than the launch queue; between them the device is waited for. What the operations use has no known values:
else the virtual GPU takes some 30 us for a launch, to find out what that makes unknown.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from fakedist.extras.confirm.allocator_history import replace_with  # noqa: E402
from fakedist.extras.confirm.scripts.device import device, parse  # noqa: E402

BURST, NUM_BURSTS = 200, 40


def _operations(pool: Any, with_nccl: bool) -> dict[str, Callable[[], object]]:
    import torch
    import torch.distributed as dist
    from torch import nn

    cleared = torch.empty(8, 64, device="cuda")
    with torch.cuda.use_mem_pool(pool):
        x, y = (torch.empty(8, 64, device="cuda") for _ in range(2))
        linear = nn.utils.skip_init(nn.Linear, 64, 64, bias=False, device="cuda")
        matrix = torch.empty(64, 64, device="cuda")
    event, other = torch.cuda.Event(), torch.cuda.Stream()
    pinned = torch.zeros(8, 64).pin_memory()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            y.add_(1)
    found: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "addition": lambda: x + x,
        "addition in place": lambda: x.add_(1),
        "product (torch.mm)": lambda: torch.mm(x, matrix),
        "Linear's forward": lambda: linear(x),
        "fill (zero_)": lambda: cleared.zero_(),
        "copy on the device": lambda: y.copy_(x),
        "copy from pinned memory": lambda: y.copy_(pinned, non_blocking=True),
        "event recorded": lambda: event.record(),
        "event waited for by a stream": lambda: other.wait_event(event),
        "graph of 20 kernels": graph.replay,
    }
    if with_nccl:
        store = dist.HashStore()
        dist.init_process_group("nccl", store=store, rank=0, world_size=1)
        found["all_reduce of one rank"] = lambda: dist.all_reduce(x)
    return found


def _us(operation: Callable[[], object]) -> tuple[float, float]:
    """Least and median of the bursts, microseconds for each call."""
    import torch

    times = []
    for _ in range(NUM_BURSTS):
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        for _ in range(BURST):
            operation()
        times.append((time.perf_counter_ns() - begin) / BURST / 1e3)
    return min(times), statistics.median(times)


def main() -> None:
    args = parse(__doc__, ("result", {"type": Path}))
    with device(args):
        import torch

        rows, pool = [], torch.cuda.MemPool()
        gc.disable()
        for name, operation in _operations(pool, args.device == "present").items():
            with torch.cuda.use_mem_pool(pool):
                operation()
                least, median = _us(operation)
            rows.append({"operation": name, "least_us": round(least, 3), "median_us": round(median, 3)})
            replace_with(args.result, rows)
        time.sleep(0.3)


if __name__ == "__main__":
    main()
