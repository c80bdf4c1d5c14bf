"""The axes of a space: names and the values that they take, from a sweep file or from a command line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from fakedist.errors import SweepError
from fakedist.section import Section

#: A value of an axis.
Scalar: TypeAlias = bool | int | float | str

#: More values than any axis needs; catches slips of the pen.
MAX_VALUES = 10_000
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_INTEGER = re.compile(r"[+-]?\d{1,18}")
_NUMBER = re.compile(r"[+-]?(\d{1,18}(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?")
_RANGE = re.compile(r"(?P<first>[^.\s][^\s]*?)\.\.(?P<last>[^\s+*]+)(?P<by>[+*][^\s]+)?")
_EXAMPLE = "tp = [1, 2, 4, 8]"


@dataclass(frozen=True)
class Axis:
    """One axis of a space.

    Attributes:
        name: Its name: a letter, then letters, digits and underscores.
        values: The values that it takes, in order.
        arguments: What a value with several words, or none, puts in place of its placeholder; by value.
        is_monotone: Whether a later value always takes more memory than an earlier one.
    """

    name: str
    values: tuple[Scalar, ...]
    arguments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    is_monotone: bool = False


def check_name(name: str, where: str) -> str:
    """A name that placeholders and conditions can use.

    Raises:
        SweepError: It is not one.
    """
    if not _NAME.fullmatch(name) or name in ("and", "or", "not", "in", "is", "if", "else", "true", "false"):
        raise SweepError(
            f"{where}: {name!r} cannot be a name: it is a letter, then letters, digits and underscores", _EXAMPLE
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
    """A value as text: what a placeholder becomes."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def read_values(text: str, where: str) -> list[Scalar]:
    """The values in a text: ``1,2,4``, ``1..8``, ``0..100+10`` and ``1..64*2``.

    Raises:
        SweepError: A range has no end.
    """
    found: list[Scalar] = []
    for piece in text.split(","):
        if (range_ := _RANGE.fullmatch(piece.strip())) is None:
            found.append(read_scalar(piece.strip()))
            continue
        first, last = (read_scalar(range_[name]) for name in ("first", "last"))
        by = range_["by"] or "+1"
        found += _range(first, last, by[0], read_scalar(by[1:]), where)
    return found


def axis_of_text(text: str, monotone: Sequence[str] = ()) -> Axis:
    """An axis from a command line: ``tp=1,2,4,8``.

    Args:
        text: Name and values.
        monotone: Names of the axes along which memory grows.

    Raises:
        SweepError: It is not an axis.
    """
    name, equals, values = text.partition("=")
    if not equals or not values:
        raise SweepError(f"--axis {text!r} has no values", "--axis tp=1,2,4,8")
    check_name(name, "--axis")
    return _checked(Axis(name, tuple(read_values(values, f"--axis {name}")), is_monotone=name in monotone))


def axis_of_toml(name: str, plain: object, where: str) -> Axis:
    """An axis from a sweep file.

    Args:
        name: Its name.
        plain: A list of values; a text as on the command line; or a table with ``values``, with ``from`` and ``to``
            (and ``step`` or ``factor``), or with ``named``, and with ``monotone``.
        where: The place in the file, for messages.

    Raises:
        SweepError: It is not an axis.
    """
    check_name(name, where)
    where = f"{where}, axis {name}"
    if not isinstance(plain, dict):
        return _checked(Axis(name, tuple(_plain_values(plain, where))))
    section = Section(where, plain, SweepError)
    monotone = section.take("monotone", bool) or False
    values, named = section.take_any("values"), section.take("named", dict)
    bounds = {key: section.take_any(key) for key in ("from", "to", "step", "factor")}
    section.end()
    given = [values is not None, named is not None, bounds["from"] is not None or bounds["to"] is not None]
    if sum(given) != 1:
        raise SweepError(f"{where} has one of values, named, or from and to", f"{name} = {{ from = 1, to = 8 }}")
    if named is not None:
        arguments = {str(key): _words(words, f"{where}, {key}") for key, words in named.items()}
        return _checked(Axis(name, tuple(arguments), arguments, monotone))
    found = _plain_values(values, where) if values is not None else _bounded(bounds, where)
    return _checked(Axis(name, tuple(found), is_monotone=monotone))


def _plain_values(plain: object, where: str) -> Sequence[Scalar]:
    if isinstance(plain, str):
        return read_values(plain, where)
    found: list[Scalar] = []
    for value in plain if isinstance(plain, list) else [plain]:
        if not isinstance(value, bool | int | float | str):
            raise SweepError(f"{where}: {value!r} is no value: it is a number, a text, true or false", _EXAMPLE)
        found.append(value)
    return found


def _bounded(bounds: Mapping[str, object], where: str) -> list[Scalar]:
    if bounds["step"] is not None and bounds["factor"] is not None:
        raise SweepError(f"{where} has both a step and a factor", "leave one out")
    by = bounds["factor"] if bounds["factor"] is not None else bounds["step"] if bounds["step"] is not None else 1
    return _range(bounds["from"], bounds["to"], "+" if bounds["factor"] is None else "*", by, where)


def _range(first: object, last: object, how: str, by: object, where: str) -> list[Scalar]:
    numbers = [each for each in (first, last, by) if isinstance(each, int | float) and not isinstance(each, bool)]
    if len(numbers) < 3 or not all(abs(each) < 1e18 for each in numbers):
        raise SweepError(f"{where}: a range goes from a number to a number, not from {first!r} to {last!r}", "1..64*2")
    start, end, step = numbers
    if (how == "+" and step <= 0) or (how == "*" and (step <= 1 or start <= 0)):
        raise SweepError(f"{where}: a range grows: by a step above 0, or from above 0 by a factor above 1", "1..64*2")
    found: list[Scalar] = list(_steps(start, end, how, step))
    if len(found) > MAX_VALUES:
        raise SweepError(f"{where} has more than {MAX_VALUES:,} values", "give a larger step, or a factor: 1..64*2")
    if not found:
        raise SweepError(f"{where}: a range goes upwards, not from {start} to {end}", f"{end}..{start}")
    return found


def _steps(start: float, end: float, how: str, step: float) -> Iterator[float]:
    for count in range(MAX_VALUES + 1):
        value = start + count * step if how == "+" else start * step**count
        if value > end * (1 + 1e-12 if end > 0 else 1):
            return
        yield value


def _words(plain: object, where: str) -> tuple[str, ...]:
    found: list[str] = []
    for word in plain if isinstance(plain, list) else [plain]:
        if not isinstance(word, bool | int | float | str):
            raise SweepError(f"{where}: arguments are a list of texts, not {plain!r}", 'full = ["--recompute", "full"]')
        found.append(text_of(word))
    return tuple(found)


def _checked(axis: Axis) -> Axis:
    seen: set[tuple[type, Scalar]] = set()
    for value in axis.values:
        if (type(value), value) in seen or text_of(value) in {text_of(other) for _, other in seen}:
            raise SweepError(f"axis {axis.name} names {text_of(value)} twice", "name each value once")
        seen.add((type(value), value))
        if "\0" in text_of(value):
            raise SweepError(f"axis {axis.name}: a value has a NUL character", _EXAMPLE)
    if not axis.values:
        raise SweepError(f"axis {axis.name} has no values", _EXAMPLE)
    if len(axis.values) > MAX_VALUES:
        raise SweepError(f"axis {axis.name} has more than {MAX_VALUES:,} values", "give fewer")
    return axis
