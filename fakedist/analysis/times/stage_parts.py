"""What a rank does during the job's step: it computes, communicates, waits for other ranks, or for its host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from fakedist.analysis.recording import Array
from fakedist.analysis.times.busy import find_busy
from fakedist.time.exposure import union, union_us

#: What a lane shows, the first covering the later ones.
LANES = ("generation", "forward", "recompute", "backward", "optimizer", "other", "communication", "bubble")
#: Breaks shorter than this share of the step are not drawn.
_DRAWN = 1 / 4000


@dataclass(frozen=True)
class RankRows:
    """The launches with work of a rank, in their order, once they are placed.

    Attributes:
        start_us: When each began.
        launch_us: When the host had launched it.
        end_us: When it ended.
        alone_us: How long it takes without waiting for other ranks.
        lane: What it is for: a place in :data:`LANES`.
    """

    start_us: Array
    launch_us: Array
    end_us: Array
    alone_us: Array
    lane: Array

    @property
    def is_call(self) -> Array:
        """Which are collectives, sends and receives."""
        return np.asarray(self.lane == LANES.index("communication"))

    @property
    def works_from_us(self) -> Array:
        """When each goes on to work, once it has waited for other ranks."""
        return np.asarray(np.maximum(self.end_us - self.alone_us, self.start_us))


@dataclass(frozen=True)
class Parts:
    """How a rank spends the job's step. The parts add up to the job's step.

    Attributes:
        own_us: When the rank is done.
        compute_us: It computes.
        communication_us: It communicates and does not compute.
        bubble_us: It waits for what other ranks send or take part in, or has finished before them.
        host_us: The GPU waits for the rank's own host.
        wait_us: Anything else.
    """

    own_us: float
    compute_us: float
    communication_us: float
    bubble_us: float
    host_us: float
    wait_us: float


def parts_of(rows: RankRows, own_us: float, step_us: float) -> Parts:
    """Divide the job's step for a rank.

    Args:
        rows: Its launches.
        own_us: When the rank is done.
        step_us: When all ranks are done.
    """
    is_call = rows.is_call
    frame = pd.DataFrame(
        {
            "start_us": rows.start_us,
            "launch_us": rows.launch_us,
            "known_us": rows.end_us - rows.start_us,
            "is_known": True,
            "is_compute": ~is_call,
        }
    )
    busy = find_busy(frame, own_us)
    working = union_us(
        np.concatenate([rows.start_us[~is_call], rows.works_from_us[is_call]]),
        np.concatenate([rows.end_us[~is_call], rows.end_us[is_call]]),
    )
    communication = max(working - busy.busy_us, 0.0)
    waits = max(busy.communication_us - communication, 0.0)
    return Parts(own_us, busy.busy_us, communication, waits + step_us - own_us, busy.launch_gap_us, busy.wait_us)


def lanes_of(rows: RankRows, own_us: float, step_us: float) -> pd.DataFrame:
    """What a rank does when, for a drawing.

    Returns:
        A row for each stretch: ``lane`` (of :data:`LANES`), ``start_us``, ``end_us``. Stretches of one lane are joined
        over breaks too short to draw; those of different lanes may overlap.
    """
    found = []
    for number, name in enumerate(LANES):
        own = rows.lane == number
        starts, ends = np.where(rows.is_call, rows.works_from_us, rows.start_us)[own], rows.end_us[own]
        if name == "bubble":
            own = rows.is_call
            starts = np.append(rows.start_us[own], own_us)
            ends = np.append(rows.works_from_us[own], step_us)
        starts, ends = union(starts, ends)
        if not len(starts):
            continue
        is_break = starts[1:] - ends[:-1] > step_us * _DRAWN
        first, last = np.concatenate([[True], is_break]), np.concatenate([is_break, [True]])
        found.append(pd.DataFrame({"lane": name, "start_us": starts[first], "end_us": ends[last]}))
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=["lane", "start_us", "end_us"])
