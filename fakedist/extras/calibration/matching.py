"""Matches the kernels of a trace with the launches of a recorded step, and counts what is not matched and why.

The trace may begin and end anywhere in a step, and have other kernels: skipping a launch on either side costs a little.
Recorded launches form a ring, so marks of steps are not needed. A small problem is solved as a whole. For a large one,
products and attention are aligned first, then all launches within a band around that.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.rundir.families import kernel_family
from fakedist.rundir.launch_records import WorkRow
from fakedist.traces.step_trace import Ints, ProcessTrace

SignatureKind = Literal["kernel", "product", "library", "copy", "fill"]

#: Kernels that complete a product or prepare it. They are not the product itself.
_AUXILIARY_NAMES = re.compile(r"split_?k\w*reduce|reduce_1block|scal_kernel|cublas\w*init|zero_?tile", re.IGNORECASE)
_WORDS = re.compile(r"[A-Za-z_]\w*")
_TRITON_NUMBER = re.compile(r"(_\d+)+$")
#: Words of C++ that name no kernel.
_NOISE = frozenset(
    _WORDS.findall(
        "void at native anonymous namespace std array char unsigned int long float double bool const true false lambda "
        "detail Array c10 operator cuda cutlass TensorIteratorBase TensorIterator ul l"
    )
)


class Signature(NamedTuple):
    """A launch, as far as it is known; empty and -1 are unknown.

    Attributes:
        kind: A library's product or other call, whose kernels are not known, or the launch itself. A trace has kernels,
            copies and fills.
        name: The kernel, "Memcpy HtoD", "Memset", or the library's function.
        family: One of ``rundir.schema.FAMILIES``.
        operations: Names such as "aten::mm": of a recorded launch, its operation; of a traced one, all around it,
            innermost first.
        grid: Blocks as x,y,z.
        num_bytes: Of a copy or fill.
        sizes: Of a product: the smaller and the larger of m and n, and k.
    """

    kind: SignatureKind
    name: str
    family: str
    operations: tuple[str, ...] = ()
    grid: str = ""
    num_bytes: int = -1
    sizes: tuple[int, ...] = ()

    @property
    def is_tuned(self) -> bool:
        """True if its grid depends on tuning, and not on its work alone."""
        return self.name.startswith("triton_")

    @property
    def is_auxiliary(self) -> bool:
        """True if it completes a product of a library, such as the sum over parts of k."""
        return self.kind == "kernel" and _AUXILIARY_NAMES.search(self.name) is not None


@dataclass(frozen=True)
class Sequence:
    """Launches in the order in which the host made them, each a row of ``signatures``."""

    signatures: list[Signature]
    signature: Ints

    def __len__(self) -> int:
        return len(self.signature)

    @classmethod
    def of(cls, launches: list[Signature]) -> Sequence:
        """The sequence of these launches."""
        return cls(*_distinct(launches))

    def of_families(self, *families: str) -> Ints:
        """Positions of the launches of these families, without those that only complete another."""
        wanted = np.array(
            [signature.family in families and not signature.is_auxiliary for signature in self.signatures] or [False]
        )
        return np.flatnonzero(wanted[self.signature]) if len(self) else np.zeros(0, np.int64)


def operation_name(text: str) -> str:
    """An operation as a trace names it: ``aten.mm.default`` is ``aten::mm``."""
    parts = text.split(".")
    return f"{parts[0]}::{parts[1]}" if len(parts) > 2 and "::" not in text else text


@cache
def kernel_words(name: str) -> frozenset[str]:
    """The words of a kernel's name that say what it computes. They stay the same between releases of torch."""
    return frozenset(_WORDS.findall(name)) - _NOISE


def plain_name(name: str) -> str:
    """A kernel's name without what Inductor numbers anew in each graph, a copy's without the kind of host memory."""
    if name.startswith("triton_"):
        return _TRITON_NUMBER.sub("", name)
    if name.startswith("Memcpy"):
        return " ".join(name.split(" ")[:2])
    return "Memset" if name.startswith("Memset") else name


Scores = npt.NDArray[np.int32]
T = TypeVar("T", bound=Hashable)

_NAME, _LIKE_NAME, _FAMILY, _GRID, _OTHER_GRID = 40, 20, 5, 20, -10
_OPERATION, _OTHER_OPERATION = 30, -30
_PRODUCT, _SIZES, _OTHER_SIZES, _AUXILIARY = 30, 30, -100, -25
_COPY, _BYTES, _OTHER_BYTES = 20, 30, -20
_NEVER = -1000
#: The fraction of common words from which two names count as alike.
_ALIKE = 0.5
#: Which of the two families an elementwise kernel belongs to depends on its phase, which a trace may lack.
_SAME_FAMILY = {"optimizer": "elementwise"}
#: A pair is strong from this score on: a name and a grid, or an operation and sizes, and nothing against it.
STRONG = 50


def score(recorded: list[Signature], traced: list[Signature]) -> Scores:
    """Scores of all pairs: a row for each recorded signature, a column for each traced one."""
    if not recorded or not traced:
        return np.zeros((len(recorded), len(traced)), np.int32)
    scores = _by_kind(recorded, traced)
    scores = np.where(scores > _NEVER // 2, scores + _by_operation(recorded, traced), _NEVER)
    scores += np.maximum(_equal(recorded, traced, "grid", "", (_GRID, _OTHER_GRID)), _tuned(recorded) * _OTHER_GRID)
    scores += _equal(recorded, traced, "num_bytes", -1, (_BYTES, _OTHER_BYTES))
    scores += _equal(recorded, traced, "sizes", (), (_SIZES, _OTHER_SIZES))
    return scores.astype(np.int32)


def conflicts(recorded: list[Signature], traced: list[Signature]) -> npt.NDArray[np.bool_]:
    """True for two kernels of known and different grids, or copies of different bytes: their work differs.

    Triton chooses blocks by tuning, so its grids differ for the same work.
    """
    grid = _equal(recorded, traced, "grid", "", (0, 1))
    bytes_ = _equal(recorded, traced, "num_bytes", -1, (0, 1))
    return np.asarray(((grid > 0) & (_tuned(recorded) > 0)) | (bytes_ > 0))


def _by_kind(recorded: list[Signature], traced: list[Signature]) -> Scores:
    rows, row = _distinct((launch.kind, plain_name(launch.name), _family(launch.family), False) for launch in recorded)
    columns, column = _distinct(
        (launch.kind, plain_name(launch.name), _family(launch.family), launch.is_auxiliary) for launch in traced
    )
    scores = np.array([[_pair(one, other) for other in columns] for one in rows], np.int32)
    mine, others = (np.array([name if kind == "kernel" else "" for kind, name, *_ in side]) for side in (rows, columns))
    # A kernel that the other side has by this name is not one of another name.
    in_both = np.intersect1d(mine, others)
    has_own = np.isin(mine, in_both)[:, None] | np.isin(others, in_both)[None, :]
    are_kernels = (mine != "")[:, None] & (others != "")[None, :]
    scores[are_kernels & has_own & (mine[:, None] != others[None, :])] = _NEVER
    return scores[row][:, column]


def _pair(recorded: tuple[str, str, str, bool], traced: tuple[str, str, str, bool]) -> int:
    kind, name, family, _ = recorded
    of_kind, of_name, of_family, is_auxiliary = traced
    if kind in ("copy", "fill") or of_kind in ("copy", "fill"):
        return _COPY if (kind, name) == (of_kind, of_name) else _NEVER
    if kind in ("product", "library"):
        is_like = family == of_family or "other" in (family, of_family)
        score = _PRODUCT if family == of_family else 0
        return score + (_AUXILIARY if is_auxiliary else 0) if is_like else _NEVER
    if name == of_name:
        return _NAME
    words, others = kernel_words(name), kernel_words(of_name)
    if len(words & others) >= _ALIKE * max(len(words | others), 1):
        return _LIKE_NAME
    return _FAMILY if family == of_family else _OTHER_GRID


def _by_operation(recorded: list[Signature], traced: list[Signature]) -> Scores:
    """Scores by operation. One that the other side never names, as those of compiled graphs, scores 0."""
    rows, row = _distinct(launch.operations for launch in recorded)
    columns, column = _distinct(launch.operations for launch in traced)
    named = {name for names in columns for name in names}
    scores = np.zeros((len(rows), len(columns)), np.int32)
    for number, names in enumerate(rows):
        if known := named & set(names):
            for other, around in enumerate(columns):
                if around:
                    scores[number, other] = _OPERATION if known & set(around) else _OTHER_OPERATION
    return scores[row][:, column]


def _equal(
    recorded: list[Signature], traced: list[Signature], name: str, unknown: object, points: tuple[int, int]
) -> Scores:
    """Points for an equal and for a different value of a field, where both sides know it."""
    numbers: dict[object, int] = {unknown: 0}
    row, column = (
        np.array([numbers.setdefault(getattr(launch, name), len(numbers)) for launch in side])
        for side in (recorded, traced)
    )
    known = (row > 0)[:, None] & (column > 0)[None, :]
    equal, different = points
    return np.where(known, np.where(row[:, None] == column[None, :], equal, different), 0).astype(np.int32)


def _tuned(recorded: list[Signature]) -> Scores:
    """A column: 0 for Triton's kernels, whose blocks are tuned, 1 for others."""
    return np.array([[not launch.is_tuned] for launch in recorded], np.int32)


def _family(family: str) -> str:
    return _SAME_FAMILY.get(family, family)


def _distinct(values: Iterable[T]) -> tuple[list[T], npt.NDArray[np.int64]]:
    numbers: dict[T, int] = {}
    rows = [numbers.setdefault(value, len(numbers)) for value in values]
    return list(numbers), np.array(rows, np.int64)


_SKIP_RECORDED, _SKIP_TRACED = 3, 1
_UNREACHED = -(1 << 28)
_TOOK, _SKIPPED = 1, 2
#: The most cells that are computed as a whole, a byte of memory each.
MOST_CELLS = 300_000_000
#: Half of the band's width, in launches.
_REACH = 256


def align(recorded: Sequence, traced: Sequence, scores: Scores, most_cells: int = MOST_CELLS) -> Ints:
    """The position of each traced launch's recorded launch; -1 without one, as beyond the first of a very long trace.

    Positions count on over repetitions of the step: modulo the number of recorded launches, they are the launch; the
    quotient is the repetition.
    """
    if not len(recorded) or not len(traced):
        return np.full(len(traced), -1, np.int64)
    scores = np.where(scores > 0, scores, _UNREACHED)
    if len(recorded) * len(traced) <= most_cells:
        return _ring(scores, recorded.signature, traced.signature)
    anchors, marks = (launches.of_families("gemm", "attention") for launches in (recorded, traced))
    if len(anchors) < 2:
        anchors, marks = np.arange(len(recorded)), np.arange(len(traced))
    num_marks = len(marks)
    marks = marks[: max(most_cells // max(len(anchors), 1), 1)]
    rough = _ring(scores, recorded.signature[anchors], traced.signature[marks])
    known = np.flatnonzero(rough >= 0)
    if not len(known):
        return np.full(len(traced), -1, np.int64)
    anchor, repetition = rough[known] % len(anchors), rough[known] // len(anchors)
    at = repetition * len(recorded) + anchors[anchor]
    is_cut = len(marks) < num_marks
    num_traced = int(marks[known[-1]]) + 1 if is_cut else len(traced)
    centre = np.interp(np.arange(num_traced), marks[known], at).astype(np.int64)
    return _band(scores, recorded.signature, traced.signature[:num_traced], centre)


def _ring(scores: Scores, recorded: Ints, traced: Ints) -> Ints:
    """Align with a ring of recorded launches. A cell: the best score if this launch was the last one passed."""
    count = len(recorded)
    by_traced = np.ascontiguousarray(scores.T)
    cost = (_SKIP_RECORDED * np.arange(2 * count)).astype(np.int32)
    best = np.zeros(count, np.int32)
    moves = np.empty((len(traced), count), np.uint8)
    twice = np.empty(2 * count, np.int32)
    for number, signature in enumerate(traced.tolist()):
        taken = np.roll(best, 1) + by_traced[signature][recorded]
        kept = best - _SKIP_TRACED
        took = taken > kept
        base = np.where(took, taken, kept)
        twice[:count] = twice[count:] = base
        twice += cost
        best = (np.maximum.accumulate(twice) - cost)[count:]
        moves[number] = took + _SKIPPED * (best > base)
    position = np.full(len(traced), -1, np.int64)
    at = int(best.argmax()) + count * (len(traced) + 1)  # no launch passes more than the whole ring
    for number in range(len(traced) - 1, -1, -1):
        row = moves[number]
        while row[at % count] & _SKIPPED:
            at -= 1
        if row[at % count] & _TOOK:
            position[number] = at
            at -= 1
    return _from_first(position, count)


def _band(scores: Scores, recorded: Ints, traced: Ints, centre: Ints) -> Ints:
    count, width = len(recorded), 2 * _REACH + 1
    first = np.maximum.accumulate(centre - _REACH)
    offsets = np.arange(width)
    by_traced = np.ascontiguousarray(scores.T)
    cost = (_SKIP_RECORDED * offsets).astype(np.int32)
    best = np.zeros(width, np.int32)
    moves = np.empty((len(traced), width), np.uint8)
    before = int(first[0])
    for number, signature in enumerate(traced.tolist()):
        shift, before = int(first[number]) - before, int(first[number])
        best = _moved(best, shift)
        gains = by_traced[signature][recorded[(before + offsets) % count]]
        taken = np.maximum(_moved(best, -1) + gains, _UNREACHED)
        kept = np.maximum(best - _SKIP_TRACED, _UNREACHED)
        took = taken > kept
        base = np.where(took, taken, kept)
        best = np.maximum.accumulate(base + cost) - cost
        moves[number] = took + _SKIPPED * (best > base)
    position = np.full(len(traced), -1, np.int64)
    at = int(first[-1]) + int(best.argmax()) if len(first) else 0
    for number in range(len(traced) - 1, -1, -1):
        row, start = moves[number], int(first[number])
        while 0 <= at - start < width and row[at - start] & _SKIPPED:
            at -= 1
        if not 0 <= at - start < width:
            continue
        if row[at - start] & _TOOK:
            position[number] = at
            at -= 1
    return _from_first(position, count)


def _from_first(positions: Ints, count: int) -> Ints:
    """The positions, counted from the first repetition that has any."""
    known = positions[positions != -1]
    if not len(known):
        return positions
    return np.where(positions != -1, positions - int(known.min()) // count * count, -1)


def _moved(row: Scores, by: int) -> Scores:
    """The row moved to the left. Cells that come in are out of reach."""
    if not by:
        return row
    moved = np.full_like(row, _UNREACHED)
    if abs(by) < len(row):
        if by > 0:
            moved[:-by] = row[by:]
        else:
            moved[-by:] = row[:by]
    return moved


Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


#: Shares of a step's launches: with fewer, a repetition is a fragment that does not count; with more, it is a step.
_FRAGMENT, _MOST = 0.1, 0.5


@dataclass(frozen=True)
class Traced:
    """A trace's kernels, copies and fills, in the order in which the host launched them.

    ``within`` numbers the operation that launched each; -1 if unknown.
    """

    launches: Sequence
    duration_us: Floats
    within: Ints


@dataclass(frozen=True)
class Matched:
    """Kernels of a trace and the recorded launches that they are.

    Attributes:
        launch: Position of each used pair's recorded launch.
        repetition: The repetition of the step that each used pair is from.
        duration_us: Of each used pair's kernel, with those that complete it.
        of_launch: Used pairs of each recorded launch.
        num_repetitions: Repetitions of the step that are in the trace for the most part.
        num_strong: Of the telling pairs, those with a name and a grid, or an operation and sizes.
        num_telling: Pairs that can tell one job from another: not a library's calls of unknown sizes, nor Triton's.
        num_pairs: Used and unused.
        num_conflicts: Pairs left out because their grids or bytes differ.
        num_ambiguous: Pairs left out because they may be neighbours alike that are missing.
        unmatched: Positions of traced kernels that are nothing recorded.
        num_read: Kernels that were looked at; not all of a very long trace.
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


def match(recorded: Sequence, work: Ints, traced: Traced, most_cells: int = MOST_CELLS) -> Matched:
    """Match a trace with a recorded step, whose ``work`` is a row of that table for each launch."""
    rows, columns = recorded.signatures, traced.launches.signatures
    scores = score(rows, columns)
    position = align(recorded, traced.launches, scores, most_cells)
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
    """Positions in mostly traced repetitions, and their number. Initialisation may have kernels like a step's."""
    of_step = np.where(position >= 0, position // count, -1)
    repetitions, which, number = np.unique(of_step, return_inverse=True, return_counts=True)
    is_step = repetitions >= 0
    kept = is_step & (number >= _FRAGMENT * count)
    return np.where(kept[which], position, -1), int((is_step & (number >= _MOST * count)).sum())


def _telling(recorded: Sequence, traced: Traced) -> Bools:
    named = np.array(
        [signature.kind not in ("product", "library") and not signature.is_tuned for signature in recorded.signatures]
    )
    rows, columns = (
        np.array([bool(signature.sizes) for signature in side.signatures]) for side in (recorded, traced.launches)
    )
    return np.asarray(named[:, None] | (rows[:, None] & columns[None, :]))


def _ambiguous(looks: Ints, work: Ints, position: Ints, certain: Bools) -> Bools:
    """Pairs that may be one of several launches that look alike, do different work, and were not all traced.

    If one of a layer's three projections is missing, which one is unknown. Certain pairs bound the part of the step.

    Args:
        looks: Equal numbers for recorded launches that fit equally well to all that was traced.
        position: Of each pair, counted on over repetitions.
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
        # Not the first launch of a part, but those after it, show whether works differ within it.
        after = _next_of(launches, len(looks), first) + 1
        changing = launches[changes]
        differs = _count_until(changing, len(looks), last) - _count_until(changing, len(looks), after)
        num_launches = np.bincount(part)[part]
        unclear[pairs] = (num_launches < expected) & (differs > 0)
    return unclear


def _count_until(launches: Ints, count: int, position: Ints) -> Ints:
    return np.asarray(position // count * len(launches) + np.searchsorted(launches, position % count))


def _next_of(launches: Ints, count: int, position: Ints) -> Ints:
    index = np.searchsorted(launches, position % count)
    turn = index // len(launches)
    return np.asarray((position // count + turn) * count + launches[index % len(launches)])


def _completed(recorded: Sequence, traced: Traced, pairs: Ints, launch: Ints, num_read: int) -> tuple[Floats, Ints]:
    """Durations of pairs, and the positions of kernels that were added to them.

    A library's call may be several kernels: those of its operation that are nothing else recorded. Without operations,
    those that complete a product belong to the product before them.
    """
    duration = traced.duration_us[pairs].copy()
    by_library = np.array([signature.kind in ("product", "library") for signature in recorded.signatures] or [False])
    of_library = by_library[recorded.signature[launch]] if len(launch) else np.zeros(0, bool)
    matched = np.zeros(num_read, bool)
    matched[pairs] = True
    completes = np.array([signature.is_auxiliary for signature in traced.launches.signatures] or [False])
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
            owner = next((pair for pair in (one, other) if pair >= 0 and within[at[pair]] == within[kernel]), -1)
        else:
            owner = one if one >= 0 and completes[kernel] and at[one] + 1 >= kernel else -1
        if owner >= 0:
            duration[owners[owner]] += traced.duration_us[kernel]
            added.append(kernel)
    return duration, np.array(added, np.int64)


#: What launches of these kinds are in a trace. Collectives are left out: their time is not a kernel's.
_KINDS: dict[str, SignatureKind] = {
    "kernel": "kernel",
    "product": "product",
    "library": "library",
    "copy": "copy",
    "fill": "fill",
    "host_reads": "copy",
}
#: Operations whose tensors are the operands; "add" has what is added before them.
_PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::_scaled_mm")


@dataclass(frozen=True)
class RecordedLaunches:
    """The launches of a recorded step that a trace can contain, with their rows of the table ``work``."""

    launches: Sequence
    work: Ints
    works: list[WorkRow]


def recorded_step(launches: pd.DataFrame, work: pd.DataFrame) -> RecordedLaunches:
    """The recorded step."""
    works = [WorkRow(*row) for row in work[list(WorkRow._fields)].itertuples(index=False, name=None)]
    kept = launches[launches["what"].isin(list(_KINDS)) & (launches["work"] >= 0)]
    by_value: dict[tuple[int, str], Signature] = {}
    signatures = []
    for row, grid in zip(kept["work"].tolist(), kept["grid"].tolist(), strict=True):
        key = (row, grid)
        if key not in by_value:
            by_value[key] = _signature(works[row], grid)
        signatures.append(by_value[key])
    return RecordedLaunches(Sequence.of(signatures), kept["work"].to_numpy(np.int64), works)


def _signature(work: WorkRow, grid: str) -> Signature:
    kind: SignatureKind = _KINDS[work.kind]
    is_read = work.kind == "host_reads"
    if is_read and not work.name.startswith("Memcpy"):
        kind = "library"  # all kernels of an operation that the host knew the result of
    name = plain_name(work.name) if kind in ("copy", "fill") else work.name
    operations = (operation_name(work.operation),) if work.operation else ()
    num_bytes = -1
    if kind in ("copy", "fill") and not is_read and work.moved_bytes == work.moved_bytes:
        num_bytes = int(work.moved_bytes)
    sizes = _sizes(work.m, work.n, work.k) if work.k and not work.groups else ()
    return Signature(kind, name, work.family, operations, grid if kind == "kernel" else "", num_bytes, sizes)


def traced_kernels(trace: ProcessTrace) -> Traced:
    """The trace's kernels without communication, and without graphs that were traced as a whole."""
    within, chains, chain = trace.operations()
    activity = trace.activity
    inputs = np.where(within >= 0, trace.inputs[within], -1) if len(trace.inputs) else np.full(len(within), -1)
    bytes_ = activity.columns["bytes"]
    keys = np.stack([activity.name, activity.shape, chain, np.where(activity.is_copy, bytes_, -1), inputs])
    distinct, which = np.unique(keys, axis=1, return_inverse=True)
    which = which.ravel()
    signatures = [
        _traced_signature(
            activity.names[name], activity.shapes[shape][0], chains[of], size, _product(trace, row, chains[of])
        )
        for name, shape, of, size, row in distinct.T.tolist()
    ]
    computes = np.array([signature.family != "communication" for signature in signatures] or [False])[which]
    kept = np.flatnonzero(computes & ~activity.is_graph)
    duration = (activity.columns["end"] - activity.columns["start"]) / 1000
    return Traced(Sequence(signatures, which[kept]), duration[kept], within[kept])


def _traced_signature(
    name: str, grid: str, operations: tuple[str, ...], num_bytes: int, sizes: tuple[int, ...]
) -> Signature:
    kind: SignatureKind = "kernel"
    stands_in = any(operation.startswith("fakedist::") for operation in operations)  # for a collective
    if name.startswith(("Memcpy", "Memset")):
        kind = "copy" if name.startswith("Memcpy") else "fill"
        return Signature(kind, plain_name(name), "communication" if stands_in else "copy", operations, "", num_bytes)
    family = "communication" if stands_in else kernel_family(name, operations[0] if operations else "")
    return Signature("kernel", name, family, operations, grid, -1, sizes if family == "gemm" else ())


def _product(trace: ProcessTrace, inputs: int, operations: tuple[str, ...]) -> tuple[int, ...]:
    """The sizes of a product from those of its operation's tensors; empty if they are unknown."""
    if inputs < 0 or not operations or operations[0] not in _PRODUCTS:
        return ()
    matrices = [size for size in trace.shapes[inputs] if len(size) in (2, 3)]
    a, b = (matrices[-2:] if "add" in operations[0] else matrices[:2]) if len(matrices) > 1 else ((0, 0), (1, 1))
    return _sizes(a[-2], b[-1], a[-1]) if a[-1] == b[-2] else ()


def _sizes(m: int, n: int, k: int) -> tuple[int, int, int]:
    """Libraries may compute the transposed product: m and n in ascending order, then k."""
    return min(m, n), max(m, n), k
