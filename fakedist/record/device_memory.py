"""What is outside the caching allocator: NCCL's settings, and the other memory in use on a real GPU."""

from __future__ import annotations

import os

import torch

from fakedist.run.nccl import of_environment
from fakedist.run.records import NcclRecord, OutsideRecord


def nccl_record() -> NcclRecord:
    """The version of NCCL that the job would have loaded, and its environment now."""
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return NcclRecord(version, of_environment(os.environ))


def outside_record(device: int) -> OutsideRecord | None:
    """Bytes in use on the real GPU, and bytes that the caching allocator reserved. None if CUDA no longer answers.

    The bytes in use include other processes on the same GPU.

    Args:
        device: The GPU's index.
    """
    try:
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
    except RuntimeError:  # a sticky CUDA error: every later call fails
        return None
    return OutsideRecord(device, used_bytes=total - free, reserved_bytes=reserved)
