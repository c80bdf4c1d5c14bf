"""Several ranks of a job side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from fakedist.report.text.json_object import summary_object
from fakedist.report.text.sheet import SheetColumn, print_remark, print_table
from fakedist.results.opening import open_run_directory
from fakedist.run.outcome import Ending
from fakedist.run.plain import to_plain
from fakedist.units import format_bytes


@dataclass(frozen=True)
class RankRow:
    """One rank that has run.

    Attributes:
        rank: The rank.
        run_directory: Its run; None if it could not start.
        exit: How it ended.
        wall_s: Seconds that its run took, including recording and tables.
    """

    rank: int
    run_directory: Path | None
    exit: Ending
    wall_s: float


def render_ranks(rows: Sequence[RankRow], world_size: int, console: Console) -> None:
    """Print a table with a row for each rank."""
    runs = [None if row.run_directory is None else open_run_directory(row.run_directory) for row in rows]
    endings = [row.exit if run is None else run.summary.exit for row, run in zip(rows, runs, strict=True)]
    columns = [
        SheetColumn("rank", [str(row.rank) for row in rows]),
        SheetColumn("outcome", [ending.outcome for ending in endings]),
        SheetColumn("peak allocated", ["-" if run is None else format_bytes(run.peak_allocated_bytes) for run in runs]),
        SheetColumn("reserved", ["-" if run is None else format_bytes(run.peak_reserved_bytes) for run in runs]),
        SheetColumn("wall", [f"{row.wall_s:.1f} s" for row in rows], rank=1),
        SheetColumn("run", [_shown(row.run_directory) for row in rows], is_text=True, rank=2),
    ]
    print_table(console, f"Ranks of {world_size:,}, memory measured", columns)
    for row, ending in zip(rows, endings, strict=True):
        if ending.message:
            print_remark(console, f"rank {row.rank}: {ending.message}")
    if any(row.run_directory for row in rows):
        console.print(Text("  fakedist report RUN shows each", style="dim"), soft_wrap=True)


def ranks_object(rows: Sequence[RankRow], world_size: int, exit_code: int) -> dict[str, object]:
    """What ``--json`` prints for several ranks. ``ranks`` has what it prints for each rank, and ``wall_s``."""
    return {"world_size": world_size, "exit_code": exit_code, "ranks": [rank_object(row) for row in rows]}


def rank_object(row: RankRow) -> dict[str, object]:
    """One rank's object. For a rank that could not start, it has only how it ended."""
    if row.run_directory is None:
        return {"rank": row.rank, "exit": to_plain(row.exit), "wall_s": row.wall_s}
    return {**summary_object(row.run_directory), "wall_s": row.wall_s}


def _shown(path: Path | None) -> str:
    if path is None:
        return "-"
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
