"""Budgets and tolerances: limits on figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fakedist.errors import CheckError, JobError, did_you_mean
from fakedist.run.schema import CATEGORIES, FAMILIES
from fakedist.section import Section
from fakedist.units import parse_bytes, parse_share, parse_us

#: Figures of a rank as a whole.
PLAIN = ("peak_allocated", "peak_reserved", "headroom", "step_time")
_FAMILIES = tuple(name for name in FAMILIES if name != "communication")
#: Figures of a part of a rank, by the part's name.
PARTED = ("categories", "layers", "groups", "families")


@dataclass(frozen=True)
class Figure:
    """A figure that can have a budget.

    Attributes:
        kind: One of PLAIN or PARTED.
        part: The category, the layers' pattern, the group or the family of kernels. Empty for a PLAIN figure.
    """

    kind: str
    part: str = ""

    @property
    def name(self) -> str:
        """The figure's name in tables."""
        if self.kind in PLAIN:
            return self.kind.replace("_", " ")
        one = {"categories": "category", "layers": "layers", "groups": "group", "families": "kernels of"}
        return f"{one[self.kind]} {self.part}"

    @property
    def is_time(self) -> bool:
        """Whether the figure is in microseconds. All others are in bytes."""
        return self.kind in ("step_time", "families")


@dataclass(frozen=True)
class Limit:
    """How much of a figure is allowed, or how much growth over its baseline.

    Attributes:
        figure: The figure.
        amount: Bytes or microseconds, or a share if ``is_share``.
        is_share: Whether the amount is a share: of the baseline, or of the GPU's memory for a headroom.
        text: The limit as written.
    """

    figure: Figure
    amount: float
    is_share: bool
    text: str

    def of(self, whole: float) -> float:
        """The amount. A share is taken of ``whole``."""
        return self.amount * whole if self.is_share else self.amount


def read_budgets(section: Section) -> tuple[Limit, ...]:
    """Read the budgets of a job.

    Raises:
        CheckError: A figure or unit does not exist.
    """
    return _read(section, PLAIN, _budget)


def read_tolerances(value: object, section: Section) -> tuple[Limit, ...]:
    """Read how much a job may exceed its baseline.

    Args:
        value: A text for both peaks, or a table of figures. None for no tolerance.
        section: The section that contains it.

    Raises:
        CheckError: A figure or unit does not exist.
    """
    where = f"{section.where}, max_increase"
    if isinstance(value, str):
        return tuple(_tolerance(Figure(kind), value, where) for kind in ("peak_allocated", "peak_reserved"))
    if value is not None and not isinstance(value, dict):
        raise CheckError(f"{section.where}: max_increase is a text or a table, not {value!r}", 'max_increase = "1%"')
    return _read(Section(where, value or {}), ("peak_allocated", "peak_reserved", "step_time"), _tolerance)


def _read(section: Section, plain: tuple[str, ...], make: Callable[[Figure, object, str], Limit]) -> tuple[Limit, ...]:
    found = [
        make(Figure(kind), value, section.where) for kind in plain if (value := section.take_any(kind)) is not None
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


def _budget(figure: Figure, value: object, where: str) -> Limit:
    if figure.kind == "headroom" and isinstance(value, str) and "%" in value:
        share = _parsed(parse_share, figure, value, where, example="5%")
        if share.amount > 1:
            raise CheckError(f"{where}: headroom: {value} of the GPU's memory cannot be left", 'headroom = "5%"')
        return replace(share, is_share=True)
    return _parsed(_parser(figure), figure, value, where, example="900 ms" if figure.is_time else "72 GiB")


def _tolerance(figure: Figure, value: object, where: str) -> Limit:
    if isinstance(value, str) and "%" in value:
        return replace(_parsed(parse_share, figure, value, where, example="1%"), is_share=True)
    if isinstance(value, str) and value.strip().startswith("0 "):
        return Limit(figure, 0, False, value)
    return _parsed(_parser(figure), figure, value, where, example="1%")


def _parser(figure: Figure) -> Callable[[str], float]:
    return parse_us if figure.is_time else parse_bytes


def _parsed(parse: Callable[[str], float], figure: Figure, value: object, where: str, *, example: str) -> Limit:
    """A limit whose amount is parsed from a text such as the example."""
    key = figure.part or figure.kind
    hint = f'write it like {key} = "{example}"'
    if not isinstance(value, str):
        raise CheckError(f"{where}: {key} = {value!r} has no unit", hint)
    try:
        return Limit(figure, parse(value), False, value)
    except JobError as error:
        raise CheckError(f"{where}: {key}: {error.message}", hint) from None
