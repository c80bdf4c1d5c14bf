"""The allocator that the script chose, and its settings."""

from __future__ import annotations

import os

import torch

from fakedist.errors import RecordingError
from fakedist.record.torch_snapshot import take_snapshot
from fakedist.run.allocator import SETTINGS, refusal


def check_allocator() -> None:
    """Check that the allocator keeps a history. CUDA need not be initialised.

    Raises:
        RecordingError: It keeps none.
    """
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        raise RecordingError(
            f"the allocator backend {backend} keeps no history; fakedist reads the native caching allocator's",
            "take backend:cudaMallocAsync out of PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF",
        )
    if refused := refusal({name: text for name, text in os.environ.items() if name not in SETTINGS}):
        raise RecordingError(*refused)


def allocator_settings() -> str:
    """The allocator's settings, as in PYTORCH_ALLOC_CONF. CUDA must be initialised."""
    found = take_snapshot().get("allocator_settings", {})
    told = [found[name] for name in SETTINGS if name in found]
    return next(map(str, filter(None, told or [os.environ.get(name) for name in SETTINGS])), "")
