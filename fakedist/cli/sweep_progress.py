"""The progress of a sweep: a line for each point as it comes, with the rate and the time left."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from fakedist.cli.say import remark
from fakedist.units import format_us

if TYPE_CHECKING:
    from fakedist.sweep.records import Row


class SweepProgress:
    """What is printed on stderr while a sweep runs.

    Args:
        directory: Its directory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._number = self._known = 0
        self._ran: set[str] = set()
        self._start = time.monotonic()

    def begins(self, number: int) -> None:
        """Take in the number of points."""
        self._number, self._start = number, time.monotonic()
        remark(f"{number:,} point{'' if number == 1 else 's'}, into {self._directory}")

    def finished(self, row: Row, was_known: bool) -> None:
        """Print a row. Rows of an earlier session are counted."""
        from fakedist.sweep.wording import row_text

        if was_known:
            self._known += 1
            return
        if self._known and not self._ran:
            remark(f"{self._known:,} of them ran before (--fresh runs them again)")
        self._ran.add(row.id)
        remark(f"{self._known + len(self._ran):,} of {self._number:,}: {row_text(row)}{self._rate()}")

    def interrupted(self) -> None:
        """Print how to go on."""
        remark(
            f"{self._known + len(self._ran):,} of {self._number:,} points are done; the same command goes on from here"
        )

    def _rate(self) -> str:
        ran = len(self._ran)
        left = self._number - self._known - ran
        seconds = time.monotonic() - self._start
        if left <= 0 or seconds <= 0:
            return ""
        return f" ({60 * ran / seconds:.1f} points a minute, {format_us(1e6 * left * seconds / ran)} left)"
