"""The recording as a torch memory snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fakedist.analysis.blocks import Blocks
from fakedist.analysis.recording import Array, Recording
from fakedist.run.schema import ACTIONS
from fakedist.run.snapshot import stack_frames, write_snapshot

_GAINS, _LOSSES = {"segment_alloc", "segment_map"}, {"segment_free", "segment_unmap"}
_SMALL_SEGMENT_BYTES = 2 << 20


def build_snapshot(run_directory: Path, recording: Recording, blocks: Blocks) -> None:
    """Write ``memory_snapshot.pickle``: every device's history, and the segments of the rank's device at the end."""
    frames = stack_frames(recording.frames)
    stacks = [[frames[frame] for frame in stack] for stack in recording.stacks]
    last = max(recording.events, default=recording.device)
    traces = [list(_entries(recording.events.get(device), stacks)) for device in range(last + 1)]
    write_snapshot(run_directory, traces, _segments(recording, blocks, stacks))


def _entries(events: dict[str, Array] | None, stacks: list[list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    if events is None:
        return
    no_frames: list[dict[str, Any]] = []
    columns = (events[name].tolist() for name in ("action", "address", "size", "stream", "time_us", "stack"))
    for action, address, size, stream, time_us, stack in zip(*columns, strict=True):
        name = ACTIONS[action]
        yield {
            "action": name,
            "device_free" if name == "oom" else "addr": address,
            "size": size,
            "stream": stream,
            "time_us": time_us,
            "frames": stacks[stack] if stack >= 0 else no_frames,
        }


def _segments(recording: Recording, blocks: Blocks, stacks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Segments alive at the end with the blocks that tensors hold in them; what lies between is inactive."""
    events = recording.device_events
    alive: dict[int, tuple[int, int]] = {}
    for action, address, size, stream in zip(
        *(events[name].tolist() for name in ("action", "address", "size", "stream")), strict=True
    ):
        if ACTIONS[action] in _GAINS:
            alive[address] = (size, stream)
        elif ACTIONS[action] in _LOSSES:
            alive.pop(address, None)
    held = blocks.frame[blocks.frame["free_event"] >= len(events["op"])].sort_values("address")
    rows = iter(held[["address", "bytes", "requested_bytes", "stack"]].itertuples(index=False))
    waiting = next(rows, None)
    segments = []
    for address, (size, stream) in sorted(alive.items()):
        inside = []
        while waiting is not None and waiting[0] < address + size:
            if waiting[0] >= address:
                inside.append(tuple(int(value) for value in waiting))
            waiting = next(rows, None)
        segments.append(_segment(recording.device, (address, size, stream), inside, stacks))
    return segments


def _segment(
    device: int,
    where: tuple[int, int, int],
    held: Iterable[tuple[int, ...]],
    stacks: list[list[dict[str, Any]]],
) -> dict[str, Any]:
    address, size, stream = where
    found: list[dict[str, Any]] = []
    at = address
    for start, bytes_, requested, stack in [*held, (address + size, 0, 0, -1)]:
        if start > at:
            found.append({"address": at, "size": start - at, "requested_size": 0, "state": "inactive", "frames": []})
        if bytes_:
            frames = stacks[stack] if stack >= 0 else []
            state = {"state": "active_allocated", "frames": frames}
            found.append({"address": start, "size": bytes_, "requested_size": requested, **state})
        at = start + bytes_
    in_use = sum(block["size"] for block in found if block["state"] == "active_allocated")
    return {
        "device": device,
        "address": address,
        "total_size": size,
        "allocated_size": in_use,
        "active_size": in_use,
        "requested_size": sum(block["requested_size"] for block in found),
        "stream": stream,
        "segment_type": "small" if size == _SMALL_SEGMENT_BYTES else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": found,
    }
