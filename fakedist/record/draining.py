"""Moves what the recorder holds in memory to the journal, in pieces, and reports progress to the parent."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fakedist.record.device_memory import AllocatorHistory
from fakedist.record.graph_layers import Placing
from fakedist.record.ledger import Journal, Ledger
from fakedist.record.marks import Marks
from fakedist.record.module_names import LayerTable
from fakedist.record.operations import Operations
from fakedist.record.position import Position
from fakedist.rundir.records import LayersRecord, OperationNamesRecord, RegionsRecord, ScopesRecord

DRAIN_EVERY_S = 2.0  # a rank that is killed loses what happened since the last drain
DRAIN_LEAST_OPS = 4096
DRAIN_EVERY_OPS = 50_000  # about 150 MB of history as Python objects
PROGRESS_EVERY_S = 0.1


@dataclass(frozen=True)
class Sources:
    """The objects that hold records until they are drained.

    Attributes:
        layers: Layers seen.
        operations: Operations by number.
        history: The allocator's history.
        marks: What blocks are for.
        placing: Layers of what compiled graphs allocate.
        ledger: Calls on process groups.
    """

    layers: LayerTable
    operations: Operations
    history: AllocatorHistory
    marks: Marks
    placing: Placing
    ledger: Ledger


class Drain:
    """Empties the sources into the journal.

    Args:
        journal: Receives the records.
        position: Where the rank is.
        sources: What to empty.
        progress: Called with (phase, step, allocated peak in bytes), at most ten times a second.

    Attributes:
        is_recording: Whether operations and memory are recorded. A step may still be timed afterwards.
    """

    def __init__(
        self, journal: Journal, position: Position, sources: Sources, progress: Callable[[str, int, int], None]
    ) -> None:
        self.is_recording = True
        self._journal = journal
        self._position = position
        self._sources = sources
        self._progress = progress
        self._at = self._progress_at = time.monotonic()
        self._op = 0
        self._is_compiling = False

    def tick(self) -> None:
        """Drain and report progress, each if it is due."""
        now = time.monotonic()
        ops = self._position.op - self._op
        if ops >= DRAIN_EVERY_OPS or (now - self._at > DRAIN_EVERY_S and ops >= DRAIN_LEAST_OPS):
            self.all()
        if now - self._progress_at > PROGRESS_EVERY_S:
            self._report()

    def compiling(self, is_on: bool) -> None:
        """Report that torch compiles: for seconds or minutes nothing runs that would report anything."""
        self._is_compiling = is_on
        self._report()

    def _report(self) -> None:
        self._progress_at = time.monotonic()
        peak = 0
        if self._sources.history.is_on:
            peak = torch._C._cuda_memoryStats(torch.cuda.current_device())["allocated_bytes"]["all"]["peak"]
        self._progress("compiling" if self._is_compiling else self._position.phase, self._position.step, peak)

    def all(self) -> None:
        """Empty every source."""
        self._op, append, sources, position = self._position.op, self._journal.append, self._sources, self._position
        self.names()
        operations = sources.operations
        if operations.names:
            append(OperationNamesRecord(operations.names))
            operations.names = []
        sources.history.drain()
        if (ran := operations.numbering.take()).operation:
            append(ran)
        if (marks := sources.marks.take()).op:
            append(marks)
        regions, position.regions = position.regions, []
        if regions:
            append(RegionsRecord(regions))
        for record in sources.placing.take():
            append(record)
        sources.ledger.flush()
        self._at = time.monotonic()

    def names(self) -> None:
        """Write layers and scopes, which the calls of a timed step need too."""
        if rows := self._sources.layers.new_rows():
            self._journal.append(LayersRecord(rows))
        scopes, self._position.new_scopes = self._position.new_scopes, []
        if scopes:
            self._journal.append(ScopesRecord(scopes))
        if not self.is_recording:
            self._sources.ledger.flush()
