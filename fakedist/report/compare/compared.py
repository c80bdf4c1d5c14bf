"""Opens what is compared: two runs, or memory snapshots of torch, of which only the memory is known."""

from __future__ import annotations

from pathlib import Path

from fakedist.report.compare.comparison import Comparison, comparison_object
from fakedist.report.compare.snapshot_comparison import SnapshotComparison, snapshot_object
from fakedist.results.opening import open_run

Compared = Comparison | SnapshotComparison


def open_comparison(a: Path, b: Path) -> Compared:
    """Compare two run directories; or by what snapshots know, if one of them is a snapshot.

    Args:
        a: The reference.
        b: The one in question. Changes are from ``a`` to ``b``.

    Raises:
        RunDirectoryError: One of them is neither, or is damaged; or a snapshot is compared with a run without memory.
    """
    if a.is_file() or b.is_file():
        return SnapshotComparison(open_run(a), open_run(b))
    return Comparison(a, b)


def compared_object(comparison: Compared) -> dict[str, object]:
    """The object that ``fakedist compare --json`` prints."""
    return comparison_object(comparison) if isinstance(comparison, Comparison) else snapshot_object(comparison)
