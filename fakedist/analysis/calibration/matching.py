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
        num_repetitions: Repetitions of the step with any pair.
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
    pairs = np.flatnonzero(position >= 0)
    launch, repetition = position[pairs] % max(len(recorded), 1), position[pairs] // max(len(recorded), 1)
    row, column = recorded.signature[launch], traced.launches.signature[pairs]
    clash = conflicts(rows, columns)[row, column] if len(pairs) else np.zeros(0, bool)
    telling = _telling(recorded, traced)[row, column] if len(pairs) else clash
    strong = telling & (scores[row, column] >= STRONG) & ~clash if len(pairs) else clash
    looks = np.unique(scores, axis=0, return_inverse=True)[1].ravel()[recorded.signature]
    unclear = _ambiguous(looks, work, launch, repetition) & ~clash
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
        num_repetitions=len(np.unique(repetition)),
        num_strong=int(strong.sum()),
        num_telling=int(telling.sum()),
        num_pairs=len(pairs),
        num_conflicts=int(clash.sum()),
        num_ambiguous=int(unclear.sum()),
        unmatched=np.flatnonzero(left),
        num_read=len(position),
    )


def _telling(recorded: Sequence, traced: Traced) -> Bools:
    named = np.array([each.kind not in ("product", "library") and not each.is_tuned for each in recorded.signatures])
    rows, columns = (np.array([bool(each.sizes) for each in side.signatures]) for side in (recorded, traced.launches))
    return np.asarray(named[:, None] | (rows[:, None] & columns[None, :]))


def _ambiguous(looks: Ints, work: Ints, launch: Ints, repetition: Ints) -> Bools:
    """Pairs in a run of launches that look alike and do different work, where not all of the run was traced.

    The projections of a layer are such a run: if one of three products is missing, which one is unknown.

    Args:
        looks: For each recorded launch a number, equal for those that fit equally well to all that was traced.
        work: What each has to do.
        launch: The recorded launch of each pair.
        repetition: Its repetition.
    """
    if not len(launch):
        return np.zeros(0, bool)
    alike = np.zeros(len(looks), bool)
    alike[1:] = looks[1:] == looks[:-1]
    run = np.cumsum(~alike) - 1
    length = np.bincount(run)
    first = np.flatnonzero(~alike)
    differs = np.maximum.reduceat(work, first) != np.minimum.reduceat(work, first)
    key = repetition * len(length) + run[launch]
    distinct, place, count = np.unique(key, return_inverse=True, return_counts=True)
    missing = count < length[distinct % len(length)]
    return np.asarray(missing[place] & differs[run[launch]])


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
