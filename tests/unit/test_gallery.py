"""The gallery is as old as the schema at most, and its list says what its pages say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fakedist.run.schema import SCHEMA_VERSION
from tests.unit.report.reading import read_page

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted((ROOT / "reports").glob("*.html"))
README = (ROOT / "reports" / "README.md").read_text()
MAX_BYTES = 1_000_000  # they are in the repository, once for every schema


def test_there_is_a_gallery() -> None:
    assert len(PAGES) >= 3


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_no_page_is_older_than_the_schema(path: Path) -> None:
    found = re.search(r'<meta name="fakedist-schema" content="(\d+)">', path.read_text()[:2_000])
    assert found is not None
    assert int(found[1]) == SCHEMA_VERSION, "make gallery"


@pytest.mark.parametrize("path", [path for path in PAGES if "compared" not in path.name], ids=lambda path: path.stem)
def test_the_list_says_what_the_page_says(path: Path) -> None:
    row = next(line for line in README.splitlines() if f"({path.name})" in line)
    page = read_page(path.read_text())
    assert f"| {page.figures['peak_allocated']} |" in row
    command = next(line for line in README.splitlines() if line.endswith(f" {page.title}"))
    assert f"--world-size {row.split('|')[2].strip().replace(',', '')} " in command


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_is_small_and_says_nothing_of_where_it_was_made(path: Path) -> None:
    assert path.stat().st_size < MAX_BYTES
    words = " ".join(read_page(path.read_text()).words)
    places = set(re.findall(r"/(?:home|root|opt|work|Users)/\S+", words))
    assert places == set()
