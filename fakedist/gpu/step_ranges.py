"""The ranges that the script opens (NVTX, ``record_function``), and which launches of a step are in each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fakedist.run.launch_records import RangeRow


@dataclass(frozen=True)
class _Range:
    """A range: what it is called, its thread, how many of that thread are around it, and its place in the log."""

    name: str
    thread: int
    depth: int
    begin: int
    end: int = 0


class StepRanges:
    """Ranges that are open, and those of the step that ended.

    Args:
        position: Returns how many launches the log has.
    """

    def __init__(self, position: Callable[[], int]) -> None:
        self._position = position
        self._is_on = False
        self._open: dict[int, _Range] = {}
        self._closed: list[_Range] = []
        self._next = 0
        self._threads: dict[int, int] = {}

    def begins(self, name: str) -> int:
        """A range begins in this thread. Return its number."""
        thread = self._threads.setdefault(threading.get_ident(), len(self._threads))
        depth = sum(each.thread == thread for each in self._open.values())
        number, self._next = self._next, self._next + 1
        self._open[number] = _Range(name, thread, depth, self._position() if self._is_on else 0)
        return number

    def ended(self, number: int) -> None:
        """The range with that number ended."""
        found = self._open.pop(number, None)
        if found is not None and self._is_on:
            self._closed.append(replace(found, end=self._position()))

    def step_begins(self) -> None:
        """The step begins. What is open began before its first launch."""
        self._is_on, self._closed = True, []
        self._open = {number: replace(each, begin=0) for number, each in self._open.items()}

    def step_ended(self, num_launches: int) -> None:
        """The step ended, with that many launches. What is open lasts beyond it, or is of the next step."""
        self._is_on = False
        ours = [each for each in self._open.values() if each.begin < num_launches]
        self._closed += [replace(each, end=num_launches) for each in ours]

    def cut_short(self, num_launches: int) -> None:
        """The step that ended keeps only so many of its launches."""
        ours = [each for each in self._closed if each.begin < num_launches]
        self._closed = [replace(each, end=min(each.end, num_launches)) for each in ours]

    def rows(self, row_of: Sequence[int]) -> list[RangeRow]:
        """The step's ranges in the order in which they began, outer ones first.

        Args:
            row_of: How many rows of the table ``launches`` come before each launch of the log, and how many there are.
        """
        found = sorted(self._closed, key=lambda each: (each.begin, -each.end, each.depth))
        return [RangeRow(each.name, each.thread, each.depth, row_of[each.begin], row_of[each.end]) for each in found]
