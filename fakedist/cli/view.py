"""``fakedist view``."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import click

from fakedist.cli.damaged import reading

_TEMPORARY = "fakedist-view-"
#: How long a page in a temporary directory is kept, in seconds.
_KEPT_S = 86_400


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--port", type=int, metavar="N", help="Serve the page on 127.0.0.1 instead, until Ctrl-C. 0 takes a free port."
)
def view(run: Path, port: int | None) -> int:
    """Open the page of a run in the browser, or print where it is if there is no browser."""
    from fakedist.report.page.run_page import page, write_page
    from fakedist.results.opening import open_run

    if port is None:
        with reading(run):
            found = open_run(run)
            path = _place(found.path)
            write_page(found, path)  # an existing page may be anyone's, so it is rendered anew from the tables
        _open(path.as_uri())
        return 0
    from fakedist.report.page.serve import PageServer

    with reading(run):
        html = page(open_run(run))
    with PageServer(html, port) as server:
        _open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


def _place(run: Path) -> Path:
    """Where the page of a run goes: into its directory, or into a temporary one if that is not possible."""
    from fakedist.run.directory import PAGE_NAME

    path = run / PAGE_NAME
    if run.is_dir() and os.access(run, os.W_OK) and not path.is_symlink():
        return path
    folder = Path(tempfile.gettempdir())
    for old in folder.glob(f"{_TEMPORARY}*"):  # of earlier calls; the browser has read them long ago
        with suppress(OSError):
            if old.lstat().st_uid == os.geteuid() and old.stat().st_mtime < time.time() - _KEPT_S:
                shutil.rmtree(old)
    return Path(tempfile.mkdtemp(prefix=_TEMPORARY)) / PAGE_NAME


def _open(url: str) -> None:
    """Open an address, or print it."""
    import webbrowser

    has_screen = sys.platform != "linux" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")))
    click.echo(url)  # whoever has no browser here takes it to one; it is flushed before anything waits
    if has_screen:
        webbrowser.open(url)
