"""Has CUPTI trace where events are recorded. torch.profiler has it trace only what waits for them."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

#: cupti_activity.h: CUPTI_ACTIVITY_KIND_CUDA_EVENT. Kineto reads these records, and names them in the waits' metadata.
_CUDA_EVENT = 36
_MAPS = Path("/proc/self/maps")


def enable_event_records() -> bool:
    """Begin. The profiler must have started. Returns whether CUPTI does it."""
    library = _cupti()
    return library is not None and library.cuptiActivityEnable(_CUDA_EVENT) == 0


def disable_event_records() -> None:
    """End, after :func:`enable_event_records`."""
    library = _cupti()
    if library is not None:
        library.cuptiActivityDisable(_CUDA_EVENT)


def _cupti() -> ctypes.CDLL | None:
    """The CUPTI that this process has loaded; None if torch has it inside its own libraries."""
    process = ctypes.CDLL(None)
    if hasattr(process, "cuptiActivityEnable"):
        return process
    for line in _MAPS.read_text(errors="replace").splitlines():
        path = line.rpartition(" ")[2]
        if os.path.basename(path).startswith("libcupti"):
            return ctypes.CDLL(path)
    return None
