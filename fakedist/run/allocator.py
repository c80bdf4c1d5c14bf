"""What of PyTorch's allocator settings cannot be recorded; known to the parent and to the rank."""

from __future__ import annotations

import re
from collections.abc import Mapping

#: The allocator's settings: the name since torch 2.9 first, the older one beside it.
SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
#: Set to anything, every tensor is a cudaMalloc of its own (c10/cuda/CUDACachingAllocator.cpp).
NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"


def refusal(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Why an allocator with these settings keeps no history, and what to type; None where it keeps one."""
    for name in SETTINGS:
        if re.search(r"backend\s*:\s*cudaMallocAsync", environment.get(name, "")):
            message = f"{name} asks for the backend cudaMallocAsync, which keeps no history of its allocations"
            return message, f"--env {name}=   (peaks are then those of PyTorch's native caching allocator)"
    if NO_CACHING in environment:
        message = f"{NO_CACHING} switches the caching allocator off, and nothing else keeps a history of allocations"
        return message, f"unset {NO_CACHING}   (empty counts as set)"
    return None
