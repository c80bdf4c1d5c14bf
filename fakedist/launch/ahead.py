"""Imports what is needed after the rank, while the rank runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def import_ahead(page: bool) -> None:
    """Import what makes the tables, and the page if there is one."""
    with suppress(ImportError):  # raised again where it is needed
        import fakedist.analysis.building
        import fakedist.results.opening
        from fakedist.run.tables import import_parquet

        import_parquet()
        if page:
            import fakedist.report.page.run_page  # noqa: F401


@contextmanager
def importing_ahead(page: bool) -> Iterator[None]:
    """Import what makes the tables and the page while the rank runs on another core: it takes half a second."""
    thread = threading.Thread(target=import_ahead, args=(page,), name="imports")
    thread.start()
    try:
        yield
    finally:
        thread.join()  # two threads must not import modules that import each other
