"""Counts what stood in for values from other ranks, for the report's notes."""

from __future__ import annotations

from collections.abc import Iterator

from fakedist.frames import script_line
from fakedist.run import notes
from fakedist.run.notes import Note


class MadeUp:
    """Counts calls that neither a tape nor "every rank is like me" could answer."""

    def __init__(self) -> None:
        self._objects = self._tensors = self._zeros = 0
        self._first_object = self._first_tensor = ""

    def object(self, call: str) -> None:
        """Count an object of this rank that stood in for another rank's."""
        self._objects += 1
        self._first_object = self._first_object or _first(call)

    def tensors(self, call: str, count: int, are_floats: bool) -> None:
        """Count received tensors that were filled with random floats or with zeros."""
        self._tensors += count
        self._zeros += 0 if are_floats else count
        self._first_tensor = self._first_tensor or _first(call)

    def notes(self) -> Iterator[Note]:
        """Notes for the report."""
        if self._objects:
            yield notes.objects_made_up(self._objects, self._first_object)
        if self._tensors:
            yield notes.tensors_made_up(self._tensors, self._zeros, self._first_tensor)


def _first(call: str) -> str:
    line = script_line()
    return f"first in {call}" + (f" at {line}" if line else "")
