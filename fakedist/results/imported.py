"""Files of real GPUs as runs: traces and reports of torch.profiler and Nsight Systems."""

from __future__ import annotations

from pathlib import Path

from fakedist.analysis.recording import JournalReading
from fakedist.results.building import build_tables, compute_recording
from fakedist.results.run import Run, RunTables
from fakedist.results.summing_up import summarize
from fakedist.rundir.directory import JOURNAL_NAME
from fakedist.rundir.journal import JournalWriter
from fakedist.rundir.manifest import import_manifest, imported_manifest
from fakedist.traces.one_step import StepChoice
from fakedist.traces.trace_files import read_step
from fakedist.traces.traced_step import ImportedStep


def open_imported(path: Path, choice: StepChoice = StepChoice(), exported: Path | None = None) -> Run:  # noqa: B008
    """Open a file of a real GPU as a run, of which only the tables are known that its tool traced.

    Args:
        exported: Of a report of nsys, its SQLite export.

    Raises:
        ReportError: It is not a trace, or lacks what was chosen.
    """
    step = read_step(exported or path, path, choice)
    reading = JournalReading()
    for record in step.records:
        reading.take(record)
    reading.join()
    computed = compute_recording(reading.recording, None, ())
    manifest = imported_manifest(path, step.tool)
    summary = summarize(
        computed.recording,
        None,
        computed.tables,
        computed.folds,
        ending=manifest.exit,
        left=None,
        peak=computed.peak,
        times=computed.times,
        notes=computed.notes,
    )
    return Run(path.resolve(), manifest, summary, RunTables(None, computed.tables))


def write_run(step: ImportedStep, run_directory: Path) -> None:
    """Write a step as a run, into a new run directory."""
    import_manifest(run_directory, step.file, step.tool)
    journal = JournalWriter(run_directory / JOURNAL_NAME)
    for record in step.records:
        journal.append(record)
    journal.close()
    build_tables(run_directory)
