"""Ranges of device addresses: free memory during a replay, and the segments that the allocator holds at a moment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

Pool = tuple[int, int]
#: The pool of every allocation outside of a private pool.
COMMON_POOL: Pool = (0, 0)


class AddressRanges:
    """Address ranges that do not overlap, indexed by start and by end. Neighbours in the same segment are merged.

    Ranges of a foreign snapshot may overlap, if it contradicts itself. What is listed is then wrong, but nothing fails.
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
        found = self._starts.pop(start, None)
        if found is not None:
            self._ends.pop(start + found[0], None)
        return found

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

    def listed(self) -> list[tuple[int, int, int]]:
        """Every range as (start, bytes, segment), sorted by address."""
        return sorted((start, bytes_, segment) for start, (bytes_, segment) in self._starts.items())


class Segment(NamedTuple):
    """Memory that the allocator holds in one piece: a segment, or mapped pages of an expandable one without a gap.

    Attributes:
        address: Where it begins.
        bytes: Its size.
        stream: Its stream.
        is_expandable: Whether pages can be added to it and taken from it.
        pool_id: Id of its private pool; ``COMMON_POOL`` outside of private pools.
    """

    address: int
    bytes: int
    stream: int
    is_expandable: bool = False
    pool_id: Pool = COMMON_POOL


class Segments:
    """The segments that the allocator holds, event by event.

    Args:
        before: The segments at the beginning.
    """

    def __init__(self, before: Iterable[Segment] = ()) -> None:
        self._ranges = AddressRanges()
        self._ordinary: dict[int, tuple[int, Pool]] = {}  # by address: stream and pool
        self._numbers: dict[tuple[int, Pool], int] = {}  # of expandable segments, by stream and pool
        for segment in before:
            self.add(segment)

    def add(self, segment: Segment) -> None:
        """Take a segment, or map pages."""
        place = (segment.stream, segment.pool_id)
        number = segment.address
        if segment.is_expandable:
            # A block may span several mappings in a row of its stream and pool. Ordinary segments never merge.
            number = -1 - self._numbers.setdefault(place, len(self._numbers))
        else:
            self._ordinary[segment.address] = place
        self._ranges.put(segment.address, segment.bytes, number)

    def remove(self, segment: Segment) -> None:
        """Give a segment back, or unmap pages."""
        if segment.is_expandable:
            self._ranges.cut(segment.address, segment.bytes)
        else:
            self._ranges.take(segment.address)

    def listed(self) -> list[Segment]:
        """What is held, sorted by address."""
        expandable = {-1 - number: place for place, number in self._numbers.items()}
        found = []
        for address, bytes_, number in self._ranges.listed():
            stream, pool = expandable[number] if number < 0 else self._ordinary[number]
            found.append(Segment(address, bytes_, stream, number < 0, pool))
        return found
