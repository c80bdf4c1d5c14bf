"""The caching allocator's history played again, to learn what the history does not say: the size of each block.

The history tells what was *requested*; the allocator's statistics count what was *given*. What it gives is written in
c10/cuda/CUDACachingAllocator.cpp: the request rounded up to 512 bytes, or all of the free block it is taken from where
what remains is too small to be a block of its own (``should_split``). So the replay keeps the free blocks of each
segment. :func:`replay` is checked against the allocator's own statistics wherever a run has them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from fakedist.run.schema import ACTIONS

MIN_BLOCK_BYTES = 512  # kMinBlockSize
SMALL_BYTES = 1 << 20  # kSmallSize
SMALL_SEGMENT_BYTES = 2 << 20  # kSmallBuffer: segments of the small pool; those of the large pool have 20 MiB or more


@dataclass(frozen=True)
class AllocatorSettings:
    """What of PYTORCH_CUDA_ALLOC_CONF changes the size of a block.

    Attributes:
        max_split_bytes: Larger blocks are not split (``max_split_size_mb``).
        power2_divisions: Requests are rounded up to this many steps between powers of two
            (``roundup_power2_divisions`` as one number); 0 where they are not.
        expandable: ``expandable_segments:True``.
    """

    max_split_bytes: int = 1 << 62
    power2_divisions: int = 0
    expandable: bool = False


def parse_settings(alloc_conf: str) -> AllocatorSettings:
    """Settings in a PYTORCH_CUDA_ALLOC_CONF text; those that do not change the size of a block are left out."""
    options = dict(part.strip().split(":", 1) for part in alloc_conf.split(",") if ":" in part)
    split = options.get("max_split_size_mb", "").strip()
    divisions = options.get("roundup_power2_divisions", "").strip()
    return AllocatorSettings(
        int(split) << 20 if split.isdecimal() else 1 << 62,
        int(divisions) if divisions.isdecimal() else 0,
        options.get("expandable_segments", "").strip().lower() == "true",
    )


def rounded_bytes(requested: int, settings: AllocatorSettings) -> int:
    """``round_size``: the least that a request is given."""
    if requested < MIN_BLOCK_BYTES:
        return MIN_BLOCK_BYTES
    divisions = settings.power2_divisions
    if divisions > 1 and requested > MIN_BLOCK_BYTES * divisions:
        if requested & (requested - 1) == 0:
            return requested
        step = (1 << (requested.bit_length() - 1)) // divisions
        return requested if step == 0 else -(-requested // step) * step
    return -(-requested // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


@dataclass
class Replay:
    """What the replay found. Blocks are in the order of their allocation, curves have one element per event.

    Attributes:
        alloc_event: Index of each block's ``alloc`` event.
        free_event: Index of its ``free_requested`` event; the number of events where it was never freed.
        block_bytes: What the allocator gave.
        allocated_bytes: Bytes in blocks that tensors hold, after each event.
        reserved_bytes: Bytes in segments, after each event.
        unknown_frees: Frees of blocks that were allocated before the history began.
    """

    alloc_event: array[int] = field(default_factory=lambda: array("q"))
    free_event: array[int] = field(default_factory=lambda: array("q"))
    block_bytes: array[int] = field(default_factory=lambda: array("q"))
    allocated_bytes: array[int] = field(default_factory=lambda: array("q"))
    reserved_bytes: array[int] = field(default_factory=lambda: array("q"))
    unknown_frees: int = 0


class _FreeBlocks:
    """Free blocks of every segment, by where they start and where they end."""

    def __init__(self) -> None:
        self._starts: dict[int, tuple[int, int]] = {}  # start -> (bytes, segment)
        self._ends: dict[int, int] = {}  # end -> start

    def put(self, start: int, bytes_: int, segment: int) -> None:
        """Add a free block, merged with free neighbours in the same segment."""
        before = self._ends.get(start)
        if before is not None and self._starts[before][1] == segment:
            bytes_ += self._starts.pop(before)[0]
            del self._ends[start]
            start = before
        after = self._starts.get(start + bytes_)
        if after is not None and after[1] == segment:
            del self._starts[start + bytes_], self._ends[start + bytes_ + after[0]]
            bytes_ += after[0]
        self._starts[start] = (bytes_, segment)
        self._ends[start + bytes_] = start

    def take(self, start: int) -> tuple[int, int] | None:
        """Remove the free block that starts here: (bytes, segment)."""
        found = self._starts.pop(start, None)
        if found is not None:
            del self._ends[start + found[0]]
        return found

    def cut(self, start: int, bytes_: int) -> None:
        """Remove a piece of a free block (an expandable segment gives pages back)."""
        for first, (length, segment) in self._starts.items():
            if first <= start and start + bytes_ <= first + length:
                self.take(first)
                if start > first:
                    self.put(first, start - first, segment)
                if start + bytes_ < first + length:
                    self.put(start + bytes_, first + length - start - bytes_, segment)
                return


def replay(action: Sequence[int], address: Sequence[int], size: Sequence[int], settings: AllocatorSettings) -> Replay:
    """Play one device's history again.

    Args:
        action: Codes of ``run.schema.ACTIONS``, one per event, in order.
        address: Of the block or segment.
        size: Requested bytes of a block, bytes of a segment.
        settings: What the allocator was told.
    """
    codes = {name: code for code, name in enumerate(ACTIONS)}
    alloc, requested, completed = codes["alloc"], codes["free_requested"], codes["free_completed"]
    gain, loss = {codes["segment_alloc"], codes["segment_map"]}, {codes["segment_free"], codes["segment_unmap"]}
    found, free = Replay(), _FreeBlocks()
    live: dict[int, int] = {}  # start -> block number
    leaving: dict[int, list[int]] = {}  # start -> blocks whose free is not completed
    segments: list[int] = []
    small: dict[int, bool] = {}
    allocated = reserved = 0
    for event, (what, at, bytes_) in enumerate(zip(action, address, size, strict=True)):
        if what == alloc:
            taken = free.take(at)
            given = rounded_bytes(bytes_, settings)
            segment = -1
            if taken is not None:
                whole, segment = taken
                if _splits(whole - given, given, small.get(segment, False), settings):
                    free.put(at + given, whole - given, segment)
                else:
                    given = whole
            live[at] = len(segments)
            segments.append(segment)
            found.alloc_event.append(event)
            found.free_event.append(len(action))
            found.block_bytes.append(given)
            allocated += given
        elif what == requested:
            block = live.pop(at, -1)
            if block < 0:
                found.unknown_frees += 1
            else:
                found.free_event[block] = event
                allocated -= found.block_bytes[block]
                leaving.setdefault(at, []).append(block)
        elif what == completed:
            if blocks := leaving.get(at):
                block = blocks.pop(0)
                if segments[block] >= 0:
                    free.put(at, found.block_bytes[block], segments[block])
        elif what in gain:
            reserved += bytes_
            small[at] = bytes_ == SMALL_SEGMENT_BYTES
            # Pages mapped behind each other belong to one expandable segment; ordinary segments never merge.
            free.put(at, bytes_, 0 if what == codes["segment_map"] else at)
        elif what in loss:
            reserved -= bytes_
            if what == codes["segment_free"]:
                free.take(at)
            else:
                free.cut(at, bytes_)
        found.allocated_bytes.append(allocated)
        found.reserved_bytes.append(reserved)
    return found


def _splits(remaining: int, given: int, small_pool: bool, settings: AllocatorSettings) -> bool:
    """``should_split``."""
    if small_pool or settings.expandable:
        return remaining >= MIN_BLOCK_BYTES
    return given < settings.max_split_bytes and remaining > SMALL_BYTES
