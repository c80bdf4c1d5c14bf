"""The object that ``--json`` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fakedist.analysis.summary import layer_objects
from fakedist.report.run import open_run


def summary_object(run_directory: Path, *, all_layers: bool = False) -> dict[str, Any]:
    """One object with the run's figures; keys in ``run.schema.SUMMARY``.

    Args:
        run_directory: The run directory.
        all_layers: Whether repeated layers stay apart.

    Raises:
        RunDirectoryError: It is not a run directory, or a damaged one.
    """
    run = open_run(run_directory)
    summary = run.summary
    if all_layers:
        summary["layers"] = layer_objects(run.table("layers"), fold=False)
    return summary
