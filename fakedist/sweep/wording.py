"""What a sweep found, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fakedist.sweep.axes import Scalar, text_of
from fakedist.sweep.ranking import UNITS, Ranked, Ranking, rate_in
from fakedist.sweep.records import RankResult, Row, Status
from fakedist.units import GIB, format_us

_NAMED_AS_FAST = 3


def short_label(values: Sequence[tuple[str, Scalar]]) -> str:
    """A point as people write it: ``tp2 pp8 recompute=full``."""
    parts = [
        f"{name}{value}" if type(value) is int and not name[-1].isdigit() else f"{name}={text_of(value)}"
        for name, value in values
    ]
    return " ".join(parts) or "the only point"


def sentences(ranking: Ranking) -> Iterator[str]:
    """The counts, the fastest point that fits, and what is not told apart from it."""
    yield counts_text(ranking)
    yield from answer(ranking)


def counts_text(ranking: Ranking) -> str:
    """How many points came to what: "48 points: 30 fit, 10 do not fit, 8 invalid layout"."""
    number = sum(ranking.counts.values())
    several = {Status.FITS: "fit", Status.DOES_NOT_FIT: "do not fit"}
    parts = [
        f"{count:,} {status if count == 1 else several.get(status, status)}"
        for status in Status
        if (count := ranking.counts.get(status))
    ]
    return f"{number:,} point{'' if number == 1 else 's'}: {', '.join(parts) or 'none ran'}"


def answer(ranking: Ranking) -> Iterator[str]:
    """The fastest point that fits, and what limits that."""
    share = f"{ranking.headroom:.0%} headroom"
    best = ranking.best
    if best is None and not ranking.unit and ranking.num_without_speed:
        yield (
            "no ranking: steps of unequal work do not compare, and neither the tokens nor the samples nor the FLOPs of "
            "a step are known; --tokens-per-step N gives the tokens"
        )
    elif best is None:
        yield f"no point fits with {share} and has a step"
    else:
        yield f"fastest that fits with {share}: {ranked_text(best, ranking.unit)}"
        if best.speed.low == best.speed.high:
            yield "its interval is not known"
        if others := ranking.as_fast:
            named = ", ".join(short_label(each.row.values) for each in others[:_NAMED_AS_FAST])
            more = f" and {len(others) - _NAMED_AS_FAST:,} more" if len(others) > _NAMED_AS_FAST else ""
            yield f"not told apart from it: {named}{more} (within each other's 90 % intervals)"
    if ranking.num_too_full:
        yield f"{_points(ranking.num_too_full)} fit with less than {share}"
    if ranking.num_without_step:
        yield f"{_points(ranking.num_without_step)} fit and have no step, and are not ranked"
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
    """What a rank takes, of what there is: "68.1 of 79.1 GiB"."""
    return f"{rank.total_bytes / GIB:.1f} of {rank.capacity_bytes / GIB:.1f} GiB"


def row_text(row: Row) -> str:
    """A row in one line, for progress."""
    if row.status.ran and row.step is not None and row.fullest is not None:
        speed = next((f"{speed_text(rate)} {unit}" for unit in UNITS if (rate := rate_in(unit, row.step))), "")
        did = speed or f"a step in {format_us(row.step.step_us)}"
        return f"{row.label}: {row.status}, {did}, {memory_text(row.fullest)}"
    return f"{row.label}: {row.status}{f': {row.reason}' if row.reason else ''}"


def _points(number: int) -> str:
    return "1 point" if number == 1 else f"{number:,} points"
