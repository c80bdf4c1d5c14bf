"""A report becomes a run: the kernels of one it was recorded with, or a run directory of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fakedist.analysis.build import build_tables
from fakedist.analysis.nsys.database import Database, open_database
from fakedist.analysis.nsys.tracing import Choice, gpu_name, read_trace, tool_version
from fakedist.analysis.recording import read_recording
from fakedist.analysis.timed.kernels import kernel_record
from fakedist.analysis.timed.paths import LayerNumbers
from fakedist.run.directory import JOURNAL_NAME
from fakedist.run.journal import JournalWriter
from fakedist.run.manifest import import_manifest


def recorded_kernels(run_directory: Path, exported: Path, more: Mapping[str, Any]) -> dict[str, Any]:
    """The journal's record of the kernels of a recorded run.

    Args:
        run_directory: The run.
        exported: The report of its timed step, as SQLite.
        more: What else the summary says of them.

    Raises:
        ReportError: The report cannot be read, or has no kernels.
    """
    layers = LayerNumbers(read_recording(run_directory).rows["layers"])
    with open_database(exported) as database:
        return kernel_record(read_trace(database, Choice()), layers, {**_source(database), **more})


def import_report(report: Path, exported: Path, run_directory: Path, choice: Choice) -> None:
    """Make a run of a report that nobody recorded a run with: its kernels, and the layers that its ranges name.

    Args:
        report: What the user gave.
        exported: It, as SQLite.
        run_directory: A new run directory.
        choice: Which step of which process.

    Raises:
        ReportError: The report cannot be read, or has no such kernels.
    """
    layers = LayerNumbers()
    with open_database(exported) as database:
        source = _source(database)
        record = kernel_record(read_trace(database, choice), layers, {**source, "report": str(report.resolve())})
    import_manifest(run_directory, report, "nsys")
    journal = JournalWriter(run_directory / JOURNAL_NAME)
    journal.append({"kind": "gpu", "gpu_name": source["gpu"], "torch": "", "notes": []})
    journal.append({"kind": "layers", "rows": layers.rows})
    journal.append(record)
    journal.append({"kind": "outcome", "outcome": "finished", "code": 0, "message": ""})
    journal.close()
    build_tables(run_directory)


def _source(database: Database) -> dict[str, Any]:
    return {"tool": "nsys", "gpu": gpu_name(database), "tool_version": tool_version(database)}
