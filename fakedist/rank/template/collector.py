"""Keeps Python's cycle collector in step: a forked rank collects when one that starts on its own does.

The collector runs after a number of allocations. An import that only appears makes few. So its counts are set to what
they were after the import of a rank that started on its own, or a tensor in a reference cycle would be freed at another
event.
"""

from __future__ import annotations

import gc
import sys

_kept: list[list[object]] = []


class OutermostImport:
    """Tells imports that the script asks for from those inside them."""

    def __init__(self) -> None:
        self._open = ""

    def begins(self, name: str) -> bool:
        """A module is looked for. Returns whether no import is under way."""
        if self._open in sys.modules:
            return False
        self._open = name  # an import that failed is no longer in sys.modules
        return True

    def ends(self) -> None:
        """The outermost import is over."""
        self._open = ""


def counts() -> tuple[int, int]:
    """Allocations since the last collection, and young collections since the last older one."""
    youngest, young, _ = gc.get_count()
    return youngest, young


def set_counts(wanted: tuple[int, int]) -> None:
    """Collect what is young, as an import does, and set the counts."""
    if not gc.isenabled():
        return
    gc.collect(1)
    for _ in range(wanted[1]):
        gc.collect(0)
    while gc.get_count()[0] < wanted[0]:
        _kept.append([])
