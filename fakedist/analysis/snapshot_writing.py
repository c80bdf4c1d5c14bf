"""Writes the recording as a torch memory snapshot.

A million dicts of events for ``pickle.dump`` take a second and half a GB. Pickled dicts with the same keys differ only
in their values, so together they form a matrix of bytes, one event per row. What rows refer to (keys, actions, stacks)
must come before them in the pickle: it is the first value of ``device_traces``, which the histories then replace.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from fakedist.analysis.blocks import Blocks
from fakedist.analysis.recording import Array, Recording
from fakedist.analysis.replay import SMALL_BYTES, Segment
from fakedist.analysis.segments import SMALL_SEGMENT_BYTES, segments_after
from fakedist.rundir.directory import SNAPSHOT_NAME
from fakedist.rundir.schema import ACTIONS
from fakedist.temporary import replacing

Columns = Mapping[str, Array]
#: One frame of a stack in torch's format: filename, line, name.
Frame = Mapping[str, object]

_KEYS = ("action", "addr", "device_free", "size", "stream", "time_us", "frames")
_ROWS_AT_ONCE = 200_000


def pickled(
    segments: Sequence[Mapping[str, object]], histories: Sequence[Columns], stacks: Sequence[list[Frame]]
) -> Iterator[bytes]:
    """The pickle of ``{"device_traces": ..., "segments": ...}``, in pieces. Segments and stacks have torch's format.

    ``histories`` has, for each device, columns action, address, size, stream, time_us and stack (a row of ``stacks``;
    -1 for none). ``segments`` may hold the same frames as ``stacks``.
    """
    parts, nothing = _PickleParts(), list[Frame]()
    yield pickle.PROTO + b"\x04" + pickle.EMPTY_DICT + pickle.MARK
    yield parts.dump("device_traces") + parts.dump([_KEYS, ACTIONS, list(stacks), nothing])
    yield parts.dump("segments") + parts.dump(segments)
    yield parts.dump("device_traces") + pickle.EMPTY_LIST
    memo = parts.memo()
    key = {name: np.array([memo[id(name)]]) for name in _KEYS}
    action = np.array([memo[id(name)] for name in ACTIONS])
    stack = np.array([*(memo[id(frames)] for frames in stacks), memo[id(nothing)]])  # the last is row -1
    for history in histories:
        yield pickle.EMPTY_LIST
        for first in range(0, len(history["action"]), _ROWS_AT_ONCE):
            rows = {name: values[first : first + _ROWS_AT_ONCE] for name, values in history.items()}
            address = np.where(rows["action"] == ACTIONS.index("oom"), key["device_free"], key["addr"])
            items = [
                (_reference(key["action"]), _reference(action[rows["action"]])),
                (_reference(address), _number(rows["address"])),
                *((_reference(key[name]), _number(rows[name])) for name in ("size", "stream", "time_us")),
                (_reference(key["frames"]), _reference(stack[rows["stack"]])),
            ]
            yield _dicts(items)
        yield pickle.APPEND
    yield pickle.SETITEMS + pickle.STOP


def _reference(memo: Array) -> Array:
    return _opcode(pickle.LONG_BINGET, memo.astype("<u4").view("u1").reshape(-1, 4))


def _number(values: Array) -> Array:
    """Non-negative integers, each in as many bytes as the largest needs."""
    num_bytes = int(values.max()).bit_length() // 8 + 1
    wide = np.zeros((len(values), 9), "u1")
    wide[:, :8] = values.astype("<u8").view("u1").reshape(-1, 8)
    return _opcode(pickle.LONG1 + bytes([num_bytes]), wide[:, :num_bytes])


def _opcode(opcode: bytes, argument: Array) -> Array:
    first = np.tile(np.frombuffer(opcode, "u1"), (len(argument), 1))
    return np.concatenate([first, argument], axis=1)


def _dicts(items: list[tuple[Array, Array]]) -> bytes:
    """Dicts to append to a list, from keys and values with a row per dict; a common key has one row."""
    begin, end = pickle.EMPTY_DICT + pickle.MARK, pickle.SETITEMS + pickle.APPEND
    parts = [np.frombuffer(begin, "u1")[None], *(part for item in items for part in item)]
    parts.append(np.frombuffer(end, "u1")[None])
    matrix = np.empty((len(items[0][1]), sum(part.shape[1] for part in parts)), "u1")
    at = 0
    for part in parts:
        matrix[:, at : at + part.shape[1]] = part
        at += part.shape[1]
    return matrix.tobytes()


class _PickleParts:
    """Parts of one pickle, without its header and its end. Later parts refer to objects in earlier ones."""

    def __init__(self) -> None:
        self._file = io.BytesIO()
        self._pickler = pickle.Pickler(self._file, 3)  # protocol 4 would put each part into a frame

    def dump(self, value: object) -> bytes:
        """The pickle of a value."""
        self._file.seek(0)
        self._file.truncate()
        self._pickler.dump(value)
        return self._file.getvalue()[2:-1]

    def memo(self) -> dict[int, int]:
        """The index under which the unpickler memoizes each object, by the object's id."""
        return {of: index for of, (index, _) in self._pickler.memo.copy().items()}


_COLUMNS = ("action", "address", "size", "stream", "time_us", "stack")
_NO_EVENTS = {name: np.zeros(0, "i8") for name in _COLUMNS}


def build_snapshot(run_directory: Path, recording: Recording, blocks: Blocks) -> None:
    """Write ``memory_snapshot.pickle``: every device's history, and the segments of the rank's device at the end."""
    frames: list[Frame] = [{"filename": file, "line": line, "name": name} for file, line, name in recording.frames]
    stacks = [[frames[frame] for frame in stack] for stack in recording.stacks]
    last = max(recording.events, default=recording.device)
    histories = [recording.events.get(device, _NO_EVENTS) for device in range(last + 1)]
    columns = [{name: events[name] for name in _COLUMNS} for events in histories]
    with replacing(run_directory / SNAPSHOT_NAME) as path, path.open("wb") as file:
        file.writelines(pickled(_segments(recording, blocks, stacks), columns, stacks))


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
    """One segment; ``held`` has address, bytes, requested bytes and stack of its blocks, sorted by address."""
    address, size = segment.address, segment.bytes
    parts: list[dict[str, object]] = []
    at = address
    for start, bytes_, requested, stack in [*held, (address + size, 0, 0, -1)]:
        if start > at:
            parts.append({"address": at, "size": start - at, "requested_size": 0, "state": "inactive", "frames": []})
        if bytes_:
            frames = stacks[stack] if stack >= 0 else []
            state = {"state": "active_allocated", "frames": frames}
            parts.append({"address": start, "size": bytes_, "requested_size": requested, **state})
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
        "blocks": parts,
    }
