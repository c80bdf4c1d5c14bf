"""The values that follow, by the bytecode, from one that a walk assumes (:mod:`fakedist.gpu.values.healthy`).

A value is :class:`Given` if it follows from that one, a ``Constant`` if it does not, :class:`Current` if it follows
from variables, :class:`Listed` if it is a list of such. Anything else, such as None, is not known.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

from fakedist.gpu.values.code_paths import Constant, Name, Stack

#: Functions of Python alone; what others give is not known.
_PURE: frozenset[object] = frozenset(
    (
        bool,
        int,
        float,
        str,
        abs,
        round,
        min,
        max,
        sum,
        len,
        any,
        all,
        operator.not_,
        math.isnan,
        math.isfinite,
        math.isinf,
    )
) | {math.log, math.log2, math.log10, math.sqrt, math.exp, math.isclose}
#: Functions of an iterable that need not know all of its elements.
_REDUCE: tuple[object, ...] = (all, any, sum, min, max)
#: Functions that give all elements of an iterable.
_KEEP: tuple[object, ...] = (list, tuple, set, frozenset, sorted, iter)
#: Methods of plain values that change nothing.
_READ = frozenset({"values", "items", "keys", "get", "count", "index", "lower", "upper", "strip", "is_integer"})
_COMPARISONS: dict[str, Callable[..., object]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_OPERATORS: dict[str, Callable[..., object]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod, "&": operator.and_, "|": operator.or_, "^": operator.xor,
}  # fmt: skip


@dataclass(frozen=True)
class Rows:
    """A tensor, or several, whose number of rows is what matters: ``mask.nonzero()``, ``x[mask]``."""

    count: int

    def __bool__(self) -> bool:
        return self.count > 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: object) -> Rows:
        return self

    def numel(self) -> int:
        """Its elements, as if there were one a row."""
        return self.count

    nelement = numel

    @property
    def shape(self) -> tuple[int]:
        """Its first size."""
        return (self.count,)

    def size(self, dim: int = 0) -> int:
        """Its first size, whatever ``dim``."""
        return self.count


#: What may be asked of :class:`Rows`; all else is a tensor's.
_OF_ROWS = (getattr, len, operator.getitem)


@dataclass(frozen=True)
class Given:
    """A value that follows from the one that is read."""

    value: object

    def __hash__(self) -> int:
        return hash(type(self.value))  # a dictionary has none


@dataclass(frozen=True)
class Current(Constant):
    """A value that follows from variables that the read does not change, by how far out their functions are."""

    names: frozenset[tuple[int, Name]]


@dataclass(frozen=True)
class Listed:
    """A list, some of whose elements are known."""

    items: tuple[object, ...]


class _NotKnownError(Exception):
    """A result depends on a value that is not known."""


class _Unknown:
    """A value in a container that is not known."""

    def __bool__(self) -> bool:
        raise _NotKnownError


_UNKNOWN = _Unknown()
#: How a list begins to which a method adds: it is longer after each round of a loop.
GROWING: tuple[object, ...] = (_UNKNOWN,)
#: The result of what raises if the read gives the assumed value.
RAISED = Listed((None,))


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
        "BUILD_MAP",
        "BUILD_CONST_KEY_MAP",
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
    if name == "BUILD_MAP" and arg:
        return _record(stack[-2 * arg :: 2], stack[1 - 2 * arg :: 2], dict)
    if name == "BUILD_CONST_KEY_MAP" and arg and isinstance(keys := stack[-1], Constant):
        return _record([Constant(key) for key in list[object](keys.value)], stack[-1 - arg : -1], dict)  # type: ignore[call-overload]
    if name in ("TO_BOOL", "UNARY_NOT") and isinstance(listed := top_of(stack), Listed):
        return listed if name == "TO_BOOL" else Given(not listed.items)
    if name in ("TO_BOOL", "UNARY_NOT", "UNARY_NEGATIVE"):
        unary = {"TO_BOOL": bool, "UNARY_NOT": operator.not_}.get(name, operator.neg)
        return applied(unary, stack[-1:])
    if name == "COMPARE_OP":
        return _compared(sign.removeprefix("bool(").removesuffix(")"), stack[-2:])
    if name == "IS_OP":
        return applied(operator.is_not if arg else operator.is_, stack[-2:])
    if name == "CONTAINS_OP" and isinstance(listed := top_of(stack), Listed):
        known = [item.value for item in listed.items if isinstance(item, (Given, Constant))]
        return applied(lambda value: (value in known) is not bool(arg), [_as_given(stack[-2], listed)])
    if name == "CONTAINS_OP":
        return applied(lambda value, container: (value in container) is not bool(arg), stack[-2:])
    if name == "BINARY_OP":
        sign = sign.removesuffix("=")
        given = [value for value in stack[-2:] if isinstance(value, Given)]
        if sign in ("&", "|") and len(given) == 1 and isinstance(given[0].value, bool):
            return given[0]  # as if the other decided nothing
        return applied(_OPERATORS.get(sign), stack[-2:])
    return otherwise


def _as_given(value: object, listed: Listed) -> object:
    """A value, as one that follows from the read if it is used with a list of such."""
    return Given(value.value) if isinstance(value, Constant) and mentions_given(listed) else value


def _compared(sign: str, values: Sequence[object]) -> object:
    """The result of a comparison, of tuples and lists by their elements."""
    if sign in ("==", "!=") and any(isinstance(value, Constant) and value.value == () for value in values):
        lists = [value for value in values if isinstance(value, Listed)]
        if lists:
            return Given((not lists[0].items) is (sign == "=="))
    return applied(_COMPARISONS.get(sign), map(_plain, values))


def _plain(value: object) -> object:
    """A list whose elements are all known as a tuple."""
    items = [_plain(item) for item in value.items] if isinstance(value, Listed) else []
    if not items or not all(isinstance(item, (Given, Constant)) for item in items):
        return value
    return applied(lambda *each: each, items)


def mentions_given(value: object) -> bool:
    """Whether something in a value follows from the read."""
    return isinstance(value, Given) or (isinstance(value, Listed) and any(map(mentions_given, value.items)))


def iterated(value: object) -> object:
    """The elements of a value as a list if one of them follows from the read, else None."""
    if isinstance(value, Given) and type(value.value) in _ITERABLE:
        return Listed(tuple([Given(item) for item in value.value]))  # type: ignore[attr-defined]
    return value if mentions_given(value) and isinstance(value, Listed) else None


_ITERABLE = (list, tuple, dict, type(_COMPARISONS.values()), type(_COMPARISONS.items()))


def _record(
    names: Iterable[object], values: Iterable[object], make: Callable[[dict[object, object]], object]
) -> object:
    """A value with named parts, some of which follow from the read; None if none does."""
    parts = list(zip(names, values, strict=False))
    if not any(isinstance(value, Given) for _, value in parts):
        return None
    known = {name.value if isinstance(name, Constant) else name: value for name, value in parts}
    return Given(make({k: v.value if isinstance(v, (Given, Constant)) else _UNKNOWN for k, v in known.items()}))


def attribute_of(owner: Given, name: str) -> object:
    """An attribute of a plain value, or a method of it that changes nothing; None of anything else."""
    is_plain = owner.value is None or isinstance(owner.value, SimpleNamespace) or name in _READ
    is_plain |= isinstance(owner.value, Rows) and hasattr(Rows, name)
    return applied(getattr, (owner, Constant(name))) if is_plain else None


def result_of_call(callee: object, arguments: Sequence[object], keywords: Mapping[str, object]) -> object:
    """The result of a call; None if it is not known."""
    if isinstance(callee, Given):
        return applied(lambda method, *values: method(*values), (callee, *arguments))
    if isinstance(callee, type) and issubclass(callee, BaseException):
        return Listed((None,))  # as true as a list of something
    if (fields := getattr(callee, "_fields", getattr(callee, "__dataclass_fields__", None))) and isinstance(
        callee, type
    ):
        named = {**dict(zip(fields, arguments, strict=False)), **keywords}
        return _record(named.keys(), named.values(), lambda known: SimpleNamespace(**known))  # type: ignore[arg-type]
    listed = arguments[0] if arguments else None
    if isinstance(listed, Listed):
        if callee is len:
            number = len(listed.items)
            return Current(number, frozenset()) if listed.items[:1] == GROWING else Given(number)
        if callee is enumerate:
            return Listed(tuple(map(_numbered, enumerate(listed.items))))
        return listed if _is_one_of(callee, _KEEP) else reduced(callee, listed)
    try:
        is_known = (
            bool(arguments) and callee in _PURE and all(isinstance(value, Constant) for value in keywords.values())
        )
    except TypeError:  # not hashable
        return None
    named = {name: value.value for name, value in keywords.items() if isinstance(value, Constant)}
    return applied(functools.partial(callee, **named), arguments) if is_known and callable(callee) else None


def holds(condition: object) -> None:
    """Raise if a condition is false, as an assertion does."""
    if not condition:
        raise ValueError


def _numbered(pair: tuple[int, object]) -> Listed:
    return Listed((Constant(pair[0]), pair[1]))


def of_generator(callee: object, value: object) -> object:
    """The result of a function whose iterable, or whose argument, gives a value on the way."""
    if _is_one_of(callee, _REDUCE[:3]):
        return reduced(callee, Listed((value, None)))
    if _is_one_of(callee, _KEEP):
        return Listed((None, value))
    return None if _is_one_of(callee, (filter, map, len)) else value


def _is_one_of(callee: object, functions: Iterable[object]) -> bool:
    return any(callee is function for function in functions)


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
    """The result of ``any``, ``all``, ``sum`` of a list if the elements that are not known decide nothing."""
    known = [item for item in listed.items if isinstance(item, (Given, Constant))]
    if not _is_one_of(callee, _REDUCE) or not callable(callee) or not known:
        return None
    return applied(lambda *values: callee(values), [_as_given(item, listed) for item in known])


def applied(function: object, values: Iterable[object]) -> object:
    """The result of a function; None if it raises or an argument is not known."""
    values = list(values)
    known = [value for value in values if isinstance(value, (Given, Constant))]
    if not callable(function) or len(known) < len(values):
        return None
    if any(isinstance(value.value, Rows) for value in known) and getattr(function, "func", function) not in _OF_ROWS:
        return None
    is_given = any(isinstance(value, Given) for value in known)
    try:
        result = function(*[value.value for value in known])
    except _NotKnownError:
        return None
    except Exception:  # the script's own would raise
        return RAISED if is_given else None
    if result is _UNKNOWN:
        return None
    if is_given:
        return Given(result)
    current = [value.names for value in known if isinstance(value, Current)]
    return Current(result, frozenset[tuple[int, Name]]().union(*current)) if current else Constant(result)
