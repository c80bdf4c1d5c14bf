"""The object that ``--json`` prints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fakedist.analysis.summing_up import layer_memory
from fakedist.results.opening import open_run
from fakedist.run.plain import to_plain


def summary_object(run_directory: Path, *, all_layers: bool = False) -> dict[str, object]:
    """One object with the run's figures: the keys of :class:`fakedist.run.summary.Summary`, and ``run_directory``.

    Args:
        run_directory: The run directory.
        all_layers: Whether repeated layers stay apart.

    Raises:
        RunDirectoryError: It is not a run directory, or is damaged.
    """
    run = open_run(run_directory)
    summary = run.summary
    if all_layers:
        summary = replace(summary, layers=layer_memory(run.table("layers"), fold=False))
    return {**to_plain(summary), "run_directory": str(run.path)}
