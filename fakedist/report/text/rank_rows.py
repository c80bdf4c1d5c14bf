"""Several ranks of a job side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from fakedist.report.text.json_object import summary_object
from fakedist.report.text.sheet import SheetColumn, print_remark, print_table
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
    found = [rank_object(row, brief=True) for row in rows]
    peaks = [[_bytes(one.get(f"peak_{kind}_bytes")) for one in found] for kind in ("allocated", "reserved")]
    columns = [
        SheetColumn("rank", [str(row.rank) for row in rows]),
        SheetColumn("outcome", [one["exit"]["outcome"] for one in found]),
        SheetColumn("peak allocated", peaks[0]),
        SheetColumn("reserved", peaks[1]),
        SheetColumn("wall", [f"{row.wall_s:.1f} s" for row in rows], rank=1),
        SheetColumn("run", [_shown(row.run_directory) for row in rows], is_text=True, rank=2),
    ]
    print_table(console, f"Ranks of {world_size:,}, memory measured", columns)
    for one in found:
        if message := one["exit"]["message"]:
            print_remark(console, f"rank {one['rank']}: {message}")
    if any(row.run_directory for row in rows):
        console.print(Text("  fakedist report RUN shows each", style="dim"), soft_wrap=True)


def ranks_object(rows: Sequence[RankRow], world_size: int, exit_code: int) -> dict[str, Any]:
    """What ``--json`` prints for several ranks. ``ranks`` has what it prints for each rank, and ``wall_s``."""
    return {"world_size": world_size, "exit_code": exit_code, "ranks": [rank_object(row) for row in rows]}


def rank_object(row: RankRow, *, brief: bool = False) -> dict[str, Any]:
    """One rank's object. For a rank that could not start, it has only how it ended."""
    if row.run_directory is None:
        return {"rank": row.rank, "exit": to_plain(row.exit), "wall_s": row.wall_s}
    found = summary_object(row.run_directory)
    if brief:
        found = {key: found[key] for key in ("rank", "exit", "peak_allocated_bytes", "peak_reserved_bytes")}
    return {**found, "wall_s": row.wall_s}


def _bytes(amount: int | None) -> str:
    return "-" if amount is None else format_bytes(amount)


def _shown(path: Path | None) -> str:
    if path is None:
        return "-"
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
