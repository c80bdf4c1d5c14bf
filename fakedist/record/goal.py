"""How long a run is recorded: which step is the last one, and which is timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

from fakedist.job import Until
from fakedist.units import format_bytes

#: ``--steps auto``: at least and at most so many.
LEAST_STEPS, MOST_STEPS = 2, 6
#: What small blocks may take more or less at a step's end without being looked at: losses kept for a log.
SLACK_BYTES = 1 << 20

#: Bytes of live blocks on each device: those of the allocator's large blocks (over 1 MiB), those of its small ones.
Live = Mapping[int, tuple[int, int]]


class Goal(Protocol):
    """Which step is the last to record, and which are timed."""

    def may_end(self) -> None:
        """A step may have ended here: later it is known whether it did."""

    def is_last(self, step: int) -> bool:
        """Whether nothing after this step, which ended where :meth:`may_end` was last called, is to be recorded."""

    def is_timed(self, step: int) -> bool:
        """Whether the step that begins is to be timed; of several the last one counts."""

    def note(self) -> str:
        """What a reader must know when the run is over; empty for nothing."""


class After:
    """So many steps, and the last one is timed.

    Args:
        limit: How many.
        stops: Whether nothing is recorded after them.
    """

    def __init__(self, limit: int, *, stops: bool = True) -> None:
        self._limit = limit
        self._stops = stops

    def may_end(self) -> None:
        """Nothing is looked at."""

    def is_last(self, step: int) -> bool:
        """Whether it is the ``limit``-th."""
        return self._stops and step >= self._limit

    def is_timed(self, step: int) -> bool:
        """Whether it is the ``limit``-th."""
        return step == self._limit

    def note(self) -> str:
        """Nothing."""
        return ""


class Steady:
    """Steps until one ends with as much live memory as the step before: then the next one would be the same again.

    Live memory is what the caching allocator has given out, on each device: blocks of its large pools are compared to
    the byte, those of its small pools (up to 1 MiB each) may differ by less than 1 MiB. Every optimizer must have
    stepped. From step 2 on each step is timed until then, so that the last one counts.

    Args:
        live: What is live now.
        waits: Whether an optimizer has not stepped yet.
        stops: Whether nothing is recorded after them.
    """

    def __init__(self, live: Callable[[], Live], waits: Callable[[], bool], *, stops: bool = True) -> None:
        self.is_steady = False
        self._live, self._waits, self._stops = live, waits, stops
        self._now: Live = {}
        self._before: Live | None = None
        self._why = ""

    def may_end(self) -> None:
        """Look at what is live."""
        if not self.is_steady:
            self._now = self._live()

    def is_last(self, step: int) -> bool:
        """Whether it is steady, or the most that is tried."""
        if not self.is_steady:
            before, self._before = self._before, self._now
            if before is not None and step >= LEAST_STEPS:
                self._why = self._difference(before, self._now, step)
                self.is_steady = not self._why
        return self._stops and (self.is_steady or step >= MOST_STEPS)

    def is_timed(self, step: int) -> bool:
        """Whether it may be the steady one."""
        return LEAST_STEPS <= step <= MOST_STEPS and not self.is_steady

    def note(self) -> str:
        """That it was not steady, and why."""
        return f"not steady: {self._why}: --steps 10" if self._why else ""

    def _difference(self, before: Live, now: Live, step: int) -> str:
        for device in sorted({*before, *now}):
            (large, small), (large_now, small_now) = before.get(device, (0, 0)), now.get(device, (0, 0))
            if large != large_now or abs(small - small_now) >= SLACK_BYTES:
                told = f"{format_bytes(large + small)} were live at the end of step {step - 1}"
                exact = f" ({large_now + small_now - large - small:+,} bytes)"
                return f"{told}, {format_bytes(large_now + small_now)} at the end of step {step}{exact}"
        return f"an optimizer has not stepped in {step} steps" if self._waits() else ""


def make_goal(
    steps: int | Literal["auto"], until: int | Until | None, live: Callable[[], Live], waits: Callable[[], bool]
) -> Goal:
    """The goal that ``--steps`` and ``--until`` describe.

    Args:
        steps: How many, or "auto".
        until: How many, or what ends the run instead; None for the steps alone.
        live: What is live now, see :class:`Steady`.
        waits: See :class:`Steady`.
    """
    if isinstance(until, int):
        return After(until)
    return Steady(live, waits, stops=until is None) if steps == "auto" else After(steps, stops=until is None)
