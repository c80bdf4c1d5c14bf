"""Where collectives and kernels that compute run at the same time: for drawings."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fakedist.analysis.recording import Array
from fakedist.time.exposure import shared_us, union


def hidden_us(bars: pd.DataFrame, kernels: pd.DataFrame) -> Array:
    """How long something computes during each of some bars, in microseconds.

    Args:
        bars: Columns start_us and end_us.
        kernels: The result of :func:`fakedist.analysis.times.kernel_kinds.timed`.
    """
    starts, ends = _computing(kernels)
    return shared_us(bars["start_us"].to_numpy("f8"), bars["end_us"].to_numpy("f8"), starts, ends)


def hidden_parts(kernels: pd.DataFrame, least_us: float) -> pd.DataFrame:
    """The parts of collectives during which something computes, by stream and start.

    Args:
        kernels: The result of :func:`fakedist.analysis.times.kernel_kinds.timed`.
        least_us: Shorter parts are left out, and shorter pauses of compute count as compute.

    Returns:
        Columns stream, start_us, end_us.
    """
    begins, until = union(*_computing(kernels))
    if len(begins):
        apart = np.concatenate([[True], begins[1:] - until[:-1] > least_us])
        begins, until = begins[apart], until[np.concatenate([apart[1:], [True]])]
    calls = kernels[~kernels["is_compute"] & kernels["is_known"]].sort_values(["stream", "start_us"], kind="stable")
    start = calls["start_us"].to_numpy("f8")
    end = start + calls["known_us"].to_numpy("f8")
    first = np.searchsorted(until, start, side="right")
    num = np.maximum(np.searchsorted(begins, end, side="left") - first, 0)
    call = np.repeat(np.arange(len(calls)), num)
    place = np.arange(len(call)) - np.repeat(np.cumsum(num) - num, num) + first[call]
    found = pd.DataFrame(
        {
            "stream": calls["stream"].to_numpy()[call],
            "start_us": np.maximum(begins[place], start[call]),
            "end_us": np.minimum(until[place], end[call]),
        }
    )
    return found[found["end_us"] - found["start_us"] >= least_us].reset_index(drop=True)


def _computing(kernels: pd.DataFrame) -> tuple[Array, Array]:
    compute = kernels[kernels["is_compute"]]
    start = compute["start_us"].to_numpy("f8")
    return start, start + compute["known_us"].to_numpy("f8")
