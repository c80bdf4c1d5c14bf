"""``run.memory``: the memory that was held, as DataFrames for a notebook, in bytes and microseconds."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fakedist.results.run_tables import RunTables
from fakedist.run.schema import MOMENTS
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

    def segments(self, moment: str = "peak_reserved") -> pd.DataFrame:
        """The segments that the allocator held at a moment, most free memory first.

        ``bytes`` adds up to what was reserved, ``allocated_bytes`` to what was allocated.

        Args:
            moment: "peak_reserved" or "peak_allocated".

        Columns: those of the table ``segments``; category, layer, step, phase, operation and line of the largest block
        in each segment, empty without one.

        Raises:
            ValueError: There is no such moment.
        """
        if moment not in MOMENTS:
            raise ValueError(f"moment is {' or '.join(map(repr, MOMENTS))}, not {moment!r}")
        table = self._tables.table("segments")
        found = table[table["moment"] == moment].drop(columns="moment").reset_index(drop=True)
        largest = self.blocks().drop(columns=["bytes", "at_peak"]).reindex(found["block"]).reset_index(drop=True)
        return found.join(largest)

    def segment_blocks(self, moment: str = "peak_reserved") -> pd.DataFrame:
        """The blocks in those segments, by address.

        Columns: segment (row of :meth:`segments`), offset_bytes (from the segment's begin), bytes, is_waiting (freed
        while another stream still used it), category, layer, step, phase, operation, line. Empty if the addresses of
        the segments are not known.
        """
        segments = self.segments(moment).sort_values("address")
        blocks = self._tables.table("blocks", ["address", "alloc_event", "free_event", "reuse_event"])
        event = int(segments["event"].iloc[0]) if len(segments) else -1
        alive = blocks[(blocks["alloc_event"] <= event) & (blocks["reuse_event"] > event)].sort_values("address")
        if not len(segments) or not segments["address"].iloc[0]:
            alive = alive.head(0)
        place = np.searchsorted(segments["address"].to_numpy(), alive["address"].to_numpy(), side="right") - 1
        found = self.blocks().loc[alive.index].drop(columns="at_peak")
        found.insert(0, "segment", segments.index.to_numpy()[place])
        found.insert(1, "offset_bytes", (alive["address"] - segments["address"].to_numpy()[place]).astype("int64"))
        found.insert(3, "is_waiting", alive["free_event"] <= event)
        return found.reset_index(drop=True)

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
