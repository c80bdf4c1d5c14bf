"""Micro-batches: finds the steady ones of a step, repeats them for those that were not recorded, cuts one into passes.

A step with gradient accumulation, or of a pipeline, launches the same for each micro-batch. In a steady schedule a
stretch of launches repeats: of one micro-batch in 1F1B, of as many as stages in interleaved 1F1B, one each for forwards
and backwards if all forwards run first.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.errors import JobError
from fakedist.rundir.launch_records import LAUNCH_KINDS

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Repeat:
    """A stretch that repeats every ``period``, to the ``end`` of the last whole repetition."""

    start: int
    end: int
    period: int

    @property
    def number(self) -> int:
        """Number of repetitions."""
        return (self.end - self.start) // self.period

    @property
    def last(self) -> slice:
        """The last repetition."""
        return slice(self.end - self.period, self.end)


@dataclass(frozen=True)
class SteadyBatches:
    """The repeated stretches of a step, which together do all that a micro-batch needs.

    ``num_micro_batches`` is how many one repetition of all of them does.
    """

    repeats: tuple[Repeat, ...]
    num_micro_batches: int


@dataclass(frozen=True)
class Step:
    """A step as a sequence.

    Attributes:
        tokens: Equal numbers, from 0, for rows that do the same.
        parts: The part of a micro-batch, such as a product, that each row is, from 0; -1 for rows that do not count.
            Every micro-batch has all parts, each as often as any other micro-batch.
        num_stages: 1 without a pipeline.
    """

    tokens: Numbers
    parts: Numbers
    num_micro_batches: int
    num_stages: int


def find_steady(step: Step) -> SteadyBatches | None:
    """Find what a further micro-batch would repeat, at least twice and with all parts; None if that is uncertain."""
    if step.num_micro_batches < 1:
        return None
    wanted = _of_rows(step, slice(None))
    wanted = np.where(wanted >= step.num_micro_batches, wanted, 0)
    return _together(step, wanted) or _apart(step, wanted)


def _together(step: Step, wanted: Numbers) -> SteadyBatches | None:
    """One stretch with all that some micro-batches do: 1F1B, interleaved or not, zero bubble."""
    anchors = _anchor(step, wanted)
    per_batch = len(anchors) // step.num_micro_batches
    for number in range(1, step.num_micro_batches // 2 + 1):
        for repeat in _repeats(step.tokens, anchors, number * per_batch):
            if np.array_equal(_of_rows(step, repeat.last) * step.num_micro_batches, wanted * number):
                return SteadyBatches((repeat,), number)
    return None


def _apart(step: Step, wanted: Numbers) -> SteadyBatches | None:
    """A stretch for each part of a micro-batch, each over all micro-batches: GPipe.

    A schedule that warms up looks the same if the step has too few micro-batches to get beyond its warm-up.
    """
    if step.num_stages > 1 and step.num_micro_batches <= 2 * step.num_stages:
        return None
    for number in range(1, step.num_micro_batches // 2 + 1):
        left = wanted
        repeats = []
        while len(anchors := _anchor(step, left)) and (repeat := _over_all(step, left, anchors, number)):
            left = np.where(_of_rows(step, repeat.last) > 0, 0, left)
            repeats.append(repeat)
        if not left.any() and len(repeats) > 1:
            return SteadyBatches(tuple(sorted(repeats, key=lambda stretch: stretch.start)), number)
    return None


def _over_all(step: Step, left: Numbers, anchors: Numbers, number: int) -> Repeat | None:
    """A stretch that repeats for all micro-batches, so many at a time, with all rows of its parts."""
    for repeat in _repeats(step.tokens, anchors, number * (len(anchors) // step.num_micro_batches)):
        own = _of_rows(step, repeat.last) * step.num_micro_batches
        # The first and the last micro-batch may differ a little: they gather parameters, reduce gradients.
        is_whole = (repeat.number + 2) * number >= step.num_micro_batches
        if is_whole and np.array_equal(own, np.where(own > 0, left * number, 0)):
            return repeat
    return None


def _anchor(step: Step, wanted: Numbers) -> Numbers:
    if not wanted.any():
        return np.zeros(0, np.int64)
    rows = np.flatnonzero(np.append(wanted, 0)[step.parts] == wanted[wanted > 0].min())
    return np.flatnonzero(step.parts == step.parts[rows[0]])


def _of_rows(step: Step, rows: slice) -> Numbers:
    own = step.parts[rows]
    return np.bincount(own[own >= 0], minlength=int(step.parts.max(initial=-1)) + 1)


def _repeats(tokens: Numbers, anchors: Numbers, apart: int) -> Iterator[Repeat]:
    """Stretches that repeat twice at least, with a period from one of these rows to that ``apart`` later."""
    periods = dict.fromkeys((anchors[apart:] - anchors[:-apart]).tolist()) if 0 < apart < len(anchors) else {}
    for period in periods:
        for start, length in _runs(tokens[period:] == tokens[:-period], period):
            yield Repeat(start, start + (length + period) // period * period, period)


def _runs(same: npt.NDArray[np.bool_], least: int) -> Sequence[tuple[int, int]]:
    """Starts and lengths of runs of True, the longest first."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
    starts = edges[::2]
    ends = edges[1::2]
    long = np.flatnonzero(ends - starts >= least)
    order = long[np.argsort(starts[long] - ends[long], kind="stable")]
    return [(int(starts[at]), int(ends[at] - starts[at])) for at in order]


_RECORDS, _STREAM_WAITS, _HOST_WAITS = "stream_records", "stream_waits", "host_waits"
#: Columns by which rows do the same, in addition to their work and their call.
_ALIKE = ("what", "stream", "device", "phase", "recompute", "layer")
#: The number of an event that was recorded before the step.
_BEFORE_STEP = 1 << 62
#: A steady stretch is seen twice from this many micro-batches on, for each stage of a pipeline; without one, at all.
_ENOUGH_FOR_A_STAGE, _ENOUGH = 4, 4


@dataclass(frozen=True)
class Recorded:
    """The recorded step of a rank. ``num_stages`` is 1 without a pipeline."""

    rank: int
    launches: pd.DataFrame
    work: pd.DataFrame
    calls: pd.DataFrame
    num_stages: int
    num_micro_batches: int


def with_micro_batches(step: Recorded, wanted: int) -> pd.DataFrame:
    """The launches of a step with more micro-batches: its steady stretches are repeated.

    Raises:
        JobError: Fewer are wanted than were recorded, nothing is steady, or it comes in several at once.
    """
    recorded = step.num_micro_batches
    if wanted == recorded:
        return step.launches
    if wanted < recorded:
        raise JobError(f"rank {step.rank} recorded {recorded} micro-batches, and {wanted} is fewer", "record fewer")
    tidy = replace(step, launches=_without_idle_records(step.launches))
    # Made-up routing changes the sizes of experts' products from one micro-batch to the next.
    for tried, exactly in itertools.product((step, tidy), (True, False)):
        tokens = _tokens(tried, exactly)
        steady = find_steady(Step(tokens, _products(tried), recorded, tried.num_stages))
        if steady is not None:
            return _extended(tried.launches, tokens, steady, _number(tried, steady, wanted))
    enough = max(_ENOUGH, _ENOUGH_FOR_A_STAGE * step.num_stages if step.num_stages > 1 else 0)
    hint = f"record {enough} micro-batches" if recorded < enough else f"record all {wanted} micro-batches"
    raise JobError(f"rank {step.rank}: none of its {recorded} micro-batches is steady", hint)


def count_micro_batches(launches: pd.DataFrame, work: pd.DataFrame) -> int:
    """Micro-batches of a step, by how often most layers run their products forward; 0 if none does."""
    is_product = (work["family"].astype(str) == "gemm").to_numpy(bool)
    of_work = launches["work"].to_numpy("i8")
    is_forward = (launches["phase"].astype(str) == "forward").to_numpy(bool) & ~launches["recompute"].to_numpy(bool)
    rows = np.flatnonzero((of_work >= 0) & is_forward)
    rows = rows[is_product[of_work[rows]]]
    keys = pd.DataFrame({"layer": launches["layer"].to_numpy()[rows], "operation": _operations(work)[of_work[rows]]})
    times = keys.value_counts().value_counts()
    return int(times.index[times == times.max()].min()) if len(times) else 0


def _without_idle_records(launches: pd.DataFrame) -> pd.DataFrame:
    """The launches without records of events that nothing waits for, which take no time.

    The allocator makes one when a tensor of several streams is freed, which differs between micro-batches.
    """
    kind = launches["what"].astype(str).to_numpy(str)
    event = launches["event"].to_numpy("u8")
    recorded_at = _recorded_at(kind, event)
    kept = kind != _RECORDS
    kept[recorded_at[recorded_at >= 0]] = True
    is_measured = "host_us" in launches and launches["host_us"].notna().any()
    if is_measured or kept.all():
        return launches  # each row has its own measured time of the host
    # The host's operations before a row that goes count before the next one that stays.
    reached = np.cumsum(launches["num_operations"].to_numpy("i8"))[kept]
    busy: pd.DataFrame = launches[kept].reset_index(drop=True)
    return busy.assign(num_operations=np.diff(reached, prepend=0))


def _number(step: Recorded, steady: SteadyBatches, wanted: int) -> int:
    more = wanted - step.num_micro_batches
    if more % steady.num_micro_batches:
        least = wanted - more % steady.num_micro_batches
        raise JobError(
            f"rank {step.rank} runs its micro-batches {steady.num_micro_batches} at a time, and {wanted} is not "
            f"{step.num_micro_batches} and a multiple of that more",
            f"--micro-batches {least} or {least + steady.num_micro_batches}",
        )
    return more // steady.num_micro_batches


def _operations(work: pd.DataFrame) -> npt.NDArray[np.int64]:
    names = work["kind"].astype(str) + " " + work["operation"].astype(str) + " " + work["family"].astype(str)
    return pd.factorize(names)[0].astype(np.int64)


def _tokens(step: Recorded, exactly: bool) -> Numbers:
    """The action of each row, as a number. An event also counts by what is launched before and after it."""
    launches, calls = step.launches, step.calls
    of_work = launches["work"].to_numpy("i8")
    adds = step.work["accumulates"].to_numpy(bool)  # the first micro-batch adds to no gradient
    work = np.arange(len(step.work)) if exactly else 2 * _operations(step.work) + adds
    columns = {name: launches[name].to_numpy() for name in _ALIKE}
    columns["work"] = np.append(work, -1)[of_work]
    by_sequence = calls.drop_duplicates("sequence").set_index("sequence")
    call = launches["call"].to_numpy("i8")
    for name in ("operation", "group", "peer"):
        codes = pd.Series(pd.factorize(by_sequence[name])[0], index=by_sequence.index)
        columns[f"call_{name}"] = codes.reindex(call, fill_value=-1).to_numpy("i8")
    own = _numbered(columns)
    rows = np.arange(len(own))
    works = of_work >= 0
    before = np.maximum.accumulate(np.where(works, rows, -1))
    after = np.minimum.accumulate(np.where(works, rows, len(own))[::-1])[::-1]
    ends = np.append(own, -1)
    neighbours = {"own": own, "before": np.where(works, -1, ends[before]), "after": np.where(works, -1, ends[after])}
    return _numbered(neighbours)


def _numbered(columns: dict[str, npt.NDArray[np.generic]]) -> Numbers:
    groups = pd.DataFrame(columns).groupby(list(columns), sort=False, observed=True)
    return np.asarray(groups.ngroup(), np.int64)


def _products(step: Recorded) -> Numbers:
    """A number for each distinct product or attention, whatever its sizes; -1 for other rows."""
    launches = step.launches
    of_work = step.launches["work"].to_numpy("i8")
    is_product = step.work["family"].astype(str).isin(("gemm", "attention")).to_numpy(bool)
    counts = np.append(is_product, False)[of_work] & (launches["phase"].astype(str) != "optimizer").to_numpy(bool)
    columns = {name: launches[name].to_numpy()[counts] for name in _ALIKE}
    columns["work"] = _operations(step.work)[of_work[counts]]
    parts = np.full(len(launches), -1)
    parts[counts] = _numbered(columns)
    return parts


def _extended(launches: pd.DataFrame, tokens: Numbers, steady: SteadyBatches, number: int) -> pd.DataFrame:
    order, copy = _order(len(launches), steady.repeats, number)
    rows = launches.iloc[order].reset_index(drop=True)
    events = _events(launches, tokens, steady.repeats, order)
    numbers: dict[str, Numbers] = {}
    for name, first in (("op", 0), ("graph", 1)):  # a repeated operation or graph has a number of its own
        own = rows[name].to_numpy("i8")
        numbers[name] = np.where(own >= first, own + copy * (int(own.max(initial=0)) + 1), own)
    return rows.assign(event=events.astype("u8"), **numbers)


def _order(length: int, repeats: Sequence[Repeat], number: int) -> tuple[Numbers, Numbers]:
    """The recorded row of each row, and which copy of it that is, from 0."""
    orders = []
    copies = []
    at = 0
    for repeat in repeats:
        orders.append(np.arange(at, repeat.end))
        copies.append(np.zeros(repeat.end - at, np.int64))
        at = repeat.end
        rows = np.arange(number * repeat.period)
        span = repeat.number * repeat.period
        orders.append(repeat.end - span + rows % span)
        copies.append(1 + rows // span)
    orders.append(np.arange(at, length))
    copies.append(np.zeros(length - at, np.int64))
    return np.concatenate(orders), np.concatenate(copies)


def _events(launches: pd.DataFrame, tokens: Numbers, repeats: Sequence[Repeat], order: Numbers) -> Numbers:
    """The event of each row: the n-th wait of its kind waits for the n-th record of its kind, as recorded."""
    kind = launches["what"].astype(str).to_numpy(str)
    event = launches["event"].to_numpy("u8")
    recorded_at = _recorded_at(kind, event)
    occurrence, occurrence_now = _occurrences(tokens), _occurrences(tokens[order])
    sizes = np.bincount(tokens)
    in_repeats = sum(
        (np.bincount(tokens[repeat.last], minlength=len(sizes)) for repeat in repeats), np.zeros_like(sizes)
    )
    number = (len(order) - len(tokens)) // sum(repeat.period for repeat in repeats)
    rows_by_token = np.argsort(tokens[order], kind="stable")
    begins = np.concatenate([[0], np.cumsum(np.bincount(tokens[order], minlength=len(sizes)))])

    waits = np.flatnonzero(recorded_at[order] >= 0)
    source = order[waits]
    record = recorded_at[source]
    often, often_recorded = in_repeats[tokens[source]], in_repeats[tokens[record]]
    # How many repetitions later than in the recorded step this wait stands.
    later = (occurrence_now[waits] - occurrence[source]) // np.maximum(often, 1)
    behind = record >= _first_of(tokens, repeats)[tokens[record]]
    later = np.where(often > 0, later, np.where(behind, number, 0))
    target = occurrence[record] + later * often_recorded
    renamed = np.where(event[order] > 0, _BEFORE_STEP, 0).astype(np.int64)
    is_record = kind[order] == _RECORDS
    renamed[is_record] = 1 + np.flatnonzero(is_record)
    renamed[waits] = 1 + rows_by_token[begins[tokens[record]] + target]
    return renamed


def _recorded_at(kind: npt.NDArray[np.str_], event: npt.NDArray[np.uint64]) -> Numbers:
    """The row that records the event which a row waits for; -1 for other rows, and for what is recorded elsewhere."""
    rows = np.full(len(kind), -1)
    last: dict[int, int] = {}
    is_record, is_wait = kind == _RECORDS, np.isin(kind, (_STREAM_WAITS, _HOST_WAITS)) & (event > 0)
    for row in np.flatnonzero(is_record | is_wait).tolist():
        if is_record[row]:
            last[int(event[row])] = row
        else:
            rows[row] = last.get(int(event[row]), -1)
    return rows


def _occurrences(tokens: Numbers) -> Numbers:
    return np.asarray(pd.Series(tokens).groupby(tokens).cumcount(), np.int64)


def _first_of(tokens: Numbers, repeats: Sequence[Repeat]) -> Numbers:
    firsts = np.zeros(int(tokens.max(initial=-1)) + 1, np.int64)
    for repeat in reversed(repeats):
        firsts[tokens[repeat.last]] = repeat.start
    return firsts


_NUMBER = re.compile(r"(?:^|\.)(\d+)$")


def unit_rows(names: Sequence[str], parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """By row of ``layers``, the row of the unit that it is in (0 for none), and the number in its name (-1 for none).

    The outermost module whose name ends in a number is a unit; so is one that has none within it and is in none.
    """
    numbers = [int(found[1]) if (found := _NUMBER.search(name)) else -1 for name in names]
    unit, holds = [0] * len(names), [False] * len(names)
    for row in range(len(names) - 1, 0, -1):
        holds[parents[row]] |= holds[row] or numbers[row] >= 0
    for row, parent in enumerate(parents):
        unit[row] = unit[parent] or (row if parent and (numbers[row] >= 0 or not holds[row]) else 0)
    return unit, numbers


def repeated_passes(rows: list[int], token: Sequence[object], unit: Numbers) -> list[list[int]]:
    """The rows of a unit's passes that follow one another: what each does once shows where the next begins."""
    counts = Counter(token[row] for row in rows if unit[row])
    once = next((at for at, row in enumerate(rows) if unit[row] and counts[token[row]] == min(counts.values())), 0)
    begins = [at - once for at, row in enumerate(rows) if token[row] == token[rows[once]]]
    return [rows[begin:end] for begin, end in zip(begins, [*begins[1:], len(rows)], strict=True)]


def backward_kind(makes: Numbers, before: str) -> str:
    """B, I or W, by what products make (1 gradients of weights, -1 others); a backward without any is as the last."""
    has_weights, has_others = bool((makes > 0).any()), bool((makes < 0).any())
    if not has_weights and not has_others:
        return before if before != "F" else "B"
    return "B" if has_weights and has_others else "W" if has_weights else "I"


def backward_parts(rows: list[int], makes: Numbers, unit: Numbers) -> list[list[int]]:
    """The rows of a pass; those of two if all gradients of weights come before all others, or after them.

    One backward of several products makes both gradients of one after the other.
    """
    weights, others = ([at for at, row in enumerate(rows) if makes[row] == sign] for sign in (1, -1))
    if min(len(weights), len(others)) < 2 or (weights[-1] > others[0] and others[-1] > weights[0]):
        return [rows]
    last = min(weights[-1], others[-1])
    cut = next((at for at in range(last + 1, len(rows)) if unit[rows[at]]), len(rows))
    return [rows[:cut], rows[cut:]]


assert {_RECORDS, _STREAM_WAITS, _HOST_WAITS} <= set(LAUNCH_KINDS)
