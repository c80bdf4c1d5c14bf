"""The values that follow, by the bytecode, from one that a walk assumes (:mod:`fakedist.gpu.values.healthy`).

A value is :class:`Given` if it follows from that one, a ``Constant`` if it does not, :class:`Current` if it follows
from variables, :class:`Listed` if it is a list of such. Anything else, such as None, is not known.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from fakedist.gpu.values.code_paths import Constant, Name, Stack

#: Names of functions of Python alone; what others give is not known.
_PURE: frozenset[object] = frozenset(
    [bool, int, float, abs, round, min, max, sum, len, operator.not_, math.isnan, math.isfinite, math.isinf]
)
_COMPARISONS: dict[str, Callable[..., object]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_OPERATORS: dict[str, Callable[..., object]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod, "&": operator.and_, "|": operator.or_, "^": operator.xor,
}  # fmt: skip


@dataclass(frozen=True)
class Given:
    """A value that follows from the one that is read."""

    value: object


@dataclass(frozen=True)
class Current(Constant):
    """A value that follows from variables that the read does not change, by how far out their functions are."""

    names: frozenset[tuple[int, Name]]


@dataclass(frozen=True)
class Listed:
    """A list, some of whose elements are known."""

    items: tuple[object, ...]


def known_value(value: object) -> object:
    """The value itself; None if it is not known."""
    return value if isinstance(value, (Given, Constant)) else None


def top_of(stack: Stack) -> object:
    """The topmost value; None of an empty stack."""
    return stack[-1] if stack else None


def appended(stack: Stack, depth: int, value: object) -> Stack:
    """The stack after a value was appended to the list that lies ``depth`` deep."""
    if depth > len(stack):
        return stack
    value = value if isinstance(value, (Given, Constant)) else None
    before = stack[-depth]
    items = (*before.items, value) if isinstance(before, Listed) else (None, value)
    return (*stack[: len(stack) - depth], Listed(items), *stack[len(stack) - depth + 1 :])


#: The instructions that :func:`result_of_instruction` follows.
RESULTS = frozenset(
    {
        "BUILD_LIST",
        "BUILD_TUPLE",
        "BUILD_SET",
        "TO_BOOL",
        "UNARY_NOT",
        "UNARY_NEGATIVE",
        "COMPARE_OP",
        "IS_OP",
        "CONTAINS_OP",
        "BINARY_OP",
    }
)


def result_of_instruction(name: str, sign: str, arg: int | None, stack: Stack, otherwise: object) -> object:
    """The value that an instruction of ``RESULTS`` leaves on top of the stack, else ``otherwise``."""
    if name in ("BUILD_LIST", "BUILD_TUPLE", "BUILD_SET") and arg:
        return Listed(stack[-arg:])
    if name in ("TO_BOOL", "UNARY_NOT") and isinstance(listed := top_of(stack), Listed):
        return listed if name == "TO_BOOL" else Given(not listed.items)
    if name in ("TO_BOOL", "UNARY_NOT", "UNARY_NEGATIVE"):
        unary = {"TO_BOOL": bool, "UNARY_NOT": operator.not_}.get(name, operator.neg)
        return applied(unary, stack[-1:])
    if name == "COMPARE_OP":
        return applied(_COMPARISONS.get(sign.removeprefix("bool(").removesuffix(")")), stack[-2:])
    if name == "IS_OP":
        return applied(operator.is_not if arg else operator.is_, stack[-2:])
    if name == "CONTAINS_OP":
        return applied(lambda value, container: (value in container) is not bool(arg), stack[-2:])
    if name == "BINARY_OP":
        sign = sign.removesuffix("=")
        given = [value for value in stack[-2:] if isinstance(value, Given)]
        if sign in ("&", "|") and len(given) == 1 and isinstance(given[0].value, bool):
            return given[0]  # as if the other decided nothing
        return applied(_OPERATORS.get(sign), stack[-2:])
    return otherwise


def result_of_call(callee: object, arguments: Sequence[object]) -> object:
    """The result of a call; None if it is not known."""
    if isinstance(callee, type) and issubclass(callee, BaseException):
        return Listed((None,))  # as true as a list of something
    if len(arguments) == 1 and isinstance(arguments[0], Listed):
        return Given(len(arguments[0].items)) if callee is len else reduced(callee, arguments[0])
    try:
        return applied(callee, arguments) if arguments and callee in _PURE else None
    except TypeError:  # not hashable
        return None


def unpacked(value: object, count: int) -> tuple[object, ...]:
    """The values of a tuple as unpacking leaves them on the stack."""
    if isinstance(value, Listed):
        items = value.items
    elif isinstance(value, (Given, Constant)) and isinstance(value.value, tuple):
        items = tuple(replace(value, value=item) for item in value.value)
    else:
        items = ()
    return items[::-1] if len(items) == count else (None,) * count


def reduced(callee: object, listed: Listed) -> object:
    """The result of ``any`` or ``all`` of a list if the elements that are not known decide nothing."""
    known = [item for item in listed.items if isinstance(item, (Given, Constant))]
    if callee is not all and callee is not any:
        return None
    return Given(callee(item.value for item in known)) if known and callable(callee) else None


def applied(function: object, values: Iterable[object]) -> object:
    """The result of a function; None if it raises or an argument is not known."""
    values = list(values)
    known = [value for value in values if isinstance(value, (Given, Constant))]
    if not callable(function) or len(known) < len(values):
        return None
    try:
        result = function(*[value.value for value in known])
    except Exception:  # the script's own would raise
        return None
    if any(isinstance(value, Given) for value in known):
        return Given(result)
    current = [value.names for value in known if isinstance(value, Current)]
    return Current(result, frozenset[tuple[int, Name]]().union(*current)) if current else Constant(result)
