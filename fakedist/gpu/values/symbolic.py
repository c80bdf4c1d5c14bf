"""The values that follow, by the bytecode, from one that a walk assumes (:mod:`fakedist.gpu.values.healthy`).

A value is :class:`Given` if it follows from that one, a ``Constant`` if it does not, :class:`Current` if it follows
from variables, :class:`Listed` if it is a list of such. Anything else, such as None, is not known.
"""

from __future__ import annotations

import builtins
import enum
import functools
import inspect
import math
import operator
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from fakedist.gpu.values.code_paths import RETURNS, CodePaths, Constant, Name, Stack, paths_of

#: Functions of Python alone, with those of ``math``; what others give is not known.
_PURE: tuple[object, ...] = (bool, int, float, str, abs, round, min, max, sum, len, any, all, operator.not_)
_PURE += (operator.truth,)
#: Functions of an iterable that need not know all of its elements.
_REDUCE: tuple[object, ...] = (all, any, sum, min, max)
#: Functions that give all elements of an iterable.
_KEEP: tuple[object, ...] = (list, tuple, set, frozenset, sorted, iter)
#: Values whose methods may be called.
_OWNERS = (bool, int, float, str, list, dict, tuple, set, frozenset)
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
    __hash__ = Constant.__hash__


@dataclass(frozen=True)
class Current(Constant):
    """A value that follows from variables that the read does not change, by how far out their functions are."""

    names: frozenset[tuple[int, Name]]
    __hash__ = Constant.__hash__


@dataclass(frozen=True)
class Listed:
    """A list, some of whose elements are known, and the variable that it was loaded from."""

    items: tuple[object, ...]
    name: Name | None = field(default=None, compare=False)


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
#: Something of which only that it is true is known.
TRUE = Listed((GROWING[0],))
#: Instructions that make text of a value.
_FORMATS = ("FORMAT_VALUE", "FORMAT_SIMPLE")


def known_value(value: object) -> object:
    """The value itself; None if it is not known."""
    return value if isinstance(value, (Given, Constant)) else None


def name_of(value: object) -> Name | None:
    """The variable, or the attribute, that a value is in; None of anything else."""
    return value.name if isinstance(value, Listed) else value if isinstance(value, Name) else None


def top_of(stack: Stack) -> object:
    """The topmost value; None of an empty stack."""
    return stack[-1] if stack else None


def appended(stack: Stack, depth: int, value: object) -> Stack:
    """The stack after a value was appended to the list that lies ``depth`` deep."""
    if depth > len(stack):
        return stack
    value = value if isinstance(value, (Given, Constant, Listed)) else None
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
        "BUILD_STRING",
        "UNARY_INVERT",
        *_FORMATS,
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
    if name in _UNARY:
        return applied(_UNARY[name], stack[-1:])
    if name in _FORMATS:
        return None if arg else applied(str, stack[-1:])
    if name == "BUILD_STRING":
        parts = stack[-(arg or 1) :]
        return applied(lambda *texts: "".join(texts), parts) or (TRUE if any(map(_is_text, parts)) else None)
    if name == "COMPARE_OP":
        return _compared(sign.removeprefix("bool(").removesuffix(")"), stack[-2:])
    if name == "IS_OP":
        values = [Given(value) if isinstance(value, Listed) else value for value in stack[-2:]]
        return applied(operator.is_not if arg else operator.is_, values)
    if name == "CONTAINS_OP" and isinstance(listed := top_of(stack), Listed):
        known = [item.value for item in listed.items if isinstance(item, (Given, Constant))]
        return applied(lambda value: (value in known) is not bool(arg), [_as_given(stack[-2], listed)])
    if name == "CONTAINS_OP":
        return applied(lambda value, container: (value in container) is not bool(arg), stack[-2:])
    if name == "BINARY_OP":
        sign = sign.removesuffix("=")
        if sign == "+" and isinstance(stack[-1], Listed):
            return Listed((*(stack[-2].items if isinstance(stack[-2], Listed) else GROWING), *stack[-1].items))
        given = [value for value in stack[-2:] if isinstance(value, Given)]
        if sign in ("&", "|") and len(given) == 1 and isinstance(given[0].value, bool):
            return given[0]  # as if the other decided nothing
        return applied(_OPERATORS.get(sign), stack[-2:])
    return otherwise


_UNARY: dict[str, Callable[[Any], object]] = {
    "TO_BOOL": bool, "UNARY_NOT": operator.not_, "UNARY_NEGATIVE": operator.neg, "UNARY_INVERT": operator.invert,
}  # fmt: skip


def _is_text(value: object) -> bool:
    return isinstance(value, Constant) and isinstance(value.value, str) and bool(value.value)


def _as_given(value: object, listed: Listed) -> object:
    """A value, as one that follows from the read if it is used with a list of such."""
    return Given(value.value) if isinstance(value, Constant) and mentions_given(listed) else value


def _compared(sign: str, values: Sequence[object]) -> object:
    """The result of a comparison, of tuples and lists by their elements."""
    if sign in ("==", "!=") and any(isinstance(value, Constant) and value.value == () for value in values):
        lists = [value for value in values if isinstance(value, Listed)]
        if lists:
            return Given((not lists[0].items) is (sign == "=="))
    if sign in ("==", "!=") and all(
        isinstance(value, Listed) and value.items and known_value(value.items[0]) for value in values
    ):
        pairs = zip(*(value.items for value in values), strict=False)  # type: ignore[attr-defined]
        unlike = [applied(operator.ne, pair) for pair in pairs]
        if any(isinstance(each, Given) and each.value for each in unlike):
            return Given(sign == "!=")
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
    """The elements of a value that follow from the read, as if the others decided nothing; None without any."""
    if isinstance(value, Given) and type(value.value) in _ITERABLE:
        return Listed(tuple([Given(item) for item in value.value]))  # type: ignore[attr-defined]
    followed = tuple(filter(mentions_given, value.items if isinstance(value, Listed) else ()))
    return Listed(followed) if followed else None


_ITERABLE = (list, tuple, dict, type(_COMPARISONS.values()), type(_COMPARISONS.items()))


def _record(
    names: Iterable[object], values: Iterable[object], make: Callable[[dict[object, object]], object]
) -> object:
    """A value with named parts, some of which follow from the read; None if none does."""
    parts = list(zip(names, values, strict=False))
    known = {name.value if isinstance(name, Constant) else name: value for name, value in parts}
    kind = Given if any(isinstance(value, Given) for _, value in parts) else Constant
    return kind(make({k: v.value if isinstance(v, (Given, Constant)) else _UNKNOWN for k, v in known.items()}))


class _Instance(SimpleNamespace):
    """An object that a class makes of fields, some of which follow from the read."""

    def __init__(self, made_by: type, fields: Mapping[object, object]) -> None:
        super().__init__(**{str(name): value for name, value in fields.items()})
        self.__made_by = made_by

    def method(self, name: str) -> object:
        """A method of the class, bound to this object; None if it is something else."""
        function = getattr(self.__made_by, name, None)
        return MethodType(function, self) if isinstance(function, FunctionType) else None


@dataclass(frozen=True)
class _Listing:
    """The methods of a list, or of a dictionary by its values, of which some elements are known."""

    listed: Listed

    def values(self) -> Listed:
        return self.listed

    copy = values

    def items(self) -> Listed:
        return Listed(tuple([Listed((None, item)) for item in self.listed.items]))


#: Objects whose methods stand for those of others.
ANSWERING = (Rows, _Listing)


def attribute_of(owner: Given | Listed, name: str) -> object:
    """An attribute of a plain value, or a method of it that changes nothing; None of anything else.

    A method that changes a list goes by the variable's name.
    """
    if isinstance(owner, Listed) and name in ("values", "copy", "items"):
        return Given(getattr(_Listing(owner), name))
    if isinstance(owner, Listed):
        return None if owner.name is None else replace(owner.name, path=(*owner.name.path, name))
    if isinstance(owner.value, _Instance) and (method := owner.value.method(name)) is not None:
        return Given(method)
    is_plain = owner.value is None or isinstance(owner.value, (SimpleNamespace, enum.Enum)) or name in _READ
    is_plain |= isinstance(owner.value, Rows) and hasattr(Rows, name)
    return applied(getattr, (owner, Constant(name))) if is_plain else None


def result_of_call(callee: object, arguments: Sequence[object], keywords: Mapping[str, object]) -> object:
    """The result of a call; None if it is not known."""
    if isinstance(callee, Given):
        is_ours = isinstance(getattr(callee.value, "__self__", None), (*_OWNERS, *ANSWERING))
        result = applied(lambda method, *values: method(*values), (callee, *arguments)) if is_ours else None
        return result.value if isinstance(result, Given) and isinstance(result.value, Listed) else result
    if isinstance(callee, type) and (callee is dict or not _is_builtin(callee)):
        fields = getattr(callee, "_fields", getattr(callee, "__dataclass_fields__", ()))
        named = {**dict(zip(fields, arguments, strict=False)), **keywords}
        if any(isinstance(value, Given) for value in named.values()):
            return _record(
                named.keys(), named.values(), dict if callee is dict else functools.partial(_Instance, callee)
            )
    if isinstance(callee, type) and (not _is_builtin(callee) or issubclass(callee, BaseException)):
        return None if hasattr(callee, "__bool__") or hasattr(callee, "__len__") else TRUE
    if callee is zip:
        return _zipped(arguments)
    listed = arguments[0] if arguments else None
    if isinstance(listed, Listed):
        if callee is reversed:
            return Listed(listed.items[::-1])
        if callee is len:
            number = len(listed.items)
            return Current(number, frozenset()) if listed.items[:1] == GROWING else Given(number)
        if callee is enumerate:
            return Listed(tuple(map(_numbered, enumerate(listed.items))))
        if _is_one_of(callee, (set, frozenset)) and (known := tuple(dict.fromkeys(filter(known_value, listed.items)))):
            return Listed(known)  # as if all others were like these
        return listed if _is_one_of(callee, _KEEP) else reduced(callee, listed)
    is_pure = _is_one_of(callee, _PURE) or getattr(callee, "__self__", None) is math
    is_known = is_pure and bool(arguments) and all(isinstance(value, Constant) for value in keywords.values())
    named = {name: value.value for name, value in keywords.items() if isinstance(value, Constant)}
    return applied(functools.partial(callee, **named), arguments) if is_known and callable(callee) else None


def _is_builtin(made_by: type) -> bool:
    return getattr(made_by, "__module__", None) == "builtins"


def _zipped(arguments: Sequence[object]) -> object:
    """The tuples of a ``zip``; None if none of its iterables is a list that is followed."""
    count = min((len(each.items) for each in arguments if isinstance(each, Listed)), default=None)
    if count is None:
        return None
    columns = [each.items if isinstance(each, Listed) else (None,) * count for each in arguments]
    return Listed(tuple([Listed(items) for items in zip(*columns, strict=False)]))


def holds(condition: object) -> None:
    """Raise if a condition is false, as an assertion does."""
    if not condition:
        raise ValueError


def _numbered(pair: tuple[int, object]) -> Listed:
    return Listed((Constant(pair[0]), pair[1]))


def of_generator(callee: object, value: object, others: Sequence[object]) -> object:
    """The result of a function whose iterable, or whose argument, gives a value on the way, or ends (an empty list).

    ``others`` are its other arguments.
    """
    if value == Listed(()) and _is_one_of(callee, (next, min, max)):
        return Given(others[0].value) if others and isinstance(others[0], Constant) else None if others else RAISED
    if value == Listed(()):
        return applied(callee, [Given(())]) if _is_one_of(callee, _REDUCE[:3]) else value
    if _is_one_of(callee, _REDUCE[:3]):
        return reduced(callee, Listed((value, None)))
    if _is_one_of(callee, _KEEP):
        return Listed((value,))
    return None if _is_one_of(callee, (filter, map, len)) else value


def _is_one_of(callee: object, functions: Iterable[object]) -> bool:
    return any(callee is function for function in functions)


def unpacked(value: object, num_before: int, num_after: int | None) -> tuple[object, ...]:
    """The values of a tuple as unpacking leaves them on the stack; in between the rest, if a variable takes it."""
    if isinstance(value, Listed):
        items = value.items
    elif isinstance(value, (Given, Constant)) and isinstance(value.value, tuple):
        items = tuple(replace(value, value=item) for item in value.value)
    else:
        items = ()
    if num_after is not None and len(items) >= num_before + num_after:
        end = len(items) - num_after
        items = (*items[:num_before], Listed(items[num_before:end]), *items[end:])
    count = num_before if num_after is None else num_before + 1 + num_after
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


#: The type of ``exit`` and ``quit``.
QUITTER = "Quitter"
_ENDS = frozenset((sys.exit, os._exit, os.abort))
#: A function that never returns, because of what it calls, is small.
_MOST_CALLS = 8


def global_object(name: Name, names: Mapping[str, object]) -> object:
    """The object that a name stands for in a module; None if it cannot be found without running code."""
    return attribute_named(names.get(name.path[0], getattr(builtins, name.path[0], None)), name)


def attribute_named(value: object, name: Name) -> object:
    """The object that the attributes of a name lead to."""
    for attribute in name.path[1:]:
        if isinstance(value, (ModuleType, enum.EnumType)):
            value = (vars(value) if isinstance(value, ModuleType) else value.__members__).get(attribute)
        elif value is not None:
            value = inspect.getattr_static(value, attribute, None)
    return getattr(value, "__func__", value) if isinstance(value, (staticmethod, classmethod)) else value


def callee_of(paths: CodePaths, index: int, stack: Stack) -> object:
    """The callee of a call as the source names it, or as it was imported; None if that is not known."""
    taken = paths.step(index, stack, is_jump=False)
    both = stack[max(len(taken) - 1, 0) :][:2]  # with a NULL, in front of it or behind it
    return next((each for each in reversed(both) if isinstance(each, (Name, Constant, Given))), None)


def _ends(function: FunctionType, paths: CodePaths, index: int, depth: int) -> bool:
    """Return whether a call in a function never returns."""
    name = callee_of(paths, index, stack) if (stack := paths.stacks[index]) is not None else None
    if not isinstance(name, Name) or name.is_local:
        return False
    return never_returns(global_object(name, function.__globals__), depth - 1)


def never_returns(callee: object, depth: int = 2) -> bool:
    """Return whether a function always raises, or ends the process."""
    if isinstance(callee, FunctionType):
        if is_paused(callee.__code__):
            return False
        paths = paths_of(callee.__code__)
        calls = [index for index, each in enumerate(paths.instructions) if each.opname == "CALL"]
        ends = frozenset(index for index in calls[:_MOST_CALLS] if depth and _ends(callee, paths, index, depth))
        return not any(paths.instructions[index].opname in RETURNS for index in paths.reached((0,), ends))
    return type(callee).__name__ == QUITTER or any(callee is end for end in _ENDS)


def is_paused(code: CodeType) -> bool:
    """Return whether a call of a function does not run it."""
    return bool(code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR))


def imported(name: str, argval: object, module: object) -> object:
    """A module, or one of its objects; None if it has not been imported."""
    if name == "IMPORT_NAME":
        value = sys.modules.get(str(argval))
    else:
        value = vars(module.value).get(str(argval)) if isinstance(module, Constant) else None
    return None if value is None else Constant(value)


def stored(
    argval: object, name: str, stack: Stack, after: Stack, variables: dict[str, object]
) -> tuple[Stack, dict[str, object]]:
    """The stack and the variables after values were stored."""
    names = argval if isinstance(argval, tuple) else (argval,)
    if name == "STORE_FAST_LOAD_FAST":
        changed = assigned(variables, str(names[0]), top_of(stack))
        return (*stack[:-1], changed.get(str(names[1]), Name((str(names[1]),), is_local=True))), changed
    for each, value in zip(names, stack[::-1], strict=False):
        variables = assigned(variables, str(each), value)
    return after, variables


def assigned(variables: Mapping[str, object], place: str, value: object) -> dict[str, object]:
    """The variables after one got a value: what was known of its attributes and items is not known any more."""
    kept = {key: old for key, old in variables.items() if not key.startswith((f"{place}.", f"{place}["))}
    return {**kept, place: value}


def chosen_way(paths: CodePaths, index: int, condition: object) -> int | None:
    """The way that a branch takes; None if its condition is not known."""
    name = paths.instructions[index].opname
    if len(paths.after[index]) != 2 or not name.startswith(("POP_JUMP", "JUMP_IF")):
        return None
    if not isinstance(condition, (Given, Constant, Listed)) or isinstance(getattr(condition, "value", None), Rows):
        return None
    value = bool(condition.items) if isinstance(condition, Listed) else condition.value
    jumps = bool(value) == ("TRUE" in name)
    if name.endswith("NONE"):
        jumps = (value is None) != name.endswith("NOT_NONE")
    return paths.after[index][int(jumps)]
