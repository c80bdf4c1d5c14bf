"""Moves what the recorder holds in memory to the journal, in pieces, and reports progress to the parent."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from fakedist.record.device_memory import AllocatorHistory
from fakedist.record.graph_layers import Placing
from fakedist.record.host_ledger import HostLedger
from fakedist.record.ledger import Ledger
from fakedist.record.marks import Marks
from fakedist.record.module_names import LayerTable
from fakedist.record.operations import Operations
from fakedist.record.position import Position
from fakedist.rundir.encoding import Record
from fakedist.rundir.records import LayersRecord, OperationNamesRecord, RegionsRecord, ScopesRecord

DRAIN_EVERY_S = 2.0  # a rank that is killed loses what happened since the last drain
DRAIN_LEAST_OPS = 4096
DRAIN_EVERY_OPS = 50_000  # about 150 MB of history as Python objects
PROGRESS_EVERY_S = 0.1


class Drain:
    """Empties record holders into the journal; ``progress(phase, step, peak_bytes)`` is at most ten calls a second."""

    def __init__(
        self,
        append: Callable[[Record], None],
        position: Position,
        progress: Callable[[str, int, int], None],
        *,
        layers: LayerTable,
        operations: Operations,
        history: AllocatorHistory,
        marks: Marks,
        placing: Placing,
        ledger: Ledger,
        host: HostLedger,
    ) -> None:
        self._append = append
        self._position = position
        self._progress = progress
        self._layers = layers
        self._operations = operations
        self._history = history
        self._marks = marks
        self._placing = placing
        self._ledger = ledger
        self._host = host
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
        if self._history.is_on:
            peak = torch._C._cuda_memoryStats(torch.cuda.current_device())["allocated_bytes"]["all"]["peak"]
        self._progress("compiling" if self._is_compiling else self._position.phase, self._position.step, peak)

    def all(self) -> None:
        """Empty every source."""
        self._op = self._position.op
        self.names()
        if names := self._operations.names:
            self._append(OperationNamesRecord(names))
            self._operations.names = []
        self._history.drain()
        self._host.drain()
        if (ran := self._operations.numbering.take()).operation:
            self._append(ran)
        if (marks := self._marks.take()).op:
            self._append(marks)
        if regions := self._position.regions:
            self._append(RegionsRecord(regions))
            self._position.regions = []
        for record in self._placing.take():
            self._append(record)
        self._ledger.flush()
        self._at = time.monotonic()

    def names(self) -> None:
        """Write layers and scopes, which the calls of a timed step need too."""
        if rows := self._layers.new_rows():
            self._append(LayersRecord(rows))
        if scopes := self._position.new_scopes:
            self._append(ScopesRecord(scopes))
            self._position.new_scopes = []
