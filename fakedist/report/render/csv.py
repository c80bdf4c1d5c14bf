"""Tables of a run for programs, as CSV."""

from __future__ import annotations

from fakedist.analysis.layer_table import fold_layers, fold_table, unfolded
from fakedist.results.run import Run


def table_csv(run: Run, name: str, *, all_layers: bool = False) -> str:
    """One table. Rows of ``layers`` and ``layer_times`` are the report's: folded, with children.

    Raises:
        JobError: No table has this name.
        RunDirectoryError: It is missing or damaged.
    """
    table = run.table(name)
    if name == "layers":
        table = fold_table(table, unfolded(table) if all_layers else fold_layers(table))
    if name == "layer_times" and run.time is not None:
        table = run.time.layers(fold=not all_layers)
    return str(table.to_csv(index=False))
