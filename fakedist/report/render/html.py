"""Reports as one self-contained page: it fetches nothing and runs no script but its own.

Charts are templates, by their names.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from fakedist.report.content.report_blocks import Chapter, Chart, Drawing, Facts, Report, Verdict
from fakedist.report.content.run import run_report
from fakedist.report.figures.look import STYLE_NAMES, load_plotly
from fakedist.report.page.assets import joined, page_scripts, plotly_text
from fakedist.report.page.drawings import Pack
from fakedist.report.writing import replace_text
from fakedist.results.run import Run
from fakedist.rundir.schema import SCHEMA_VERSION
from fakedist.visible import visible_lines

_MINUS = re.compile(r"(?<![\w.)\]-])-(?=\d[\d,.]*(?: ?(?:[KMGT]?i?B|µs|ms|s|min|%))\b|\d[\d,.]*%)")
_ARROWS = (("<-", "\u2190"), ("->", "\u2192"))
_PARTS = re.compile(r"[^.]+\.*|\.+")
_LONG = 40  # letters of one part of a name, which is then broken anywhere


def signs(text: str) -> str:
    """Our own text with minus signs and arrows: "-3.00 MiB", "2 -> 4". Not for commands, where a minus is typed."""
    for typed, arrow in _ARROWS:
        text = text.replace(f" {typed} ", f" {arrow} ")
    return _MINUS.sub("\u2212", text)


def layer_name(text: str) -> Markup:
    """A layer's name that breaks after a dot and nowhere else."""
    parts = _PARTS.findall(text)
    if not parts or max(map(len, parts)) > _LONG:
        return escape(text)
    kept = (Markup('<span class="name">{}</span>').format(part) if "-" in part else escape(part) for part in parts)
    return Markup("<wbr>").join(kept)


def command(text: str) -> Markup:
    """A command that breaks between its words, not after the dashes of an option."""
    words = (
        Markup('<span class="name">{}</span>').format(word) if "-" in word and len(word) <= _LONG else escape(word)
        for word in text.split(" ")
    )
    return Markup(" ").join(words)


def source_line(text: str) -> Markup:
    """A file, line and function that break after a folder: "examples/train.py:7 (main)"."""
    return Markup("/<wbr>").join(escape(part) for part in text.split("/"))


FILTERS: dict[str, Callable[[str], str]] = {
    "signs": signs,
    "layer_name": layer_name,
    "command": command,
    "source_line": source_line,
}
_TEMPLATES = Path(__file__).parent.parent / "page" / "templates"


def _in_its_own_direction(value: object) -> object:
    """Text with its control characters written out: one that turns the direction would turn the sentence around it."""
    return value if isinstance(value, Markup) or not isinstance(value, str) else visible_lines(value)


def _of_visible(made: Callable[[str], str], text: str) -> str:
    return made(visible_lines(text))


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        finalize=_in_its_own_direction,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update({name: partial(_of_visible, made) for name, made in FILTERS.items()})
    return environment


def load_page() -> None:
    """Compile templates and import what plotly makes figures of, as the first page needs them."""
    environment = _environment()
    for name in environment.list_templates(extensions=["j2"]):
        environment.get_template(name)
    joined("page")
    plotly_text()
    load_plotly()


#: The script of a page with a chart of this name; that of others has lanes, bars and tables.
_ENTRIES = {
    "compared": "compare",
    "front": "sweep",
    "parallel": "sweep",
    **dict.fromkeys(("timeline", "kernels", "device-use", "groups", "peak"), "page"),
}


def report_page(report: Report, plotly_file: str = "") -> str:
    """A report as a page. ``plotly_file``, next to it, has plotly.js; empty to have it in the page.

    Raises:
        RunDirectoryError: A table is missing or damaged.
    """
    shown = [(block, block.data() if isinstance(block, Chart) else None) for block in report.page_blocks]
    drawn = {block.name: chart for block, chart in shown if isinstance(block, Chart) and isinstance(chart, Drawing)}
    pack = Pack()
    pack.meta |= {"style": STYLE_NAMES, "run": report.name or report.title}
    pack.meta["figures"] = {name: figure for drawing in drawn.values() for name, figure in drawing.figures.items()}
    for drawing in drawn.values():
        pack.meta |= drawing.meta
        for name, values in drawing.arrays.items():
            pack.add(name, values)
    names = {block.name for block, _ in shown if isinstance(block, Chart)}
    entry = next((entry for name, entry in _ENTRIES.items() if name in names), "job")
    about = next((block.rows for block, _ in shown if isinstance(block, Facts) and block.kind == "about"), [])
    verdict = next((block.text for block, _ in shown if isinstance(block, Verdict) and not block.word), report.title)
    style = (_TEMPLATES / "style.css").read_text("utf-8")
    return _environment().get_template("report.html.j2").render(
        schema_version=SCHEMA_VERSION,
        scripts=page_scripts(entry, style, plotly_file),
        style=style,
        title=report.title,
        heading=about[0].text if about else verdict,
        labels=[(block.name if isinstance(block, Chapter) else label.lower(), label)
                for block, _ in shown if (label := getattr(block, "label", ""))],
        names=names,
        blocks=[(type(block).__name__, block, chart) for block, chart in shown],
        drawn={name: drawing.context for name, drawing in drawn.items()},
        numbers=pack.text(),
    )  # fmt: skip


def write_page(run: Run, path: Path) -> None:
    """Write the page of a run. An existing file is replaced atomically.

    Raises:
        RunDirectoryError: A table is missing or damaged.
        JobError: The file cannot be written.
        OSError: The disk is full.
    """
    replace_text(path, report_page(run_report(run, folder=path.parent)))
