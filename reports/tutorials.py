"""Run the commands of the tutorials, and draw what a terminal shows of those that have a picture.

A picture is docs/images/PAGE-NUMBER.svg, where the page shows what its fakedist command of that number printed, from 0.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).parent.parent
TUTORIALS = ROOT / "docs" / "tutorials"
IMAGES = ROOT / "docs" / "images"
_COLUMNS = 110
#: Codes of commands that find what they look for: a rank that does not fit, figures that grew.
_FINDINGS = (0, 3, 4)


def steps(page: Path) -> list[list[str]]:
    """The commands of a tutorial in their order, each split as a shell would."""
    words = ("fakedist ", "mkdir ", "cp ", "cd ", "sed ", "git ")
    return [shlex.split(line) for line in _fenced(page, "").splitlines() if line.startswith(words)]


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
    for step in steps(page):
        if step[0] == "cd":
            folder /= step[1]
            (folder / "fakedist.toml").write_text(configuration(page))
        elif step[0] == "fakedist":
            finished = subprocess.run(
                [sys.executable, "-m", *step],
                cwd=folder,
                env=os.environ
                | {"PYTHONPATH": str(ROOT), "FORCE_COLOR": "1", "COLUMNS": str(_COLUMNS)}
                | {"GIT_CEILING_DIRECTORIES": str(folder), "FAKEDIST_HOST_CLOCK": "0"},
                capture_output=True,
                text=True,
                check=False,
            )
            if finished.returncode not in _FINDINGS:
                raise SystemExit(f"{finished.stderr[-3_000:]}\nexit {finished.returncode}: {shlex.join(step)}")
            yield step, finished.returncode, finished.stdout.replace(f"{folder}/", "")
        elif step[0] != "git":
            subprocess.run(step, cwd=folder, check=True)


def draw_tutorial(page: Path, folder: Path) -> None:
    """Run a tutorial and make its pictures again."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    text = page.read_text()
    for number, (step, _, shown) in enumerate(outputs(page, folder)):
        picture = IMAGES / f"{page.stem}-{number}.svg"
        if f"../images/{picture.name})" in text:
            picture.write_text(terminal_svg(shlex.join(step), shown))


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
