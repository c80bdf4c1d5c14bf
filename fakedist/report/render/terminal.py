"""Reports on a terminal of any width. Columns of tables that do not fit are left out, and named.

A narrow terminal folds headings and text at blanks, else after the dots, slashes and underscores of a name, else
anywhere. Everything that goes through here is safe to print, whoever wrote the file that it came from.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from rich.cells import cell_len, chop_cells
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fakedist.report.content.report_blocks import (
    KEY,
    Block,
    Changes,
    Fact,
    Facts,
    Items,
    Remark,
    Report,
    Sheet,
    SheetColumn,
    Verdict,
)
from fakedist.visible import MOST_OF_A_TEXT, visible

_GAP = 2  # blanks between columns
_LEAST_TEXT = 14  # narrower text is hard to read: rather leave out a column of figures
_LEAST = 4
_NARROW = 64  # below this, what is said about a figure goes on a line of its own
_PIECES = re.compile(r"[^./_,]*[./_,]*")
#: Between a number and its unit, which stay on one line, a blank is this private character until a line is printed.
_NO_BREAK = "\ue000"
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]?i?B|m?s|µs|ns|GHz|W)\b)")
#: Width of a fact's name.
FACT_WIDTH = 8


def print_table(console: Console, title: str, columns: Sequence[SheetColumn], *, has_json: bool = True) -> None:
    """Print a table below its title, with as many of its columns as fit, and where the others are."""
    shown = _fitting(columns, console.width)
    widths = _widths(shown, console.width)
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim")
    for column, width in zip(shown, widths, strict=True):
        justify: Literal["left", "right"] = "left" if column.is_text else "right"
        is_title = not title and column is shown[0]
        heading = Text(folded(column.name, width), style="not dim bold" if is_title else "")
        table.add_column(heading, justify=justify, no_wrap=True, width=width)
    for row in zip(*(column.cells for column in shown), strict=True):
        table.add_row(*(Text(folded(cell, width)) for cell, width in zip(row, widths, strict=True)))
    print_heading(console, title)
    print_lines(console, table, width=sum(widths) + _GAP * len(widths))
    if left_out := [column.name for column in columns if column not in shown]:
        where = "a wider terminal or --json" if has_json else "a wider terminal"
        print_remark(console, f"columns not shown: {', '.join(left_out)} ({where} has them)")


def print_short_table(console: Console, sheet: Sheet) -> None:
    """Print a table with its title above its first column, each row on one line.

    Columns that do not fit whole are left out, those of low rank only where the first, which is cut in its middle,
    would get less than a share of the terminal.
    """
    first, *others = sheet.columns
    shown = [replace(first, name=sheet.title), *others]
    for least_first, least_rank in ((_width(shown[0]), 2), (int(_FIRST_SHARE * console.width), KEY + 1)):
        least_first = min(least_first, _width(shown[0]))
        while len(shown) > 1 and least_first + sum(_GAP + _width(column) for column in shown[1:]) > console.width:
            least = max(reversed(shown[1:]), key=lambda column: column.rank)
            if least.rank < least_rank:
                break
            shown.remove(least)
    room = max(console.width - sum(_GAP + _width(column) for column in shown[1:]), _LEAST)
    cells = [cut(cell, room, _HEAD_SHARE) for cell in shown[0].cells]
    shown[0] = replace(shown[0], name=cut(sheet.title, room), cells=cells)
    print_table(console, "", shown)


_FIRST_SHARE = 0.45
_HEAD_SHARE = 0.35  # of a name that is cut: its end tells more


def cut(text: str, width: int, head_share: float = 1.0) -> str:
    """A text in at most ``width`` terminal cells. If it is cut, ``head_share`` of what stays is before the ellipsis."""
    text = visible(text, MOST_OF_A_TEXT)
    if cell_len(text) <= width:
        return text
    head = int(head_share * (width - 1))
    tail = text[::-1]
    while cell_len(text) > head:
        text = text[:-1]
    while cell_len(tail) > width - 1 - head:
        tail = tail[:-1]
    return f"{text}…{tail[::-1]}"


def _print_figures(console: Console, facts: Sequence[Fact]) -> None:
    rows = [(visible(fact.name), visible(fact.text), visible(fact.more, MOST_OF_A_TEXT)) for fact in facts]
    name_width = max(cell_len(name) for name, _, _ in rows)
    width = max(cell_len(figure) for _, figure, _ in rows)
    for name, figure, more in rows:
        gap = " " * (width - cell_len(figure))
        head = Text(f"  {name:<{name_width}}  {gap}{figure}")
        if console.width < _NARROW:
            print_words(console, Text(head.plain.rstrip()), 2)
            if more:
                print_words(console, Text(more, style="dim"), 4)
        else:
            line = Table.grid(padding=(0, 2))
            line.add_column(no_wrap=True)
            line.add_column(overflow="fold")
            line.add_row(head, Text(_with_units(more)))
            print_lines(console, line)


def print_heading(console: Console, title: str) -> None:
    """Print a title, unless it is empty, below an empty line."""
    console.print()
    if title:
        print_words(console, Text(title, style="bold"), 0)


def print_remark(console: Console, text: str) -> None:
    """Print a remark about the table above."""
    print_words(console, Text(text, style="dim"), 2)


def print_words(console: Console, text: Text, indent: int) -> None:
    """Print a text that breaks between words, indented."""
    text.overflow = "fold"
    text.plain = _with_units(visible(text.plain.strip(), MOST_OF_A_TEXT))
    print_lines(console, Padding(text, (0, 0, 0, indent)))


def print_facts(console: Console, facts: Sequence[tuple[str, str]]) -> None:
    """Print names and texts, one a line, however long they are."""
    for name, value in facts:
        print_long(
            console, Text(f"{name:<{FACT_WIDTH}}", style="dim") + Text(visible(value, MOST_OF_A_TEXT), style="not dim")
        )


def print_long(console: Console, text: Text) -> None:
    """Print a text that a terminal may break anywhere: a path or a command, to be copied."""
    text.plain = visible(text.plain, MOST_OF_A_TEXT)
    console.print(text, soft_wrap=True)


def print_items(console: Console, texts: Sequence[str]) -> None:
    """Print a list of sentences."""
    items = Table.grid(padding=(0, 1))
    items.add_column()
    items.add_column(overflow="fold")
    for text in texts:
        items.add_row("  -", Text(_with_units(visible(text, MOST_OF_A_TEXT))))
    print_lines(console, items)


def print_lines(console: Console, renderable: RenderableType, *, width: int | None = None) -> None:
    """Print without padding each line to the full width, which may be more than the terminal's."""
    options = console.options if width is None else console.options.update(width=max(width, 1))
    for line in console.render_lines(renderable, options, pad=False):
        text = Text.assemble(*((part.text.replace(_NO_BREAK, " "), part.style or "") for part in line))
        text.rstrip()
        console.print(text, soft_wrap=True, highlight=False)


def _with_units(text: str) -> str:
    return _BEFORE_UNIT.sub(_NO_BREAK, text)


def folded(text: str, width: int) -> str:
    """A text in lines of at most ``width`` terminal cells."""
    if cell_len(text) <= width:
        return text
    lines = [""]
    for word in text.split():
        if not lines[-1] or cell_len(lines[-1]) + 1 + cell_len(word) > width:
            pieces = [word] if cell_len(word) <= width else _PIECES.findall(word)
            lines += [""] if lines[-1] else []
        else:
            pieces = [f" {word}"]
        for piece in pieces:
            if lines[-1] and cell_len(lines[-1]) + cell_len(piece) > width:
                lines.append("")
            head, *more = chop_cells(piece, width) or [""]
            lines[-1] += head
            lines += more
    return "\n".join(lines)


def _widths(columns: Sequence[SheetColumn], width: int) -> list[int]:
    """The width of each column: headings folded first, then the widest texts, until all fit."""
    widths = [_width(column) for column in columns]
    texts = [at for at, column in enumerate(columns) if column.is_text]
    excess = sum(widths) + _GAP * (len(widths) - 1) - width
    for at, column in enumerate(columns):
        narrower = min(max(excess, 0), widths[at] - _least_width(column))
        widths[at] -= narrower
        excess -= narrower
    while excess > 0 and texts:
        widest = max(texts, key=lambda at: widths[at])
        if widths[widest] <= _LEAST:
            break
        widths[widest] -= 1
        excess -= 1
    return widths


def _fitting(columns: Sequence[SheetColumn], width: int) -> list[SheetColumn]:
    shown = list(columns)
    while len(shown) > 1 and sum(_least_width(column) + _GAP for column in shown) - _GAP > width:
        least = max(shown[1:], key=lambda column: column.rank)
        if least.rank <= 0:
            break
        shown.remove(least)
    while len(shown) > 2 and sum(_readable_width(column) + _GAP for column in shown) - _GAP > width:
        least = max(reversed(shown[1:]), key=lambda column: column.rank)
        if least.rank == KEY:
            break
        shown.remove(least)
    return shown


def _readable_width(column: SheetColumn) -> int:
    return min(_width(column), _LEAST_TEXT) if column.is_text else _least_width(column)


def _width(column: SheetColumn) -> int:
    """Width in terminal cells."""
    return max(cell_len(text) for text in (column.name, *column.cells))


def _least_width(column: SheetColumn) -> int:
    """The width of a column once its heading is folded; text columns count as they are."""
    if column.is_text:
        return _width(column)
    return max(cell_len(text) for text in (*column.name.split(), *column.cells, ""))


def print_sheets(console: Console, sheets: Sequence[Sheet]) -> None:
    """Print tables with their remarks."""
    for sheet in (whole.shortened for whole in sheets):
        print_table(console, sheet.title, sheet.columns, has_json=sheet.has_json)
        for remark in sheet.remarks:
            print_remark(console, remark)


def render(report: Report, console: Console) -> None:
    """Print a report, or the screen of it."""
    if report.screen is not None:
        _render_screen(report.screen(), console)
        return
    shown = report.text_blocks
    for before, block in zip([None, *shown], shown, strict=False):
        _print_block(console, block, before)


#: Lines of a report of one screen, which what it always has may exceed.
_SCREEN = 40


def _render_screen(report: Report, console: Console) -> None:
    """Print each table in short, and of lists that have a least as many as there is room for."""
    shown = report.text_blocks
    texts = [_in_short(console, block, before) for before, block in zip([None, *shown], shown, strict=False)]
    rows = [max(-(-Text.from_ansi(line).cell_len // console.width), 1) for line in "".join(texts).splitlines()]
    left = _SCREEN - sum(rows)
    for at, block in enumerate(shown):
        if isinstance(block, Items) and block.least is not None:
            kept = list(block.texts[: block.least])
            for text in block.texts[block.least :]:
                if (takes := len(Text(text).wrap(console, console.width - 2))) <= left:
                    kept.append(text)
                    left -= takes
            texts[at] = _in_short(console, block, None, kept)
    console.file.write("".join(texts))


def _in_short(console: Console, block: Block, before: Block | None, kept: Sequence[str] | None = None) -> str:
    with console.capture() as captured:
        _print_in_short(console, block, before, kept)
    return captured.get()


def _print_in_short(console: Console, block: Block, before: Block | None, kept: Sequence[str] | None) -> None:
    match block:
        case Sheet():
            print_short_table(console, block)
        case Facts(rows, kind="about"):
            (name, first), *others = [(row.name, row.text) for row in rows]
            print_facts(console, [(name, cut(first, console.width - FACT_WIDTH)), *others])
        case Items(title, texts, least=int() as least):
            listed = texts[:least] if kept is None else kept
            more = len(texts) - len(listed)
            print_heading(console, title + (f", {more} more" if more else ""))
            for text in (text for text in texts if text in listed):
                print_words(console, Text(text), 2)
        case Remark(text, is_warning=True):
            print_heading(console, "")
            print_long(console, Text(cut(text, console.width), style="yellow"))
        case Remark(is_code=True) if not isinstance(before, Remark):
            print_heading(console, "")
            _print_block(console, block, before)
        case _:
            _print_block(console, block, before)


_TONES = {"good": "bold green", "maybe": "bold yellow", "no": "bold red"}


def _print_block(console: Console, block: Block, before: Block | None) -> None:
    match block:
        case Verdict(text, word="") if text:
            if not isinstance(before, Verdict | None):
                console.print()
            print_words(console, Text(text, style="bold"), 0)
        case Verdict(text, word=word, tone=tone):
            print_words(console, Text(word, _TONES[tone]) + Text(text, _TONES[tone] if tone == "no" else ""), 2)
        case Facts(rows, kind="answers"):
            for row in rows:
                print_words(console, Text(f"{row.name}: {row.text}"), 2)
        case Facts(rows, ""):
            print_facts(console, [(row.name, f"{row.text} ({row.more})" if row.more else row.text) for row in rows])
        case Facts(rows, title):
            print_heading(console, title)
            _print_figures(console, rows)
        case Sheet():
            print_sheets(console, [block])
        case Items(title, texts, True):
            print_heading(console, "")
            print_long(console, Text(title, style="bold"))
            for text in texts:
                print_long(console, Text(text))
        case Items(title, texts):
            print_heading(console, title)
            print_items(console, texts)
        case Remark(text, is_code=True):
            print_long(console, Text(text))
        case Remark(text, is_warning):
            print_words(console, Text(text, style="yellow" if is_warning else "dim"), 0 if is_warning else 2)
        case Changes(title, items):
            print_heading(console, title)
            for item in items:
                print_words(console, Text(item.head), 2)
                for text in filter(None, (*item.remarks, item.text)):
                    print_words(console, Text(text, style="dim"), 4)
