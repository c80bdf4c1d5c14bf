"""Matches the kernels of a trace with the launches of a recorded step, and counts what is not matched and why."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fakedist.analysis.calibration.alignment import align
from fakedist.analysis.calibration.scoring import STRONG, conflicts, score
from fakedist.analysis.calibration.signatures import Sequence
from fakedist.analysis.traces.intervals import Ints

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


#: Shares of a step's launches: with fewer, a repetition is a fragment that does not count; with more, it is a step.
_FRAGMENT, _MOST = 0.1, 0.5


@dataclass(frozen=True)
class Traced:
    """A trace's kernels, copies and fills, in the order in which the host launched them.

    Attributes:
        launches: What is known of each.
        duration_us: How long each took.
        within: A number of the operation that launched each; -1 if unknown.
    """

    launches: Sequence
    duration_us: Floats
    within: Ints


@dataclass(frozen=True)
class Matched:
    """Kernels of a trace and the recorded launches that they are.

    Attributes:
        launch: For each used pair, the position of the recorded launch.
        repetition: The repetition of the step that it is from.
        duration_us: How long the kernel took, with those that complete it.
        of_launch: For each recorded launch, the number of used pairs.
        num_repetitions: Repetitions of the step that are in the trace for the most part.
        num_strong: Of those that can tell, pairs with a name and a grid, or an operation and sizes.
        num_telling: Pairs that can tell one job from another: not a library's calls of unknown sizes, nor Triton's.
        num_pairs: All pairs, the unused ones too.
        num_conflicts: Pairs left out because their grids or bytes differ.
        num_ambiguous: Pairs left out because neighbours alike are missing, so that it may be one of those.
        unmatched: Positions of traced kernels that are nothing recorded.
        num_read: Kernels of the trace that were looked at; of a very long trace, not all are.
    """

    launch: Ints
    repetition: Ints
    duration_us: Floats
    of_launch: Ints
    num_repetitions: int
    num_strong: int
    num_telling: int
    num_pairs: int
    num_conflicts: int
    num_ambiguous: int
    unmatched: Ints
    num_read: int


def match(recorded: Sequence, work: Ints, traced: Traced) -> Matched:
    """Match a trace with a recorded step.

    Args:
        recorded: The step's launches.
        work: The row of ``work`` of each: what it has to do.
        traced: The trace.
    """
    rows, columns = recorded.signatures, traced.launches.signatures
    scores = score(rows, columns)
    position = align(recorded, traced.launches, scores)
    position, num_repetitions = _of_whole_steps(position, max(len(recorded), 1))
    pairs = np.flatnonzero(position >= 0)
    launch, repetition = position[pairs] % max(len(recorded), 1), position[pairs] // max(len(recorded), 1)
    row, column = recorded.signature[launch], traced.launches.signature[pairs]
    clash = conflicts(rows, columns)[row, column] if len(pairs) else np.zeros(0, bool)
    telling = _telling(recorded, traced)[row, column] if len(pairs) else clash
    strong = telling & (scores[row, column] >= STRONG) & ~clash if len(pairs) else clash
    looks = np.unique(scores, axis=0, return_inverse=True)[1].ravel()[recorded.signature]
    unclear = _ambiguous(looks, work, position[pairs], strong) & ~clash
    duration, completing = _completed(recorded, traced, pairs, launch, len(position))
    used = ~clash & ~unclear
    left = np.ones(len(position), bool)
    left[pairs] = False
    left[completing] = False
    return Matched(
        launch=launch[used],
        repetition=repetition[used],
        duration_us=duration[used],
        of_launch=np.bincount(launch[used], minlength=len(recorded)),
        num_repetitions=num_repetitions,
        num_strong=int(strong.sum()),
        num_telling=int(telling.sum()),
        num_pairs=len(pairs),
        num_conflicts=int(clash.sum()),
        num_ambiguous=int(unclear.sum()),
        unmatched=np.flatnonzero(left),
        num_read=len(position),
    )


def _of_whole_steps(position: Ints, count: int) -> tuple[Ints, int]:
    """The positions without those of fragments of a step, and the number of repetitions that have most of it.

    Outside of steps, in initialisation or validation, a few kernels may look like the step's.
    """
    of_step = np.where(position >= 0, position // count, -1)
    found, place, number = np.unique(of_step, return_inverse=True, return_counts=True)
    is_step = found >= 0
    kept = is_step & (number >= _FRAGMENT * count)
    return np.where(kept[place], position, -1), int((is_step & (number >= _MOST * count)).sum())


def _telling(recorded: Sequence, traced: Traced) -> Bools:
    named = np.array([each.kind not in ("product", "library") and not each.is_tuned for each in recorded.signatures])
    rows, columns = (np.array([bool(each.sizes) for each in side.signatures]) for side in (recorded, traced.launches))
    return np.asarray(named[:, None] | (rows[:, None] & columns[None, :]))


def _ambiguous(looks: Ints, work: Ints, position: Ints, certain: Bools) -> Bools:
    """Pairs that may be one of several launches that look alike and do different work, of which not all were traced.

    The projections of a layer look alike: if one of three products is missing, which one is unknown. Pairs that are
    certain bound the part of the step in which a pair is.

    Args:
        looks: For each recorded launch a number, equal for those that fit equally well to all that was traced.
        work: What each has to do.
        position: The position of each pair, counted on over repetitions.
        certain: Whether each pair can be no other launch.
    """
    unclear = np.zeros(len(position), bool)
    if not len(position):
        return unclear
    bounds = np.concatenate([[position[0] - 1], position[certain], [position[-1] + 1]])
    for look in np.unique(looks[position[~certain] % len(looks)]).tolist():
        launches = np.flatnonzero(looks == look)
        changes = np.flatnonzero(np.diff(work[launches], prepend=work[launches[-1]]))
        if not len(changes):
            continue
        pairs = np.flatnonzero(~certain & (looks[position % len(looks)] == look))
        part = np.searchsorted(bounds, position[pairs])
        first, last = bounds[part - 1] + 1, bounds[part]
        expected = _count_until(launches, len(looks), last) - _count_until(launches, len(looks), first)
        # Not the first launch of a part, but those after it, tell whether works differ within it.
        after = _next_of(launches, len(looks), first) + 1
        changing = launches[changes]
        differs = _count_until(changing, len(looks), last) - _count_until(changing, len(looks), after)
        found = np.bincount(part)[part]
        unclear[pairs] = (found < expected) & (differs > 0)
    return unclear


def _count_until(launches: Ints, count: int, position: Ints) -> Ints:
    """How many of these launches of a step, which repeats, are before a position."""
    return np.asarray(position // count * len(launches) + np.searchsorted(launches, position % count))


def _next_of(launches: Ints, count: int, position: Ints) -> Ints:
    """The first of these launches at a position or after it."""
    place = np.searchsorted(launches, position % count)
    turn = place // len(launches)
    return np.asarray((position // count + turn) * count + launches[place % len(launches)])


def _completed(recorded: Sequence, traced: Traced, pairs: Ints, launch: Ints, num_read: int) -> tuple[Floats, Ints]:
    """Durations of pairs, and the positions of kernels that were added to them.

    A library's call is one recorded launch and may be several kernels. Those of the same operation that are nothing
    else recorded belong to it. Without operations, those that complete a product belong to the product before them.
    """
    duration = traced.duration_us[pairs].copy()
    by_library = np.array([each.kind in ("product", "library") for each in recorded.signatures] or [False])
    of_library = by_library[recorded.signature[launch]] if len(launch) else np.zeros(0, bool)
    matched = np.zeros(num_read, bool)
    matched[pairs] = True
    completes = np.array([each.is_auxiliary for each in traced.launches.signatures] or [False])
    completes = completes[traced.launches.signature] if len(traced.launches) else np.zeros(0, bool)
    owners = np.flatnonzero(of_library)
    if not len(owners):
        return duration, np.zeros(0, np.int64)
    at = pairs[owners]
    before = np.searchsorted(at, np.arange(len(matched)), side="right") - 1
    after = np.minimum(before + 1, len(at) - 1)
    within = traced.within
    added: list[int] = []
    for kernel in np.flatnonzero(~matched).tolist():
        one, other = int(before[kernel]), int(after[kernel])
        if within[kernel] >= 0:
            owner = next((each for each in (one, other) if each >= 0 and within[at[each]] == within[kernel]), -1)
        else:
            owner = one if one >= 0 and completes[kernel] and at[one] + 1 >= kernel else -1
        if owner >= 0:
            duration[owners[owner]] += traced.duration_us[kernel]
            added.append(kernel)
    return duration, np.array(added, np.int64)
