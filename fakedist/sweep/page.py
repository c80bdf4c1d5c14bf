"""The page of a sweep, and what is shown of one while it goes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fakedist.report.page.live import Follower
from fakedist.report.render.html import report_page
from fakedist.rundir.directory import MANIFEST_NAME
from fakedist.rundir.manifest import load_manifest
from fakedist.rundir.outcome import Outcome
from fakedist.sweep.opened import Sweep, open_sweep
from fakedist.sweep.ranking import counts_text
from fakedist.sweep.sheets import (
    columns_of,
    pages_of,
    shown_rows,
    sweep_report,
)
from fakedist.sweep.sweep_directory import JOURNAL_NAME, PAGE_NAME, RUNS_NAME, replace_file


def write_sweep_page(sweep: Sweep) -> None:
    """Write the page into the sweep's directory."""
    replace_file(sweep.path / PAGE_NAME, report_page(sweep_report(sweep, folder=sweep.path)))


class SweepFollower(Follower):
    """A sweep while it goes, from its journal and its runs' manifests."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def state(self) -> dict[str, object]:
        """See :meth:`Follower.state`."""
        sweep = open_sweep(self._path)
        total = sweep.about.points
        rows, journal = shown_rows(sweep), self._path / JOURNAL_NAME
        running = list(self._running(sweep))
        failed = [row for row in sweep.rows if row.fullest is None]
        columns = columns_of(sweep, rows)
        return {
            "title": sweep.path.name,
            "rows": [
                ("points", f"{len(sweep.rows):,} done" + ("" if total is None else f" of {len(total):,}")),
                ("counts", counts_text(sweep.ranking)),
                ("ranks running", f"{len(running):,}"),
            ],
            "points": [],
            "columns": [column.name for column in columns],
            "table": [list(cells) for cells in zip(*(column.cells for column in columns), strict=True)],
            "links": [pages_of(row, sweep) for row in rows],
            "others": [[row.label, str(row.status), row.reason, row.line] for row in failed],
            "other_links": [pages_of(row, sweep) for row in failed],
            "done": journal.is_file() and _written(self._path / PAGE_NAME) >= _written(journal),
        }

    def report(self) -> str:
        """See :meth:`Follower.report`."""
        return report_page(sweep_report(open_sweep(self._path), folder=self._path))

    def _running(self, sweep: Sweep) -> Iterator[Path]:
        known = {sweep.path / rank.directory for row in sweep.rows for rank in row.ranks if rank.directory}
        for manifest in (self._path.resolve() / RUNS_NAME).glob(f"*/rank*/{MANIFEST_NAME}"):
            if manifest.parent not in known and load_manifest(manifest.parent).exit.outcome is Outcome.RUNNING:
                yield manifest.parent


def _written(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return -1
