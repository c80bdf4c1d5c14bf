"""Reports as Markdown, which fits a comment on a pull request."""

from __future__ import annotations

from collections.abc import Sequence

from fakedist.report.content.report_blocks import (
    Advice,
    Block,
    Changes,
    Facts,
    Items,
    Remark,
    Report,
    Sheet,
    Verdict,
)
from fakedist.visible import MOST_OF_A_TEXT, visible

#: GitHub refuses comments of more than 65,536 characters. The rest leaves a bot room for text of its own.
MAX_CHARACTERS = 60_000


def report_markdown(report: Report) -> str:
    """A report as Markdown; tables are collapsed under their titles. A long one ends after ``MAX_CHARACTERS``."""
    pieces: list[list[str]] = []
    before = None
    for block in report.text_blocks:
        lines = _lines(block)
        if isinstance(block, Remark) and isinstance(before, Remark):
            pieces[-1] += lines
        elif lines:
            pieces.append(lines)
        before = block if lines else before
    text = ""
    for number, piece in enumerate("\n".join(lines) for lines in pieces):
        if len(text) + len(piece) > MAX_CHARACTERS:
            return f"{text}{len(pieces) - number} more parts of the report did not fit here.\n"
        text += piece + "\n\n"
    return text.rstrip() + "\n"


def _lines(block: Block) -> list[str]:
    match block:
        case Verdict(text, word=word):
            return [f"**{escaped(word or text)}**{' ' * text.startswith(' ')}{escaped(text) if word else ''}"]
        case Facts(rows, title, is_detail=False, kind=kind):
            first = [f"### fakedist: {escaped(rows[0].text[:_TITLE])}", ""] if kind == "about" else []
            texts = [f"`{visible(row.text, MOST_OF_A_TEXT)}`" if row.is_code else escaped(row.text) for row in rows]
            more = [f" ({escaped(row.more)})" if row.more else "" for row in rows]
            facts = [f"- {row.name}: {text}{said}" for row, text, said in zip(rows, texts, more, strict=True)]
            return [*first, *([f"**{escaped(title)}**", ""] if title else []), *facts[bool(first) :]]
        case Sheet(is_detail=False):
            return sheet_markdown(block.shortened)
        case Items(title, texts, True):
            return [f"**{escaped(title)}**", "", "```", *(text.replace("```", "'''") for text in texts), "```"]
        case Items(title, texts, is_folded=is_folded):
            items = [f"- {escaped(text)}" for text in texts]
            folded = [f"<details><summary>{title}</summary>", "", *items, "", "</details>"]
            return folded if is_folded else [f"**{escaped(title)}**", "", *items]
        case Remark(text):
            return [f"- {escaped(text)}"]
        case Changes(title, items):
            return [f"**{escaped(title)}**", "", *map(_change, items)]
    return []


_TITLE = 300  # letters


def _change(item: Advice) -> str:
    rest = item.head.removeprefix(item.gives)
    texts = [rest, *item.remarks, item.text]
    return f"- **{escaped(item.gives)}**{' ' * rest.startswith(' ')}{'; '.join(map(escaped, filter(None, texts)))}"


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
    rules = ["---" if column.is_text else "---:" for column in sheet.columns]
    rows = [*zip(*(column.cells for column in sheet.columns), strict=True)]
    table = [_line([column.name for column in sheet.columns]), _line(rules)]
    table += [_line([escaped(cell) for cell in row]) for row in rows[:_MAX_ROWS]]
    remarks = [*sheet.remarks]
    if len(rows) > _MAX_ROWS:
        remarks.append(f"{len(rows) - _MAX_ROWS} more rows are in the run")
    below = [line for remark in remarks for line in ("", f"_{escaped(remark)}_")]
    if sheet.is_open:
        return [f"**{sheet.title}**", "", *table, *below]
    return ["<details>", f"<summary>{sheet.title}</summary>", "", *table, *below, "", "</details>"]
