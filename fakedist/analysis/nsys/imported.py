"""Imports a report: as the kernels of the run it was recorded with, or as a new run directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fakedist.analysis.building import build_tables, no_collector
from fakedist.analysis.nsys.database import Database, open_database
from fakedist.analysis.nsys.tracing import Choice, gpu_name, read_trace, tool_version
from fakedist.analysis.recording import read_recording
from fakedist.analysis.timed.kernels import kernel_record
from fakedist.analysis.timed.paths import LayerNumbers
from fakedist.run.directory import JOURNAL_NAME
from fakedist.run.journal import JournalWriter
from fakedist.run.manifest import import_manifest
from fakedist.run.outcome import Ending, Outcome
from fakedist.run.plain import to_plain


def recorded_kernels(run_directory: Path, exported: Path, report: Path) -> dict[str, Any]:
    """The journal's record of the kernels of a recorded run.

    Args:
        run_directory: The run's directory.
        exported: The report of the run's timed step, as SQLite.
        report: The report itself.

    Raises:
        ReportError: The report cannot be read, or has no kernels.
    """
    layers = LayerNumbers(read_recording(run_directory).rows["layers"])
    with no_collector(), open_database(exported, report) as database:
        source = _source(database) | {"report": report.name}
        return kernel_record(read_trace(database, Choice()), layers, source)


@dataclass(frozen=True)
class Imported:
    """The contents of a report that does not belong to a recorded run.

    Attributes:
        report: The path that the user gave.
        kernels: The journal's record of the kernels.
        layers: The journal's rows of the layers that its ranges name.
    """

    report: Path
    kernels: dict[str, Any]
    layers: list[tuple[int, str, str, int]]


def read_report(report: Path, exported: Path, choice: Choice) -> Imported:
    """Read a report.

    Args:
        report: The path that the user gave.
        exported: The report as SQLite.
        choice: Which step of which process.

    Raises:
        ReportError: The report cannot be read, or has no such kernels.
    """
    layers = LayerNumbers()
    with no_collector(), open_database(exported, report) as database:
        source = _source(database) | {"report": str(report.resolve())}
        kernels = kernel_record(read_trace(database, choice), layers, source)
    return Imported(report, kernels, layers.rows)


def write_run(found: Imported, run_directory: Path) -> None:
    """Write a report as a run, into a new run directory."""
    import_manifest(run_directory, found.report, "nsys")
    journal = JournalWriter(run_directory / JOURNAL_NAME)
    journal.append({"kind": "gpu", "gpu_name": found.kernels["source"]["gpu"], "torch": "", "notes": []})
    journal.append({"kind": "layers", "rows": found.layers})
    journal.append(found.kernels)
    ended = {**to_plain(Ending(Outcome.FINISHED, 0)), "last_step": found.kernels["source"]["step"]}
    journal.append({"kind": "outcome", "last_phase": "other", **ended})
    journal.close()
    build_tables(run_directory)


def _source(database: Database) -> dict[str, Any]:
    return {"tool": "nsys", "gpu": gpu_name(database), "tool_version": tool_version(database)}
