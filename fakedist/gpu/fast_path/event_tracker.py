"""The operation of each event of the allocator's history, for torch 2.8 and 2.9, whose history does not keep it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from fakedist.errors import RecordingError
from fakedist.gpu.fast_path.build import TRACKER
from fakedist.rundir.schema import ACTIONS

#: TraceEntry::Action of torch 2.8 and 2.9, in its order.
_TORCHS_ACTIONS = (
    *("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free"),
    *("segment_map", "segment_unmap", "snapshot", "oom"),
)
_SNAPSHOT = "snapshot"
assert set(_TORCHS_ACTIONS) <= set(ACTIONS)


class EventTracker:
    """Numbers the allocator's events. CUDA must be initialised. SetupError if it cannot be built."""

    def __init__(self) -> None:
        # PyDLL keeps the GIL: these calls take less time than releasing it would.
        library = ctypes.PyDLL(str(TRACKER.ensure()))
        self._set = library.fakedist_operation
        self._set.argtypes = [ctypes.c_int64]
        library.fakedist_events.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
        library.fakedist_events.restype = ctypes.c_size_t
        self._library = library
        library.fakedist_track_allocator()

    def tell(self, number: str) -> None:
        """Events from now on belong to this operation."""
        self._set(int(number))

    def operations(self, device: int, actions: Sequence[str]) -> Sequence[int]:
        """The operation of each event since :meth:`forget`; -1 for snapshots, which it does not track.

        RecordingError if the history, with these actions, has other events.
        """
        kept = [action for action in actions if action != _SNAPSHOT]
        count = len(kept)
        events = (ctypes.c_int64 * (2 * count))()
        known = self._library.fakedist_events(device, events, count)
        tracked = [_TORCHS_ACTIONS[action] for action in events[1 : 2 * count : 2]] if known >= count else []
        if tracked != kept:
            raise RecordingError(
                f"the allocator's history has other events on cuda:{device} than its tracker saw",
                "this is a bug in fakedist; torch 2.10 and newer need no tracker",
            )
        numbers = events[0 : 2 * count : 2]
        if count == len(actions):
            return numbers
        following = iter(numbers)
        return [-1 if action == _SNAPSHOT else next(following) for action in actions]

    def forget(self) -> None:
        """Begin again, as the history does."""
        self._library.fakedist_forget_events()
