"""A run as the rules of findings read it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import pandas as pd

from fakedist.analysis.advice import MIN_BYTES
from fakedist.analysis.call_order import RankCalls
from fakedist.analysis.evidence import Change, Evidence, Saving, matches, owners, stacks
from fakedist.analysis.memory_tables import fold_layers
from fakedist.analysis.recording import Array
from fakedist.analysis.typed_tables import table_of
from fakedist.rundir.step_time import StepTime
from fakedist.rundir.summary import Summary

#: A smaller share of the peak or of the step is not worth a finding.
LEAST_SHARE = 0.02
_EVIDENCE = ("blocks", "layers", "spans", "calls", "groups", "steps", "shares", "frames", "events", "asleep", "stacks")


class Case:
    """One run: its tables, read when a rule asks for them, and its summary.

    Attributes:
        has: Whether the run has a table.
        table: Reads one.
        gpus_per_node: Of the job; 0 if that is not known.
        calls: Makes the calls of the rank, to be played against those of others; None outside of a job.
    """

    calls: Callable[[], RankCalls] | None = None

    def __init__(
        self,
        table: Callable[[str], pd.DataFrame],
        has: Callable[[str], bool],
        summary: Summary,
        gpus_per_node: int = 0,
    ) -> None:
        self.table, self.has, self.summary, self.gpus_per_node = table, has, summary, gpus_per_node

    @cached_property
    def evidence(self) -> Evidence:
        """The tables of memory and calls. Those that the run lacks have no rows."""
        tables = {name: self.table(name) if self.has(name) else table_of(name) for name in _EVIDENCE}
        if self.has("kernels"):
            tables["kernels"] = self.table("kernels")
        return Evidence(tables, fold_layers(tables["layers"]))

    @property
    def time(self) -> StepTime | None:
        """The timed step; None without one."""
        return self.summary.timed[0] if self.summary.timed else None

    @property
    def peak(self) -> int:
        """The allocated peak."""
        return self.evidence.peak

    def is_worth(self, bytes_: float) -> bool:
        """Whether so many bytes at the peak are worth a finding."""
        return bytes_ >= max(MIN_BYTES, LEAST_SHARE * self.peak)

    def is_worth_us(self, time_us: float) -> bool:
        """Whether so much of the timed step is worth a finding."""
        return self.time is not None and time_us >= LEAST_SHARE * self.time.step_us

    def saved(self, bytes_: Array, starts: Array | None = None, ends: Array | None = None) -> int:
        """How much lower the peak would be with bytes of each block gone, replayed. See :class:`Saving`."""
        saving = Saving(bytes_.astype("f8"), starts, ends)
        return max(self.evidence.saved([Change("", "", "", saving)])[0], 0)

    @cached_property
    def outside_layers(self) -> Array:
        """Mask of the layers that are neither repeated nor in a repeated one."""
        repeated = [layer for fold in stacks(self.evidence) for layer in fold.layers]
        return owners(self.evidence.layers, repeated) < 0

    @cached_property
    def is_outside(self) -> Array:
        """Mask of the blocks that no repeated layer owns, such as those of the loss."""
        return np.asarray(self.outside_layers[self.evidence.blocks["layer"].to_numpy()])

    @cached_property
    def is_saved(self) -> Array:
        """Mask of the blocks that forwards saved for backward."""
        evidence = self.evidence
        is_again = evidence.blocks["recompute"].to_numpy(bool)
        return np.asarray(evidence.category("activation") & evidence.phase("forward") & ~is_again)

    def line(self, stack: int) -> str:
        """The script's line of a stack; empty without one."""
        return self.evidence.lines[stack]

    def in_phase(self, table: pd.DataFrame, *wanted: str) -> Array:
        """Mask of the rows of a table in one of the phases."""
        return matches(table["phase"], lambda name: name in wanted)

    @cached_property
    def kernels(self) -> pd.DataFrame:
        """The timed step's kernels with what they have to do: columns of ``kernels``, and of ``work`` by its names.

        No rows without both tables.
        """
        if not (self.has("kernels") and self.has("launches") and self.has("work")):
            return pd.DataFrame()
        work = self.table("work")
        kernels = self.table("kernels").query("launch >= 0")
        row = self.table("launches")["work"].to_numpy()[kernels["launch"].to_numpy()]
        columns = ["kind", "dtype", "batch", "m", "n", "k", "groups", "a_bytes", "attention"]
        done = pd.DataFrame(work.iloc[row][columns].reset_index(drop=True))
        return pd.concat([kernels.reset_index(drop=True), done], axis=1)

    @cached_property
    def lines_of_operations(self) -> dict[int, str]:
        """The script's line of each operation of the timed step that has one."""
        if not self.has("operation_stacks"):
            return {}
        table = self.table("operation_stacks")
        lines = [self.line(stack) for stack in table["stack"].tolist()]
        return dict(zip(table["op"].tolist(), lines, strict=True))

    def main_line(self, kernels: pd.DataFrame) -> str:
        """The line that launched the most time of some of the timed step's kernels; empty if none has one."""
        lines = kernels["op"].map(self.lines_of_operations).fillna("")
        taken = kernels["duration_us"].groupby(lines).sum().drop("", errors="ignore")
        return str(taken.idxmax()) if len(taken) else ""


def base_name(operation: str) -> str:
    """An operation without its namespace and overload: "mm" of "aten.mm.default", or of "aten::mm"."""
    return operation.split(".")[1] if operation.count(".") > 1 else operation.removeprefix("aten::")
