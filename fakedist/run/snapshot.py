"""memory_snapshot.pickle: the recorded history in torch's own format, for pytorch.org/memory_viz."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fakedist.run.directory import SNAPSHOT_NAME


def write_snapshot(run_directory: Path, traces: list[list[dict[str, Any]]], segments: list[dict[str, Any]]) -> None:
    """Write a snapshot, pickle protocol 4, builtins only.

    Args:
        run_directory: The run directory.
        traces: Per device, trace entries as ``torch.cuda.memory._snapshot()["device_traces"]`` has them.
        segments: Segments alive at the end, as its ``segments``.
    """
    path = run_directory / SNAPSHOT_NAME
    scratch = path.with_name(f".{SNAPSHOT_NAME}.{os.getpid()}")
    try:
        with scratch.open("wb") as file:
            pickle.dump({"segments": segments, "device_traces": traces}, file, protocol=4)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def stack_frames(frames: Iterable[tuple[str, int, str]]) -> list[dict[str, Any]]:
    """Frames as torch writes them."""
    return [{"filename": filename, "line": line, "name": name} for filename, line, name in frames]
