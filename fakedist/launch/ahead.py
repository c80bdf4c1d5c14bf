"""Imports what is needed after the rank, while the rank runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def importing_ahead(page: bool) -> Iterator[None]:
    """Import what makes the tables and the page while the rank runs on another core: it takes half a second."""

    def import_() -> None:
        with suppress(ImportError):  # raised again where it is needed
            import fakedist.analysis.building
            import fakedist.results.opening

            if page:
                import fakedist.report.page.run_page  # noqa: F401

    thread = threading.Thread(target=import_, name="imports")
    thread.start()
    try:
        yield
    finally:
        thread.join()  # two threads must not import modules that import each other
