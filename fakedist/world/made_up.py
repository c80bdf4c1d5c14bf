"""Counts what stood in for values from other ranks, for the report's notes."""

from __future__ import annotations

from collections.abc import Iterator

from fakedist.frames import script_line

_HINT = "to receive what those ranks send, use their tapes: --rank with several ranks, or --tape"


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

    def notes(self) -> Iterator[str]:
        """Notes for the report."""
        if self._objects:
            yield (
                f"this rank's own objects stood in for {self._objects:,} objects from other ranks, "
                f"{self._first_object}; {_HINT}"
            )
        if self._tensors:
            zeros = f" ({self._zeros:,} of integers or flags, as zeros)" if self._zeros else ""
            yield f"{self._tensors:,} tensors from other ranks were made up{zeros}, {self._first_tensor}; {_HINT}"


def _first(call: str) -> str:
    line = script_line()
    return f"first in {call}" + (f" at {line}" if line else "")
