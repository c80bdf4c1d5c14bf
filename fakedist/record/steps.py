"""Finds where training steps end, without the script's help, and defines the exception that stops the run."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass, field

from fakedist.record.goal import Goal

#: One key for all optimizers that step inside a backward, one per parameter. They step in any order.
_IN_BACKWARD = -1
#: If an optimizer steps this many times more than in the step before, its steps are taken as training steps.
_MOST_REPEATS = 16


class StopRun(BaseException):
    """Raised inside the script after the last wanted step.

    A ``BaseException``, so ``except Exception`` around a training step does not swallow it, while ``finally`` and
    ``atexit`` still run.
    """

    def __str__(self) -> str:
        # The script's context managers may log it, as Megatron-LM's straggler detector does.
        return "the recorded steps are done: fakedist ends the run here"


#: How far the real time was ahead of the steady clock when this process began.
_AHEAD_NS = time.time_ns() - time.monotonic_ns()


def _now_us() -> int:
    """Microseconds since the epoch; a clock that is set meanwhile changes no step's length."""
    return (_AHEAD_NS + time.monotonic_ns()) // 1000


@dataclass
class _Step:
    """A step: when it began, how often each optimizer stepped in it, and which one stepped first."""

    start_us: int = field(default_factory=_now_us)
    end_us: int = 0
    stepped: Counter[int] = field(default_factory=Counter)
    first: int = 0
    told: bool = False


class Steps:
    """Counts training steps.

    A sign of work is a root module's forward, a backward or the replay of a CUDA graph. Step 0 (``init``) is everything
    before the first one. A step ends at the first sign of work after an ``optimizer.step()``. Gradient accumulation has
    no optimizer step in between, so it does not count. Where a job shows no sign of work, or works only in closures
    inside ``optimizer.step()``, a step ends when its first optimizer steps again. Jobs without an optimizer call
    ``fakedist.step()``, which switches the search off. An optimizer that steps before any work only creates its state
    (torch's distributed checkpoints, Megatron-FSDP), and that is ``init``.

    Where several optimizers step in turn (a GAN's), a step ends where the work for its first optimizer begins again: at
    the last sign of work before that optimizer steps. This is known only afterwards. So each sign of work after an
    optimizer's step begins a new step until the next optimizer steps. If that is not the first one, ``merged`` is
    called: the new step is still the old one. A step ends at once, as with one optimizer, when every optimizer has
    stepped as often as in the step before; in the first step, when no optimizer is left that never stepped (``waits``).
    An optimizer that steps only every k-th time (a generator after each fifth critic) belongs to the step in which it
    steps.

    Args:
        goal: Decides which step is the last. :class:`StopRun` is raised where the next one would begin.
        ended: Called with (step, start_us, end_us) when a step ends. Unix time in microseconds.
        merged: Called with a step that went on, even if ``ended`` was already called for it.
        waits: Whether an optimizer exists that has never stepped, given the ``id`` of those that have.
        stop_error: Makes the exception to raise.

    Attributes:
        number: Number of the current step.
        more: Steps to run after the last recorded one. ``ended`` is called for them too.
        done: The last recorded step. None until it has ended.
        stopped: Whether :class:`StopRun` was raised.
        optimizer_steps: How often any optimizer stepped.
    """

    def __init__(
        self,
        goal: Goal,
        ended: Callable[[int, int, int], None],
        merged: Callable[[int], None] = lambda step: None,
        waits: Callable[[Container[int]], bool] = lambda stepped: False,
        *,
        stop_error: Callable[[], StopRun] = StopRun,
    ) -> None:
        self.number = self.more = self.optimizer_steps = 0
        self.done: int | None = None
        self.stopped = False
        self._goal, self._ended, self._merged, self._waits = goal, ended, merged, waits
        self._stop_error = stop_error
        self._step = _Step()
        self._before: _Step | None = None  # a step that may have ended, before the current one
        self._usual: Counter[int] | None = None  # how often each optimizer stepped in the step before
        self._references: dict[int, weakref.ref[object]] = {}
        self._inside_optimizer = 0
        self._works = self._works_inside = False
        self._manual = False

    @property
    def last(self) -> int:
        """The last recorded step that has begun."""
        return self.number if self.done is None else min(self.number, self.done)

    @property
    def is_manual(self) -> bool:
        """Whether the script itself marks where steps end."""
        return self._manual

    def waits(self) -> bool:
        """Whether an optimizer exists that has never stepped."""
        return self._waits(self._references)

    def work(self) -> None:
        """Take a sign of work: a root module's forward, a ``backward()`` or a CUDA graph's replay is about to run."""
        if self._inside_optimizer:  # a closure: its forwards and backwards belong to the optimizer's one step
            self._works_inside = True
            if self.number == 0:
                self._begin()
            return
        self._works = True
        if self._before is None or self._before.told:
            self._stop_if_done()  # raises again if a bare `except:` swallowed the first StopRun
        if self.number == 0:
            self._begin()
        elif self._step.stepped and not self._manual:
            self._may_end()

    def optimizer_begins(self, optimizer: object, in_backward: bool = False) -> None:
        """``optimizer.step()`` was called."""
        if not self._inside_optimizer and not self._manual:
            self._optimizer_again(_IN_BACKWARD if in_backward else id(optimizer))
            self._works_inside = False
        self._inside_optimizer += 1

    def optimizer_ended(self, optimizer: object, in_backward: bool = False) -> None:
        """``optimizer.step()`` returned."""
        self._inside_optimizer = max(0, self._inside_optimizer - 1)
        if not self._inside_optimizer:
            self._refer_to(optimizer)
            key, stepped = (_IN_BACKWARD if in_backward else id(optimizer)), self._step.stepped
            self._step.first = self._step.first or key
            stepped[key] = 1 if in_backward else stepped[key] + 1
            self.optimizer_steps += 1

    def manual(self) -> None:
        """End a step here, at the script's request (``fakedist.step()``).

        The first step then began with the first module's forward or, if no module ran, with the recording.
        """
        self._manual, self._before = True, None
        if self.number == 0:
            self.number = 1
        self._stop_if_done()
        self._goal.may_end()
        self._end(self._step, self.number)
        self._begin()
        self._stop_if_done()

    def close(self) -> None:
        """End the run. The last step has ended if its optimizer stepped, and a step that may have ended has."""
        if self._manual:
            return
        if self._before is not None and not self._before.told:
            self._end(self._before, self.number - 1)
        if self._step.stepped and self.number > 0 and not self._is_over():
            self._goal.may_end()
            self._end(self._step, self.number)

    def stop(self) -> None:
        """End the run here, in the middle of a step."""
        if self.done is None:
            self.done = self.number
        self.stopped = True
        raise self._stop_error()

    # ---- inside

    def _optimizer_again(self, key: int) -> None:
        """Decide whether a step ended, before this optimizer steps."""
        before = self._before
        if before is not None:
            self._before = None
            repeats = before.stepped[key] - (self._usual or Counter())[key]
            if key == before.first or not self._is_alive(before.first) or repeats >= _MOST_REPEATS:
                if not before.told:
                    self._end(before, self.number - 1)
                self._usual = before.stepped
                self._stop_if_done()
            elif self.done is None:
                self.number -= 1
                self._step = _Step(before.start_us, 0, before.stepped, before.first)
                self._merged(self.number)
        elif key == self._step.first and (self._works_inside or not self._works):
            self._may_end()
            self._before, before = None, self._before
            if before is not None:
                if not before.told and self.number > 1:
                    self._end(before, self.number - 1)
                self._usual = before.stepped
            self._stop_if_done()

    def _may_end(self) -> None:
        """Note that a step may have ended here, and end it if that is certain."""
        self._goal.may_end()
        before, number = self._step, self.number
        before.end_us = _now_us()
        if number > 0 and self._is_whole(before):
            self._end(before, number)
        self._begin()
        self._before = before
        if before.told:
            self._stop_if_done()

    def _is_whole(self, step: _Step) -> bool:
        """Whether every optimizer that belongs to the step has stepped, as far as is known."""
        if self._usual is None:
            return not self.waits()
        return all(step.stepped[key] >= times for key, times in self._usual.items() if self._is_alive(key))

    def _begin(self) -> None:
        self._before = None
        self._step = _Step()
        self.number += 1

    def _end(self, step: _Step, number: int) -> None:
        step.told = True
        if self.done is None and self._goal.is_last(number):
            self.done = number
        self._ended(number, step.start_us, step.end_us or _now_us())

    def _is_over(self) -> bool:
        return self.done is not None and self.number > self.done + self.more

    def _stop_if_done(self) -> None:
        if self._is_over():
            self.stop()

    def _refer_to(self, optimizer: object) -> None:
        """Track the life of an optimizer. Once it is gone, another optimizer may get the same ``id``."""
        key = id(optimizer)
        if key not in self._references:
            self._references[key] = weakref.ref(optimizer, lambda _: self._references.pop(key, None))

    def _is_alive(self, key: int) -> bool:
        return key == _IN_BACKWARD or key in self._references
