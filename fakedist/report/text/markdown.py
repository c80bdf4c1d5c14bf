"""Tables as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from fakedist.report.text.sheet import SheetColumn
from fakedist.visible import MOST_OF_A_TEXT, visible


def markdown_table(columns: Sequence[SheetColumn]) -> list[str]:
    """The lines of a table, with figures right-aligned."""
    rules = ["---" if column.is_text else "---:" for column in columns]
    lines = [_line([column.name for column in columns]), _line(rules)]
    return lines + [_line([escaped(cell) for cell in row]) for row in zip(*(c.cells for c in columns), strict=True)]


def escaped(text: str) -> str:
    """Text escaped for a table: layers.*.mlp, a|b, _foreach_add."""
    text = visible(" ".join(text.split()), MOST_OF_A_TEXT)
    for mark in "\\|*_<>`[]":
        text = text.replace(mark, "\\" + mark)
    return text


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
