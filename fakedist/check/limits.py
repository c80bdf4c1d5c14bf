"""Budgets and tolerances: which figure, and how much."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fakedist.check.section import Section, did_you_mean
from fakedist.errors import CheckError, JobError
from fakedist.run.schema import CATEGORIES, FAMILIES
from fakedist.units import parse_bytes, parse_share, parse_us

#: Figures of a rank as a whole.
PLAIN = ("peak_allocated", "peak_reserved", "headroom", "step_time")
_FAMILIES = tuple(name for name in FAMILIES if name != "communication")
#: Figures of a part of it, by the part's name.
PARTED = ("categories", "layers", "groups", "families")


@dataclass(frozen=True)
class Figure:
    """A figure that can have a budget.

    Attributes:
        kind: One of PLAIN or PARTED.
        part: The category, the layers' pattern, the group or the family of kernels; empty for those of PLAIN.
    """

    kind: str
    part: str = ""

    @property
    def name(self) -> str:
        """What tables call it."""
        if self.kind in PLAIN:
            return self.kind.replace("_", " ")
        one = {"categories": "category", "layers": "layers", "groups": "group", "families": "kernels of"}
        return f"{one[self.kind]} {self.part}"

    @property
    def is_time(self) -> bool:
        """Whether it is in microseconds; all others are in bytes."""
        return self.kind in ("step_time", "families")


@dataclass(frozen=True)
class Limit:
    """How much of a figure is allowed, or how much more of it than there was.

    Attributes:
        figure: Which.
        amount: Bytes or microseconds; a share where ``is_share``.
        is_share: Whether the amount is a share: of the baseline, or of the GPU's memory for a headroom.
        text: As it was written.
    """

    figure: Figure
    amount: float
    is_share: bool
    text: str

    def of(self, whole: float) -> float:
        """The amount, where it is a share: of ``whole``."""
        return self.amount * whole if self.is_share else self.amount


def read_budgets(section: Section) -> tuple[Limit, ...]:
    """The budgets of a job.

    Raises:
        CheckError: A figure or unit that does not exist.
    """
    return _read(section, PLAIN, _budget)


def read_tolerances(value: Any, section: Section) -> tuple[Limit, ...]:
    """How much more than its baseline a job may take.

    Args:
        value: A text for both peaks, or a table of figures.
        section: Where it was written.

    Raises:
        CheckError: A figure or unit that does not exist.
    """
    where = f"{section.where}, max_increase"
    if isinstance(value, str):
        return tuple(_tolerance(Figure(kind), value, where) for kind in ("peak_allocated", "peak_reserved"))
    return _read(Section(where, value or {}), ("peak_allocated", "peak_reserved", "step_time"), _tolerance)


def _read(section: Section, plain: tuple[str, ...], make: Callable[[Figure, Any, str], Limit]) -> tuple[Limit, ...]:
    found = [
        make(Figure(kind), value, section.where)
        for kind in plain
        if (value := section.take_either(kind, str, int, float)) is not None
    ]
    for kind in PARTED:
        parts = section.take_table(kind)
        for part, value in parts.items():
            if kind == "categories" and part not in CATEGORIES:
                raise CheckError(f"{parts.where}: there is no category {part!r}", did_you_mean(part, CATEGORIES))
            if kind == "families" and part not in _FAMILIES:
                raise CheckError(
                    f"{parts.where}: there is no family of kernels {part!r}", did_you_mean(part, _FAMILIES)
                )
            found.append(make(Figure(kind, part), value, parts.where))
    section.end()
    return tuple(found)


def _budget(figure: Figure, value: Any, where: str) -> Limit:
    example = "900 ms" if figure.is_time else "72 GiB"
    if figure.kind == "headroom" and isinstance(value, str) and "%" in value:
        share = _parsed((parse_share, "5%"), figure, value, where)
        if share > 1:
            raise CheckError(f"{where}: headroom: {value} of the GPU's memory cannot be left", 'headroom = "5%"')
        return Limit(figure, share, True, value)
    return Limit(figure, _parsed((_parser(figure), example), figure, value, where), False, value)


def _tolerance(figure: Figure, value: Any, where: str) -> Limit:
    example = "1%"
    if isinstance(value, str) and "%" in value:
        return Limit(figure, _parsed((parse_share, example), figure, value, where), True, value)
    if isinstance(value, str) and value.strip().startswith("0 "):
        return Limit(figure, 0, False, value)
    return Limit(figure, _parsed((_parser(figure), example), figure, value, where), False, value)


def _parser(figure: Figure) -> Callable[[str], float]:
    return parse_us if figure.is_time else parse_bytes


def _parsed(how: tuple[Callable[[str], float], str], figure: Figure, value: Any, where: str) -> float:
    """A value as a number; ``how`` is what reads it, and an example of what it reads."""
    parse, example = how
    key = figure.part or figure.kind
    hint = f'write it like {key} = "{example}"'
    if not isinstance(value, str):
        raise CheckError(f"{where}: {key} = {value!r} has no unit", hint)
    try:
        return parse(value)
    except JobError as error:
        raise CheckError(f"{where}: {key}: {error.message}", hint) from None
