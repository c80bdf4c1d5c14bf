"""The host's time before each launch, from logs of bare steps (:mod:`fakedist.record.host_clock`).

The core does not always run alike. Others share it: its other hardware thread, and processes that take it for a while
and leave its caches cold. So the driver measures the core's pace, the time of a fixed piece of work, every 250 us, and
the time between two launches counts as if the pace had been that of a calm moment. After a wait for the core, launches
took 1.27 times as long at first, and 1.04 after 2 ms. So of the repeats of a launch those count that were not so soon
after a wait. If there are none, its time is divided by how much longer the same launches of the step took so soon.

The least of the repeats is not taken: it falls with their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf, nan
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

#: What a launch is. Those with equal keys are the same work on the same stream.
Key = object

#: A wait of the process for a core that takes so long changes what follows.
_WAIT_US = 100.0
#: A time between two launches that is longer was spent without a core, if the process had none for a while.
_SLICE_US = 1000.0
#: CPU time since the last such wait, from which on the caches are warm, and bounds of the classes before that.
_WARM_US = 2500.0
_SINCE_US = (1.0, 500.0, 1000.0, 1500.0, _WARM_US)
#: Launches that say how much longer those of a class take.
_ENOUGH = 100
#: What the recorder costs a script besides the time in our own code, over the core's pace: caches, torch's boxes,
#: slower calls of modules. And the least that is left of the time between two moments.
_OPERATION_COST, _HOOK_COST, _LEAST_OF_SCRIPT = 0.55, 1.5, 0.2
#: The pace of a calm moment is this quantile of all.
_CALM = 0.02


class Pace(NamedTuple):
    """The core's pace at a moment: launches in the log, several clocks, and the time of the work, in microseconds.

    ``num_operations`` and ``num_hooks`` of the recorder's had run, in a recorded step.
    """

    position: int
    host_us: float
    wall_us: float
    cpu_us: float
    work_us: float
    num_operations: int = 0
    num_hooks: int = 0


class CalmClock(NamedTuple):
    """The host's clock as if the core's pace had always been ``pace_us``, without waits for the core.

    Attributes:
        at_us: The clock at each launch of the log.
        warm_us: CPU time since the process last waited for a core, at each launch.
        paces_us: The clock at each moment of a pace.
    """

    pace_us: float
    at_us: list[float]
    warm_us: list[float]
    paces_us: list[float]


def calm_clock(at_us: Sequence[float], paces: Sequence[Pace]) -> CalmClock:
    """The calm clock of a log. ``at_us`` is the host's clock at each of its launches."""
    works = sorted(pace.work_us for pace in paces)
    calm_us = works[int(_CALM * len(works))] if works else 0.0
    last_us = paces[0].host_us if paces and not paces[0].position else at_us[0] if at_us else 0.0
    now_us, since_us = 0.0, inf
    clock = CalmClock(calm_us, [], [], [])
    for before, after in pairwise([None, *paces, None]):
        begin = 0 if before is None else before.position
        end = len(at_us) if after is None else after.position
        waited_us = 0.0
        if before is not None and after is not None:
            cpu_us = after.cpu_us - before.cpu_us
            waited_us = after.wall_us - before.wall_us - cpu_us
            since_us = 0.0 if waited_us > _WAIT_US else since_us + cpu_us
        moments_us = [last_us, *at_us[begin:end]]
        if after is not None:
            moments_us.append(max(after.host_us, moments_us[-1]))
        gaps_us = [now - last for last, now in pairwise(moments_us)]
        last_us = moments_us[-1]
        if gaps_us and waited_us > _WAIT_US:
            longest = max(range(len(gaps_us)), key=gaps_us.__getitem__)
            if gaps_us[longest] > min(waited_us / 2, _SLICE_US):  # else it waited in our own code
                gaps_us[longest] -= min(waited_us, gaps_us[longest])
        works = [pace.work_us for pace in (before, after) if pace is not None]
        rate = calm_us / fmean(works) if works else 1.0
        if before is not None and after is not None:
            rate *= _of_script(before, after, sum(gaps_us))
        for number, gap_us in enumerate(gaps_us):
            now_us += gap_us * rate
            if number < end - begin:
                clock.at_us.append(now_us)
                clock.warm_us.append(since_us)
        if after is not None:
            clock.paces_us.append(now_us)
    return clock


def _of_script(before: Pace, after: Pace, host_us: float) -> float:
    """The fraction of the time between two moments that the script would have taken without the recorder."""
    cost = _OPERATION_COST * (after.num_operations - before.num_operations)
    cost += _HOOK_COST * (after.num_hooks - before.num_hooks)
    return (
        max(1 - cost * (before.work_us + after.work_us) / 2 / host_us, _LEAST_OF_SCRIPT)
        if cost and host_us > 0
        else 1.0
    )


def times_of_rows(matched: Sequence[int], at_us: Sequence[float], before_us: float) -> list[float]:
    """The time from the launch matched before to each one; NaN for what is not matched.

    ``before_us`` is the clock before the first. What only a bare step launches counts for the next launch of both.
    """
    times, last_us = [], before_us
    for position in matched:
        times.append(nan if position < 0 else at_us[position] - last_us)
        last_us = last_us if position < 0 else at_us[position]
    return times


class Repeats(NamedTuple):
    """The time before each launch in each repeat, and how long the caches had been warm: [repeats, rows].

    NaN: the repeat lacks the launch.
    """

    time_us: Array
    warm_us: Array


def as_if_warm(keys: Sequence[Key], repeats: Repeats) -> Repeats:
    """The repeats as if the caches had always been warm.

    The times of one class are so many times longer as they are, in sum, than warm ones of the same launches, of which
    each is known by its key and by the one before it.
    """
    time_us, warm_us = repeats
    numbers = dict[tuple[Key, Key], int]()
    pair_of_row = [numbers.setdefault(pair, len(numbers)) for pair in zip([*keys[-1:], *keys], keys, strict=False)]
    pairs = np.broadcast_to(np.array(pair_of_row, "i8"), time_us.shape)
    is_warm = (warm_us >= _WARM_US) & ~np.isnan(time_us)
    sums_us = np.bincount(pairs[is_warm], time_us[is_warm], minlength=len(numbers))
    with np.errstate(invalid="ignore"):
        usual_us = (sums_us / np.bincount(pairs[is_warm], minlength=len(numbers)))[pairs]
    classes = np.searchsorted(_SINCE_US, warm_us, side="right")
    is_compared = ~np.isnan(time_us + usual_us)
    compared, num_classes = classes[is_compared], len(_SINCE_US) + 1
    cold, usual = (np.bincount(compared, each[is_compared], minlength=num_classes) for each in (time_us, usual_us))
    is_known = (np.bincount(compared, minlength=num_classes) >= _ENOUGH) & (usual > 0)
    slower = np.ones(num_classes)
    slower[is_known] = np.maximum(cold[is_known] / usual[is_known], 1.0)
    return Repeats(time_us / slower[classes], warm_us)


def times_of(repeats: Repeats) -> Array:
    """The time of each row: the mean of its warm repeats, else that of the longest after a wait; NaN without any."""
    warm_us = np.where(np.isnan(repeats.time_us), -inf, repeats.warm_us)
    counts = warm_us >= np.minimum(_WARM_US, np.max(warm_us, axis=0, initial=0.0))
    sums_us = np.where(counts, repeats.time_us, 0.0).sum(axis=0)
    with np.errstate(invalid="ignore"):
        mean_us: Array = np.maximum(sums_us / counts.sum(axis=0), 0.0)
    return mean_us
