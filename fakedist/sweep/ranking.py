"""The fastest point of those that fit, the trade-off of each point, and the effect of each axis."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from fakedist.sweep.point_rows import RankResult, Row, Status, StepEstimate
from fakedist.sweep.space import Scalar, text_of
from fakedist.units import GIB, format_us

#: The work of a point, per second and GPU, and the field of its step that has it. The first that is known at every
#: point ranks them. Steps per second never do: the smallest batch would win.
UNITS = {
    "tokens/s per GPU": "tokens_per_s_per_gpu",
    "samples/s per GPU": "samples_per_s_per_gpu",
    "model TFLOP/s per GPU": "tflops_per_gpu",
}


def rate_in(unit: str, step: StepEstimate) -> float | None:
    """The rate of a step in one of ``UNITS``; None if it is not known."""
    value: float | None = getattr(step, UNITS[unit])
    return value


@dataclass(frozen=True)
class Speed:
    """The estimated speed of a point in the ranking's unit. ``low`` is the least of its 90 % interval, or the value."""

    value: float
    low: float
    high: float

    def differs_from(self, other: Speed) -> bool:
        """True if neither of two lies within the interval of the other."""
        return not (self.low <= other.value <= self.high or other.low <= self.value <= other.high)


@dataclass(frozen=True)
class Ranked:
    """A point in the ranking. Its ``place`` is 1 plus the number of points that are significantly faster."""

    row: Row
    speed: Speed
    place: int


@dataclass(frozen=True)
class AxisEffect:
    """The effect of an axis, from points that differ in it alone.

    Attributes:
        speed_ratio: The fastest of such points over the slowest, in the median; None if no two have a step.
        memory_bytes: The largest less the smallest, in the median; None if no two ran.
        best: The value that is significantly fastest most often; empty if there is none.
        num_groups: Groups of points that differ in it alone.
    """

    axis: str
    speed_ratio: float | None
    memory_bytes: int | None
    best: str
    num_groups: int


@dataclass(frozen=True)
class Ranking:
    """The answer of a sweep. Points are known by their IDs.

    Attributes:
        ranked: The points that fit with the headroom that was asked for, fastest first.
        speeds: Speeds of points that have a step.
        unit: One of ``UNITS``; empty if none is known at any point, so that nothing is ranked.
        front: The points that no other beats in both memory and speed.
        headroom: Free memory that was asked for, as a share.
        num_too_full: Points that fit, but not with the headroom.
        num_without_step: Points that fit, but whose step is not known.
        num_without_speed: Points that fit and have a step, but no speed in the unit.
        num_without_bubble: Points whose step lacks the bubble of their pipeline.
    """

    ranked: Sequence[Ranked]
    speeds: Mapping[str, Speed]
    unit: str
    front: frozenset[str]
    effects: Sequence[AxisEffect]
    counts: dict[Status, int]
    headroom: float
    num_too_full: int
    num_without_step: int
    num_without_speed: int
    num_without_bubble: int

    @property
    def best(self) -> Ranked | None:
        """The fastest point that fits; None if none does."""
        return self.ranked[0] if self.ranked else None

    @property
    def as_fast(self) -> list[Ranked]:
        """The points that are statistically tied with the fastest."""
        return [entry for entry in self.ranked[1:] if entry.place == 1]


def rank_rows(rows: Sequence[Row], headroom: float) -> Ranking:
    """Rank the points of a sweep."""
    unit = _unit([row.step for row in rows if row.step is not None])
    speeds = {row.id: speed for row in rows if (speed := _speed(row, unit)) is not None}
    fitting = [row for row in rows if row.status is Status.FITS]
    roomy = [row for row in fitting if _has_room(row, headroom)]
    ordered = sorted((row for row in roomy if row.id in speeds), key=lambda row: -speeds[row.id].value)
    if not speeds:  # made with --no-kernels: by memory
        ordered = []
    return Ranking(
        ranked=[Ranked(row, speeds[row.id], _place(row, ordered, speeds)) for row in ordered],
        speeds=speeds,
        unit=unit,
        front=_front([row for row in fitting if row.id in speeds], speeds),
        effects=_effects(rows, speeds),
        counts=dict(Counter(row.status for row in rows)),
        headroom=headroom,
        num_too_full=len(fitting) - len(roomy),
        num_without_step=sum(row.step is None for row in roomy),
        num_without_speed=sum(row.step is not None and row.id not in speeds for row in roomy),
        num_without_bubble=sum(row.step is not None and row.step.bubble_from == "not known" for row in rows),
    )


def _unit(steps: Sequence[StepEstimate]) -> str:
    """The unit that is known at most points, the first of equals; empty if none is.

    Samples of several shapes, sequences of several lengths say, do not compare.
    """
    known = {unit: sum(rate_in(unit, step) is not None for step in steps) for unit in UNITS}
    if len({step.sample_shape for step in steps if step.samples_per_s_per_gpu is not None}) > 1:
        del known["samples/s per GPU"]
    unit = max(known, key=lambda unit: known[unit])
    return unit if known[unit] else ""


def _speed(row: Row, unit: str) -> Speed | None:
    step = row.step
    value = None if step is None or not unit else rate_in(unit, step)
    if step is None or value is None:
        return None
    low, high = ((step.step_us if bound is None else bound) for bound in (step.low_us, step.high_us))
    return Speed(value, value * step.step_us / high, value * step.step_us / low)


def _has_room(row: Row, headroom: float) -> bool:
    fullest, free = row.fullest, row.headroom_bytes
    return fullest is None or free is None or free >= headroom * fullest.capacity_bytes


def _place(row: Row, ordered: Sequence[Row], speeds: dict[str, Speed]) -> int:
    own = speeds[row.id]
    return 1 + sum(speeds[other.id].value > own.value and own.differs_from(speeds[other.id]) for other in ordered)


def _front(rows: Sequence[Row], speeds: dict[str, Speed]) -> frozenset[str]:
    """The points that no other beats in both, or in one with the other equal."""
    front: list[str] = []
    fastest = float("-inf")
    sized = [(fullest.total_bytes, row.id) for row in rows if (fullest := row.fullest) is not None]
    for _, row_id in sorted(sized, key=lambda pair: (pair[0], -speeds[pair[1]].value)):
        if speeds[row_id].value > fastest:
            fastest = speeds[row_id].value
            front.append(row_id)
    return frozenset(front)


def _effects(rows: Sequence[Row], speeds: dict[str, Speed]) -> list[AxisEffect]:
    names = list(dict.fromkeys(name for row in rows for name, _ in row.values))
    effects = [_effect(name, rows, speeds) for name in names]
    return sorted(effects, key=lambda effect: -(effect.speed_ratio or 0.0))


def _effect(name: str, rows: Sequence[Row], speeds: dict[str, Speed]) -> AxisEffect:
    groups: dict[tuple[tuple[str, Scalar], ...], list[Row]] = defaultdict(list)
    for row in rows:
        if row.fullest is not None:
            groups[tuple(pair for pair in row.values if pair[0] != name)].append(row)
    several = [group for group in groups.values() if len(group) > 1]
    ratios, memory = [], []
    best: Counter[str] = Counter()
    for group in several:
        sizes = [fullest.total_bytes for row in group if (fullest := row.fullest) is not None]
        memory.append(max(sizes) - min(sizes))
        timed = sorted((row for row in group if row.id in speeds), key=lambda row: -speeds[row.id].value)
        if len(timed) > 1:
            first, second, last = (speeds[timed[at].id] for at in (0, 1, -1))
            ratios.append(first.value / last.value)
            best.update([text_of(dict(timed[0].values)[name])] if first.differs_from(second) else [])
    return AxisEffect(
        axis=name,
        speed_ratio=median(ratios) if ratios else None,
        memory_bytes=round(median(memory)) if memory else None,
        best=best.most_common(1)[0][0] if best else "",
        num_groups=len(several),
    )


_NAMED_AS_FAST = 3


def short_label(values: Sequence[tuple[str, Scalar]]) -> str:
    """A point as people write it: ``tp2 pp8 recompute=full``."""
    parts = [
        f"{name}{value}" if type(value) is int and not name[-1].isdigit() else f"{name}={text_of(value)}"
        for name, value in values
    ]
    return " ".join(parts) or "the only point"


def sentences(ranking: Ranking) -> Iterator[str]:
    """The counts, the fastest point that fits, and those statistically tied with it."""
    yield counts_text(ranking)
    yield from answer(ranking)


def counts_text(ranking: Ranking) -> str:
    """The number of points of each status: "48 points: 30 fit, 10 do not fit, 8 invalid layout"."""
    number = sum(ranking.counts.values())
    several = {Status.FITS: "fit", Status.DOES_NOT_FIT: "do not fit", Status.SLOWER: "cannot win"}
    parts = [
        f"{count:,} {status if count == 1 else several.get(status, status)}"
        for status in Status
        if (count := ranking.counts.get(status))
    ]
    return f"{number:,} point{'' if number == 1 else 's'}: {', '.join(parts) or 'none ran'}"


def answer(ranking: Ranking) -> Iterator[str]:
    """The fastest point that fits, and what limits that."""
    headroom = f"{ranking.headroom:.0%} headroom"
    best = ranking.best
    if best is None and not ranking.unit and ranking.num_without_speed:
        yield (
            "no ranking: steps of unequal work do not compare, and neither the tokens nor the samples nor the FLOPs of "
            "a step are known; --tokens-per-step N gives the tokens"
        )
    elif best is None:
        yield f"no point fits with {headroom} and has a step"
    else:
        yield f"fastest that fits with {headroom}: {ranked_text(best, ranking.unit)}"
        if best.speed.low == best.speed.high:
            yield "its interval is not known"
        if others := ranking.as_fast:
            named = ", ".join(short_label(entry.row.values) for entry in others[:_NAMED_AS_FAST])
            more = f" and {len(others) - _NAMED_AS_FAST:,} more" if len(others) > _NAMED_AS_FAST else ""
            yield f"statistically tied with it: {named}{more} (within each other's 90 % intervals)"
    if ranking.num_too_full:
        yield f"not ranked, because less than {headroom} is left: {_points(ranking.num_too_full)}"
    if ranking.num_without_step:
        yield f"not ranked, because no step is known: {_points(ranking.num_without_step)}"
    if ranking.num_without_speed and ranking.unit:
        yield f"not ranked, because {ranking.unit} are not known: {_points(ranking.num_without_speed)}"
    if ranking.num_without_bubble:
        yield (
            f"the steps of {_points(ranking.num_without_bubble)} lack the bubble of their pipeline: "
            "--rank stages:all runs every stage"
        )


def ranked_text(ranked: Ranked, unit: str) -> str:
    """A point, its speed and its memory: "tp2 pp8, 1,702 tokens/s per GPU, 68.1 of 79.1 GiB"."""
    fullest = ranked.row.fullest
    memory = "" if fullest is None else f", {memory_text(fullest)}"
    return f"{short_label(ranked.row.values)}, {speed_text(ranked.speed.value)} {unit}{memory}"


def speed_text(value: float) -> str:
    """A speed with three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def memory_text(rank: RankResult) -> str:
    """Memory that a rank takes, of the GPU's: "68.1 of 79.1 GiB"."""
    return f"{rank.total_bytes / GIB:.1f} of {rank.capacity_bytes / GIB:.1f} GiB"


def row_text(row: Row) -> str:
    """A row in one line, for progress."""
    if row.status.ran and row.step is not None and row.fullest is not None:
        speed = next((f"{speed_text(rate)} {unit}" for unit in UNITS if (rate := rate_in(unit, row.step))), "")
        did = speed or f"a step in {format_us(row.step.step_us)}"
        return f"{row.label}: {row.status}, {did}, {memory_text(row.fullest)}"
    more = f": {row.reason}" if row.reason else f", its step is not known: {row.why_no_step}" if row.why_no_step else ""
    return f"{row.label}: {row.status}{more}"


def _points(number: int) -> str:
    return "1 point" if number == 1 else f"{number:,} points"
