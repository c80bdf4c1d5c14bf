"""``fakedist view``."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import click

from fakedist.cli.output import RunPath, linked_page, page_of, reading, removed_option, run_or_last
from fakedist.temporary import kept_directory

#: How long a page in a temporary directory is kept, in seconds: a browser may read it after this process has ended.
_KEPT_S = 86_400


@click.command()
@click.argument("run", type=RunPath(), required=False)
@click.option(
    "--port", type=int, metavar="N", help="Serve the page on 127.0.0.1 instead, until Ctrl-C. 0 takes a free port."
)
@removed_option("--live", "--live was removed: fakedist report says whether a run is still being written", is_flag=True)
def view(run: Path | None, port: int | None) -> int:
    """Open the page of a run in the browser.

    RUN is a run directory, a snapshot, trace or Nsight report of a real GPU, a directory of several ranks' runs or a
    sweep's directory. Without RUN, the last of these in the current directory is taken. It also prints the page's
    address, for machines that have no browser.
    """
    run = run_or_last(run)
    if port is None:
        from fakedist.report.writing import replace_text

        with reading(run):
            path = _page_path(run.resolve())
            replace_text(path, page_of(run, path.parent))  # an existing page may be anyone's: it is rendered anew
        _open(path.as_uri())
        return 0
    from fakedist.report.page.serve import PageServer

    with reading(run):
        html = page_of(run, run, is_served=True)
    with PageServer(html, port, partial(linked_page, run)) as server:
        _open(server.url)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


def _page_path(run: Path) -> Path:
    """A file in the run's own directory, or in a temporary one if that is not possible."""
    from fakedist.report.writing import may_hold_page
    from fakedist.rundir.directory import MANIFEST_NAME, PAGE_NAME

    path = run / PAGE_NAME
    is_page = not path.is_symlink() if (run / MANIFEST_NAME).exists() else may_hold_page(path)
    if run.is_dir() and os.access(run, os.W_OK) and is_page:
        return path
    return kept_directory("view", _KEPT_S) / PAGE_NAME


def _open(url: str) -> None:
    import webbrowser

    has_screen = sys.platform != "linux" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")))
    click.echo(url)  # whoever has no browser here takes it to one; it is flushed before anything waits
    if has_screen:
        webbrowser.open(url)
