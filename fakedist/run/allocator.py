"""PyTorch allocator settings that cannot be recorded. The parent and the rank both check them."""

from __future__ import annotations

import re
from collections.abc import Mapping

#: The variables with the allocator's settings: first the name since torch 2.9, then the older one.
SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
#: If this is set to anything, every tensor is its own cudaMalloc (c10/cuda/CUDACachingAllocator.cpp).
NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"


def refusal(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Why an allocator with these settings keeps no history, and what to type; None if it keeps one."""
    for name in SETTINGS:
        if re.search(r"backend\s*:\s*cudaMallocAsync", environment.get(name, "")):
            message = f"{name} asks for the backend cudaMallocAsync, which keeps no history of its allocations"
            return message, f"--env {name}=   (peaks are then those of PyTorch's native caching allocator)"
    if NO_CACHING in environment:
        message = f"{NO_CACHING} switches the caching allocator off, and nothing else keeps a history of allocations"
        return message, f"unset {NO_CACHING}   (empty counts as set)"
    return None
