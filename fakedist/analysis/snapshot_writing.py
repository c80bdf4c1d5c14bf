"""Writes the recording as a torch memory snapshot."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fakedist.analysis.blocks import Blocks
from fakedist.analysis.pickled import Frame, pickled
from fakedist.analysis.recording import Recording
from fakedist.analysis.replay import SMALL_BYTES, AddressRanges
from fakedist.run.schema import ACTIONS
from fakedist.run.snapshot import stack_frames, write_snapshot

_MOVES = [code for code, name in enumerate(ACTIONS) if name.startswith("segment_")]
_SMALL_SEGMENT_BYTES = 2 << 20  # kSmallBuffer
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
    events = recording.device_events
    alive = AddressRanges()
    streams: dict[int, int] = {}
    for event in np.flatnonzero(np.isin(events["action"], _MOVES)).tolist():
        address, size = int(events["address"][event]), int(events["size"][event])
        move = ACTIONS[events["action"][event]]
        if move in ("segment_alloc", "segment_map"):
            streams[address] = stream = int(events["stream"][event])
            # A block may span several consecutive mappings of its stream. Ordinary segments never merge.
            alive.put(address, size, -1 - stream if move == "segment_map" else address)
        elif move == "segment_free":
            alive.take(address)
        else:
            alive.cut(address, size)
    held = blocks.frame[blocks.frame["free_event"] >= len(events["op"])].sort_values("address")
    rows = iter(held[["address", "bytes", "requested_bytes", "stack"]].itertuples(index=False))
    waiting = next(rows, None)
    segments = []
    for address, size, segment in alive.listed():
        inside = []
        while waiting is not None and waiting[0] < address + size:
            if waiting[0] >= address:
                inside.append(tuple(int(value) for value in waiting))
            waiting = next(rows, None)
        stream = streams[address] if segment >= 0 else -1 - segment
        found = _segment(address, size, stream, held=inside, stacks=stacks)
        segments.append({"device": recording.device, "is_expandable": segment < 0, **found})
    return segments


def _segment(
    address: int, size: int, stream: int, *, held: list[tuple[int, ...]], stacks: list[list[Frame]]
) -> dict[str, object]:
    """One segment.

    Args:
        address: Where it begins.
        size: Its bytes.
        stream: Its stream.
        held: Address, bytes, requested bytes and stack of its blocks, sorted by address.
        stacks: The frames of each stack.
    """
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
    small = max(block[1] for block in held) <= SMALL_BYTES if held else size == _SMALL_SEGMENT_BYTES
    return {
        "address": address,
        "total_size": size,
        "allocated_size": in_use,
        "active_size": in_use,
        "requested_size": sum(block[2] for block in held),
        "stream": stream,
        "segment_type": "small" if small else "large",
        "segment_pool_id": (0, 0),
        "frames": [],
        "blocks": found,
    }
