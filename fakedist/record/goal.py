"""How long a run is recorded: which step is the last, and which is timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, Protocol

from fakedist.job import Until
from fakedist.run import notes
from fakedist.run.notes import Note
from fakedist.units import format_bytes

#: ``--steps auto`` runs at least and at most this many steps.
LEAST_STEPS, MOST_STEPS = 2, 6
#: Bytes by which small blocks may differ at a step's end and still count as steady, such as losses kept for a log.
SLACK_BYTES = 1 << 20
#: A step whose batch is smaller than this share of the largest before has a partial one. Batches of graphs and of
#: packed sequences differ by less from step to step.
WHOLE_BATCH = 0.9

#: Bytes that live blocks were requested with, on each device: the allocator's large blocks (over 1 MiB) and its small
#: ones. What it adds to a request varies from step to step: it leaves the rest of a cached block whole if it is small.
Live = Mapping[int, tuple[int, int]]


class StepSize(NamedTuple):
    """The inputs of the model that a step trained.

    Attributes:
        rows: First dimension of the first input, as a rule the batch, summed over the step's forwards.
        elements: Elements of all inputs.
    """

    rows: int
    elements: int


class Goal(Protocol):
    """Decides which step is the last to record, and which are timed."""

    def may_end(self) -> None:
        """Note that a step may have ended here. Whether it did is known later."""

    def is_last(self, step: int) -> bool:
        """Whether this step, which ended where :meth:`may_end` was last called, is the last one to record."""

    def is_timed(self, step: int) -> bool:
        """Whether to time the step that begins. See :class:`~fakedist.record.timed_step.recorded_step.RecordedStep`."""

    def notes(self) -> list[Note]:
        """Notes for the report when the run is over."""


class After:
    """A fixed number of steps, of which the last is timed.

    Args:
        limit: Number of steps.
        stops: Whether recording stops after them.
    """

    def __init__(self, limit: int, *, stops: bool = True) -> None:
        self._limit = limit
        self._stops = stops

    def may_end(self) -> None:
        """Do nothing."""

    def is_last(self, step: int) -> bool:
        """Whether this is the ``limit``-th step."""
        return self._stops and step >= self._limit

    def is_timed(self, step: int) -> bool:
        """Whether this is the ``limit``-th step."""
        return step == self._limit

    def notes(self) -> list[Note]:
        """No notes."""
        return []


class Steady:
    """Steps until one ends with as much live memory as the step before, so that the next one would be the same.

    Live memory is what was requested of the caching allocator and is still allocated, on each device, without what the
    allocator adds to a request. Blocks of its large pools must match to the byte. Blocks of its small pools (up to 1
    MiB each) may differ by less than 1 MiB in total. Every optimizer must have
    stepped, and the step's batch must not be a partial one, as the last of an epoch is.
    Each step from step 2 on is timed until then.

    Args:
        live: Returns what is live now.
        waits: Whether an optimizer has not stepped yet.
        size: Returns the inputs of a step.
        stops: Whether recording stops after the steady step.
    """

    def __init__(
        self,
        live: Callable[[], Live],
        waits: Callable[[], bool],
        size: Callable[[int], StepSize] = lambda step: StepSize(0, 0),
        *,
        stops: bool = True,
    ) -> None:
        self.is_steady = False
        self._live, self._waits, self._size, self._stops = live, waits, size, stops
        self._most_rows = 0
        self._now: Live = {}
        self._before: Live | None = None
        self._why = ""

    def may_end(self) -> None:
        """Read what is live."""
        if not self.is_steady:
            self._now = self._live()

    def is_last(self, step: int) -> bool:
        """Whether the step is steady, or the last one to try."""
        if not self.is_steady:
            before, self._before = self._before, self._now
            self._most_rows = max(self._most_rows, self._size(step).rows)
            if before is not None and step >= LEAST_STEPS:
                self._why = self._difference(before, self._now, step)
                self.is_steady = not self._why
        return self._stops and (self.is_steady or step >= MOST_STEPS)

    def is_timed(self, step: int) -> bool:
        """Whether the step may be the steady one."""
        return LEAST_STEPS <= step <= MOST_STEPS and not self.is_steady

    def notes(self) -> list[Note]:
        """Why the run was not steady, if it was not."""
        return [notes.not_steady(self._why)] if self._why else []

    def _difference(self, before: Live, now: Live, step: int) -> str:
        for device in sorted({*before, *now}):
            (large, small), (large_now, small_now) = before.get(device, (0, 0)), now.get(device, (0, 0))
            if large != large_now or abs(small - small_now) >= SLACK_BYTES:
                told = f"{format_bytes(large + small)} of requests were live at the end of step {step - 1}"
                exact = f" ({large_now + small_now - large - small:+,} bytes)"
                return f"{told}, {format_bytes(large_now + small_now)} at the end of step {step}{exact}"
        if self._size(step).rows < WHOLE_BATCH * self._most_rows:
            return f"step {step} had a smaller batch than a step before"
        return f"an optimizer has not stepped in {step} steps" if self._waits() else ""


def make_goal(
    steps: int | Literal["auto"],
    until: int | Until | None,
    live: Callable[[], Live],
    waits: Callable[[], bool],
    size: Callable[[int], StepSize],
) -> Goal:
    """Make the goal that ``--steps`` and ``--until`` describe.

    Args:
        steps: Number of steps, or "auto".
        until: Number of steps, or what ends the run instead. None if only ``steps`` counts.
        live: See :class:`Steady`.
        waits: See :class:`Steady`.
        size: See :class:`Steady`.
    """
    if isinstance(until, int):
        return After(until)
    return Steady(live, waits, size, stops=until is None) if steps == "auto" else After(steps, stops=until is None)
