"""Replays the caching allocator's history to find the size of each block, which the history does not contain.

The history has the bytes *requested*; the allocator's statistics count the bytes *given*. By
c10/cuda/CUDACachingAllocator.cpp, a block is the request rounded up to 512 bytes, or the whole free block it is taken
from if the remainder would be too small (``should_split``). So the replay tracks free blocks event by event, but only
around the few blocks that may have been given whole. Every run that has the allocator's own statistics checks
:func:`replay` against them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fakedist.rundir.schema import ACTIONS

Pool = tuple[int, int]
#: The pool of every allocation outside of a private pool.
COMMON_POOL: Pool = (0, 0)


class AddressRanges:
    """Address ranges, indexed by start and by end. Neighbours in the same segment are merged.

    Ranges of a foreign snapshot that contradicts itself may overlap. The lists are then wrong, but nothing fails.
    """

    def __init__(self) -> None:
        self._starts: dict[int, tuple[int, int]] = {}  # start -> (bytes, segment)
        self._ends: dict[int, int] = {}  # end -> start

    def put(self, start: int, bytes_: int, segment: int) -> None:
        """Add a range and merge it with its neighbours in the same segment."""
        before = self._ends.get(start)
        if before is not None and before in self._starts and self._starts[before][1] == segment:
            bytes_ += self._starts.pop(before)[0]
            del self._ends[start]
            start = before
        after = self._starts.get(start + bytes_)
        if after is not None and after[1] == segment:
            del self._starts[start + bytes_]
            self._ends.pop(start + bytes_ + after[0], None)
            bytes_ += after[0]
        self._starts[start] = (bytes_, segment)
        self._ends[start + bytes_] = start

    def take(self, start: int) -> tuple[int, int] | None:
        """Remove and return the range that starts here, as (bytes, segment); None without one."""
        known = self._starts.pop(start, None)
        if known is not None:
            self._ends.pop(start + known[0], None)
        return known

    def cut(self, start: int, bytes_: int) -> None:
        """Remove part of a range (an expandable segment unmaps pages)."""
        for first, (length, segment) in self._starts.items():
            if first <= start and start + bytes_ <= first + length:
                self.take(first)
                if start > first:
                    self.put(first, start - first, segment)
                if start + bytes_ < first + length:
                    self.put(start + bytes_, first + length - start - bytes_, segment)
                return

    def to_list(self) -> list[tuple[int, int, int]]:
        """Every range as (start, bytes, segment), sorted by address."""
        return sorted((start, bytes_, segment) for start, (bytes_, segment) in self._starts.items())


class Segment(NamedTuple):
    """Memory that the allocator holds in one piece: a segment, or mapped pages of an expandable one without a gap.

    ``pool_id`` is ``COMMON_POOL`` outside of private pools.
    """

    address: int
    bytes: int
    stream: int
    is_expandable: bool = False
    pool_id: Pool = COMMON_POOL


class Segments:
    """The segments that the allocator holds, event by event."""

    def __init__(self, before: Iterable[Segment] = ()) -> None:
        self._ranges = AddressRanges()
        self._ordinary: dict[int, tuple[int, Pool]] = {}  # by address: stream and pool
        self._numbers: dict[tuple[int, Pool], int] = {}  # of expandable segments, by stream and pool
        for segment in before:
            self.add(segment)

    def add(self, segment: Segment) -> None:
        """Take a segment, or map pages."""
        pool_of = (segment.stream, segment.pool_id)
        number = segment.address
        if segment.is_expandable:
            # A block may span several mappings in a row of its stream and pool. Ordinary segments never merge.
            number = -1 - self._numbers.setdefault(pool_of, len(self._numbers))
        else:
            self._ordinary[segment.address] = pool_of
        self._ranges.put(segment.address, segment.bytes, number)

    def remove(self, segment: Segment) -> None:
        """Give a segment back, or unmap pages."""
        if segment.is_expandable:
            self._ranges.cut(segment.address, segment.bytes)
        else:
            self._ranges.take(segment.address)

    def to_list(self) -> list[Segment]:
        """The segments held, sorted by address."""
        expandable = {-1 - number: pool_of for pool_of, number in self._numbers.items()}
        segments = []
        for address, bytes_, number in self._ranges.to_list():
            stream, pool = expandable[number] if number < 0 else self._ordinary[number]
            segments.append(Segment(address, bytes_, stream, number < 0, pool))
        return segments


Ints = npt.NDArray[np.int64]

MIN_BLOCK_BYTES = 512  # kMinBlockSize
SMALL_BYTES = 1 << 20  # kSmallSize: larger requests are served by the large pool
_NUM_INTERVALS = 16  # kRoundUpPowerOfTwoIntervals: from 1 MiB to 64 GiB
_CODES = {name: code for code, name in enumerate(ACTIONS)}
_ALLOC, _REQUESTED, _COMPLETED = (_CODES[name] for name in ("alloc", "free_requested", "free_completed"))
_SEGMENT, _SEGMENT_GONE = _CODES["segment_alloc"], _CODES["segment_free"]
_MAP, _UNMAP = _CODES["segment_map"], _CODES["segment_unmap"]


@dataclass(frozen=True)
class AllocatorSettings:
    """Settings in PYTORCH_CUDA_ALLOC_CONF that change the size of a block.

    Attributes:
        max_split_bytes: Larger blocks are not split (``max_split_size_mb``).
        power2_divisions: ``roundup_power2_divisions``: steps between powers of two for rounding up requests below 2
            MiB, 4 MiB, ..., 64 GiB and above. Empty if unset.
    """

    max_split_bytes: int = 1 << 62
    power2_divisions: tuple[int, ...] = ()
    expandable: bool = False


def parse_settings(alloc_conf: str) -> AllocatorSettings:
    """The settings in a PYTORCH_CUDA_ALLOC_CONF value. Those that do not change the size of a block are left out."""
    options = dict(re.findall(r"(\w+)\s*:\s*(\[[^\]]*\]|[^,]*)", alloc_conf))
    split = options.get("max_split_size_mb", "").strip()
    return AllocatorSettings(
        min(int(split[:12]) << 20, 1 << 62) if split.isdecimal() else 1 << 62,
        _divisions(options.get("roundup_power2_divisions", "").replace(" ", "")),
        options.get("expandable_segments", "").strip().lower() == "true",
    )


def _divisions(text: str) -> tuple[int, ...]:
    """``parseRoundUpPower2Divisions`` in c10/core/AllocatorConfig.cpp: one number, or [256:1,512:2,>:4] in MiB."""
    if text.isdecimal():
        return (_division(text),) * _NUM_INTERVALS
    divisions = [0] * _NUM_INTERVALS
    last = -1
    for boundary, number in re.findall(r"(\d+|>):(\d+)", text):
        if boundary == ">":
            divisions[max(last, 0) + 1 :] = [_division(number)] * (_NUM_INTERVALS - 1 - max(last, 0))
            continue
        index = min(int(boundary[:12]).bit_length() - 1, _NUM_INTERVALS - 1)
        if last < 0:
            divisions[:index] = [_division(number)] * index
        divisions[index] = _division(number)
        last = index
    return tuple(divisions) if any(divisions) else ()


def _division(text: str) -> int:
    return min(int(text[:12]), 1 << 30)  # a foreign snapshot may have a number of any length


def rounded_bytes(requested: npt.ArrayLike, settings: AllocatorSettings) -> Ints:
    """``round_size``: the fewest bytes that each request is given."""
    bytes_ = np.maximum(np.asarray(requested, np.int64), 1)
    step = np.full_like(bytes_, MIN_BLOCK_BYTES)
    if settings.power2_divisions:
        power = np.frexp(bytes_.astype(np.float64))[1].astype(np.int64) - 1
        divisions = np.array(settings.power2_divisions)[np.clip(power - 20, 0, _NUM_INTERVALS - 1)]
        divided = (divisions > 1) & (bytes_ > MIN_BLOCK_BYTES * divisions)
        step = np.where(divided, (np.int64(1) << power) // np.maximum(divisions, 1), step)
    return np.asarray(-(-bytes_ // step) * step)


@dataclass(frozen=True)
class Replay:
    """The result of a replay. Blocks are in order of allocation. Curves have one element per event.

    Attributes:
        free_event: Index of its ``free_requested`` event, or the number of events if it was never freed.
        reuse_event: Index of its ``free_completed`` event, from which on its memory can be given again; the number of
            events if there was none.
        allocated_bytes: Bytes in blocks that tensors hold, after each event.
        reserved_bytes: Bytes in segments, after each event.
    """

    alloc_event: Ints
    free_event: Ints
    reuse_event: Ints
    block_bytes: Ints
    allocated_bytes: Ints
    reserved_bytes: Ints
    unknown_frees: int


@dataclass(frozen=True)
class _Events:
    """One device's events: action, address (as a signed integer) and size of each."""

    action: npt.NDArray[np.unsignedinteger]
    address: Ints
    size: Ints

    def at(self, *actions: int) -> Ints:
        """Events with these actions, in order."""
        return np.flatnonzero(np.logical_or.reduce([self.action == action for action in actions]))


def replay(
    action: npt.ArrayLike,
    address: npt.ArrayLike,
    size: npt.ArrayLike,
    settings: AllocatorSettings,
    changes: Sequence[tuple[int, AllocatorSettings]] = (),
) -> Replay:
    """Replay one device's history of actions (``rundir.schema.ACTIONS``), addresses, and requested or segment bytes.

    ``changes``: events from which other settings were in force, in order.
    """
    history = _Events(np.asarray(action), np.asarray(address).astype(np.int64), np.asarray(size, np.int64))
    num_events = len(history.action)
    made = history.at(_ALLOC)
    requested, completed = _ends(history)
    rounded = np.zeros(len(made), np.int64)
    max_split = np.zeros(num_events, np.int64)
    expands = np.zeros(num_events, bool)
    for first, now in [(0, settings), *changes]:
        max_split[first:], expands[first:] = now.max_split_bytes, now.expandable
        rounded[made >= first] = rounded_bytes(history.size[made[made >= first]], now)
    if not changes and len(mapped := history.at(_MAP)):  # of a foreign snapshot, whose script may have set it
        expands[mapped[0] :] = True
    whole = _may_be_whole(history, made, rounded, max_split[made], expands[made])
    for event, bytes_ in _play(
        history, max_split, made=made, rounded=rounded, completed=completed, is_asked=whole
    ).items():
        rounded[np.searchsorted(made, event)] = bytes_
    moves = np.zeros(num_events, np.int64)
    moves[made] = rounded
    let_go = requested[made] < num_events
    moves[requested[made][let_go]] = -rounded[let_go]
    segments = np.where(np.isin(history.action, (_SEGMENT, _MAP)), history.size, 0)
    segments -= np.where(np.isin(history.action, (_SEGMENT_GONE, _UNMAP)), history.size, 0)
    return Replay(
        alloc_event=made,
        free_event=requested[made],
        reuse_event=completed[made],
        block_bytes=rounded,
        allocated_bytes=np.cumsum(moves),
        reserved_bytes=np.cumsum(segments),
        unknown_frees=len(history.at(_REQUESTED)) - int(let_go.sum()),
    )


def free_events(action: npt.NDArray[Any], address: npt.NDArray[Any]) -> Ints:
    """For each event that makes a block, the one that frees it; the number of events for others."""
    history = _Events(action, address.astype(np.int64), np.zeros(0, np.int64))
    moves = history.at(_ALLOC, _REQUESTED)
    freed = np.full(len(action), len(action))
    first, then = _neighbours(history, moves[np.argsort(history.address[moves], kind="stable")], _ALLOC, _REQUESTED)
    freed[first] = then
    return freed


def _ends(history: _Events) -> tuple[Ints, Ints]:
    """The events of each block's requested and completed free (the number of events if none), by its making event."""
    moves = history.at(_ALLOC, _REQUESTED, _COMPLETED)
    moves = moves[np.argsort(history.address[moves], kind="stable")]
    requested, completed = (np.full(len(history.action), len(history.action)) for _ in range(2))
    actions = history.action[moves]
    first, then = _neighbours(history, moves[actions != _COMPLETED], _ALLOC, _REQUESTED)
    requested[first] = then
    is_ours = np.zeros(len(history.action), bool)
    is_ours[then] = True
    blocks = np.empty(len(history.action), np.int64)
    blocks[then] = first
    asked, done = _neighbours(history, moves[is_ours[moves] | (actions == _COMPLETED)], _REQUESTED, _COMPLETED)
    completed[blocks[asked]] = done
    return requested, completed


def _neighbours(history: _Events, events: Ints, first: int, second: int) -> tuple[Ints, Ints]:
    """Pairs of events, ``first`` directly followed at its address by ``second``, of ``events`` sorted by address."""
    action, address = history.action[events], history.address[events]
    follows = (action[:-1] == first) & (action[1:] == second) & (address[:-1] == address[1:])
    return events[:-1][follows], events[1:][follows]


def _may_be_whole(
    history: _Events, made: Ints, rounded: Ints, max_split: Ints, expands: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Blocks that may have been given more than their rounded request.

    The remainder of a free block is a multiple of 512 bytes. Where 512 bytes are enough for a block (small blocks,
    expandable segments), no remainder is too small. A large free block is given whole if at most 1 MiB would remain:
    another block began, or the segment ended, within that distance behind it.
    """
    segments = history.at(_SEGMENT)
    last = np.iinfo(np.int64).max
    borders = np.concatenate(
        [history.address[made], history.address[segments] + history.size[segments], np.array([last])]
    )
    borders.sort()
    behind = history.address[made] + rounded
    is_near = borders[np.searchsorted(borders, behind, "right")] - SMALL_BYTES <= behind
    return np.asarray((rounded > SMALL_BYTES) & ~expands & (is_near | (rounded >= max_split)))


def _play(
    history: _Events,
    max_split: Ints,
    *,
    made: Ints,
    rounded: Ints,
    completed: Ints,
    is_asked: npt.NDArray[np.bool_],
) -> dict[int, int]:
    """Bytes of the blocks in question (``is_asked``, with ``rounded`` requests), by the events that made them.

    ``completed`` is when a block's memory could be reused, by the event that made it.
    """
    if not is_asked.any():
        return {}
    borders = _region_starts(history)
    wanted = np.zeros(len(borders) + 1, bool)  # the last element is for addresses below every segment
    wanted[np.searchsorted(borders, history.address[made[is_asked]], "right") - 1] = True
    is_near = wanted[np.searchsorted(borders, history.address, "right") - 1]
    is_near[made[is_asked][-1] + 1 :] = False
    ends = np.zeros(len(history.action), bool)
    ends[completed[made[completed[made] < len(history.action)]]] = True
    moves = history.at(_SEGMENT, _SEGMENT_GONE, _ALLOC, _COMPLETED)
    moves = moves[is_near[moves] & ((history.action[moves] != _COMPLETED) | ends[moves])]
    bytes_ = history.size.copy()
    bytes_[made] = rounded
    asked = np.zeros(len(history.action), bool)
    asked[made] = is_asked
    columns = (moves, history.action[moves], history.address[moves], bytes_[moves], asked[moves], max_split[moves])
    return _given(zip(*(column.tolist() for column in columns), strict=True))


def _region_starts(history: _Events) -> Ints:
    """Start addresses of regions such that no segment, at any time, spans two regions."""
    segments = history.at(_SEGMENT)
    start = history.address[segments]
    order = np.argsort(start, kind="stable")
    start, end = start[order], (start + history.size[segments])[order]
    is_apart = np.ones(len(start), bool)
    is_apart[1:] = start[1:] >= np.maximum.accumulate(end)[:-1]
    return np.asarray(start[is_apart])


def _given(moves: Iterator[tuple[int, int, int, int, bool, int]]) -> dict[int, int]:
    """Bytes of the blocks in question, by event.

    ``moves`` has event, action, address, bytes (of a block: its rounded request), whether the block is in question, and
    from how many bytes on a block is not split.
    """
    free = AddressRanges()
    held: dict[int, tuple[int, int]] = {}  # by address: bytes, segment
    bytes_of: dict[int, int] = {}
    for event, action, at, bytes_, is_asked, max_split in moves:
        if action == _ALLOC:
            block_bytes = bytes_
            held.pop(at, None)
            if (taken := free.take(at)) is not None:
                remaining = taken[0] - block_bytes
                segment = taken[1]
                if is_asked and (remaining <= SMALL_BYTES or block_bytes >= max_split):
                    bytes_of[event] = block_bytes = taken[0]
                elif remaining > 0:
                    free.put(at + block_bytes, remaining, segment)
                held[at] = block_bytes, segment
        elif action == _COMPLETED:
            if (block := held.pop(at, None)) is not None:
                free.put(at, *block)
        elif action == _SEGMENT:
            free.put(at, bytes_, at)
        else:
            free.take(at)
    return bytes_of
