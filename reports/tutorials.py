"""Run the commands of the tutorials, draw what a terminal shows of those that have a picture, and compare figures.

A picture is docs/images/PAGE-NUMBER.svg, where the page shows what its fakedist command of that number printed, from 0.
"""

from __future__ import annotations

import html
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).parent.parent
TUTORIALS = ROOT / "docs" / "tutorials"
IMAGES = ROOT / "docs" / "images"
#: Of a picture, and of what a page quotes.
_COLUMNS, _QUOTED = 110, 130
#: How the commands of a page begin.
_WORDS = ("fakedist ", "mkdir ", "cp ", "cd ", "sed ", "git ")
#: Codes of commands that find what they look for: a rank that does not fit, figures that grew.
_FINDINGS = (0, 3, 4)


def steps(page: Path) -> list[list[str]]:
    """The commands of a tutorial in their order, each split as a shell would."""
    return [shlex.split(line) for line in _fenced(page, "").splitlines() if line.startswith(_WORDS)]


def configuration(page: Path) -> str:
    """The configuration that a tutorial has its reader write; empty if it has none."""
    return _fenced(page, "toml")


def _fenced(page: Path, language: str) -> str:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return "".join(block for known, block in blocks if known == language)


def outputs(page: Path, folder: Path) -> Iterator[tuple[list[str], int, str]]:
    """Run a tutorial in a folder with the examples: each fakedist command, its exit code and what a terminal shows.

    The host takes a constant time, not this machine's, so the figures are the same everywhere.
    """
    number = 0
    for step in steps(page):
        if step[0] == "cd":
            folder /= step[1]
            (folder / "fakedist.toml").write_text(configuration(page))
        elif step[0] == "fakedist":
            finished = subprocess.run(
                [sys.executable, "-m", *step],
                cwd=folder,
                env=os.environ
                | {"PYTHONPATH": str(ROOT), "FORCE_COLOR": "1", "COLUMNS": str(_columns(page, number))}
                | {"GIT_CEILING_DIRECTORIES": str(folder), "FAKEDIST_HOST_CLOCK": "0"},
                capture_output=True,
                text=True,
                check=False,
            )
            if finished.returncode not in _FINDINGS:
                raise SystemExit(f"{finished.stderr[-3_000:]}\nexit {finished.returncode}: {shlex.join(step)}")
            number += 1
            yield step, finished.returncode, finished.stdout.replace(f"{folder}/", "")
        elif step[0] != "git":
            subprocess.run(step, cwd=folder, check=True)


def _picture(page: Path, number: int) -> Path:
    return IMAGES / f"{page.stem}-{number}.svg"


def _columns(page: Path, number: int) -> int:
    return _COLUMNS if f"../images/{_picture(page, number).name})" in page.read_text() else _QUOTED


#: How far a figure may be from what a command prints, besides the rounding of either.
_DRIFT = 0.01
_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")
#: A figure of a sentence: a number with a unit.
_FIGURE = re.compile(r"(?<![\w.])(\d[\d,]*(?:\.\d+)?)\s?(GiB|MiB|ms|s|%)(?!\w)")


def drifts(page: Path, printed: Sequence[str]) -> list[str]:
    """The lines of a page's excerpts, its pictures and the figures of its sentences that no command prints any more.

    Args:
        printed: The text that each fakedist command of the page printed, in their order.
    """
    every = " ".join("\n".join(printed).split())
    excerpts = [line for line in _fenced(page, "").splitlines() if line.strip() and not line.startswith(_WORDS)]
    stale = [f"no command prints: {line.strip()}" for line in excerpts if not _is_printed(line, every)]
    for picture in sorted(IMAGES.glob(f"{page.stem}-[0-9]*.svg")):
        lines = picture_lines(picture.read_text())
        now = " ".join(printed[int(picture.stem.rpartition("-")[2])].split())
        stale += [f"{picture.name}: {line}" for line in lines if not _is_printed(line, now)]
        stale += [f"{picture.name}: has no figures"] * (not any(map(_NUMBER.search, lines)))
    known = [*_FIGURE.findall(every), *_FIGURE.findall(_fenced(page, "toml"))]
    for number, unit in _FIGURE.findall(re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)):
        if not any(of == unit and _is_close(number, other) for other, of in known):
            stale.append(f"no command prints {number} {unit}")
    return stale


_SPAN = re.compile(r'<text [^>]*?x="([\d.]+)" y="([\d.]+)" textLength="([\d.]+)"[^>]*>(.*?)</text>', re.DOTALL)


def picture_lines(svg: str) -> list[str]:
    """The lines of text that a terminal's picture shows, without its title."""
    rows: dict[float, str] = {}
    ends: dict[float, float] = {}
    for x, y, length, text in _SPAN.findall(svg):
        row, begin = float(y), float(x)
        gap = " " if begin > ends.get(row, 0.0) + 1 else ""
        rows[row] = rows.get(row, "") + gap + html.unescape(text)
        ends[row] = begin + float(length)
    return [line for _, line in sorted(rows.items()) if line.strip()]


def _is_printed(line: str, printed: str) -> bool:
    """Whether a text with single spaces has a line's words and nearly its figures."""
    line = " ".join(line.split())
    pattern = re.compile(r"(\d[\d,]*(?:\.\d+)?)".join(map(re.escape, _NUMBER.split(line))))
    return any(
        all(_is_close(shown, now) for shown, now in zip(_NUMBER.findall(line), match.groups(), strict=True))
        for match in pattern.finditer(printed)
    )


def _is_close(shown: str, now: str) -> bool:
    """Whether two numbers are the same within the drift and the rounding of the one that has fewer digits."""
    values = [float(text.replace(",", "")) for text in (shown, now)]
    rounding = max(0.5 * 10.0 ** -len(text.partition(".")[2]) for text in (shown, now))
    rounding = rounding if "." in shown + now else 0.5 * (len(shown) != len(now))
    return abs(values[0] - values[1]) <= max(_DRIFT * max(values), rounding)


def draw_tutorial(page: Path, folder: Path) -> None:
    """Run a tutorial and make its pictures again."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    for number, (step, _, shown) in enumerate(outputs(page, folder)):
        if _columns(page, number) == _COLUMNS:
            _picture(page, number).write_text(terminal_svg(shlex.join(step), shown))


#: A window as rich draws one, without the fonts that it would fetch: a picture that a page embeds may fetch nothing.
_WINDOW = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: system-ui, sans-serif; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def terminal_svg(command: str, shown: str) -> str:
    """A terminal's window with what a command printed; dark, so that it reads on a page of either colour."""
    text = Text.from_ansi(shown.strip("\n"))
    console = Console(record=True, width=_COLUMNS, file=StringIO(), force_terminal=True, color_system="truecolor")
    console.print(text)
    console.print()  # the window's edge cuts off what is below the last line's letters
    title = command if len(command) < _COLUMNS else f"{command[: _COLUMNS - 4]} ..."
    return console.export_svg(title=title, theme=MONOKAI, code_format=_WINDOW, unique_id="fakedist")
