"""The caching allocator's history played again, to learn what the history does not say: the size of each block.

The history tells what was *requested*; the allocator's statistics count what was *given*. What it gives is written in
c10/cuda/CUDACachingAllocator.cpp: the request rounded up to 512 bytes, or all of the free block it is taken from where
what remains is too small to be a block of its own (``should_split``). So the replay keeps the free blocks of each
segment. :func:`replay` is checked against the allocator's own statistics wherever a run has them.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from fakedist.run.schema import ACTIONS

MIN_BLOCK_BYTES = 512  # kMinBlockSize
SMALL_BYTES = 1 << 20  # kSmallSize: larger requests are served by the large pool
_NUM_INTERVALS = 16  # kRoundUpPowerOfTwoIntervals: from 1 MiB to 64 GiB


@dataclass(frozen=True)
class AllocatorSettings:
    """What of PYTORCH_CUDA_ALLOC_CONF changes the size of a block.

    Attributes:
        max_split_bytes: Larger blocks are not split (``max_split_size_mb``).
        power2_divisions: ``roundup_power2_divisions``: into how many steps the room between two powers of two is cut
            when requests are rounded up, for requests below 2 MiB, 4 MiB, ..., 64 GiB and above; empty for none.
        expandable: ``expandable_segments:True``.
    """

    max_split_bytes: int = 1 << 62
    power2_divisions: tuple[int, ...] = ()
    expandable: bool = False


def parse_settings(alloc_conf: str) -> AllocatorSettings:
    """Settings in a PYTORCH_CUDA_ALLOC_CONF text; those that do not change the size of a block are left out."""
    options = dict(re.findall(r"(\w+)\s*:\s*(\[[^\]]*\]|[^,]*)", alloc_conf))
    split = options.get("max_split_size_mb", "").strip()
    return AllocatorSettings(
        int(split) << 20 if split.isdecimal() else 1 << 62,
        _divisions(options.get("roundup_power2_divisions", "").replace(" ", "")),
        options.get("expandable_segments", "").strip().lower() == "true",
    )


def _divisions(text: str) -> tuple[int, ...]:
    """``parseRoundUpPower2Divisions`` of c10/core/AllocatorConfig.cpp: one number, or [256:1,512:2,>:4] with MiB."""
    if text.isdecimal():
        return (int(text),) * _NUM_INTERVALS
    found, last = [0] * _NUM_INTERVALS, -1
    for boundary, number in re.findall(r"(\d+|>):(\d+)", text):
        if boundary == ">":
            found[max(last, 0) + 1 :] = [int(number)] * (_NUM_INTERVALS - 1 - max(last, 0))
            continue
        index = min(int(boundary).bit_length() - 1, _NUM_INTERVALS - 1)
        if last < 0:
            found[:index] = [int(number)] * index
        found[index] = int(number)
        last = index
    return tuple(found) if any(found) else ()


def rounded_bytes(requested: int, settings: AllocatorSettings) -> int:
    """``round_size``: the least that a request is given."""
    if requested < MIN_BLOCK_BYTES:
        return MIN_BLOCK_BYTES
    if settings.power2_divisions:
        power = requested.bit_length() - 1
        divisions = settings.power2_divisions[min(max(power - 20, 0), _NUM_INTERVALS - 1)]
        if divisions > 1 and requested > MIN_BLOCK_BYTES * divisions:
            step = (1 << power) // divisions
            return -(-requested // step) * step
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


class Ranges:
    """Stretches of addresses that do not overlap, by where they start and where they end; merged within a segment."""

    def __init__(self) -> None:
        self._starts: dict[int, tuple[int, int]] = {}  # start -> (bytes, segment)
        self._ends: dict[int, int] = {}  # end -> start

    def put(self, start: int, bytes_: int, segment: int) -> None:
        """Add a stretch, merged with neighbours in the same segment."""
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
        """Remove the stretch that starts here: (bytes, segment)."""
        found = self._starts.pop(start, None)
        if found is not None:
            del self._ends[start + found[0]]
        return found

    def cut(self, start: int, bytes_: int) -> None:
        """Remove a piece of a stretch (an expandable segment gives pages back)."""
        for first, (length, segment) in self._starts.items():
            if first <= start and start + bytes_ <= first + length:
                self.take(first)
                if start > first:
                    self.put(first, start - first, segment)
                if start + bytes_ < first + length:
                    self.put(start + bytes_, first + length - start - bytes_, segment)
                return

    def listed(self) -> list[tuple[int, int, int]]:
        """Every stretch by address: (start, bytes, segment)."""
        return sorted((start, bytes_, segment) for start, (bytes_, segment) in self._starts.items())


class _Player:
    """The allocator's state: the blocks that are held, those whose free waits for a stream, and the free ones."""

    def __init__(self, num_events: int, settings: AllocatorSettings) -> None:
        self.found = Replay()
        self._free = Ranges()
        self._never = num_events
        self._settings = settings
        self._expandable = settings.expandable
        self._segments: list[int] = []  # of each block; -1 where it is not known
        self._held: dict[int, int] = {}  # start -> block number
        self._leaving: dict[int, int] = {}  # the same, of blocks whose free is not completed

    def alloc(self, event: int, at: int, requested: int) -> int:
        """Give a block: its bytes."""
        given = rounded_bytes(requested, self._settings)
        segment = -1
        if (taken := self._free.take(at)) is not None:
            whole, segment = taken
            if self._splits(whole - given, given):
                self._free.put(at + given, whole - given, segment)
            else:
                given = whole
        self._held[at] = len(self._segments)
        self._segments.append(segment)
        found = self.found
        found.alloc_event.append(event)
        found.free_event.append(self._never)
        found.block_bytes.append(given)
        return given

    def request_free(self, event: int, at: int) -> int:
        """A tensor lets go of a block: the bytes that are held no longer."""
        block = self._held.pop(at, -1)
        if block < 0:
            self.found.unknown_frees += 1
            return 0
        self.found.free_event[block] = event
        self._leaving[at] = block
        return self.found.block_bytes[block]

    def complete_free(self, at: int) -> None:
        """Every stream is done with a block: it can be given again."""
        block = self._leaving.pop(at, -1)
        if block >= 0 and self._segments[block] >= 0:
            self._free.put(at, self.found.block_bytes[block], self._segments[block])

    def gain(self, at: int, bytes_: int, mapped: bool) -> None:
        """A segment, or pages of an expandable one."""
        # Pages mapped behind each other belong to one expandable segment; ordinary segments never merge.
        self._free.put(at, bytes_, 0 if mapped else at)
        self._expandable |= mapped  # the script switched them on itself

    def lose(self, at: int, bytes_: int, mapped: bool) -> None:
        """A segment goes back to the GPU, or pages of an expandable one."""
        if mapped:
            self._free.cut(at, bytes_)
        else:
            self._free.take(at)

    def _splits(self, remaining: int, given: int) -> bool:
        """``should_split``. A block of the small pool never serves a large request, so the request tells the pool."""
        if given <= SMALL_BYTES or self._expandable:
            return remaining >= MIN_BLOCK_BYTES
        return given < self._settings.max_split_bytes and remaining > SMALL_BYTES


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
    gain, loss = (codes["segment_alloc"], codes["segment_map"]), (codes["segment_free"], codes["segment_unmap"])
    player = _Player(len(action), settings)
    found = player.found
    allocated = reserved = 0
    for event, (what, at, bytes_) in enumerate(zip(action, address, size, strict=True)):
        if what == alloc:
            allocated += player.alloc(event, at, bytes_)
        elif what == requested:
            allocated -= player.request_free(event, at)
        elif what == completed:
            player.complete_free(at)
        elif what in gain:
            reserved += bytes_
            player.gain(at, bytes_, mapped=what == gain[1])
        elif what in loss:
            reserved -= bytes_
            player.lose(at, bytes_, mapped=what == loss[1])
        found.allocated_bytes.append(allocated)
        found.reserved_bytes.append(reserved)
    return found
