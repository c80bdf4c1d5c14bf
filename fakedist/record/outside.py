"""What lies outside of the caching allocator: NCCL's settings, and how much a real GPU holds beside it."""

from __future__ import annotations

import os
from typing import Any

import torch

from fakedist.run.nccl import of_environment


def nccl_record() -> dict[str, Any]:
    """The version of NCCL that the job would have loaded, and what its environment says now."""
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return {"kind": "nccl", "version": version, "environment": of_environment(os.environ)}


def outside_record(device: int) -> dict[str, Any] | None:
    """Bytes in use on the real GPU less what the caching allocator reserved; None where CUDA cannot say any more.

    Other processes on the same GPU are in it.

    Args:
        device: Its index.
    """
    try:
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
    except RuntimeError:  # an error of CUDA that lasts: every call fails after it
        return None
    return {"kind": "outside", "device": device, "used_bytes": total - free, "reserved_bytes": reserved}
