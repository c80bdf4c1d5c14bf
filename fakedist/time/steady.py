"""Finds the steady micro-batches of a step: stretches of its launches that repeat, and that do all that one does.

A step with gradient accumulation, or of a pipeline, launches the same for each micro-batch. Where a schedule is steady,
a stretch of launches repeats: forward and backward of one micro-batch in 1F1B, of as many as there are stages in
interleaved 1F1B. A step that runs all forwards before all backwards has a stretch for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Repeat:
    """A stretch of a sequence that repeats.

    Attributes:
        start: Where it begins.
        end: Where the last whole repetition ends.
        period: How long one is.
    """

    start: int
    end: int
    period: int

    @property
    def number(self) -> int:
        """How often it repeats."""
        return (self.end - self.start) // self.period

    @property
    def last(self) -> slice:
        """The last repetition."""
        return slice(self.end - self.period, self.end)


@dataclass(frozen=True)
class Steady:
    """What repeats in a step.

    Attributes:
        repeats: One stretch of each; together they do all that a micro-batch needs.
        num_micro_batches: How many micro-batches one repetition of all of them does.
    """

    repeats: tuple[Repeat, ...]
    num_micro_batches: int


@dataclass(frozen=True)
class Step:
    """A step as a sequence.

    Attributes:
        tokens: What each row does; rows that do the same have the same number, from 0.
        parts: The part of a micro-batch that each row is, a number from 0: a product; -1 for rows that do not count.
            Every micro-batch has all parts, each as often as any other micro-batch.
        num_micro_batches: Micro-batches of the step.
        num_stages: Stages of its pipeline; 1 without one.
    """

    tokens: Numbers
    parts: Numbers
    num_micro_batches: int
    num_stages: int


def find_steady(step: Step) -> Steady | None:
    """Find what a further micro-batch would repeat; None if that is not certain.

    A stretch counts if it comes twice at least and has, of each part, the share of its micro-batches.
    """
    if step.num_micro_batches < 1:
        return None
    wanted = _of_rows(step, slice(None))
    wanted = np.where(wanted >= step.num_micro_batches, wanted, 0)
    return _together(step, wanted) or _apart(step, wanted)


def _together(step: Step, wanted: Numbers) -> Steady | None:
    """One stretch with all that some micro-batches do: 1F1B, interleaved or not, zero bubble."""
    places = _anchor(step, wanted)
    each = len(places) // step.num_micro_batches
    for number in range(1, step.num_micro_batches // 2 + 1):
        for found in _repeats(step.tokens, places, number * each):
            if np.array_equal(_of_rows(step, found.last) * step.num_micro_batches, wanted * number):
                return Steady((found,), number)
    return None


def _apart(step: Step, wanted: Numbers) -> Steady | None:
    """A stretch for each part of a micro-batch, each over all micro-batches: GPipe.

    A schedule that warms up looks the same if the step has too few micro-batches to get beyond its warm-up.
    """
    if step.num_stages > 1 and step.num_micro_batches <= 2 * step.num_stages:
        return None
    for number in range(1, step.num_micro_batches // 2 + 1):
        left, repeats = wanted, []
        while len(places := _anchor(step, left)) and (found := _over_all(step, left, places, number)):
            left = np.where(_of_rows(step, found.last) > 0, 0, left)
            repeats.append(found)
        if not left.any() and len(repeats) > 1:
            return Steady(tuple(sorted(repeats, key=lambda each: each.start)), number)
    return None


def _over_all(step: Step, left: Numbers, places: Numbers, number: int) -> Repeat | None:
    """A stretch that repeats for all micro-batches, so many at a time, with all rows of its parts."""
    for found in _repeats(step.tokens, places, number * (len(places) // step.num_micro_batches)):
        own = _of_rows(step, found.last) * step.num_micro_batches
        # The first and the last micro-batch may differ a little: they gather parameters, reduce gradients.
        is_whole = (found.number + 2) * number >= step.num_micro_batches
        if is_whole and np.array_equal(own, np.where(own > 0, left * number, 0)):
            return found
    return None


def _anchor(step: Step, wanted: Numbers) -> Numbers:
    """The rows of the first part that is wanted, of those with the fewest in a micro-batch; none if nothing is."""
    if not wanted.any():
        return np.zeros(0, np.int64)
    rows = np.flatnonzero(np.append(wanted, 0)[step.parts] == wanted[wanted > 0].min())
    return np.flatnonzero(step.parts == step.parts[rows[0]])


def _of_rows(step: Step, rows: slice) -> Numbers:
    """How often some rows have each of the parts."""
    own = step.parts[rows]
    return np.bincount(own[own >= 0], minlength=int(step.parts.max(initial=-1)) + 1)


def _repeats(tokens: Numbers, places: Numbers, apart: int) -> Iterator[Repeat]:
    """Stretches that repeat twice at least, with a period from one of these places to that ``apart`` later."""
    periods = dict.fromkeys((places[apart:] - places[:-apart]).tolist()) if 0 < apart < len(places) else {}
    for period in periods:
        for start, length in _runs(tokens[period:] == tokens[:-period], period):
            yield Repeat(start, start + (length + period) // period * period, period)


def _runs(same: npt.NDArray[np.bool_], least: int) -> Sequence[tuple[int, int]]:
    """Starts and lengths of runs of True, the longest first."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
    starts, ends = edges[::2], edges[1::2]
    long = np.flatnonzero(ends - starts >= least)
    order = long[np.argsort(starts[long] - ends[long], kind="stable")]
    return [(int(starts[at]), int(ends[at] - starts[at])) for at in order]
