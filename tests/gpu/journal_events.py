"""The allocator's events of a run directory of ``fakedist profile``, cut where the job itself had ended."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path

from fakedist.rundir.journal import read_journal
from fakedist.rundir.memory_records import EventsRecord
from fakedist.rundir.records import OperationNamesRecord, OperationsRecord
from fakedist.rundir.schema import ACTIONS
from tests.gpu.recording import Events, EventsBuilder


def journal_events(run_directory: Path, statistics: Mapping[str, int], device: int = 0) -> Events:
    """The events of the allocator of ``device`` until its counts were those of ``statistics``.

    The job takes its statistics at its end; what is freed while the process ends comes after them.

    Args:
        run_directory: Of a run with its journal.
        statistics: ``torch.cuda.memory_stats()`` at the job's end.
        device: Which GPU.
    """
    names: dict[int, str] = {}
    operation_of: dict[int, int] = {}
    columns: list[tuple[array[int], ...]] = []
    for record in read_journal(run_directory / "journal.bin"):
        if isinstance(record, OperationNamesRecord):
            names.update(record.rows)
        elif isinstance(record, OperationsRecord):
            operation_of.update(enumerate(array("I", record.operation), record.first))
        elif isinstance(record, EventsRecord) and record.device == device:
            action, size = array("B", record.action), array("q", record.size)
            columns.append((action, size, array("Q", record.stream), array("q", record.op)))
    builder = EventsBuilder()
    wanted = tuple(statistics.get(name, 0) for name in ("allocation.all.allocated", "allocation.all.freed"))
    for action, size, stream, op in _until(_rows(columns), wanted):
        name = names.get(operation_of.get(op, -1), "") if action == "alloc" else ""
        builder.add(action, size, stream, name)
    return builder.build()


def _rows(columns: list[tuple[array[int], ...]]) -> Iterator[tuple[str, int, int, int]]:
    for each in columns:
        for action, size, stream, op in zip(*each, strict=True):
            yield ACTIONS[action], size, stream, op


def _until(rows: Iterator[tuple[str, int, int, int]], wanted: tuple[int, ...]) -> Iterator[tuple[str, int, int, int]]:
    """Events until as many blocks were allocated and freed as wanted, and what followed before the next block."""
    allocated = freed = 0
    for row in rows:
        is_block = row[0] in ("alloc", "free_requested", "free_completed")
        if is_block and (allocated, freed) == wanted:
            # The statistics count a free when it is asked for, or when it is done: either way none is half done there.
            return
        allocated += row[0] == "alloc"
        freed += row[0] == "free_completed"
        yield row
