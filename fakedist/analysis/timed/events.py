"""What a trace holds: ranges of the host, and what the GPU did. Times in nanoseconds from one zero."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fakedist.analysis.timed.intervals import Ints
from fakedist.analysis.timed.names import IGNORED, LAYER, OPERATION, PHASE, STEP, Meaning


@dataclass
class Ranges:
    """Ranges that say something.

    Attributes:
        meanings: What texts say.
        meaning: For each range a row of ``meanings``.
        thread: Its thread, any number but -1.
        start: When it begins.
        end: When it ends; the trace's last moment where it never did.
        sequence: Autograd's sequence number in it; -1 without one.
        num_ignored: Ranges that say nothing.
        flops: Floating-point operations of each operation, 0 where they are not counted; None where the trace has none.
    """

    meanings: list[Meaning]
    meaning: npt.NDArray[np.int32]
    thread: Ints
    start: Ints
    end: Ints
    sequence: Ints
    num_ignored: int = 0
    flops: Ints | None = None

    @property
    def kind(self) -> npt.NDArray[np.int8]:
        """STEP, PHASE, ... of each range."""
        return np.array([each.kind for each in self.meanings] or [IGNORED], np.int8)[self.meaning]

    def with_functions(self) -> Ranges:
        """Autograd functions of the script are operations: torch calls them as their class, and numbers them."""
        ours = np.array([each.is_ours for each in self.meanings] or [False])[self.meaning]
        rows = np.flatnonzero((self.kind == LAYER) & (self.sequence >= 0) & ~ours)
        if not len(rows):
            return self
        distinct, place = np.unique(self.meaning[rows], return_inverse=True)
        meaning = self.meaning.copy()
        meaning[rows] = len(self.meanings) + place
        functions = [Meaning(OPERATION, self.meanings[each].name) for each in distinct.tolist()]
        return dataclasses.replace(self, meanings=[*self.meanings, *functions], meaning=meaning)

    def told_by_us(self) -> Ranges:
        """Without the script's own steps, phases and layers, where there are ours."""
        ours = np.array([each.is_ours for each in self.meanings] or [False])[self.meaning]
        return self.where(ours | ~np.isin(self.kind, (STEP, PHASE, LAYER))) if ours.any() else self

    def where(self, mask: npt.NDArray[np.bool_]) -> Ranges:
        """Some of the ranges."""
        arrays = {name: getattr(self, name)[mask] for name in ("meaning", "thread", "start", "end", "sequence")}
        if self.flops is not None:
            arrays["flops"] = self.flops[mask]
        return dataclasses.replace(self, **arrays)


@dataclass
class Activity:
    """What the GPU did: kernels, copies, fills and whole graphs, in the order of their start.

    Attributes:
        columns: start, end, streamId, correlationId, graphNodeId, bytes (-1: unknown), and more that a trace has.
        name: A row of ``names`` for each.
        shape: A row of ``shapes`` for each.
        is_copy: Whether it is a copy or a fill; a row each.
        is_graph: Whether it is a whole graph, of which only the launch was traced.
        names: Texts.
        shapes: Grid and block as text.
    """

    columns: dict[str, Ints]
    name: npt.NDArray[np.int64]
    shape: npt.NDArray[np.int64]
    is_copy: npt.NDArray[np.bool_]
    is_graph: npt.NDArray[np.bool_]
    names: list[str] = field(default_factory=list)
    shapes: list[tuple[str, str]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.name)

    def where(self, mask: npt.NDArray[Any]) -> Activity:
        """Some of it: by a mask, or rows in their new order."""
        columns = {name: column[mask] for name, column in self.columns.items()}
        arrays = {name: getattr(self, name)[mask] for name in ("name", "shape", "is_copy", "is_graph")}
        return dataclasses.replace(self, columns=columns, **arrays)
