"""Imports a report: as the kernels of the run it was recorded with, or as a new run directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fakedist.analysis.building import build_tables
from fakedist.analysis.nsys.database import Database, open_database
from fakedist.analysis.nsys.tracing import Choice, gpu_name, read_trace, tool_version
from fakedist.analysis.recording import read_recording
from fakedist.analysis.traces.layer_numbers import LayerNumbers
from fakedist.analysis.traces.traced_host import host_record
from fakedist.analysis.traces.traced_kernels import Tool, kernel_record
from fakedist.run.collector import no_collector
from fakedist.run.directory import JOURNAL_NAME
from fakedist.run.journal import JournalWriter
from fakedist.run.manifest import import_manifest
from fakedist.run.outcome import Outcome
from fakedist.run.records import GpuRecord, LayersRecord, OutcomeRecord
from fakedist.run.rows import LayerRow
from fakedist.run.trace_records import HostRecord, KernelsRecord


def recorded_step(run_directory: Path, exported: Path, report: Path) -> tuple[KernelsRecord, HostRecord]:
    """The journal's records of the timed step of a recorded run: its kernels, and what else the host did.

    Args:
        run_directory: The run's directory.
        exported: The report of the run's timed step, as SQLite.
        report: The report itself.

    Raises:
        ReportError: The report cannot be read, or has no kernels.
    """
    layers = LayerNumbers(read_recording(run_directory).layers)
    with no_collector(), open_database(exported, report) as database:
        trace = read_trace(database, Choice())
        return kernel_record(trace, layers, _tool(database, report.name)), host_record(trace)


@dataclass(frozen=True)
class ImportedReport:
    """The contents of a report that does not belong to a recorded run.

    Attributes:
        report: The path that the user gave.
        kernels: The journal's record of the kernels.
        layers: The journal's rows of the layers that its ranges name.
    """

    report: Path
    kernels: KernelsRecord
    layers: list[LayerRow]


def read_report(report: Path, exported: Path, choice: Choice) -> ImportedReport:
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
        kernels = kernel_record(read_trace(database, choice), layers, _tool(database, str(report.resolve())))
    return ImportedReport(report, kernels, layers.rows)


def write_run(found: ImportedReport, run_directory: Path) -> None:
    """Write a report as a run, into a new run directory."""
    import_manifest(run_directory, found.report, "nsys")
    journal = JournalWriter(run_directory / JOURNAL_NAME)
    source = found.kernels.source
    journal.append(GpuRecord(gpu_name=source.gpu))
    journal.append(LayersRecord(found.layers))
    journal.append(found.kernels)
    journal.append(OutcomeRecord(Outcome.FINISHED, 0, last_phase="other", last_step=source.step))
    journal.close()
    build_tables(run_directory)


def _tool(database: Database, report: str) -> Tool:
    return Tool("nsys", gpu_name(database), version=tool_version(database), report=report)
