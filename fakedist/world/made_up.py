"""Counts what stood in for values from other ranks, for the report's notes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fakedist.frames import script_line
from fakedist.run import notes
from fakedist.run.notes import Note
from fakedist.run.records import NotSentRecord


class MadeUp:
    """Counts calls that neither a tape nor "every rank is like me" could answer."""

    def __init__(self) -> None:
        self._objects = self._tensors = self._zeros = 0
        self._first_object = self._first_tensor = ""
        #: Integers and flags that another rank should have sent: (rank, call, line), and whether the script read them.
        self._not_sent: dict[tuple[int, str, str], bool] = {}

    def object(self, call: str) -> None:
        """Count an object of this rank that stood in for another rank's."""
        self._objects += 1
        self._first_object = self._first_object or _first(call)

    def tensors(self, call: str, count: int, are_floats: bool) -> None:
        """Count received tensors that were filled with random floats or with zeros."""
        self._tensors += count
        self._zeros += 0 if are_floats else count
        self._first_tensor = self._first_tensor or _first(call)

    def read(self, source: int, call: str) -> None:
        """Take note that the script reads an integer or a flag here that another rank should have sent."""
        self._not_sent[(source, call, script_line())] = True

    def arrived_on_host(self, source: int, call: str) -> None:
        """Take note of a few integers or flags on the host that another rank should have sent; reads are not seen."""
        self._not_sent.setdefault((source, call, script_line()), False)

    def not_sent(self, command: Callable[[int], str]) -> Iterator[NotSentRecord]:
        """The lines that read what another rank should have sent.

        Args:
            command: Returns the command that supplies it, given the rank that sends it.
        """
        for (source, call, line), is_read in self._not_sent.items():
            yield NotSentRecord(line, call, source, command(source), is_read)

    def notes(self) -> Iterator[Note]:
        """Notes for the report."""
        if self._objects:
            yield notes.objects_made_up(self._objects, self._first_object)
        if self._tensors:
            yield notes.tensors_made_up(self._tensors, self._zeros, self._first_tensor)


def _first(call: str) -> str:
    line = script_line()
    return f"first in {call}" + (f" at {line}" if line else "")
