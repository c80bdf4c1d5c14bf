"""A page as a reader sees it: its tables by id, its text, and what a browser would run or fetch."""

from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

from fakedist.report.content.run import run_report
from fakedist.report.render.html import report_page
from fakedist.results.run import Run

_VOID = {"wbr", "meta", "link", "input", "br", "img", "hr"}


@dataclass
class PageText(HTMLParser):
    """A parsed page.

    Attributes:
        tables: Rows of each table that has an id, each a list of cell texts.
        figures: Text of the elements with ``data-figure``.
        scripts: Contents of script elements.
        fetched: Addresses that a browser would fetch.
        handlers: Attributes that would run something.
        title: The first heading.
    """

    tables: dict[str, list[list[str]]] = field(default_factory=dict)
    figures: dict[str, str] = field(default_factory=dict)
    scripts: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    handlers: list[str] = field(default_factory=list)
    title: str = ""
    words: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self._table: str = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.fetched += [str(named[name]) for name in ("src", "href") if name in named]
        self.handlers += [name for name in named if name.startswith("on")]
        if tag in _VOID:
            return
        self._open.append((tag, named))
        if tag == "table":
            self._table = str(named.get("id") or "")
            self.tables[self._table] = []
        elif tag == "tr" and self._table:
            self.tables[self._table].append([])
        elif tag in ("td", "th") and self._table:
            self.tables[self._table][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1][0] == tag, f"<{self._open[-1][0]}> is closed by </{tag}>"
        self._open.pop()
        if tag == "table":
            self._table = ""

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1][0] == "script":
            self.scripts.append(data)
            return
        if any(tag == "style" for tag, _ in self._open):
            return
        self.words.append(data)
        if any(tag == "h1" for tag, _ in self._open):
            self.title += data
        for _, named in self._open:
            if figure := named.get("data-figure"):
                self.figures[figure] = self.figures.get(figure, "") + data
        rows = self.tables.get(self._table) if self._table else None
        if rows and rows[-1] and any(tag in ("td", "th") for tag, _ in self._open):
            rows[-1][-1] += data


def read_page(text: str) -> PageText:
    """Parse a page; elements must be closed in order."""
    found = PageText()
    found.feed(text)
    found.close()
    assert found._open == []
    for rows in found.tables.values():
        rows[:] = [[" ".join(cell.split()) for cell in row] for row in rows]
    return found


def page(run: Run, folder: Path | None = None) -> str:
    """The page of a run."""
    return report_page(run_report(run, folder=folder))
