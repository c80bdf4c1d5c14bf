"""A recording's allocations as a program for the player, in which some sizes follow counts of experts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.analysis.blocks import Blocks
from fakedist.analysis.recording import Recording
from fakedist.analysis.routed_blocks import Counts, Ints, calls_of, fitted_sizes
from fakedist.errors import JobError
from fakedist.rundir.schema import ACTIONS

_EMPTY_CACHE = np.iinfo(np.int32).min
_GIVEN_BACK = [ACTIONS.index(action) for action in ("segment_free", "segment_unmap")]
_TAKEN = [ACTIONS.index(action) for action in ("segment_alloc", "segment_map")]


@dataclass(frozen=True)
class AllocationProgram:
    """A recording's allocations for the player (player.py).

    Attributes:
        events: In order: n allocates block n, ~n frees it, the least number empties the cache.
        base, per, follows: The bytes of each block are ``base + per x count``; ``follows`` says which, -1: none.
        stream: Number of the stream of each block; 0 is the default one.
        is_shared: Whether another stream used the block.
        event: The recorded event of each of ``events``.
        bounded: Rows of the blocks whose sizes are only bounded from above.
    """

    events: npt.NDArray[np.int32]
    base: Ints
    per: Ints
    follows: npt.NDArray[np.int32]
    stream: npt.NDArray[np.int32]
    is_shared: npt.NDArray[np.uint8]
    event: Ints
    bounded: Ints

    @property
    def largest_bounded_bytes(self) -> int:
        """The most that such a block has in the recording."""
        return int(self.base[self.bounded].max(initial=0))


def program_of(recording: Recording, blocks: Blocks, counts: Counts, mine: Ints) -> AllocationProgram:
    """The program of a recording in which the calls had these counts (:meth:`Counts.of_rank`).

    Raises:
        JobError: Memory is in a private pool.
    """
    check_pools(recording)
    frame = blocks.frame
    call = calls_of(recording, frame, counts.passes)
    fitted = fitted_sizes(frame, call, mine, np.array([of.layer for of in counts.passes]))
    events, at = program_events(recording, blocks)
    follows = np.where(fitted.follows < 0, -1, fitted.follows + call * mine.shape[1]).astype("i4")
    return AllocationProgram(events, fitted.base, fitted.per, follows, *streams_of(frame), at, fitted.bounded)


def check_pools(recording: Recording) -> None:
    """Refuse a recording with blocks in private pools."""
    if any(pool != (0, 0) for pool in recording.pools.get(recording.device, {}).values()):
        raise JobError(
            "the recording has blocks in private pools of CUDA graphs, which cannot be played", "record it without them"
        )


def streams_of(frame: pd.DataFrame) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """The stream's number of each block, 0 for the default one, and whether another stream used it."""
    streams = {0: 0} | {handle: n for n, handle in enumerate(sorted(set(frame["stream"].tolist()) - {0}), 1)}
    is_shared = np.asarray(frame["reuse_event"] > frame["free_event"] + 1, np.uint8)
    return frame["stream"].map(streams).to_numpy("i4"), is_shared


def program_events(recording: Recording, blocks: Blocks) -> tuple[npt.NDArray[np.int32], Ints]:
    """The events of a program, and the recorded one of each."""
    frame, num_events = blocks.frame, len(recording.device_events["action"])
    made, freed = frame["alloc_event"].to_numpy("i8"), frame["free_event"].to_numpy("i8")
    number, is_freed, gone = np.arange(len(frame)), freed < num_events, _emptied(recording, blocks)
    event = np.concatenate([made, freed[is_freed], gone])
    what = np.concatenate([number, ~number[is_freed], np.full(len(gone), _EMPTY_CACHE)])
    order = np.argsort(event, kind="stable")
    return what[order].astype("i4"), event[order]


def _emptied(recording: Recording, blocks: Blocks) -> Ints:
    """The first events of segments that the script gave back, not the allocator to serve a request."""
    events, reserved = recording.device_events, blocks.replay.reserved_bytes
    action = events["action"]
    gone = np.flatnonzero(np.isin(action, _GIVEN_BACK))
    runs = np.split(gone, np.flatnonzero(np.diff(gone) > 1) + 1) if len(gone) else []
    capacity = 0 if recording.gpu is None else recording.gpu.capacity_bytes
    emptied = []
    for run in runs:
        first, after = run[0], run[-1] + 1
        is_for_request = after < len(action) and action[after] in _TAKEN
        asked = int(events["size"][after]) if is_for_request else 0
        if int(reserved[first - 1]) + asked <= capacity or not is_for_request:
            emptied.append(first)
    return np.array(emptied, np.int64)
