"""A run as calibration needs it: the tables that pricing its step takes, its GPU model and its job."""

from __future__ import annotations

from pathlib import Path

from fakedist.analysis.calibration.own_times import TimedRun
from fakedist.results.opening import open_run_directory
from fakedist.results.repricing import gpu_of, nccl_of, tables_to_price
from fakedist.results.run_tables import StoredTables


def open_timed_run(path: Path) -> TimedRun:
    """Open a run directory for calibration.

    Raises:
        RunDirectoryError: It is not a run directory, is damaged, or its run has no launches to price.
    """
    run = open_run_directory(path)
    tables = tables_to_price(run.manifest, run.summary, StoredTables(run.path))
    return TimedRun(tables, gpu_of(run.manifest, None, None), run.manifest.job, nccl_of(run.summary))
