"""Recorded steps as kinds that can be played in any order, with sizes that follow a length.

A step's blocks are freed within it, or some are carried and freed in a later one: always as many steps later, counted
in all steps or in those of the name that made them (a rollout; training has none). Steps that allocate and free alike,
block by block, differ in sizes only: a size that is ``base + per x count`` in all of them, for one count of their
length or of the next step's (whose batch may be there already), follows it to the byte. Others are as in the step of
the same name whose length is nearest.

A recording's allocations as a program for the player, in which some sizes follow counts of experts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.analysis.blocks import Blocks, event_places, scope_columns
from fakedist.analysis.recording import Recording
from fakedist.analysis.routed_blocks import Counts, Ints, calls_of, exact_fit, fitted_sizes
from fakedist.errors import JobError
from fakedist.rundir.schema import ACTIONS

_EMPTY_CACHE = np.iinfo(np.int32).min
_GIVEN_BACK = [ACTIONS.index(action) for action in ("segment_free", "segment_unmap")]
_TAKEN = [ACTIONS.index(action) for action in ("segment_alloc", "segment_map")]


@dataclass(frozen=True)
class AllocationProgram:
    """A recording's allocations for the player (player.py).

    Attributes:
        events: In order: n allocates block n, ~n frees it, the least number empties the cache.
        base, per, follows: The bytes of each block are ``base + per x count``; ``follows`` says which, -1: none.
        stream: Number of the stream of each block; 0 is the default one.
        is_shared: Whether another stream used the block.
        event: The recorded event of each of ``events``.
        bounded: Rows of the blocks whose sizes are only bounded from above.
    """

    events: npt.NDArray[np.int32]
    base: Ints
    per: Ints
    follows: npt.NDArray[np.int32]
    stream: npt.NDArray[np.int32]
    is_shared: npt.NDArray[np.uint8]
    event: Ints
    bounded: Ints

    @property
    def largest_bounded_bytes(self) -> int:
        """The most that such a block has in the recording."""
        return int(self.base[self.bounded].max(initial=0))


def program_of(recording: Recording, blocks: Blocks, counts: Counts, mine: Ints) -> AllocationProgram:
    """The program of a recording in which the calls had these counts (:meth:`Counts.of_rank`).

    Raises:
        JobError: Memory is in a private pool.
    """
    check_pools(recording)
    frame = blocks.frame
    call = calls_of(recording, frame, counts.passes)
    fitted = fitted_sizes(frame, call, mine, np.array([of.layer for of in counts.passes]))
    events, at = program_events(recording, blocks)
    follows = np.where(fitted.follows < 0, -1, fitted.follows + call * mine.shape[1]).astype("i4")
    return AllocationProgram(events, fitted.base, fitted.per, follows, *streams_of(frame), at, fitted.bounded)


def check_pools(recording: Recording) -> None:
    """Refuse a recording with blocks in private pools."""
    if any(pool != (0, 0) for pool in recording.pools.get(recording.device, {}).values()):
        raise JobError(
            "the recording has blocks in private pools of CUDA graphs, which cannot be played", "record it without them"
        )


def streams_of(frame: pd.DataFrame) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """The stream's number of each block, 0 for the default one, and whether another stream used it."""
    streams = {0: 0} | {handle: n for n, handle in enumerate(sorted(set(frame["stream"].tolist()) - {0}), 1)}
    is_shared = np.asarray(frame["reuse_event"] > frame["free_event"] + 1, np.uint8)
    return frame["stream"].map(streams).to_numpy("i4"), is_shared


def program_events(recording: Recording, blocks: Blocks) -> tuple[npt.NDArray[np.int32], Ints]:
    """The events of a program, and the recorded one of each."""
    frame, num_events = blocks.frame, len(recording.device_events["action"])
    made, freed = frame["alloc_event"].to_numpy("i8"), frame["free_event"].to_numpy("i8")
    number, is_freed, gone = np.arange(len(frame)), freed < num_events, _emptied(recording, blocks)
    event = np.concatenate([made, freed[is_freed], gone])
    what = np.concatenate([number, ~number[is_freed], np.full(len(gone), _EMPTY_CACHE)])
    order = np.argsort(event, kind="stable")
    return what[order].astype("i4"), event[order]


def _emptied(recording: Recording, blocks: Blocks) -> Ints:
    """The first events of segments that the script gave back, not the allocator to serve a request."""
    events, reserved = recording.device_events, blocks.replay.reserved_bytes
    action = events["action"]
    gone = np.flatnonzero(np.isin(action, _GIVEN_BACK))
    runs = np.split(gone, np.flatnonzero(np.diff(gone) > 1) + 1) if len(gone) else []
    capacity = 0 if recording.gpu is None else recording.gpu.capacity_bytes
    emptied = []
    for run in runs:
        first, after = run[0], run[-1] + 1
        is_for_request = after < len(action) and action[after] in _TAKEN
        asked = int(events["size"][after]) if is_for_request else 0
        if int(reserved[first - 1]) + asked <= capacity or not is_for_request:
            emptied.append(first)
    return np.array(emptied, np.int64)


_PADDINGS = (8, 16, 32, 64, 128)
_UNKNOWN = (-1, 0, -1)
_FREE_CARRIED = -(1 << 30)


@dataclass(frozen=True)
class StepInput:
    """A step's input: so many samples, and the elements of each."""

    samples: int
    length: int

    def counts(self) -> list[int]:
        """The counts that sizes may follow."""
        padded = [-(-self.length // step) * step for step in _PADDINGS]
        each = [self.length, *padded, self.length**2, *(size * size for size in padded)]
        return [*(self.samples * size for size in each), *each]


NO_INPUT = StepInput(0, 0)
NUM_COUNTS = 2 * len(NO_INPUT.counts())


@dataclass(frozen=True)
class StepKind:
    """A recorded step, or what comes before the first one that repeats.

    Attributes:
        number: The step; 0 for what comes before.
        name: As in the table ``steps``.
        group: It is counted with the steps of this group.
        input, next_input: Its input, and that of the step after it; NO_INPUT if not known.
        events: As of ``allocation_program.AllocationProgram``, by the kind's own blocks; -2^30 - n frees carried
            block n.
        block: Row of ``blocks`` of each of its blocks.
        base, per, follows: The bytes of each are ``base + per x count``; ``follows`` says which count, -1: none.
        carried: Which carried block each of its blocks is; -1: none.
        generation: Of those before the first step, how many steps of their group before its last one they were made.
        is_fitted: Whether a block's size is known at other lengths.
    """

    number: int
    name: str
    group: int
    input: StepInput
    next_input: StepInput
    events: npt.NDArray[np.int32]
    block: Ints
    base: Ints
    per: Ints
    follows: npt.NDArray[np.int32]
    carried: npt.NDArray[np.int32]
    generation: npt.NDArray[np.int32]
    is_fitted: npt.NDArray[np.bool_]

    @property
    def length(self) -> int:
        """Length of the step's input."""
        return self.input.length

    @property
    def counts(self) -> list[int]:
        """The counts that its sizes may follow."""
        return [*self.input.counts(), *self.next_input.counts()]


@dataclass(frozen=True)
class StepKinds:
    """A recording's steps.

    Attributes:
        before: What comes before the first of them.
        steps: Those that can be played, in order.
        sequence: The names of those and of the ones that cannot be played, in order.
        left_out: Numbers of those that cannot: they free other blocks than the steps around them.
        age: Of each carried block, how many steps of its group later it is freed; 0: before the next one.
        maker: Of each carried block, its group: that of the steps that make it.
        stream, is_shared: Of each block of the recording.
        is_whole: Whether ``before`` and ``steps`` are all that was recorded.
        peaks: Bytes allocated and reserved at most in each of the steps, as recorded, [steps, 2].
    """

    before: StepKind
    steps: list[StepKind]
    sequence: list[str]
    age: npt.NDArray[np.int32]
    maker: npt.NDArray[np.int32]
    left_out: list[int]
    stream: npt.NDArray[np.int32]
    is_shared: npt.NDArray[np.uint8]
    is_whole: bool
    peaks: Ints

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The kinds for player.py; the first one is ``before``."""
        kinds = [self.before, *self.steps]
        block = np.concatenate([kind.block for kind in kinds])
        arrays: dict[str, npt.NDArray[Any]] = {
            name: np.concatenate([getattr(kind, name) for kind in kinds])
            for name in ("events", "base", "per", "follows", "carried", "generation")
        }
        arrays["first_event"] = np.cumsum([0, *(len(kind.events) for kind in kinds)])
        arrays["first_block"] = np.cumsum([0, *(len(kind.block) for kind in kinds)])
        arrays |= {"group": np.array([kind.group for kind in kinds], "i4"), "age": self.age, "maker": self.maker}
        return arrays | {"stream": self.stream[block], "is_shared": self.is_shared[block]}

    def nearest(self, length: int, name: str = "") -> int:
        """The number among kinds (``before`` is 0) of the step of this name whose length is nearest."""
        others = [kind.name != name for kind in self.steps]
        return 1 + int(np.lexsort(([abs(kind.length - length) for kind in self.steps], others))[0])

    def fitted_part(self) -> float:
        """The part of the steps' bytes in blocks whose sizes are known at other lengths."""
        sizes = [(recorded_sizes(kind), kind.is_fitted) for kind in self.steps]
        return sum(int(size[fits].sum()) for size, fits in sizes) / max(sum(int(size.sum()) for size, _ in sizes), 1)

    def fitted_without(self, left_out: Sequence[int]) -> StepKinds:
        """Fit sizes again without some steps, which are left out."""
        return replace(self, steps=_fitted([kind for kind in self.steps if kind.number not in left_out]))


def whole_recording(recording: Recording, blocks: Blocks) -> StepKind:
    """All that was recorded as one kind."""
    events, _ = program_events(recording, blocks)
    return _constant((0, "", 0), (NO_INPUT, NO_INPUT), events, np.arange(len(blocks.frame)), blocks.frame)


def step_kinds(recording: Recording, blocks: Blocks, steps: pd.DataFrame) -> StepKinds:
    """The kinds of a recording's steps; ``steps`` is the table of this name.

    The first steps are not like the others, for example where a first optimizer step makes its state. They are played
    once, before the others.

    Raises:
        JobError: Memory is in a private pool, or no step can be played.
    """
    check_pools(recording)
    columns = (steps[name].tolist() for name in ("step", "samples", "sample_shape"))
    inputs = {n: StepInput(samples, _elements(shape)) for n, samples, shape in zip(*columns, strict=True)}
    numbers = sorted(inputs)
    maker = _Maker(recording, blocks, dict(zip(steps["step"].tolist(), steps["name"].tolist(), strict=True)))
    best: StepKinds | None = None
    for by_name in (False, True) if len(set(steps["name"])) > 1 else (False,):
        maker.group(by_name=by_name)
        for first in range(1, len(numbers)):
            trial = maker.kinds(numbers[first:], inputs)
            if trial is not None and (best is None or _score(trial) > _score(best)):
                best = trial
            if best is not None and _score(best) >= (len(numbers) - 1 - first, 0):
                break  # others have fewer steps
    if best is None:
        raise JobError(
            "no recorded step can follow any other: they free different blocks of the steps before them",
            "record more steps that are alike: fakedist profile --steps 10",
        )
    return best


def _score(kinds: StepKinds) -> tuple[int, int]:
    return len(kinds.steps), -len(kinds.left_out)


def _elements(shape: str) -> int:
    return int(np.prod([int(size) for size in shape.split("x")])) if shape else 1


def _constant(
    step: tuple[int, str, int],
    inputs: tuple[StepInput, StepInput],
    events: npt.NDArray[np.int32],
    block: Ints,
    frame: pd.DataFrame,
) -> StepKind:
    size, none = frame["requested_bytes"].to_numpy("i8")[block], np.full(len(block), -1, "i4")
    nothing = np.zeros(len(block), "i4")
    return StepKind(
        *step, *inputs, events, block, size, np.zeros_like(size), none, none, nothing, np.zeros(len(block), bool)
    )


class _Maker:
    """Cuts a recording's events into steps."""

    def __init__(self, recording: Recording, blocks: Blocks, names: Mapping[int, str]) -> None:
        frame = self._frame = blocks.frame
        self._events, at = program_events(recording, blocks)
        of_event = self._of_event = _played_steps(recording)
        self._step_at = of_event[at]
        self._last = int(of_event.max(initial=0))
        self._made, freed = of_event[frame["alloc_event"].to_numpy()], frame["free_event"].to_numpy("i8")
        self._freed = np.where(freed < len(of_event), of_event[np.minimum(freed, len(of_event) - 1)], -1)
        self._curves = blocks.replay.allocated_bytes, blocks.replay.reserved_bytes
        self._names = names
        self.group(by_name=False)
        self._shared = streams_of(frame)
        alike = ["operation", "phase", "stack", "stream"]
        turn = frame[alike].assign(step=self._made).groupby([*alike, "step"], observed=True).cumcount()
        columns = [frame[name].astype(str) if name in ("operation", "phase") else frame[name] for name in alike]
        self._key = list(zip(*(column.tolist() for column in (*columns, turn)), strict=True))

    def group(self, *, by_name: bool) -> None:
        """Count all steps, or those of each name."""
        known = sorted(set(self._names.values())) if by_name else [""]
        names = [self._names.get(step, "") for step in range(self._last + 1)]
        self._group_at = np.array([known.index(name) if name in known else 0 for name in names], "i8")
        # Of each step, how many steps of each group there are up to it, [groups, steps].
        self._so_far = np.cumsum(self._group_at == np.arange(len(known))[:, None], axis=1)

    def kinds(self, numbers: Sequence[int], inputs: Mapping[int, StepInput]) -> StepKinds | None:
        """These steps, and what comes before; None if none of them, or not that, can be played."""
        carried = self._carried(numbers)
        found = {n: self._kind(n, (inputs[n], inputs.get(n + 1, NO_INPUT)), carried) for n in numbers}
        kinds = [kind for kind in found.values() if kind is not None]
        if not kinds:
            return None
        before = self._kind(0, (NO_INPUT, NO_INPUT), carried, until=numbers[0], freed_by=kinds[-1].number)
        if before is None:
            return None
        left_out = [number for number, kind in found.items() if kind is None]
        is_whole = not left_out
        age, maker = np.array([row[1:] for row in carried.values()], "i4").reshape(-1, 2).T
        sequence = [self._names[number] for number in numbers]
        peaks = np.array([[curve[self._of_event == kind.number].max() for curve in self._curves] for kind in kinds])
        return StepKinds(before, _fitted(kinds), sequence, age, maker, left_out, *self._shared, is_whole, peaks)

    def _age(self, rows: Ints, step: int | Ints) -> Ints:
        """How many steps of their groups were made after these blocks, up to a step."""
        made = self._made[rows]
        by = self._group_at[made]
        return np.asarray(self._so_far[by, step] - self._so_far[by, made])

    def _carried(self, numbers: Sequence[int]) -> dict[Hashable, tuple[int, int, int]]:
        """Number, age and group of the blocks that steps leave to later ones: those that most steps of a group free."""
        freed: dict[int, Counter[frozenset[tuple[Hashable, int, int]]]] = defaultdict(Counter)
        for number in numbers:
            rows = np.flatnonzero((self._made < number) & (self._freed == number))
            ages = self._age(rows, number).tolist()
            found = zip((self._key[row] for row in rows), ages, self._group_at[self._made[rows]].tolist(), strict=True)
            freed[int(self._group_at[number])][frozenset(found)] += 1
        usual = {group: max(sets, key=lambda each: sets[each]) for group, sets in freed.items()}
        of_key = {key: (age, by) for key, age, by in sorted(set().union(*usual.values()), key=str)}
        numbered = {key: n for n, key in enumerate(of_key)}
        self._usual = {group: sorted(numbered[key] for key, _, _ in found) for group, found in usual.items()}
        return {key: (n, *of_key[key]) for key, n in numbered.items()}

    def _kind(
        self,
        number: int,
        inputs: tuple[StepInput, StepInput],
        carried: Mapping[Hashable, tuple[int, int, int]],
        until: int = -1,
        freed_by: int = -1,
    ) -> StepKind | None:
        """A step, or all before ``until``; None if it does not fit between others.

        Of what comes before, steps after ``freed_by`` may free anything: a script that ends frees all.
        """
        is_before = until >= 0
        last = until - 1 if is_before else number
        what = self._events[(self._step_at <= last) & (is_before | (self._step_at == number))].astype("i8")
        block = what[what >= 0]
        numbers, stays = self._left(block, last, carried)
        left, group, rows = numbers >= 0, int(self._group_at[last]), list(carried.values())
        generation = np.where(left, self._age(block, last), 0).astype("i4")
        found = list(zip(numbers[left].tolist(), generation[left].tolist(), strict=True))
        made = self._so_far[:, last] - self._so_far[:, 0] if is_before else np.arange(len(self._so_far)) == group
        most = {(n, g) for n, age, by in carried.values() for g in range(max(age, 1) if is_before else int(made[by]))}
        least = {
            (n, g) for n, g in most for _, age, by in (rows[n],) if g < min(int(made[by]), age if is_before else 1)
        }
        if len(set(found)) < len(found) or not least <= set(found) <= most:
            return None
        is_freed = (self._freed[block] >= 0) & (self._freed[block] <= freed_by)
        if (stays & (is_freed | (not is_before))).any():
            return None
        codes = self._codes(what, block, number, carried)
        if codes is None:
            return None
        freed = _FREE_CARRIED - codes[(codes <= _FREE_CARRIED) & (codes != _EMPTY_CACHE)]
        if not is_before and sorted(freed.tolist()) != self._usual[group]:
            return None
        kind = _constant((number, self._names.get(number, ""), group), inputs, codes, block, self._frame)
        return replace(kind, carried=numbers, generation=generation)

    def _left(
        self, block: Ints, last: int, carried: Mapping[Hashable, tuple[int, int, int]]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """Number the carried blocks after this step, and list the others that are still there."""
        freed = self._freed[block]
        known = np.array([carried.get(self._key[row], (-1, 0, 0)) for row in block.tolist()], "i8").reshape(-1, 3)
        is_alive = (freed > last) | (freed < 0)
        age = self._age(block, np.where(freed < 0, self._last, freed))
        is_carried = (
            (known[:, 0] >= 0) & is_alive & ((age == known[:, 1]) | ((freed < 0) & (age < np.maximum(known[:, 1], 1))))
        )
        return np.where(is_carried, known[:, 0], -1).astype("i4"), is_alive & ~is_carried

    def _codes(
        self, what: Ints, block: Ints, number: int, carried: Mapping[Hashable, tuple[int, int, int]]
    ) -> npt.NDArray[np.int32] | None:
        position = np.full(len(self._frame), -1)
        position[block] = np.arange(len(block))
        codes = what.copy()
        codes[what >= 0] = position[block]
        is_free = (what < 0) & (what != _EMPTY_CACHE)
        own = position[~what[is_free]]
        codes[is_free] = ~own
        for index in np.flatnonzero(is_free)[own < 0].tolist():
            row = int(~what[index])
            which, age, _ = carried.get(self._key[row], (-1, 0, 0))
            if which < 0 or self._age(np.array([row]), number)[0] != age:
                return None
            codes[index] = _FREE_CARRIED - which
        return codes.astype("i4")


def _played_steps(recording: Recording) -> Ints:
    """The step of each event; what follows a step's optimizer, such as an evaluation's batch, is of the next one."""
    ran = np.arange(len(recording.op_scope))
    places, op = scope_columns(recording, ran), np.maximum.accumulate(recording.device_events["op"])
    of_op, step = places["step"].to_numpy("i8"), np.maximum.accumulate(event_places(recording)["step"].to_numpy("i8"))
    optimizer = np.flatnonzero(places["phase"] == "optimizer")
    last = np.full(int(step.max(initial=0)) + 1, len(ran))
    known = optimizer[of_op[optimizer] < len(last)]
    last[of_op[known]] = known
    return np.asarray(step + (op > last[step]))


def _fitted(kinds: Sequence[StepKind]) -> list[StepKind]:
    """Kinds with the sizes that follow lengths, among those that allocate and free alike."""
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for n, kind in enumerate(kinds):
        alike[kind.events.tobytes(), kind.carried.tobytes()].append(n)
    fitted = list(kinds)
    for group in alike.values():
        of_group = [kinds[n] for n in group]
        sizes = np.array([recorded_sizes(kind) for kind in of_group])
        counts = np.array([kind.counts for kind in of_group])
        unique, row = np.unique(sizes, axis=1, return_inverse=True)
        fits = [_fit(size, counts) for size in unique.T]
        base, per, follows = (np.array([fit[n] for fit in fits])[row.ravel()] for n in range(3))
        for n, kind, own in zip(group, of_group, sizes, strict=True):
            is_fitted = base + per * np.array([*kind.counts, 0])[follows] == own
            fitted[n] = replace(
                kind,
                base=np.where(is_fitted, base, own),
                per=np.where(is_fitted, per, 0),
                follows=np.where(is_fitted, follows, -1).astype("i4"),
                is_fitted=is_fitted,
            )
    return fitted


def recorded_sizes(kind: StepKind) -> Ints:
    """The bytes of each of a step's blocks, as recorded."""
    counts = np.array([*kind.counts, 0])
    return np.asarray(kind.base + kind.per * counts[kind.follows])


def _fit(size: Ints, counts: Ints) -> tuple[int, int, int]:
    """``base``, ``per`` and ``follows`` of a block in steps that are alike; a negative base if its size is unknown."""
    num = NUM_COUNTS // 2
    if (counts[:, 0] == counts[0, 0]).all():
        return _UNKNOWN
    if (size == size[0]).all():
        return int(size[0]), 0, -1
    if found := exact_fit(size, counts[:, :num]):
        return found
    has_next = counts[:, num] > 0
    found = exact_fit(size[has_next], counts[has_next, num:]) if has_next.sum() > 1 else None
    return _UNKNOWN if found is None else (found[0], found[1], num + found[2])
