"""A caching allocator in small: best fit, splits, merges and segments as in c10/cuda/CUDACachingAllocator.cpp.

It knows what it gives, so its history is one whose answers are known without the replay.
"""

import random
from dataclasses import dataclass, field

KIB, MIB = 1 << 10, 1 << 20
Event = tuple[str, int, int]  # action, address, bytes as the history tells them


@dataclass
class BestFit:
    """An allocator that writes its history, as torch's would. Blocks larger than ``max_split_bytes`` are not split.

    ``given`` has the bytes of each block, in the order of allocation; ``allocated`` those held after each event.
    """

    max_split_bytes: int = 1 << 62
    history: list[Event] = field(default_factory=list)
    given: list[int] = field(default_factory=list)
    allocated: list[int] = field(default_factory=list)
    _free: dict[int, tuple[int, int, bool]] = field(default_factory=dict)  # address: bytes, segment, small
    _segments: dict[int, int] = field(default_factory=dict)
    _held: dict[int, tuple[int, int, bool]] = field(default_factory=dict)
    _next: int = 0x7F0000000000
    _bytes: int = 0

    def alloc(self, requested: int) -> int:
        """Its address."""
        size = max(-(-requested // 512), 1) * 512
        small = size <= MIB
        fitting = [
            (bytes_, at)
            for at, (bytes_, _, is_small) in self._free.items()
            if is_small == small and bytes_ >= size and (size >= self.max_split_bytes or bytes_ < self.max_split_bytes)
        ]
        if not fitting:
            fitting = [self._new_segment(size, small)]
        bytes_, at = min(fitting)
        segment = self._free.pop(at)[1]
        remaining = bytes_ - size
        if remaining >= 512 if small else size < self.max_split_bytes and remaining > MIB:
            self._free[at + size] = remaining, segment, small
            bytes_ = size
        self._held[at] = bytes_, segment, small
        self._bytes += bytes_
        self.given.append(bytes_)
        self._say("alloc", at, requested)
        return at

    def free(self, at: int, requested: int, *, completes: bool = True) -> None:
        """Let go of a block; without `completes` a stream still works with it."""
        self._bytes -= self._held[at][0]
        self._say("free_requested", at, requested)
        if completes:
            self.complete(at, requested)

    def complete(self, at: int, requested: int) -> None:
        """Every stream is done with it: merge it with its neighbours."""
        bytes_, segment, small = self._held.pop(at)
        self._say("free_completed", at, requested)
        after = self._free.get(at + bytes_)
        if after is not None and after[1] == segment:
            bytes_ += self._free.pop(at + bytes_)[0]
        for before, (length, of, _) in self._free.items():
            if before + length == at and of == segment:
                at, bytes_ = before, bytes_ + length
                break
        self._free[at] = bytes_, segment, small

    def give_back(self) -> None:
        """``empty_cache``."""
        for segment, size in list(self._segments.items()):
            if self._free.get(segment, (0,))[0] == size:
                del self._free[segment], self._segments[segment]
                self._say("segment_free", segment, size)
        self._next = max((at + size for at, size in self._segments.items()), default=0x7F0000000000)

    def _new_segment(self, size: int, small: bool) -> tuple[int, int]:
        total = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        at, self._next = self._next, self._next + total
        self._segments[at] = total
        self._free[at] = total, at, small
        self._say("segment_alloc", at, total)
        return total, at

    def _say(self, action: str, at: int, bytes_: int) -> None:
        self.history.append((action, at, bytes_))
        self.allocated.append(self._bytes)


def random_history(seed: int, num_events: int, max_split_bytes: int) -> BestFit:
    """Blocks of many sizes, some of which leave 1 MiB or a little more or less of what they are taken from."""
    chance = random.Random(seed)
    allocator = BestFit(max_split_bytes)
    sizes = [*(512 * 2**power - chance.randrange(512) for power in range(16)), 19 * MIB, 19 * MIB - 512, 20 * MIB]
    sizes += [chance.randrange(MIB, 30 * MIB) for _ in range(12)]
    held: list[tuple[int, int]] = []
    leaving: list[tuple[int, int]] = []
    while len(allocator.history) < num_events:
        what = chance.random()
        if what < 0.5 or not held:
            requested = chance.choice(sizes)
            held.append((allocator.alloc(requested), requested))
        elif what < 0.97:
            block = held.pop(chance.randrange(len(held)))
            waits = chance.random() < 0.1
            allocator.free(*block, completes=not waits)
            leaving += [block] * waits
        elif leaving:
            allocator.complete(*leaving.pop(0))
        elif what > 0.995:
            allocator.give_back()
    return allocator
