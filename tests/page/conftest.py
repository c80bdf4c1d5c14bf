"""The browser of the tests that open pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fakedist.report.render.html import write_page
from fakedist.results.opening import open_run
from tests.page.browser import DESKTOP, Reader, browser, no_browser
from tests.unit.report.page.test_drawings import trained


@pytest.fixture(scope="module")
def opened_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """A browser for the tests of a file. Skips where Chromium or Playwright is missing."""
    if missing := no_browser():
        pytest.skip(missing)
    with browser(tmp_path_factory.mktemp("chromium")) as reader:
        yield reader


@pytest.fixture
def reader(opened_browser: Reader) -> Iterator[Reader]:
    """That browser; a test fails where its page says anything on the console, throws, or fetches something."""
    yield opened_browser
    opened_browser.page.set_viewport_size(DESKTOP)
    assert opened_browser.told == []


@pytest.fixture(scope="module")
def advised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = trained(tmp_path_factory.mktemp("runs") / "run")
    write_page(open_run(run), run / "report.html")
    return run / "report.html"
