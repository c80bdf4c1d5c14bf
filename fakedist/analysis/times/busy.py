"""When the GPU computes, when it waits, and for what. Overlapping streams count once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from fakedist.analysis.recording import Array
from fakedist.time.exposure import union_us

_ROUNDING_US = 1e-3


@dataclass(frozen=True)
class Busy:
    """How a step's time is spent. The four parts add up to the step.

    Attributes:
        step_us: From the start of the step to the end of everything that it launched.
        busy_us: At least one stream computes.
        communication_us: Nothing computes, and a collective of known duration runs.
        launch_gap_us: Nothing runs, and the next kernel was launched after the gap began: the host is late.
        wait_us: Nothing runs for any other reason; for any reason at all if launches are unknown.
        of_kernel_us: For each kernel, the launch gap that it ended. The gap at the step's end belongs to no kernel.
    """

    step_us: float
    busy_us: float
    communication_us: float
    launch_gap_us: float
    wait_us: float
    of_kernel_us: Array


def find_busy(kernels: pd.DataFrame, step_us: float) -> Busy:
    """Divide a step's time into its parts.

    Args:
        kernels: The result of :func:`fakedist.analysis.times.kernel_kinds.timed`.
        step_us: The step's time. Kernels that end later make it longer.
    """
    known = kernels["is_known"].to_numpy(bool)
    start = np.maximum(kernels["start_us"].to_numpy("f8")[known], 0.0)
    end = np.maximum(kernels["start_us"].to_numpy("f8")[known] + kernels["known_us"].to_numpy()[known], start)
    step_us = max(float(step_us), float(end.max(initial=0.0)))
    compute = kernels["is_compute"].to_numpy(bool)[known]
    busy = union_us(start[compute], end[compute])
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    launch = kernels["launch_us"].to_numpy("f8")[known][order]
    free = np.concatenate([[0.0], np.maximum.accumulate(end)])  # before each kernel, when the GPU had run out of work
    gap = np.maximum(start - free[:-1], 0.0)
    is_late = launch > free[:-1]  # never true if the launch is unknown
    late = np.where(is_late, gap, 0.0)
    of_kernel = np.zeros(len(kernels))
    of_kernel[np.flatnonzero(known)[order]] = late
    tail = step_us - float(free[-1])  # after the last kernel only the host works
    waits = float(gap.sum() - late.sum())
    late_us = float(late.sum()) + (tail if np.isfinite(launch).any() else 0.0)
    waits += 0.0 if np.isfinite(launch).any() else tail
    rest = step_us - busy - late_us - waits
    rest = rest if rest > _ROUNDING_US else 0.0
    return Busy(step_us, busy, rest, late_us, waits, of_kernel)
