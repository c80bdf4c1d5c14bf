"""Which step is timed: the last one that is wanted, by whoever times it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from fakedist.record.collectives import Ledger
from fakedist.record.operations import Operations
from fakedist.record.position import Position
from fakedist.record.timer import Timer, captures


class Timing:
    """Has one step timed.

    Args:
        timer: Who times it; None for nobody.
        step: Its number.
        position: Where the rank is.
        operations: What it runs.
        ledger: What it says to other ranks.
    """

    def __init__(
        self, timer: Timer | None, step: int, position: Position, operations: Operations, ledger: Ledger
    ) -> None:
        self._timer = timer
        self._step = step
        self._position = position
        self._operations = operations
        self._ledger = ledger
        self._is_on = False
        self._ended = False
        self._num_captures = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """CUDA graphs that are captured before the step may be launched in it."""
        if self._timer is None:
            yield
            return
        with captures(self._capture_begins, self._capture_ended):
            yield

    def follow(self) -> None:
        """The position's step is another now, or still the same."""
        if self._timer is not None and self._position.step == self._step and not self._is_on and not self._ended:
            self._is_on = True
            self._tell_operations()
            self._timer.begin()

    def step_ended(self) -> dict[str, Any] | None:
        """A step is over: the journal's record of its kernels if it was the timed one."""
        if self._timer is None or not self._is_on:
            return None
        self._is_on, self._ended = False, True
        self._tell_operations()
        return self._timer.end(self._step)

    def moved(self) -> None:
        """Where the rank is has changed: a module or a phase began or ended in this thread."""
        timer = self._operations.timer
        if timer is not None:
            timer.moved(self._place())

    def close(self, last_step: int) -> str:
        """The run is over; what is to be said of it where no step was timed."""
        if self._timer is None or self._ended:
            return ""
        if self._is_on:
            self.step_ended()
            return f"no kernel times: step {self._step}, which is timed, did not end"
        wanted = f"--steps {last_step} times step {last_step}" if last_step else "there was no training step"
        return f"no kernel times: step {self._step} is timed, and the run ended in step {last_step} ({wanted})"

    def _place(self) -> tuple[int, str, int, bool]:
        return self._position.places[self._position.scope()]

    def _tell_operations(self) -> None:
        """Operations are told while a step is timed or a graph captured, collectives too."""
        timer = self._timer if self._is_on or self._num_captures else None
        self._operations.timer = timer
        self._ledger.around = None if timer is None else self._around

    def _around(self, sequence: int, operation: str) -> AbstractContextManager[None]:
        assert self._timer is not None
        return self._timer.collective(sequence, self._position.op, operation, self._place())

    def _capture_begins(self) -> None:
        self._num_captures += 1
        self._tell_operations()
        if self._timer is not None:
            self._timer.capture_begins()

    def _capture_ended(self) -> None:
        self._num_captures -= 1
        self._tell_operations()
        if self._timer is not None:
            self._timer.capture_ended()
