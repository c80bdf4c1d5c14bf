"""A report as a value: a title, blocks, and the object of its JSON. Renderers decide what a block looks like."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from fakedist.units import format_bytes, format_us
from fakedist.visible import visible

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import ArrayLike

#: The rank of a column that always stays.
KEY = -1

#: The rank of an empty column, which is left out before all others.
EMPTY_RANK = 9

_FORMATS: Mapping[str, Callable[[float], str]] = {
    "bytes": format_bytes,
    "us": format_us,
    "%": lambda value: f"{value:.1%}",
    "": lambda value: f"{value:,}",
}


@dataclass(frozen=True)
class SheetColumn:
    """One column of a table.

    Attributes:
        cells: The cells' texts; None for those of the values, by their unit.
        is_text: Text is left-aligned and wraps if necessary. Figures are right-aligned and never cut.
        rank: Columns with the highest rank are left out first, rank 0 only where the others' text would have to fold to
            a few letters. The first column and those of rank ``KEY`` always stay.
        values: The cells' figures, by which a page sorts the column and which a CSV file gets; None where one is not
            known, and None without any.
        unit: Unit of ``values``: "bytes", "us" or "%" (a fraction); empty for a number.
        kind: Of text on a page: "layer", "line" (of source), "code" or "word" (which never wraps).
        chips: On a page, the class of the coloured square before each cell.
        hovers: On a page, what a cell says when it is pointed at.
        whole: On a page, the cells' texts where they are longer.
        opened: On a page, what the cells of a folded row's layers are made of: "sum" and the categories, "time" and the
            array, "own", "most", or "blank".
        has_bars: On a page, each cell has a bar as long as its share of the largest.
        is_detail: A page alone has it.
    """

    name: str
    cells: Sequence[str] = ()
    is_text: bool = False
    rank: int = 0
    values: Sequence[float | None] | None = None
    unit: str = ""
    kind: str = ""
    chips: Sequence[str] = ()
    hovers: Sequence[str] = ()
    whole: Sequence[str] = ()
    opened: tuple[str, str] | None = None
    has_bars: bool = False
    is_detail: bool = False

    def __post_init__(self) -> None:
        cells = self.cells
        if not cells and self.values:
            cells = ["-" if value is None else _FORMATS[self.unit](value) for value in self.values]
        object.__setattr__(self, "name", visible(self.name))
        object.__setattr__(self, "cells", [visible(cell) for cell in cells])

    @property
    def largest(self) -> float:
        """The largest value, which has the longest bar."""
        return max((value for value in self.values or () if value), default=1.0)

    def rows(self, numbers: Sequence[int]) -> SheetColumn:
        """The same column with only these rows."""
        kept: dict[str, Any] = {
            name: [values[at] for at in numbers]
            for name in ("cells", "values", "chips", "hovers", "whole")
            if (values := getattr(self, name))
        }
        return replace(self, **kept)


def text_column(name: str, cells: Sequence[str], rank: int = 0, **look: Any) -> SheetColumn:
    """A column of text, with what its cells look like."""
    return SheetColumn(name, cells, is_text=True, rank=rank, **look)


def bytes_column(name: str, sizes: Sequence[float | None], rank: int = 0, **look: Any) -> SheetColumn:
    """A column of bytes; None is not known, or nothing."""
    return SheetColumn(name, rank=rank, values=sizes, unit="bytes", **look)


def us_column(name: str, times_us: Sequence[float | None], rank: int = 0, **look: Any) -> SheetColumn:
    """A column of times; None is not known, or nothing."""
    return SheetColumn(name, rank=rank, values=times_us, unit="us", **look)


def count_column(name: str, numbers: Sequence[float | None], rank: int = 0, **look: Any) -> SheetColumn:
    """A column of numbers; None is not known."""
    return SheetColumn(name, rank=rank, values=numbers, **look)


def share_column(name: str, shares: Sequence[float | None], rank: int = 0, **look: Any) -> SheetColumn:
    """A column of fractions; None is not known."""
    return SheetColumn(name, rank=rank, values=shares, unit="%", **look)


@dataclass(frozen=True)
class SheetRow:
    """A row as a page has it.

    Attributes:
        fold: The number of the folded layers that it stands for; -1 for none.
        repeats: How many layers or blocks it stands for: "x3" follows its name.
        is_small: Left out elsewhere than on a page, which hides it until asked.
        is_marked: It stands out.
        is_inner: It belongs to the row above, which a page unfolds to it.
        blocks: Their rows in the table ``blocks``; the page shows them in its timeline.
        stack: Lines of code, innermost first, each with whether it is the job's.
    """

    fold: int = -1
    repeats: int = 1
    is_small: bool = False
    is_marked: bool = False
    is_inner: bool = False
    blocks: Sequence[int] = ()
    stack: Sequence[tuple[str, bool]] = ()


@dataclass(frozen=True)
class Sheet:
    """One table.

    Attributes:
        remarks: Sentences that read it.
        has_json: The command that prints it prints it as JSON, too.
        links: Pages of each row, as (text, address); None without any.
        is_open: Markdown shows it without a click.
        label: Its name in a page's navigation; empty if it has none of its own.
        most: Rows that are shown elsewhere than on a page; 0 for all.
        rest: A sentence on those that are left out there.
        is_detail: A page alone has it.
        name: Its address on a page; empty for any.
        intro: Sentences that a page has before it.
        rows: What a page does with each row; empty for nothing.
        lanes: What its rows are in a page's lanes: "layer", "kernel" or "call".
        is_narrow: Half of a page's width is enough.
        small: A sentence on its small rows, where they are left out.
    """

    title: str
    columns: Sequence[SheetColumn]
    remarks: Sequence[str] = ()
    has_json: bool = True
    links: Sequence[Sequence[tuple[str, str]]] | None = None
    is_open: bool = False
    label: str = ""
    most: int = 0
    rest: str = ""
    is_detail: bool = False
    name: str = ""
    intro: str = ""
    rows: Sequence[SheetRow] = ()
    lanes: str = ""
    is_narrow: bool = False
    small: str = ""

    @property
    def num_small(self) -> int:
        """Rows that are left out elsewhere than on a page."""
        return sum(row.is_small for row in self.rows)

    @property
    def on_page(self) -> Sheet:
        """The table as a page shows it: without columns that are empty."""
        return replace(self, columns=[column for column in self.columns if column.rank != EMPTY_RANK])

    @property
    def shortened(self) -> Sheet:
        """The table as a terminal and Markdown show it."""
        kept = self.with_rows([at for at, row in enumerate(self.rows) if not row.is_small]) if self.rows else self
        whole = first_rows(kept, self.most) if self.most else kept
        columns = [column for column in whole.columns if not column.is_detail]
        name = next((at for at, column in enumerate(columns) if column.is_text), 0)
        if whole.rows:
            names = zip(columns[name].cells, whole.rows, strict=True)
            cells = [f"{'  ' * row.is_inner}{cell}{f' x{row.repeats}' * (row.repeats > 1)}" for cell, row in names]
            columns[name] = replace(columns[name], cells=cells)
        remarks = [*whole.remarks, *([self.small] if self.num_small else [])]
        return replace(whole, columns=columns, remarks=remarks, most=0, rows=())

    def with_rows(self, numbers: Sequence[int]) -> Sheet:
        """The same table with only these rows."""
        links = None if self.links is None else [self.links[at] for at in numbers]
        rows = [self.rows[at] for at in numbers] if self.rows else ()
        return replace(self, columns=[column.rows(numbers) for column in self.columns], links=links, rows=rows)


def first_rows(sheet: Sheet, most: int) -> Sheet:
    """The first rows of a table with those inside of them, and what is said of the others."""
    outer = [at for at in range(len(sheet.columns[0].cells)) if not (sheet.rows and sheet.rows[at].is_inner)]
    if len(outer) <= most:
        return sheet
    return replace(sheet.with_rows(range(outer[most])), remarks=[*sheet.remarks, *([sheet.rest] if sheet.rest else [])])


@dataclass(frozen=True)
class Verdict:
    """The answer in one sentence; ``name`` is the figure's name, for those who read pages by program.

    Attributes:
        word: The answer in a word or two, which the sentence goes on from.
        tone: What the word means: "good", "maybe" or "no".
    """

    text: str
    name: str = "verdict"
    word: str = ""
    tone: str = ""


@dataclass(frozen=True)
class Fact:
    """A name with its text or figure, and what is said about it; a path or a command is code.

    ``key`` is the figure's name for those who read pages by program, if it is another.
    """

    name: str
    text: str
    more: str = ""
    is_code: bool = False
    key: str = ""


@dataclass(frozen=True)
class Facts:
    """Names and texts, one a line; below a title they are figures, which stand at the right.

    Attributes:
        is_detail: A page alone has them.
        kind: "about" for what is reported on, the heading of a page; "lead" if a page shows the first figure large;
            "answers" for sentences, each with its name.
        source: "measured", "simulated" or "estimated": a page's tag of the first figure.
    """

    rows: Sequence[Fact]
    title: str = ""
    label: str = ""
    is_detail: bool = False
    kind: str = ""
    source: str = ""


@dataclass(frozen=True)
class Items:
    """Sentences of equal weight below a title, or lines of code or of a log.

    Attributes:
        least: In a report of one screen, how many there is always room for; the others follow as far as there is.
        is_folded: Shown after a click, where that can be.
    """

    title: str
    texts: Sequence[str]
    is_code: bool = False
    label: str = ""
    least: int | None = None
    is_folded: bool = False


@dataclass(frozen=True)
class Remark:
    """A sentence on the limits of what is said. A warning has to be read first; code may break anywhere."""

    text: str
    is_warning: bool = False
    is_code: bool = False
    key: str = ""


@dataclass(frozen=True)
class Advice:
    """A change that would help, or a fault.

    Attributes:
        gives: What the change gives, or the code of the fault.
        text: How it is made.
        of: What it gives less or more of.
        line: The line of code.
        remarks: Sentences about it: its outcome, its price.
        rule: The rule that found it.
        switch: The number of its switch on a page; -1 for none.
    """

    title: str
    gives: str
    text: str
    of: str = ""
    line: str = ""
    remarks: Sequence[str] = ()
    rule: str = ""
    switch: int = -1

    @property
    def head(self) -> str:
        """The change in a line: "2.00 GiB less allocated: checkpoint layers.0-2 (train.py:7; rule checkpoint)"."""
        where = "; ".join(filter(None, (self.line, f"rule {self.rule}" if self.rule else "")))
        return f"{self.gives}{' ' * bool(self.of)}{self.of}: {self.title}{f' ({where})' if where else ''}"


@dataclass(frozen=True)
class Changes:
    """Changes that would help, or faults, below a title. ``has_switches`` if a page shows them together."""

    title: str
    items: Sequence[Advice]
    has_switches: bool = False


@dataclass(frozen=True)
class Chapter:
    """A part of a page, with its address and its name in the navigation. A terminal and Markdown have its blocks alone.

    Attributes:
        source: "measured", "simulated" or "estimated".
        intro: A sentence below its title.
        is_card: All of its blocks are in one panel.
    """

    name: str
    label: str
    title: str = ""
    source: str = ""
    intro: str = ""
    is_card: bool = False


@dataclass(frozen=True)
class Drawing:
    """A chart that a page's script draws: plotly's figures by name, what the script reads, what its template has.

    ``arrays`` are numbers that the script samples again for each view.
    """

    figures: Mapping[str, object]
    meta: Mapping[str, object]
    context: Mapping[str, object]
    arrays: Mapping[str, ArrayLike] = MappingProxyType({})


@dataclass(frozen=True)
class Chart:
    """A figure of the page, by the name of its template, and the data that it is drawn from.

    Attributes:
        source: "measured", "simulated" or "estimated".
    """

    name: str
    title: str
    data: Callable[[], object]
    source: str = ""
    remark: str = ""
    label: str = ""
    is_narrow: bool = False


@dataclass(frozen=True)
class Details:
    """Blocks that are made when a page is; ``instead`` makes those that are shown elsewhere."""

    make: Callable[[], Sequence[Block]]
    instead: Callable[[], Sequence[Block]] = tuple


def part(make: Callable[[], Sequence[Block]]) -> Details:
    """Blocks that are made when they are shown, wherever that is."""
    return Details(make, make)


Block: TypeAlias = Verdict | Facts | Sheet | Chart | Items | Remark | Changes | Chapter | Details


@dataclass(frozen=True)
class Report:
    """A subject, and all that is known of it.

    Attributes:
        title: The subject in a few words: "match", "play".
        name: Of what is reported on, for the files that a page saves; empty for the subject.
        screen: Makes what a terminal shows of it, where that is less.
        data: Makes the object of its JSON.
        rows: Makes the table of its CSV; None if it has none.
    """

    title: str
    blocks: Sequence[Block]
    data: Callable[[], object]
    rows: Callable[[], pd.DataFrame] | None = None
    name: str = ""
    screen: Callable[[], Report] | None = None

    @property
    def text_blocks(self) -> list[Block]:
        """The blocks that a terminal and Markdown show."""
        kept = [block for block in _flat(self.blocks, on_page=False) if not isinstance(block, Chapter | Chart)]
        return [block for block in kept if not getattr(block, "is_detail", False)]

    @property
    def page_blocks(self) -> list[Block]:
        """The blocks that a page shows, without sections that have none."""
        flat = [*_flat(self.blocks, on_page=True)]
        is_last = [isinstance(after, Chapter) for after in (*flat[1:], Chapter("", ""))]
        return [one for one, ends in zip(flat, is_last, strict=True) if not (ends and isinstance(one, Chapter))]


def _flat(blocks: Sequence[Block], *, on_page: bool) -> Iterator[Block]:
    for block in blocks:
        if isinstance(block, Details):
            yield from _flat(block.make() if on_page else block.instead(), on_page=on_page)
        else:
            yield block
