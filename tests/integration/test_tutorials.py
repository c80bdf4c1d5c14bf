"""Every command of the tutorials, in their order, in a folder with the examples, and the figures of the pages."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from rich.text import Text

from reports.tutorials import drifts, outputs
from tests.conftest import ROOT

TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.md"))
#: By page: of which commands the exit code is not 0.
CODES = {"it-does-not-fit": {0: 4}, "a-build-that-fails": {1: 3, 2: 3}}


@pytest.mark.nightly
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_its_commands_work_and_print_what_the_page_and_its_pictures_show(page: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    printed = []
    for number, (step, code, shown) in enumerate(outputs(page, tmp_path)):
        assert code == CODES.get(page.stem, {}).get(number, 0), (step, shown)
        printed.append(Text.from_ansi(shown).plain)
    assert len(printed) >= 5
    assert drifts(page, printed) == [], f"make the pictures again: python -m reports.make {page.stem}"
