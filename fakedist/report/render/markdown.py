"""Reports as Markdown, which fits a comment on a pull request."""

from __future__ import annotations

from collections.abc import Sequence

from fakedist.report.content.report_blocks import (
    Advice,
    Block,
    Facts,
    Items,
    Remark,
    Report,
    Sheet,
    SheetColumn,
    Verdict,
)
from fakedist.visible import MOST_OF_A_TEXT, visible


def report_markdown(report: Report) -> str:
    """A report as Markdown; tables are collapsed under their titles."""
    pieces: list[list[str]] = []
    before = None
    for block in report.blocks:
        lines = _lines(block)
        if isinstance(block, Remark) and isinstance(before, Remark):
            pieces[-1] += lines
        elif lines:
            pieces.append(lines)
        before = block
    return "\n\n".join("\n".join(lines) for lines in pieces) + "\n"


def _lines(block: Block) -> list[str]:
    match block:
        case Verdict(text):
            return [f"**{escaped(text)}**"]
        case Facts(rows, title, is_detail=False):
            texts = [f"`{visible(row.text, MOST_OF_A_TEXT)}`" if row.is_code else escaped(row.text) for row in rows]
            more = [f" ({escaped(row.more)})" if row.more else "" for row in rows]
            facts = [f"- {row.name}: {text}{said}" for row, text, said in zip(rows, texts, more, strict=True)]
            return [f"**{escaped(title)}**", "", *facts] if title else facts
        case Sheet():
            return sheet_markdown(block)
        case Items(title, texts, True):
            return [f"**{escaped(title)}**", "", "```", *(text.replace("```", "'''") for text in texts), "```"]
        case Items(title, texts):
            return [f"**{escaped(title)}**", "", *(f"- {escaped(text)}" for text in texts)]
        case Remark(text):
            return [f"- {escaped(text)}"]
        case Advice(title, gives, text, command):
            return [
                f"- **{escaped(gives)}**: {escaped(title)}. {escaped(text)}",
                *([f"  `{command}`"] if command else []),
            ]
    return []


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


_MAX_ROWS = 200


def sheet_markdown(sheet: Sheet) -> list[str]:
    """The lines of a table with its remarks, collapsed under its title."""
    rows = len(sheet.columns[0].cells)
    table = markdown_table(sheet.columns)[: _MAX_ROWS + 2]
    remarks = [*sheet.remarks]
    if rows > _MAX_ROWS:
        remarks.append(f"{rows - _MAX_ROWS} more rows are in the run")
    below = [line for remark in remarks for line in ("", f"_{escaped(remark)}_")]
    if sheet.is_open:
        return [f"**{sheet.title}**", "", *table, *below]
    return ["<details>", f"<summary>{sheet.title}</summary>", "", *table, *below, "", "</details>"]
