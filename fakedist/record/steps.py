"""Where a training step ends, found without the script's help, and the exception that stops the run."""

from __future__ import annotations

import time
from collections.abc import Callable


class StopRun(BaseException):
    """Raised inside the script after the last wanted step.

    A ``BaseException``, so that ``except Exception`` around a training step does not swallow it, while ``finally`` and
    ``atexit`` still run.
    """

    def __str__(self) -> str:
        # Context managers of the script may log it (Megatron-LM's straggler detector does).
        return "the recorded steps are done: fakedist ends the run here"


class Steps:
    """Counts training steps.

    Step 0 is everything before the first forward of a root module (``init``). A step ends where the next one is seen to
    begin: at the first root forward after an ``optimizer.step()``. Gradient accumulation runs several forwards without
    one, and does not count. Jobs without modules are told apart by the next backward, or by the same optimizer stepping
    again; jobs without an optimizer call ``fakedist.step()``, which switches the search off. An optimizer that steps
    before any forward or backward makes its state (torch's distributed checkpoints, Megatron-FSDP) and is ``init``.

    Args:
        limit: Number of steps to run; :class:`StopRun` is raised where the next one would begin.
        ended: Called with (step, start_us, end_us) when a step ends; Unix time in microseconds.

    Attributes:
        number: Of the current step.
        more: Steps to run after those, of which ``ended`` is told too.
    """

    def __init__(self, limit: int, ended: Callable[[int, int, int], None]) -> None:
        self.number = self.more = 0
        self._recorded = limit
        self._ended = ended
        self._start_us = time.time_ns() // 1000
        self._stepped: set[int] = set()
        self._inside_optimizer = 0
        self._manual = False

    @property
    def last(self) -> int:
        """The last step that was begun and is recorded."""
        return min(self.number, self._recorded)

    @property
    def _limit(self) -> int:
        return self._recorded + self.more

    def root_forward(self) -> None:
        """A module that no other module called is about to run forward."""
        if not self._inside_optimizer:  # an optimizer that evaluates a closure runs forwards within its one step
            self._sign_of_work()

    def backward(self) -> None:
        """``backward()`` is about to run."""
        if not self._inside_optimizer:
            self._sign_of_work()

    def optimizer_begins(self, optimizer: object) -> None:
        """``optimizer.step()`` was called."""
        if id(optimizer) in self._stepped and not self._manual:
            self._next()
        self._inside_optimizer += 1

    def optimizer_ended(self, optimizer: object) -> None:
        """``optimizer.step()`` returned."""
        self._inside_optimizer = max(0, self._inside_optimizer - 1)
        self._stepped.add(id(optimizer))

    def manual(self) -> None:
        """The script says that a step ended here (``fakedist.step()``).

        The first step then began with the first module's forward; where no module ran, with the recording.
        """
        self._manual = True
        if self.number == 0:
            self.number = 1
        self._next()

    def close(self) -> None:
        """The run is over: the last step ended too if its optimizer stepped."""
        if self._stepped and not self._manual and 0 < self.number <= self._limit:
            self._end()

    def _sign_of_work(self) -> None:
        if self.number > self._limit:
            raise StopRun  # again: a bare `except:` swallowed the first one
        if self.number == 0 or (self._stepped and not self._manual):
            self._next()

    def _end(self) -> None:
        now = time.time_ns() // 1000
        self._ended(self.number, self._start_us, now)

    def _next(self) -> None:
        if self.number > self._limit:
            raise StopRun
        if self.number > 0:
            self._end()
        self._stepped.clear()
        self.number += 1
        self._start_us = time.time_ns() // 1000
        if self.number > self._limit:
            raise StopRun
