"""A space: axes, values derived from them, and the conditions that its points meet.

An expression can compute and compare. It has no attributes, subscripts, comprehensions and imports, and only the
functions listed here, so that a sweep file from elsewhere cannot run anything by it.

Reading what is not a name, a range or an axis raises SweepError.
"""

from __future__ import annotations

import ast
import math
import operator
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TypeAlias

import simpleeval

from fakedist.errors import SweepError, did_you_mean
from fakedist.section import Section

COLUMNS = (
    *("id", "status", "place", "on_front", "reason", "layer", "line"),
    *("peak_allocated_bytes", "peak_reserved_bytes", "nccl_low_bytes", "nccl_high_bytes", "context_bytes"),
    *("total_bytes", "capacity_bytes", "headroom_bytes"),
    *("step_us", "step_low_us", "step_high_us", "bubble_us", "bubble_from", "communication_us"),
    *("tokens_per_step", "tokens_per_s_per_gpu", "samples_per_step", "sample_shape", "samples_per_s_per_gpu"),
    *("tflops_per_gpu", "mfu", "mfu_torchtitan", "priced_gpu", "priced_fabric"),
    *("ranks", "has_every_stage", "stages", "is_check"),
    *("run", "host", "worker", "wall_s", "peak_rss_bytes"),
)


#: A value of an axis.
Scalar: TypeAlias = bool | int | float | str

#: Draws in a row that lead to no new point, after which the space counts as used up.
_MOST_IN_VAIN = 2_000
#: More values than any axis needs; catches slips of the pen.
MAX_VALUES = 10_000
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_INTEGER = re.compile(r"[+-]?\d{1,18}")
_NUMBER = re.compile(r"[+-]?(\d{1,18}(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?")
_RANGE = re.compile(r"(?P<first>[^.\s][^\s]*?)\.\.(?P<last>[^\s+*]+)(?P<by>[+*][^\s]+)?")
_AXIS_EXAMPLE = "tp = [1, 2, 4, 8]"


@dataclass(frozen=True)
class Axis:
    """One axis of a space, values in order.

    Attributes:
        name: A letter, then letters, digits and underscores.
        arguments: By value: several words, or none, that replace its placeholder.
    """

    name: str
    values: tuple[Scalar, ...]
    arguments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def level(self, value: Scalar) -> int:
        """The position of a value: of named values in the order of their names, else of numbers by size."""
        texts = [*self.arguments] or [text_of(number) for number in sorted(self.values)]
        return texts.index(text_of(value))


def check_name(name: str, where: str) -> str:
    """A name that placeholders and conditions can use."""
    if not _NAME.fullmatch(name) or name in ("and", "or", "not", "in", "is", "if", "else", "true", "false"):
        raise SweepError(
            f"{where}: {name!r} cannot be a name: it is a letter, then letters, digits and underscores", _AXIS_EXAMPLE
        )
    return name


def read_scalar(text: str) -> Scalar:
    """A value from its text: a whole number, a number, true or false, else the text itself."""
    if _INTEGER.fullmatch(text):
        return int(text)
    if _NUMBER.fullmatch(text):
        return float(text)
    return {"true": True, "false": False}.get(text, text)


def text_of(value: Scalar) -> str:
    """The text that a placeholder becomes."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def read_values(text: str, where: str) -> list[Scalar]:
    """The values in a text: ``1,2,4``, ``1..8``, ``0..100+10`` and ``1..64*2``."""
    values: list[Scalar] = []
    for piece in text.split(","):
        if (range_ := _RANGE.fullmatch(piece.strip())) is None:
            values.append(read_scalar(piece.strip()))
            continue
        first, last = (read_scalar(range_[name]) for name in ("first", "last"))
        by = range_["by"] or "+1"
        values += _range(first, last, by[0], read_scalar(by[1:]), where)
    return values


def axis_of_text(text: str) -> Axis:
    """An axis from a command line: ``tp=1,2,4,8``."""
    name, equals, values = text.partition("=")
    if not equals or not values:
        raise SweepError(f"--axis {text!r} has no values", "--axis tp=1,2,4,8")
    check_name(name, "--axis")
    return _checked(Axis(name, tuple(read_values(values, f"--axis {name}"))))


def axis_of_toml(name: str, plain: object, where: str) -> Axis:
    """An axis from a sweep file: a list of values; a text as on the command line; or a table.

    A table has ``values``, ``from`` and ``to`` (and ``step`` or ``factor``), or ``named``.
    """
    check_name(name, where)
    where = f"{where}, axis {name}"
    if not isinstance(plain, dict):
        return _checked(Axis(name, tuple(_plain_values(plain, where))))
    section = Section(where, plain, SweepError)
    if section.take_any("monotone") is not None:
        raise SweepError(f"{where}: monotone was removed: every point runs", "leave it out")
    values = section.take_any("values")
    named = section.take("named", dict)
    bounds = {key: section.take_any(key) for key in ("from", "to", "step", "factor")}
    section.end()
    forms = [values is not None, named is not None, bounds["from"] is not None or bounds["to"] is not None]
    if sum(forms) != 1:
        raise SweepError(f"{where} has one of values, named, or from and to", f"{name} = {{ from = 1, to = 8 }}")
    if named is not None:
        arguments = {str(key): _words(words, f"{where}, {key}") for key, words in named.items()}
        return _checked(Axis(name, tuple(arguments), arguments))
    listed = _plain_values(values, where) if values is not None else _bounded(bounds, where)
    return _checked(Axis(name, tuple(listed)))


def _plain_values(plain: object, where: str) -> Sequence[Scalar]:
    if isinstance(plain, str):
        return read_values(plain, where)
    values: list[Scalar] = []
    for value in plain if isinstance(plain, list) else [plain]:
        if not isinstance(value, bool | int | float | str):
            raise SweepError(
                f"{where}: {value!r} is not a value: a value is a number, a text, true or false", _AXIS_EXAMPLE
            )
        values.append(value)
    return values


def _bounded(bounds: Mapping[str, object], where: str) -> list[Scalar]:
    if bounds["step"] is not None and bounds["factor"] is not None:
        raise SweepError(f"{where} has both a step and a factor", "leave one out")
    by = bounds["factor"] if bounds["factor"] is not None else bounds["step"] if bounds["step"] is not None else 1
    return _range(bounds["from"], bounds["to"], "+" if bounds["factor"] is None else "*", by, where)


def _range(first: object, last: object, how: str, by: object, where: str) -> list[Scalar]:
    numbers = [end for end in (first, last, by) if isinstance(end, int | float) and not isinstance(end, bool)]
    if len(numbers) < 3 or not all(abs(number) < 1e18 for number in numbers):
        raise SweepError(f"{where}: a range goes from a number to a number, not from {first!r} to {last!r}", "1..64*2")
    start, end, step = numbers
    if (how == "+" and step <= 0) or (how == "*" and (step <= 1 or start <= 0)):
        raise SweepError(f"{where}: a range grows: by a step above 0, or from above 0 by a factor above 1", "1..64*2")
    values: list[Scalar] = list(_steps(start, end, how, step))
    if len(values) > MAX_VALUES:
        raise SweepError(f"{where} has more than {MAX_VALUES:,} values", "give a larger step, or a factor: 1..64*2")
    if not values:
        raise SweepError(f"{where}: a range goes upwards, not from {start} to {end}", f"{end}..{start}")
    return values


def _steps(start: float, end: float, how: str, step: float) -> Iterator[float]:
    """Steps in decimals, as they were written: three of 0.1 are 0.3, which floats exceed."""
    first, last, by = (Decimal(str(number)) for number in (start, end, step))
    is_whole = isinstance(start, int) and isinstance(step, int)
    for count in range(MAX_VALUES + 1):
        value = first + count * by if how == "+" else first * by**count
        if value > last:
            return
        yield int(value) if is_whole else float(value)


def _words(plain: object, where: str) -> tuple[str, ...]:
    words: list[str] = []
    for word in plain if isinstance(plain, list) else [plain]:
        if not isinstance(word, bool | int | float | str):
            raise SweepError(f"{where}: arguments are a list of texts, not {plain!r}", 'full = ["--recompute", "full"]')
        words.append(text_of(word))
    return tuple(words)


def _checked(axis: Axis) -> Axis:
    seen: set[tuple[type, Scalar]] = set()
    for value in axis.values:
        if (type(value), value) in seen or text_of(value) in {text_of(other) for _, other in seen}:
            raise SweepError(f"axis {axis.name} names {text_of(value)} twice", "name each value once")
        seen.add((type(value), value))
        if "\0" in text_of(value):
            raise SweepError(f"axis {axis.name}: a value has a NUL character", _AXIS_EXAMPLE)
    if not axis.values:
        raise SweepError(f"axis {axis.name} has no values", _AXIS_EXAMPLE)
    if len(axis.values) > MAX_VALUES:
        raise SweepError(f"axis {axis.name} has more than {MAX_VALUES:,} values", "give fewer")
    return axis


_CONDITION_EXAMPLE = '"tp * pp * cp <= 64"'
_LONGEST = 1_000
_MAX_NODES = 200
_LARGEST = 10**18


def _of_numbers(compute: Callable[..., object]) -> Callable[..., object]:
    """The operation for numbers only: repeated or formatted texts could fill the memory."""

    def checked(*values: object) -> object:
        for value in values:
            if not isinstance(value, int | float):
                raise TypeError(f"{value!r:.40} is not a number")
        return compute(*values)

    return checked


def _add(one: object, other: object) -> object:
    return one + other if isinstance(one, str) and isinstance(other, str) else _of_numbers(operator.add)(one, other)


def _power(base: float, exponent: float) -> float:
    if abs(base) > 1e6 or abs(exponent) > 64:
        raise OverflowError("the power is too large")
    return float(base**exponent) if exponent < 0 else base**exponent


FUNCTIONS: Mapping[str, Callable[..., object]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "int": int,
    "round": round,
    "gcd": math.gcd,
    "log2": math.log2,
    "ceil_div": lambda number, divisor: -(-number // divisor),
}
_OPERATORS: Mapping[type[ast.AST], Callable[..., object]] = {
    ast.Add: _add,
    ast.Sub: _of_numbers(operator.sub),
    ast.Mult: _of_numbers(operator.mul),
    ast.Div: _of_numbers(operator.truediv),
    ast.FloorDiv: _of_numbers(operator.floordiv),
    ast.Mod: _of_numbers(operator.mod),
    ast.Pow: _of_numbers(_power),
    ast.USub: _of_numbers(operator.neg),
    ast.UAdd: _of_numbers(operator.pos),
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, several: one in several,
    ast.NotIn: lambda one, several: one not in several,
}
_NODES = (
    *(ast.Expr, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Call, ast.Name, ast.Constant),
    *(ast.Tuple, ast.List, ast.And, ast.Or, ast.Load, *_OPERATORS),
)
_NAMED_CONSTANTS = {"true": True, "false": False}
_MISTAKES = (simpleeval.InvalidExpression, ArithmeticError, TypeError, ValueError)


class Expression:
    """An expression that only computes and compares.

    Raises:
        SweepError: It is not an expression, or does more than compute and compare.
    """

    def __init__(self, text: str, where: str) -> None:
        self.text, self._where = text, where
        try:
            tree = ast.parse(text.strip())
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise SweepError(f"{where} {_short(text)!r} is not an expression", _CONDITION_EXAMPLE) from None
        if len(text) > _LONGEST or len(tree.body) != 1 or not isinstance(tree.body[0], ast.Expr):
            raise SweepError(f"{where} {_short(text)!r} is not one expression", _CONDITION_EXAMPLE)
        self._tree = tree.body[0]
        nodes = list(ast.walk(self._tree))
        self._check(nodes)
        called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        named = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in called}
        self.names = frozenset(named - set(_NAMED_CONSTANTS))

    def value(self, names: Mapping[str, Scalar]) -> Scalar:
        """The value with these names.

        Raises:
            SweepError: It has none, such as after a division by zero.
        """
        evaluator = simpleeval.EvalWithCompoundTypes(
            operators=dict(_OPERATORS), functions=dict(FUNCTIONS), names={**_NAMED_CONSTANTS, **names}
        )
        try:
            result = evaluator.eval(self.text, previously_parsed=self._tree)
        except _MISTAKES as error:
            with_ = " ".join(f"{name}={names[name]}" for name in sorted(self.names) if name in names)
            raise SweepError(
                f"{self._where} {_short(self.text)!r} has no value with {with_}: {error}", "change the expression"
            ) from None
        if not isinstance(result, bool | int | float | str) or (
            isinstance(result, int | float) and not abs(result) < _LARGEST
        ):
            raise SweepError(
                f"{self._where} {_short(self.text)!r} gives no number, text, true or false", _CONDITION_EXAMPLE
            )
        return result

    def _check(self, nodes: list[ast.AST]) -> None:
        prefix = f"{self._where} {_short(self.text)!r}"
        if len(nodes) > _MAX_NODES:
            raise SweepError(f"{prefix} is too long", "write several conditions")
        for node in nodes:
            if not isinstance(node, _NODES):
                raise SweepError(
                    f"{prefix}: {type(node).__name__} is not available here: an expression computes and compares",
                    _CONDITION_EXAMPLE,
                )
            if isinstance(node, ast.Call) and not (
                isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and not node.keywords
            ):
                raise SweepError(
                    f"{prefix}: {ast.unparse(node.func)[:40]} is not a function",
                    f"the functions are {', '.join(FUNCTIONS)}",
                )
            if isinstance(node, ast.Constant) and not isinstance(node.value, bool | int | float | str):
                raise SweepError(f"{prefix}: {node.value!r} is not a number, text, true or false", _CONDITION_EXAMPLE)


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:79] + "…"


#: More points than this need a number of trials.
MAX_POINTS = 10_000
#: Combinations that are looked at. More take minutes, and then the conditions say little.
MAX_LOOKED_AT = 200_000


@dataclass(frozen=True)
class Point:
    """One point of a space, with its values in the order of the axes."""

    values: tuple[tuple[str, Scalar], ...]

    @property
    def label(self) -> str:
        """The point in one line: ``tp=2 pp=8``."""
        return " ".join(f"{name}={text_of(value)}" for name, value in self.values) or "the only point"


@dataclass(frozen=True)
class Space:
    """A space of points. Derived values follow from those of the axes; each may use those before it.

    Constants are names with one value, such as the world size.

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
            behind[name] = frozenset[str]().union(*(behind.get(used, frozenset()) for used in expression.names))
        return frozenset[str]().union(*(behind.get(name, frozenset()) for name in names))

    def named_values(self, point: Point) -> dict[str, Scalar]:
        """The values of all names at a point."""
        values = {**self.constants, **dict(point.values)}
        for name, expression in self.derived:
            values[name] = expression.value(values)
        return values

    def allows(self, point: Point) -> bool:
        """True if a point meets every condition."""
        values = self.named_values(point)
        return all(condition.value(values) for condition in self.conditions)

    def points(self, max_looked_at: int = MAX_LOOKED_AT) -> Iterator[Point]:
        """The points that meet every condition. A condition is tested as soon as the axes that it needs have values.

        Raises:
            SweepError: Too many combinations would have to be looked at.
        """
        yield from self._below([], [0], max_looked_at)

    def _below(self, values: list[tuple[str, Scalar]], looked_at: list[int], most: int) -> Iterator[Point]:
        depth = len(values)
        looked_at[0] += 1
        if looked_at[0] > most:
            raise SweepError(f"more than {most:,} combinations would have to be looked at", "--trials 60")
        if not self._possible(values):
            return
        if depth == len(self.axes):
            yield Point(tuple(values))
            return
        axis = self.axes[depth]
        for value in axis.values:
            yield from self._below([*values, (axis.name, value)], looked_at, most)

    def _possible(self, values: list[tuple[str, Scalar]]) -> bool:
        """True if the values of the first axes meet the conditions that need the last of them and no further axis."""
        known = {**self.constants, **dict(values)}
        newest = {values[-1][0]} if values else set()
        for name, expression in self.derived:
            if expression.names <= set(known):
                known[name] = expression.value(known)
                if expression.names & newest:
                    newest.add(name)
        due = (condition for condition in self.conditions if condition.names <= set(known))
        return all(one.value(known) for one in due if not values or one.names & newest)

    def _check_names(self, expression: Expression, known: list[str]) -> None:
        for name in sorted(expression.names):
            if name not in known:
                raise SweepError(
                    f"{expression.text!r} uses {name}, which is not an axis", did_you_mean(name, known) or "add an axis"
                )


def all_points(space: Space, *, max_points: int = MAX_POINTS, max_looked_at: int = MAX_LOOKED_AT) -> list[Point]:
    """The points of a space that is run as a whole.

    Raises:
        SweepError: No point meets the conditions, or there are too many.
    """
    points: list[Point] = []
    for point in space.points(max_looked_at):
        points.append(point)
        if len(points) > max_points:
            raise SweepError(
                f"the space has more than {max_points:,} points (of {space.size:,} without conditions)",
                "--trials 60 runs some of them; or add a condition: --where",
            )
    if not points:
        conditions = "; ".join(condition.text for condition in space.conditions)
        raise SweepError(
            f"no point of {space.size:,} meets the conditions: {conditions}", "change or leave out a condition"
        )
    return points


def drawn_points(space: Space, number: int, seed: int) -> list[Point]:
    """At most so many different points that meet the conditions, each value drawn from its axis with equal chances.

    Raises:
        SweepError: No draw meets the conditions.
    """
    generator = random.Random(seed)
    points = dict[Point, None]()
    in_vain = 0
    while len(points) < number and in_vain < _MOST_IN_VAIN:
        point = Point(tuple((axis.name, generator.choice(axis.values)) for axis in space.axes))
        in_vain += 1
        if point not in points and space.allows(point):
            points[point], in_vain = None, 0
    if not points:
        raise SweepError(f"no draw of {_MOST_IN_VAIN:,} meets the conditions", "change or leave out a condition")
    return list(points)
