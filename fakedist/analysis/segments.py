"""The allocator's segments at a moment: how much of each is allocated, its holes, and its largest block.

Reserved but not allocated is free memory in segments, or memory of freed blocks that another stream still used. The
segments of a moment add up to what is reserved, and their blocks to what is allocated, to the byte.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from fakedist.analysis.blocks import Blocks
from fakedist.analysis.recording import Array, Recording
from fakedist.analysis.replay import COMMON_POOL, SMALL_BYTES, Segment, Segments
from fakedist.analysis.typed_tables import table_of
from fakedist.rundir.schema import ACTIONS, MOMENTS, SEGMENT_STATES
from fakedist.rundir.table_rows import TABLES

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
    return held.listed()


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
    table["allocated_bytes"] = inside.sums(np.where(inside.is_allocated, sizes, 0), len(table))
    table["requested_bytes"] = inside.sums(np.where(inside.is_allocated, inside.requested, 0), len(table))
    table["waiting_bytes"] = inside.sums(np.where(inside.is_allocated, 0, sizes), len(table))
    table["free_bytes"] = table["bytes"] - table["allocated_bytes"] - table["waiting_bytes"]
    table["num_blocks"] = inside.sums(np.ones(len(sizes)), len(table))
    table["block"] = _largest(inside, len(table))
    table["pool"] = _pools(table, blocks, event) if table["address"].all() else "unknown"
    table["private_pool"] = ["" if pool == COMMON_POOL else f"{pool[0]},{pool[1]}" for pool in table["pool_id"]]
    table["state"] = _states(table)
    table["event"] = event
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
