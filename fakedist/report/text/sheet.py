"""Tables for a terminal of any width. Columns that do not fit are left out, least important first, and named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_GAP = 2  # blanks between columns


@dataclass(frozen=True)
class SheetColumn:
    """One column of a table.

    Attributes:
        name: Its heading.
        cells: Its text in every row.
        is_text: Text is left-aligned and wraps if necessary. Figures are right-aligned and never cut.
        rank: Columns with the highest rank are left out first. Rank 0 always stays.
    """

    name: str
    cells: Sequence[str]
    is_text: bool = False
    rank: int = 0

    @property
    def width(self) -> int:
        """Width in terminal cells."""
        return max(cell_len(text) for text in (self.name, *self.cells))


def print_table(console: Console, title: str, columns: Sequence[SheetColumn]) -> None:
    """Print a table below its title, with as many of its columns as fit."""
    shown = _fitting(columns, console.width)
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim")
    for column in shown:
        if column.is_text:
            table.add_column(column.name, overflow="fold")
        else:
            table.add_column(column.name, justify="right", no_wrap=True)
    for row in zip(*(column.cells for column in shown), strict=True):
        table.add_row(*(Text(cell) for cell in row))
    print_heading(console, title)
    print_lines(console, table)
    if left_out := [column.name for column in columns if column not in shown]:
        print_remark(console, f"columns not shown: {', '.join(left_out)} (a wider terminal or --json has them)")


def print_heading(console: Console, title: str) -> None:
    """Print a title below an empty line."""
    console.print()
    console.print(Text(title, style="bold"), soft_wrap=True)


def print_remark(console: Console, text: str) -> None:
    """Print a remark about the table above."""
    print_lines(console, Padding(Text(text, style="dim"), (0, 0, 0, 2)))


def print_lines(console: Console, renderable: RenderableType) -> None:
    """Print without padding each line to the full width."""
    for line in console.render_lines(renderable, pad=False):
        text = Text.assemble(*((part.text, part.style or "") for part in line))
        text.rstrip()
        console.print(text, soft_wrap=True, highlight=False)


def _fitting(columns: Sequence[SheetColumn], width: int) -> list[SheetColumn]:
    shown = list(columns)
    while sum(column.width + _GAP for column in shown) - _GAP > width:
        least = max(shown, key=lambda column: column.rank)
        if least.rank == 0:
            break
        shown.remove(least)
    return shown
