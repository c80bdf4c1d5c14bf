"""Small memory snapshots of torch that differ as told, for comparisons."""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.unit.analysis.recorded import MIB

_BASE = 1 << 30


def snapshot_of(
    path: Path,
    blocks: Sequence[tuple[int, int]],
    *,
    segment_bytes: int = 64 * MIB,
    file: str = "/job/model.py",
    function: str = "forward",
    kept: int | None = None,
) -> Path:
    """A snapshot of one segment with these blocks: line and bytes of each. A block of line 0 has no stack.

    With ``kept``, only so many events are left of the history.
    """
    trace = [_event("segment_alloc", _BASE, segment_bytes, [])]
    at, held = _BASE, []
    for line, size in blocks:
        frames = [_frame("/site/torch/nn/linear.py", 5, "forward"), _frame(file, line, function)] if line else []
        trace.append(_event("alloc", at, size, frames))
        held.append({"address": at, "size": size, "state": "active_allocated", "frames": frames})
        at += size
    held.append({"address": at, "size": _BASE + segment_bytes - at, "state": "inactive"})
    segment = {"device": 0, "address": _BASE, "total_size": segment_bytes, "stream": 0, "blocks": held}
    history = trace if kept is None else trace[len(trace) - kept :]
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [history]}))
    return path


def _frame(file: str, line: int, function: str) -> dict[str, Any]:
    return {"filename": file, "line": line, "name": function}


def _event(action: str, address: int, size: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": 1, "frames": frames}
