"""Writes the recording as a torch memory snapshot."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fakedist.analysis.address_space import Segment
from fakedist.analysis.blocks import Blocks
from fakedist.analysis.pickled import Frame, pickled
from fakedist.analysis.recording import Recording
from fakedist.analysis.replay import SMALL_BYTES
from fakedist.analysis.segments import SMALL_SEGMENT_BYTES, segments_after
from fakedist.run.snapshot import stack_frames, write_snapshot

_COLUMNS = ("action", "address", "size", "stream", "time_us", "stack")
_NO_EVENTS = {name: np.zeros(0, "i8") for name in _COLUMNS}


def build_snapshot(run_directory: Path, recording: Recording, blocks: Blocks) -> None:
    """Write ``memory_snapshot.pickle``: every device's history, and the segments of the rank's device at the end."""
    frames = stack_frames(recording.frames)
    stacks: list[list[Frame]] = [[frames[frame] for frame in stack] for stack in recording.stacks]
    last = max(recording.events, default=recording.device)
    histories = [recording.events.get(device, _NO_EVENTS) for device in range(last + 1)]
    columns = [{name: events[name] for name in _COLUMNS} for events in histories]
    write_snapshot(run_directory, pickled(_segments(recording, blocks, stacks), columns, stacks))


def _segments(recording: Recording, blocks: Blocks, stacks: list[list[Frame]]) -> list[dict[str, object]]:
    """Segments alive at the end, with the blocks that tensors hold in them. The memory between blocks is inactive."""
    held = blocks.frame[blocks.frame["free_event"] >= len(recording.device_events["op"])].sort_values("address")
    rows = iter(held[["address", "bytes", "requested_bytes", "stack"]].itertuples(index=False))
    waiting = next(rows, None)
    segments = []
    for segment in segments_after(recording, len(recording.device_events["op"])):
        inside = []
        while waiting is not None and waiting[0] < segment.address + segment.bytes:
            if waiting[0] >= segment.address:
                inside.append(tuple(int(value) for value in waiting))
            waiting = next(rows, None)
        segments.append({"device": recording.device, **_segment(segment, held=inside, stacks=stacks)})
    return segments


def _segment(segment: Segment, *, held: list[tuple[int, ...]], stacks: list[list[Frame]]) -> dict[str, object]:
    """One segment.

    Args:
        segment: The segment.
        held: Address, bytes, requested bytes and stack of its blocks, sorted by address.
        stacks: The frames of each stack.
    """
    address, size = segment.address, segment.bytes
    found: list[dict[str, object]] = []
    at = address
    for start, bytes_, requested, stack in [*held, (address + size, 0, 0, -1)]:
        if start > at:
            found.append({"address": at, "size": start - at, "requested_size": 0, "state": "inactive", "frames": []})
        if bytes_:
            frames = stacks[stack] if stack >= 0 else []
            state = {"state": "active_allocated", "frames": frames}
            found.append({"address": start, "size": bytes_, "requested_size": requested, **state})
        at = start + bytes_
    in_use = sum(block[1] for block in held)
    small = max(block[1] for block in held) <= SMALL_BYTES if held else size == SMALL_SEGMENT_BYTES
    return {
        "address": address,
        "total_size": size,
        "allocated_size": in_use,
        "active_size": in_use,
        "requested_size": sum(block[2] for block in held),
        "stream": segment.stream,
        "segment_type": "small" if small else "large",
        "segment_pool_id": segment.pool_id,
        "is_expandable": segment.is_expandable,
        "frames": [],
        "blocks": found,
    }
