"""Phases of a script by name, from ``fakedist.phase`` or recognised, and what they used of the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fakedist.record.memory_recording import Append
from fakedist.record.position import Position
from fakedist.record.timed_step import RangeTracer
from fakedist.rundir.records import NamedPhaseRecord


class NamedPhases:
    """Records phases, which may lie within each other.

    Args:
        in_use: What is in use of the virtual GPU: the most since it was called before, behind the allocator's segments,
            outside of it, by other processes.
        tracer: What is given each as a range of the timed step; None without one.
    """

    def __init__(
        self,
        append: Append,
        position: Position,
        in_use: Callable[[], tuple[int, int, int, int]] | None,
        tracer: RangeTracer | None = None,
    ) -> None:
        self._append, self._position, self._in_use, self._tracer = append, position, in_use, tracer
        self._most_of_open: list[int] = []
        self._num_of_script = 0
        self._is_closed = False

    @property
    def is_named(self) -> bool:
        """Whether the script itself has named what runs now. Then nothing is recognised."""
        return self._num_of_script > 0

    @contextmanager
    def of_script(self, name: str) -> Iterator[None]:
        """Record what runs inside as a phase that the script named."""
        self._num_of_script += 1
        try:
            with self.named(name):
                yield
        finally:
            self._num_of_script -= 1

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """Record what runs inside as a phase of this name, with what is in use of the device meanwhile."""
        if self._is_closed:
            yield
            return
        step, first_op = self._position.step, self._position.op
        self._restart_most()
        self._most_of_open.append(0)
        number = None if self._tracer is None else self._tracer.range_begins(name)
        try:
            yield
        finally:
            if self._tracer is not None and number is not None:
                self._tracer.range_ended(number)
            most, *now = self._restart_most()
            self._most_of_open.pop()
            if not self._is_closed:
                self._append(NamedPhaseRecord(name, step, first_op, self._position.op, most, *now, self._position.step))

    def close(self) -> None:
        """Record no more of them."""
        self._is_closed = True

    def _restart_most(self) -> tuple[int, int, int, int]:
        """Begin to look for the most anew. Return what is in use, with the most of the innermost phase that is open.

        The most so far counts for every phase that is open, whichever began within it.
        """
        used = (0, 0, 0, 0) if self._in_use is None else self._in_use()
        self._most_of_open = [max(most, used[0]) for most in self._most_of_open]
        return (self._most_of_open[-1] if self._most_of_open else 0, *used[1:])
