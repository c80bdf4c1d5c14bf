"""The allocator's segments at a moment: how much of each is allocated, its holes, and its largest block.

Reserved but not allocated is free memory in segments, or memory of freed blocks that another stream still used. The
segments of a moment add up to what is reserved, and their blocks to what is allocated, to the byte.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from fakedist.analysis.blocks import Blocks
from fakedist.analysis.recording import Array, Recording
from fakedist.analysis.replay import COMMON_POOL, SMALL_BYTES, Segment, Segments
from fakedist.analysis.typed_tables import table_of
from fakedist.rundir.directory import SNAPSHOT_NAME
from fakedist.rundir.schema import ACTIONS, MOMENTS, SEGMENT_STATES
from fakedist.rundir.table_rows import TABLES
from fakedist.temporary import replacing

SMALL_SEGMENT_BYTES = 2 << 20  # kSmallBuffer
#: A segment with less than this fraction allocated is pinned by what is allocated in it.
PINNED_SHARE = 0.5
_CODES = {name: code for code, name in enumerate(ACTIONS)}
_MOVES = [code for code, name in enumerate(ACTIONS) if name.startswith("segment_")]
_GAINS = (_CODES["segment_alloc"], _CODES["segment_map"])
_EXPANDABLE = (_CODES["segment_map"], _CODES["segment_unmap"])


def segments_after(recording: Recording, end: int) -> list[Segment]:
    """The segments of the rank's device after its first ``end`` events, sorted by address."""
    events, pools = recording.device_events, recording.pools.get(recording.device, {})
    held = Segments(recording.segments_before)
    for event in np.flatnonzero(np.isin(events["action"][:end], _MOVES)).tolist():
        action, address = events["action"][event], int(events["address"][event])
        if not address:  # stands for memory whose address a snapshot lacks
            continue
        of = (address, int(events["size"][event]), int(events["stream"][event]), action in _EXPANDABLE)
        segment = Segment(*of, pools.get(event, COMMON_POOL))
        if action in _GAINS:
            held.add(segment)
        else:
            held.remove(segment)
    return held.to_list()


def peak_events(recording: Recording, blocks: Blocks) -> dict[str, int]:
    """The events after which ``rundir.schema.MOMENTS`` are; the block that a new segment is for counts.

    Where most was reserved before the history began already, it is the moment with most allocated of those.
    """
    action, reserved = recording.device_events["action"], blocks.replay.reserved_bytes
    if not len(action):
        return {}
    first = max(recording.num_events_before - 1, 0)  # earlier events only stand for what was alive then
    event = max(int(reserved.argmax()), first)
    if first and event == first and reserved[blocks.peak_event] == reserved[event]:
        event = max(blocks.peak_event, first)
    if event + 1 < len(action) and action[event + 1] == _CODES["alloc"] and reserved[event + 1] == reserved[event]:
        event += 1
    return dict(zip(MOMENTS, (event, max(blocks.peak_event, first)), strict=True))


def segment_table(recording: Recording, blocks: Blocks) -> pd.DataFrame:
    """The table ``segments``: at each moment, the segments with the most free memory first."""
    moments = peak_events(recording, blocks)
    tables = [segments_at(recording, blocks, event).assign(moment=name) for name, event in moments.items()]
    filled = [table for table in tables if len(table)]
    return pd.concat(filled, ignore_index=True)[TABLES["segments"].names] if filled else table_of("segments")


@dataclass(frozen=True)
class _Inside:
    """Blocks that hold memory at a moment, sorted by address.

    Attributes:
        number: Rows in the table ``blocks``.
        is_allocated: A tensor holds it. Others were freed, but another stream may still use them.
        segment: Row of the segment that begins at or before each; -1 if none does.
    """

    number: Array
    start: Array
    end: Array
    requested: Array
    is_allocated: Array
    segment: Array

    def sums(self, values: Array, num_segments: int) -> Array:
        """Values of blocks, summed by segment."""
        return np.bincount(self.segment, values, num_segments).astype(np.int64)


def _inside(blocks: Blocks, event: int, starts: Array) -> _Inside:
    frame = blocks.frame
    number = np.flatnonzero((frame["alloc_event"].to_numpy() <= event) & (frame["reuse_event"].to_numpy() > event))
    start = frame["address"].to_numpy()[number].astype(np.int64)
    order = np.argsort(start, kind="stable")
    number, start = number[order], start[order]
    return _Inside(
        number,
        start,
        start + frame["bytes"].to_numpy()[number],
        requested=frame["requested_bytes"].to_numpy()[number],
        is_allocated=frame["free_event"].to_numpy()[number] > event,
        segment=np.searchsorted(starts, start, side="right") - 1,
    )


def segments_at(recording: Recording, blocks: Blocks, event: int) -> pd.DataFrame:
    """The table ``segments`` after an event, without ``moment``; one row if the history contradicts itself."""
    table = pd.DataFrame(segments_after(recording, event + 1), columns=Segment._fields)
    table = table.astype({"address": "int64", "bytes": "int64", "is_expandable": bool})
    inside = _inside(blocks, event, table["address"].to_numpy())
    reserved = int(blocks.replay.reserved_bytes[event])
    if not _is_consistent(table, inside, reserved):
        if (inside.end - inside.start).sum() > reserved:
            return table.head(0)
        table = pd.DataFrame([(0, reserved, 0, False, COMMON_POOL)], columns=Segment._fields)
        table = table.assign(num_holes=0, largest_hole_bytes=0)
        inside = replace(inside, segment=np.zeros_like(inside.segment))
    else:
        table["num_holes"], table["largest_hole_bytes"] = _holes(table, inside)
    sizes = inside.end - inside.start
    table = table.assign(
        allocated_bytes=inside.sums(np.where(inside.is_allocated, sizes, 0), len(table)),
        requested_bytes=inside.sums(np.where(inside.is_allocated, inside.requested, 0), len(table)),
        waiting_bytes=inside.sums(np.where(inside.is_allocated, 0, sizes), len(table)),
        free_bytes=lambda rows: rows["bytes"] - rows["allocated_bytes"] - rows["waiting_bytes"],
        num_blocks=inside.sums(np.ones(len(sizes)), len(table)),
        block=_largest(inside, len(table)),
        pool=lambda rows: _pools(rows, blocks, event) if rows["address"].all() else "unknown",
        private_pool=["" if pool == COMMON_POOL else f"{pool[0]},{pool[1]}" for pool in table["pool_id"]],
        state=_states,
        event=event,
    )
    table = table.astype({"address": "uint64", "stream": "uint64"})
    return table.sort_values(["free_bytes", "address"], ascending=[False, True])


def _is_consistent(table: pd.DataFrame, inside: _Inside, reserved: int) -> bool:
    """True if the segments are all that is reserved and hold every block without overlap."""
    start, end = (table["address"].to_numpy(), (table["address"] + table["bytes"]).to_numpy())
    if table["bytes"].sum() != reserved or (end[:-1] > start[1:]).any() or (inside.segment < 0).any():
        return False
    return not ((inside.end > end[inside.segment]).any() or (inside.end[:-1] > inside.start[1:]).any())


def _pools(table: pd.DataFrame, blocks: Blocks, event: int) -> Array:
    """The pool of each segment: of its largest block (small up to 1 MiB), or last block at its address, or size."""
    sizes, largest = blocks.frame["bytes"].to_numpy(), table["block"].to_numpy().copy()
    empty = table.loc[largest < 0, "address"].astype("uint64")
    before = blocks.frame.loc[blocks.frame["address"].isin(empty), ["address", "alloc_event"]]
    last = before[before["alloc_event"] <= event].reset_index().groupby("address")["index"].last()
    largest[largest < 0] = last.reindex(empty).fillna(-1).astype("int64")
    by_size = ~table["is_expandable"] & (table["bytes"] <= SMALL_SEGMENT_BYTES)
    is_small = by_size.to_numpy() if not len(sizes) else np.where(largest < 0, by_size, sizes[largest] <= SMALL_BYTES)
    return np.where(is_small, "small", "large")


def _holes(table: pd.DataFrame, inside: _Inside) -> tuple[Array, Array]:
    """For each segment, how many holes it has and the largest one. All of an empty segment is a hole."""
    start, end = table["address"].to_numpy(), (table["address"] + table["bytes"]).to_numpy()
    is_first = np.diff(inside.segment, prepend=-1) != 0
    before = np.where(is_first, start[inside.segment], np.roll(inside.end, 1))
    rest = start.copy()  # where the last hole of each segment would begin
    rest[inside.segment] = inside.end
    segment = np.concatenate([inside.segment, np.arange(len(table))])
    holes = np.concatenate([inside.start - before, end - rest])
    largest = np.zeros(len(table), np.int64)
    np.maximum.at(largest, segment, holes)
    return np.bincount(segment[holes > 0], minlength=len(table)), largest


def _largest(inside: _Inside, num_segments: int) -> Array:
    """The largest block in each segment, as a row of ``blocks``; -1 in an empty one. Allocated blocks come first."""
    order = np.lexsort((inside.end - inside.start, inside.is_allocated))
    largest = np.full(num_segments, -1, np.int64)
    largest[inside.segment[order]] = inside.number[order]  # of several, the last one stays
    return largest


def _states(table: pd.DataFrame) -> Array:
    """The kind of each segment's free memory: the first of ``rundir.schema.SEGMENT_STATES`` that holds."""
    used = table["bytes"] - table["free_bytes"]
    holds: dict[str, Array] = {
        "unknown": np.asarray(table["pool"] == "unknown"),
        "private": np.asarray(table["private_pool"] != ""),
        "empty": np.asarray(used == 0),
        "expandable": table["is_expandable"].to_numpy(),
        "small": np.asarray(table["pool"] == "small"),
        "pinned": np.asarray(used < PINNED_SHARE * table["bytes"]),
    }
    assert [*holds, "used"] == list(SEGMENT_STATES)
    return np.select(list(holds.values()), np.array(list(holds)), "used")


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
    for number, history in enumerate(histories):
        yield pickle.EMPTY_LIST + pickle.LONG_BINPUT + struct.pack("<I", len(memo) + number)  # for `Histories.watch`
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
