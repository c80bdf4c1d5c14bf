"""A real browser that opens our pages, and what went wrong in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CHROMIUM = os.environ.get("FAKEDIST_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
DESKTOP = {"width": 1280, "height": 900}


class Reader:
    """A browser with one tab, and what went wrong in it."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.page = context.new_page()
        self.told: list[str] = []
        self.page.on("console", lambda message: self.told.append(message.text))
        self.page.on("pageerror", lambda error: self.told.append(str(error)))
        self.page.on("dialog", lambda dialog: self.told.append(f"dialog {dialog.message}"))
        self.page.on("request", lambda request: self.told.append(request.url) if "file:" not in request.url else None)

    def open(self, path: Path) -> Any:
        self.told.clear()
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready]", timeout=20_000)
        return self.page

    def width_on(self, path: Path, screen: int) -> int:
        """How wide a page is on a screen of this width, in pixels."""
        page = self.open(path)
        page.set_viewport_size({"width": screen, "height": 800})
        width = int(page.evaluate("document.documentElement.scrollWidth"))
        page.set_viewport_size(DESKTOP)
        return width


def drawn(page: Any, panel: str) -> Any:
    """The chart of a panel; it is drawn when it comes into view."""
    chart = page.locator(f"{panel} .chart")
    chart.scroll_into_view_if_needed()
    chart.locator("svg.main-svg").first.wait_for()
    return chart


def no_browser() -> str:
    """The packages to install for these tests; empty where they can run."""
    if CHROMIUM is None:
        return "no Chromium: apt-get install chromium, or name one in FAKEDIST_CHROMIUM"
    return "" if find_spec("playwright") else "no Playwright: pip install 'fakedist[browser]'"


@contextmanager
def browser(profile: Path) -> Iterator[Reader]:
    """A running browser, its profile in a directory."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            str(profile),
            executable_path=CHROMIUM,
            headless=True,
            args=["--no-sandbox", "--disable-gpu"],
            viewport=DESKTOP,
        )
        yield Reader(context)
        context.close()


def serious_faults(page: Any, scheme: Any) -> list[tuple[str, str]] | None:
    """The faults that axe-core reports in a colour scheme: rule and markup; None where it is not installed."""
    found = find_spec("axe_playwright_python")
    if found is None or not found.submodule_search_locations:
        return None
    axe = Path(found.submodule_search_locations[0]) / "axe.min.js"
    page.emulate_media(color_scheme=scheme)
    page.evaluate(axe.read_text())  # past the page's own policy, which lets no script in
    violations = page.evaluate("axe.run()")["violations"]
    page.emulate_media(color_scheme="light")
    return [(each["id"], each["nodes"][0]["html"]) for each in violations if each["impact"] in ("serious", "critical")]
