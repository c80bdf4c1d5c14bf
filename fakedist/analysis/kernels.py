"""The table of the timed step's kernels, whatever timed them."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fakedist.analysis.recording import Recording
from fakedist.run.kernels import KERNEL_TYPES
from fakedist.run.schema import BOUNDS, FAMILIES, PHASES


def kernel_table(recording: Recording) -> pd.DataFrame:
    """The table ``kernels``: one row per kernel, copy, fill or collective, in order of start."""
    columns = recording.kernels
    texts = {"family": FAMILIES, "phase": PHASES, "bound": BOUNDS}
    texts |= dict.fromkeys(("name", "grid", "block", "operation"), tuple(recording.kernel_texts))
    frame = pd.DataFrame({name: columns[name] for name in KERNEL_TYPES})
    for name, known in texts.items():
        frame[name] = np.array(known or ("",), object)[columns[name]]
    frame["recompute"] = frame["recompute"].astype(bool)
    return frame.sort_values(["start_us", "stream"], kind="stable").reset_index(drop=True)
