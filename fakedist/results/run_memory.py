"""``run.memory``: the memory that was held, as DataFrames for a notebook, in bytes and microseconds."""

from __future__ import annotations

import pandas as pd

from fakedist.results.run_tables import RunTables
from fakedist.run.summary import Summary
from fakedist.units import format_bytes


class RunMemory:
    """The memory of a run.

    Args:
        tables: The run's tables.
        summary: The run's figures.
    """

    def __init__(self, tables: RunTables, summary: Summary) -> None:
        self._tables, self._summary = tables, summary

    def __repr__(self) -> str:
        summary = self._summary
        when = f", step {summary.peak_step}, {summary.peak_phase}" if summary.peak_phase else ""
        rows = [("peak_allocated", f"{format_bytes(summary.peak_allocated_bytes)}{when}")]
        rows.append(("peak_reserved", format_bytes(summary.peak_reserved_bytes)))
        if self._tables.has("phases"):
            held = sorted(summary.by_category.items(), key=lambda row: -row[1])
            rows += [(name, format_bytes(bytes_)) for name, bytes_ in held if bytes_]
        return "\n  ".join([type(self).__name__, *(f"{name}: {text}" for name, text in rows)])

    def peak(self) -> pd.DataFrame:
        """Blocks alive at the peak, largest first. ``bytes`` adds up to ``run.peak_allocated_bytes``.

        Columns: bytes, category, layer, step, phase, operation, line.
        """
        blocks = self.blocks()
        return blocks[blocks.pop("at_peak")].sort_values("bytes", ascending=False, kind="stable").reset_index(drop=True)

    def blocks(self) -> pd.DataFrame:
        """Every block of the run in order of allocation, with the columns of :meth:`peak` and ``at_peak``."""
        blocks = self._tables.table("blocks")
        layers = self._tables.table("layers")["name"]
        lines = [*self._tables.table("stacks")["line"], ""]  # stack -1 (none) indexes the empty line at the end
        found = blocks[["bytes", "category", "step", "phase", "operation", "at_peak"]].copy()
        found.insert(2, "layer", layers.iloc[blocks["layer"]].to_numpy())
        found.insert(6, "line", [lines[stack] for stack in blocks["stack"]])
        return found

    def by_category(self) -> pd.DataFrame:
        """Bytes at the peak by category: columns bytes, share (of the peak)."""
        found = pd.Series(self._summary.by_category, dtype="int64").rename("bytes").to_frame()
        return found.assign(share=found["bytes"] / max(self._summary.peak_allocated_bytes, 1))

    def by_phase(self) -> pd.DataFrame:
        """The table ``phases``.

        Raises:
            RunDirectoryError: The run is a snapshot, which has no phases.
        """
        return self._tables.table("phases")

    def timeline(self) -> pd.DataFrame:
        """The allocator's memory after each event: action, time_us, allocated_bytes, reserved_bytes, step, phase.

        A snapshot has no step and no phase.
        """
        found = self._tables.table("events")[["action", "time_us", "allocated_bytes", "reserved_bytes"]].copy()
        if self._tables.has("spans") and len(found):
            spans = self._tables.table("spans").set_index("first_event").reindex(range(len(found)), method="ffill")
            found["step"], found["phase"] = spans["step"].to_numpy(), spans["phase"].to_numpy()
        return found
