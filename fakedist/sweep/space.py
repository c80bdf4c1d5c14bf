"""A space: axes, values derived from them, and the conditions that its points meet."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from fakedist.errors import SweepError, did_you_mean
from fakedist.sweep.axes import Axis, Scalar, text_of
from fakedist.sweep.columns import COLUMNS
from fakedist.sweep.expressions import Expression

#: More points than this need a number of trials.
MAX_POINTS = 10_000
#: Combinations that are looked at. More take minutes, and then the conditions say little.
_MAX_LOOKED_AT = 200_000


@dataclass(frozen=True)
class Point:
    """One point of a space.

    Attributes:
        values: The value of each axis, in the order of the axes.
    """

    values: tuple[tuple[str, Scalar], ...]

    @property
    def label(self) -> str:
        """The point in one line: ``tp=2 pp=8``."""
        return " ".join(f"{name}={text_of(value)}" for name, value in self.values) or "the only point"


@dataclass(frozen=True)
class Space:
    """A space of points.

    Attributes:
        axes: Its axes. The last one changes fastest.
        derived: Values that follow from those of the axes, by name. Each may use those before it.
        conditions: What each point meets.
        constants: Names with one value, such as the world size.

    Raises:
        SweepError: An expression uses a name that does not exist, or two things have one name.
    """

    axes: tuple[Axis, ...]
    derived: tuple[tuple[str, Expression], ...] = ()
    conditions: tuple[Expression, ...] = ()
    constants: Mapping[str, Scalar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = [*self.constants, *(axis.name for axis in self.axes)]
        for name, expression in self.derived:
            self._check_names(expression, known)
            known.append(name)
        for condition in self.conditions:
            self._check_names(condition, known)
        for axis in self.axes:
            if axis.name in COLUMNS:
                raise SweepError(
                    f"{axis.name} cannot name an axis: it is a column of the result", f"rename {axis.name}"
                )
        for name in known:
            if known.count(name) > 1:
                raise SweepError(f"{name} is named twice: as an axis, a derived value or an option", f"rename {name}")

    @property
    def size(self) -> int:
        """Points without any condition."""
        return math.prod(len(axis.values) for axis in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that a placeholder can use."""
        return (*self.constants, *(axis.name for axis in self.axes), *(name for name, _ in self.derived))

    def axes_behind(self, names: Iterator[str]) -> frozenset[str]:
        """The axes that these names follow from."""
        behind = {axis.name: frozenset((axis.name,)) for axis in self.axes}
        for name, expression in self.derived:
            behind[name] = frozenset[str]().union(*(behind.get(each, frozenset()) for each in expression.names))
        return frozenset[str]().union(*(behind.get(name, frozenset()) for name in names))

    def named_values(self, point: Point) -> dict[str, Scalar]:
        """The values of all names at a point."""
        found = {**self.constants, **dict(point.values)}
        for name, expression in self.derived:
            found[name] = expression.value(found)
        return found

    def allows(self, point: Point) -> bool:
        """Whether a point meets every condition."""
        return not self.broken_condition(point)

    def broken_condition(self, point: Point) -> str:
        """The first condition that a point does not meet; empty if it meets all."""
        found = self.named_values(point)
        return next((each.text for each in self.conditions if not each.value(found)), "")

    def points(self) -> Iterator[Point]:
        """The points that meet every condition. A condition is tested as soon as the axes that it needs have values.

        Raises:
            SweepError: Too many combinations would have to be looked at.
        """
        yield from self._below([], [0])

    def _below(self, values: list[tuple[str, Scalar]], looked_at: list[int]) -> Iterator[Point]:
        depth = len(values)
        looked_at[0] += 1
        if looked_at[0] > _MAX_LOOKED_AT:
            raise SweepError(
                f"more than {_MAX_LOOKED_AT:,} combinations would have to be looked at", "--sampler tpe --trials 60"
            )
        if not self._possible(values):
            return
        if depth == len(self.axes):
            yield Point(tuple(values))
            return
        axis = self.axes[depth]
        for value in axis.values:
            yield from self._below([*values, (axis.name, value)], looked_at)

    def _possible(self, values: list[tuple[str, Scalar]]) -> bool:
        """Whether the values of the first axes meet the conditions that need the last of them and no further axis."""
        found = {**self.constants, **dict(values)}
        newest = {values[-1][0]} if values else set()
        for name, expression in self.derived:
            if expression.names <= set(found):
                found[name] = expression.value(found)
                if expression.names & newest:
                    newest.add(name)
        due = (each for each in self.conditions if each.names <= set(found))
        return all(each.value(found) for each in due if not values or each.names & newest)

    def _check_names(self, expression: Expression, known: list[str]) -> None:
        for name in sorted(expression.names):
            if name not in known:
                raise SweepError(
                    f"{expression.text!r} uses {name}, which is no axis", did_you_mean(name, known) or "add an axis"
                )


def all_points(space: Space) -> list[Point]:
    """The points of a space that is run as a whole.

    Raises:
        SweepError: No point meets the conditions, or there are too many.
    """
    found: list[Point] = []
    for point in space.points():
        found.append(point)
        if len(found) > MAX_POINTS:
            raise SweepError(
                f"the space has more than {MAX_POINTS:,} points (of {space.size:,} without conditions)",
                "--sampler tpe --trials 60 runs some of them; or add a condition: --where",
            )
    if not found:
        raise SweepError(
            f"no point of {space.size:,} meets the conditions: {'; '.join(each.text for each in space.conditions)}",
            "change or leave out a condition",
        )
    return found
