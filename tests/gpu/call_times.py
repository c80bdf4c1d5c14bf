"""How long the host takes in torch's operations whose calls of CUDA return at once: on a real GPU and a virtual one.

A module for fakedist/extras/confirm/scripts/start.py.

CUDA's own calls take next to nothing on the virtual GPU, so the differences are what they take on a real one. Bursts
are shorter than the launch queue; between them the device is waited for. What the operations use has no known values:
else the virtual GPU takes some 30 us for a launch, to find out what that makes unknown.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fakedist.extras.confirm.scripts.start import Measuring

BURST, NUM_BURSTS = 200, 40


def _operations(pool: Any, with_nccl: bool) -> dict[str, Callable[[], object]]:
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
    times = []
    for _ in range(NUM_BURSTS):
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        for _ in range(BURST):
            operation()
        times.append((time.perf_counter_ns() - begin) / BURST / 1e3)
    return min(times), statistics.median(times)


def measure(measuring: Measuring) -> None:
    rows, pool = [], torch.cuda.MemPool()
    gc.disable()
    for name, operation in _operations(pool, measuring.gpu is None).items():
        with torch.cuda.use_mem_pool(pool):
            operation()
            least, median = _us(operation)
        rows.append({"operation": name, "least_us": round(least, 3), "median_us": round(median, 3)})
        measuring.write(rows)
