"""``run.memory``: the memory that was held, as DataFrames for a notebook, in bytes and microseconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

if TYPE_CHECKING:
    from fakedist.results.run import Run


class RunMemory:
    """The memory of a run.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def peak(self) -> pd.DataFrame:
        """Blocks alive at the peak, largest first. ``bytes`` adds up to ``run.peak_allocated_bytes``.

        Columns: bytes, category, layer, step, phase, operation, line.
        """
        blocks = self.blocks()
        return blocks[blocks.pop("at_peak")].sort_values("bytes", ascending=False, kind="stable").reset_index(drop=True)

    def blocks(self) -> pd.DataFrame:
        """Every block of the run in order of allocation, with the columns of :meth:`peak` and ``at_peak``."""
        blocks = self._run.table("blocks")
        layers = self._run.table("layers")["name"]
        lines = [*self._run.table("stacks")["line"], ""]  # stack -1 (none) indexes the empty line at the end
        found = blocks[["bytes", "category", "step", "phase", "operation", "at_peak"]].copy()
        found.insert(2, "layer", layers.iloc[blocks["layer"]].to_numpy())
        found.insert(6, "line", [lines[stack] for stack in blocks["stack"]])
        return found

    def by_category(self) -> pd.DataFrame:
        """Bytes at the peak by category: columns bytes, share (of the peak)."""
        summary = self._run.summary
        found = pd.Series(summary.by_category, dtype="int64").rename("bytes").to_frame()
        return found.assign(share=found["bytes"] / max(summary.peak_allocated_bytes, 1))

    def by_phase(self) -> pd.DataFrame:
        """The table ``phases``."""
        return self._run.table("phases")

    def timeline(self) -> pd.DataFrame:
        """The allocator's memory after each event: action, time_us, allocated_bytes, reserved_bytes, step, phase."""
        found = self._run.table("events")[["action", "time_us", "allocated_bytes", "reserved_bytes"]].copy()
        if self._run.has("spans") and len(found):
            spans = self._run.table("spans").set_index("first_event").reindex(range(len(found)), method="ffill")
            found["step"], found["phase"] = spans["step"].to_numpy(), spans["phase"].to_numpy()
        return found
