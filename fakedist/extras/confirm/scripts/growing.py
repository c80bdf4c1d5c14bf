"""A job that grows until it does not fit, with less and less memory: where it fails each time.

The memory shrinks in steps of 1 GiB, in two ways. "allocator": torch.cuda.set_per_process_memory_fraction, a limit of
the caching allocator's own. "device": cudaMalloc, past the allocator, takes all but so much of the device, so it is the
device that refuses. Each trial trains from scratch: three steps of a transformer, each on longer sequences than the
last. One trial without a limit runs first, so that libraries have already taken what they take at first use.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fakedist.extras.confirm.jobs import MOST_GIB
from fakedist.extras.confirm.jobs.training import Transformer, language_loss
from fakedist.extras.confirm.scripts.start import Measuring

GIB = 1 << 30
_LENGTHS = (256, 1024, 4096)


@dataclass
class Failure:
    """Where a trial ended.

    Attributes:
        step: From 1; 0 while the model is made.
        phase: "init", "forward", "backward", "optimizer"; empty where it ended well.
        num_allocations: Blocks that the allocator had given.
        requested_bytes: Of the request that failed; 0 where none did.
        peak_reserved_bytes: Most in segments.
    """

    step: int = 0
    phase: str = "init"
    num_allocations: int = 0
    requested_bytes: int = 0
    peak_reserved_bytes: int = 0


def measure(measuring: Measuring) -> None:
    """Run the trials, one after another."""
    rows: list[dict[str, Any]] = [{"limit": "nothing", "gib": 0, "found": asdict(trial())}]
    for limit, limited in (("allocator", by_allocator), ("device", by_device)):
        for gib in range(MOST_GIB, 0, -1):
            with limited(gib * GIB):
                rows.append({"limit": limit, "gib": gib, "found": asdict(trial())})
            measuring.write(rows)


@contextmanager
def by_allocator(num_bytes: int) -> Iterator[None]:
    """The allocator's own limit."""
    torch.cuda.set_per_process_memory_fraction(num_bytes / torch.cuda.mem_get_info()[1])
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@contextmanager
def by_device(num_bytes: int) -> Iterator[None]:
    """All but so many bytes of the device are taken outside the allocator."""
    runtime = ctypes.CDLL(None)  # torch has loaded it for the whole process
    taken = ctypes.c_void_p()
    size = torch.cuda.mem_get_info()[0] - num_bytes
    if code := runtime.cudaMalloc(ctypes.byref(taken), ctypes.c_size_t(size)):
        raise SystemExit(f"cudaMalloc of {size} bytes: error {code}")
    yield
    runtime.cudaFree(taken)


def trial() -> Failure:
    """One training from nothing; where it failed. Everything is given back after it."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats().get("allocation.all.allocated", 0)
    asked: list[int] = []
    bindings: Any = torch._C
    bindings._cuda_attach_out_of_memory_observer(lambda device, size, total, free: asked.append(size))
    found = Failure()
    try:
        _train(found)
        found.phase = ""
    except torch.OutOfMemoryError:
        found.requested_bytes = asked[-1]
    found.num_allocations = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    found.peak_reserved_bytes = torch.cuda.max_memory_reserved()
    gc.collect()
    torch.cuda.synchronize()
    bindings._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return found


def _train(found: Failure) -> None:
    torch.manual_seed(0)
    model = Transformer(num_layers=8, dim=1024).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for step, length in enumerate(_LENGTHS, 1):
        found.step, found.phase = step, "forward"
        tokens = torch.zeros(4, length, dtype=torch.int64, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = language_loss(model(tokens), tokens)
        found.phase = "backward"
        loss.backward()
        found.phase = "optimizer"
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
