"""A report as a value: a title, blocks, and the object of its JSON. Renderers decide what a block looks like."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

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
    """

    name: str
    cells: Sequence[str] = ()
    is_text: bool = False
    rank: int = 0
    values: Sequence[float | None] | None = None
    unit: str = ""

    def __post_init__(self) -> None:
        cells = self.cells
        if not cells and self.values:
            cells = ["-" if value is None else _FORMATS[self.unit](value) for value in self.values]
        object.__setattr__(self, "name", visible(self.name))
        object.__setattr__(self, "cells", [visible(cell) for cell in cells])


def bytes_column(name: str, sizes: Sequence[float | None], rank: int = 0) -> SheetColumn:
    """A column of bytes; None is not known."""
    return SheetColumn(name, rank=rank, values=sizes, unit="bytes")


def us_column(name: str, times_us: Sequence[float | None], rank: int = 0) -> SheetColumn:
    """A column of times; None is not known."""
    return SheetColumn(name, rank=rank, values=times_us, unit="us")


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

    @property
    def shortened(self) -> Sheet:
        """The table as a terminal and Markdown show it."""
        if not self.most or len(self.columns[0].cells) <= self.most:
            return self
        return replace(first_rows(self, self.most), remarks=[*self.remarks, self.rest], most=0)


def first_rows(sheet: Sheet, most: int) -> Sheet:
    """The first rows of a table."""
    columns = [
        replace(column, cells=column.cells[:most], values=None if column.values is None else column.values[:most])
        for column in sheet.columns
    ]
    return replace(sheet, columns=columns, links=None if sheet.links is None else sheet.links[:most])


@dataclass(frozen=True)
class Verdict:
    """The answer in one sentence; ``name`` is the figure's name, for those who read pages by program."""

    text: str
    name: str = "verdict"


@dataclass(frozen=True)
class Fact:
    """A name with its text or figure, and what is said about it; a path or a command is code."""

    name: str
    text: str
    more: str = ""
    is_code: bool = False


@dataclass(frozen=True)
class Facts:
    """Names and texts, one a line; below a title they are figures, which stand at the right.

    A page alone has details.
    """

    rows: Sequence[Fact]
    title: str = ""
    label: str = ""
    is_detail: bool = False


@dataclass(frozen=True)
class Items:
    """Sentences of equal weight below a title, or lines of code or of a log."""

    title: str
    texts: Sequence[str]
    is_code: bool = False
    label: str = ""


@dataclass(frozen=True)
class Remark:
    """A sentence on the limits of what is said. A warning has to be read first."""

    text: str
    is_warning: bool = False


@dataclass(frozen=True)
class Advice:
    """A change that would help: what it gives, and how it is made."""

    title: str
    gives: str
    text: str
    command: str = ""


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


Block: TypeAlias = Verdict | Facts | Sheet | Chart | Items | Remark | Advice


@dataclass(frozen=True)
class Report:
    """A subject, and all that is known of it.

    Attributes:
        title: The subject in a few words: "match", "play".
        data: Makes the object of its JSON.
        rows: Makes the table of its CSV; None if it has none.
    """

    title: str
    blocks: Sequence[Block]
    data: Callable[[], object]
    rows: Callable[[], pd.DataFrame] | None = None
