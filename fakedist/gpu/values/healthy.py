"""Finds the answer that a healthy job would give where its code tests a value that no kernel computed.

From the instruction that reads the value, the code is followed with each answer that it may have: through variables,
comparisons, and the returns to the functions that called. An answer after which every way raises, or ends the process,
is not a healthy job's. Neither is one that leads around a loop whose other way leaves it.
"""

from __future__ import annotations

import builtins
import enum
import inspect
import math
import operator
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FrameType, FunctionType, ModuleType

from fakedist.gpu.values.code_paths import RAISES, RETURNS, CodePaths, Constant, Name, Stack, paths_of

#: The instructions that a walk follows, those of them after a test of the value, and the branches with both ways.
_MOST_STEPS = 3_000
_MOST_STEPS_AFTER = 200
_MOST_BRANCHES = 48
#: The functions around a read that make it another read.
_MOST_CALLERS = 8
#: Numbers that are tried where none of those passes.
_EVEN_LARGER = (-1, 100, -100, 1e4, -1e4, 1e6, -1e6, 1e-3, 1e-6)
#: Numbers in the code next to which others are tried.
_MOST_NUMBERS = 8
_MOST_KEPT = 4_096

#: Names of functions of Python alone; what others give is not known.
_PURE: frozenset[object] = frozenset(
    (bool, int, float, abs, round, min, max, sum, len, math.isnan, math.isfinite, math.isinf, operator.not_)
)
#: The truth values that these read are not what they give.
_OTHERWISE = (min, max, sum, sorted, filter, map, len)
_ENDS = frozenset((sys.exit, os._exit, os.abort))
_COMPARISONS: dict[str, Callable[..., object]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_OPERATORS: dict[str, Callable[..., object]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod, "&": operator.and_, "|": operator.or_, "^": operator.xor,
}  # fmt: skip

#: A truth value or a number that a script reads.
Number = bool | int | float


class Health(enum.IntEnum):
    """How healthy a job is that goes a way."""

    FINE = 0
    MAY_STAY = 1
    MAY_FAIL = 2
    STAYS = 3
    FAILS = 4


@dataclass(frozen=True)
class Outlook:
    """The answer that a read should give.

    Attributes:
        answer: The healthy one: what was asked about, unless that fails or stays in a loop.
        avoids: What another answer would lead to.
        is_tested: Whether a branch that the code shows depends on the value: not that of ``isfinite``.
    """

    answer: Number
    avoids: Health
    is_tested: bool


@dataclass(frozen=True)
class _Given:
    """A value that follows from the one that is read."""

    value: object


@dataclass(frozen=True)
class _Listed:
    """A list, some of whose elements are known."""

    items: tuple[object, ...]


#: How a variable of a running function is found; the default if it cannot be.
FindLocal = Callable[[FrameType, str], object]


class Healthy:
    """Finds healthy answers, and keeps those of truth values by where they were read."""

    def __init__(self, find_local: FindLocal) -> None:
        self._find_local = find_local
        self._kept: dict[tuple[object, ...], Outlook] = {}

    def outlook(self, frame: FrameType, answer: Number) -> Outlook:
        """Return what a read should give in a frame that is at the reading instruction."""
        where = _whereabouts(frame)
        is_truth = isinstance(answer, bool)
        key = (where, answer if is_truth else None)
        if (kept := self._kept.get(key)) is not None:
            return kept if is_truth else replace(kept, answer=answer)
        outlook = self._found(frame, answer)
        if is_truth or not outlook.is_tested:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[key] = outlook
        return outlook

    def _found(self, frame: FrameType, answer: Number) -> Outlook:
        first = _Walk(frame, answer, self._find_local)
        verdict = first.verdict()
        if not first.ways and not first.is_compared:
            return Outlook(answer, Health.FINE, is_tested=False)
        best, avoided, is_tested = answer, verdict, first.is_compared
        for other in [not answer] if isinstance(answer, bool) else _others(frame, answer):
            walk = _Walk(frame, other, self._find_local)
            of_other = walk.verdict()
            is_tested |= walk.ways != first.ways
            avoided = max(avoided, of_other)
            if of_other < verdict:
                best, verdict = other, of_other
        return Outlook(best, avoided if avoided > verdict else Health.FINE, is_tested=is_tested)


def _whereabouts(frame: FrameType | None) -> tuple[tuple[CodeType, int], ...]:
    callers: list[tuple[CodeType, int]] = []
    while frame is not None and len(callers) < _MOST_CALLERS:
        callers.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(callers)


def _others(frame: FrameType, answer: Number) -> list[Number]:
    """Other numbers that a read could give: simple ones, and those next to the numbers in the code."""
    numbers: list[Number] = []
    caller: FrameType | None = frame
    while caller is not None and len(numbers) < _MOST_NUMBERS:
        numbers += [value for value in caller.f_code.co_consts if type(value) in (int, float)]
        caller = caller.f_back
    near = [value for number in numbers[:_MOST_NUMBERS] for value in (number, number - 1, number + 1, number / 2)]
    kind = type(answer)
    found = [kind(value) for value in (-answer, 0, 1, *near, *_EVEN_LARGER) if math.isfinite(value)]
    return list(dict.fromkeys(value for value in found if value != answer))


@dataclass(frozen=True)
class _Point:
    """Where a walk is: in front of an instruction of a function."""

    frame: FrameType
    index: int
    stack: Stack
    variables: dict[str, object]


@dataclass(frozen=True)
class _Decision:
    """The function and the instruction that tested the value last; nothing has been stored since if it is fresh."""

    frame: FrameType
    index: int
    is_same_statement: bool = True

    def continues_at(self, point: _Point, paths: CodePaths) -> bool:
        """Whether a test comes after this one in the source, with nothing stored between them."""
        return (
            self.is_same_statement and self.frame is point.frame and paths.begin(self.index) < paths.begin(point.index)
        )


class _Walk:
    """Follows the code after a read that gives ``answer``."""

    def __init__(self, frame: FrameType, answer: Number, find_local: FindLocal) -> None:
        #: Where the value was tested, and the ways that followed.
        self.ways: list[tuple[CodeType, int, int]] = []
        #: Whether it was compared with something that is not known.
        self.is_compared = False
        self._frame, self._answer = frame, answer
        self._find_local = find_local
        self._steps = self._branches = 0
        self._seen: set[tuple[object, ...]] = set()

    def verdict(self) -> Health:
        """How healthy the job is with this answer."""
        point = self._resumed(self._frame, _Given(self._answer))
        found = None if point is None else self._way(point, None)
        return Health.FINE if found is None else found

    def _resumed(self, frame: FrameType | None, value: object) -> _Point | None:
        """Go on in a function whose current instruction gets a value, as its result or as what it tests."""
        if frame is None or value is None:
            return None
        paths = paths_of(frame.f_code)
        index = paths.running(frame)
        if index >= 0 and paths.instructions[index].opname == "PRECALL":
            index += 1
        stack = paths.stacks[index] if index >= 0 else None
        if stack is None:
            return None
        name = paths.instructions[index].opname
        if name.startswith(("POP_JUMP", "JUMP_IF")) or name in ("TO_BOOL", "UNARY_NOT"):
            return _Point(frame, index, (*stack[:-1], value), {})
        if name == "CONTAINS_OP" and paths.instructions[index].arg and isinstance(value, _Given):
            value = _Given(not value.value)
        if name.startswith("CALL"):
            value = self._through(self._callee(paths, index, stack, frame), value)
        if paths.instructions[index + 1].opname == "POP_TOP":
            return None  # nothing uses it
        after = paths.step(index, stack, is_jump=False)
        return _Point(frame, index + 1, (*after[:-1], value), {})

    @staticmethod
    def _through(callee: object, value: object) -> object:
        """The value that a function of Python gives that reads or is given a value on the way."""
        if callee is all or callee is any:
            return _reduced(callee, _Listed((value, None)))
        return None if any(callee is other for other in _OTHERWISE) else value

    def _way(self, point: _Point | None, decided: _Decision | None, left: int = _MOST_STEPS) -> Health | None:
        """How healthy a way is; None where another has been followed from here."""
        while point is not None:
            paths = paths_of(point.frame.f_code)
            here = (id(point.frame), point.index, decided is not None, point.stack, *point.variables.items())
            if here in self._seen:
                return None
            self._seen.add(here)
            self._steps += 1
            left -= 1
            if self._steps > _MOST_STEPS or not left:
                break
            name = paths.instructions[point.index].opname
            if name in RAISES:
                return _failed(decided)
            if name in RETURNS or (name == "YIELD_VALUE" and isinstance(_top(point.stack), _Given)):
                point = self._returned(point, paths, is_decided=decided is not None)
                continue
            if len(paths.after[point.index]) < 2:
                if decided is not None and name.startswith(("STORE_", "POP_TOP")):
                    decided = replace(decided, is_same_statement=False)
                point = self._next(point, paths)
                if point is None:
                    return _failed(decided)
                continue
            condition = _top(point.stack)
            if (way := _chosen(paths, point.index, condition)) is None:
                return self._fork(point, paths, decided, left)
            if isinstance(condition, _Given):
                self.ways.append((point.frame.f_code, point.index, way))
                decided, left = _Decision(point.frame, point.index), _MOST_STEPS_AFTER
                if paths.stays(point.index, way):
                    return Health.STAYS
            elif decided is not None and decided.frame is point.frame and paths.stays(point.index, way, decided.index):
                return Health.STAYS
            point = self._at(point, paths, way)
        return Health.FINE

    def _fork(self, point: _Point, paths: CodePaths, decided: _Decision | None, left: int) -> Health | None:
        """Both ways of a branch that does not depend on the value.

        Once the value has been tested, one healthy way is enough, but in the test's own statement: ``bad and strict``.
        There another test of the loop's condition decides: ``error > 1e-3 and step < 100``.
        """
        self._branches += 1
        if self._branches > _MOST_BRANCHES:
            return Health.FINE
        one_is_enough = decided is not None and not decided.is_same_statement
        continues = decided is not None and decided.continues_at(point, paths)
        verdicts: list[Health] = []
        for way in paths.after[point.index]:
            stays = continues and paths.stays(point.index, way)
            verdict = Health.MAY_STAY if stays else self._way(self._at(point, paths, way), decided, left)
            if one_is_enough and verdict is Health.FINE:
                return verdict
            verdicts += [] if verdict is None else [verdict]
        if decided is not None and not one_is_enough and Health.FAILS in verdicts and len(set(verdicts)) > 1:
            return Health.MAY_FAIL
        return (min if one_is_enough else max)(verdicts, default=None)

    def _at(self, point: _Point, paths: CodePaths, way: int) -> _Point:
        is_jump = way == paths.target(point.index)
        stack = paths.step(point.index, point.stack, is_jump=is_jump)
        return _Point(point.frame, way, stack, point.variables)

    def _returned(self, point: _Point, paths: CodePaths, *, is_decided: bool) -> _Point | None:
        instruction = paths.instructions[point.index]
        is_generator = bool(point.frame.f_code.co_flags & inspect.CO_GENERATOR)
        if is_generator != (instruction.opname == "YIELD_VALUE"):
            return None  # a generator that ends, or a coroutine that waits
        value = Constant(instruction.argval) if instruction.opname == "RETURN_CONST" else _top(point.stack)
        if is_decided and isinstance(value, Constant):
            value = _Given(value.value)  # another answer may have returned another
        return self._resumed(point.frame.f_back, value if isinstance(value, (_Given, Constant, _Listed)) else None)

    def _next(self, point: _Point, paths: CodePaths) -> _Point | None:
        """The point after an instruction that only one follows; None if it ends the process or raises."""
        instruction, stack, variables = paths.instructions[point.index], point.stack, point.variables
        name = instruction.opname
        after = paths.step(point.index, stack, is_jump=paths.target(point.index) is not None)
        if name.startswith("STORE_") and not name.startswith("STORE_ATTR") and name != "STORE_SUBSCR":
            after, variables = _stored(instruction.argval, name, stack, after, variables)
        elif name.startswith(("LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL")) and len(after) > len(stack):
            names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
            loaded = [variables.get(each, old) for each, old in zip(names, after[len(stack) :], strict=False)]
            after = (*stack, *loaded, *after[len(stack) + len(loaded) :])
        elif name == "LIST_APPEND":
            after = _appended(after, instruction.arg or 1, _top(stack))
        elif name.startswith("CALL"):
            callee = self._callee(paths, point.index, stack, point.frame)
            if _never_returns(callee):
                return None
            after = (*after[:-1], _called(callee, stack[len(after) + 1 :] if name == "CALL" else ()))
        elif after and name in _RESULTS:
            is_given = any(isinstance(value, _Given) for value in stack[-2:])
            self.is_compared |= name == "COMPARE_OP" and is_given and None in map(_known, stack[-2:])
            after = (*after[:-1], _result(instruction.opname, instruction.argrepr, instruction.arg, stack, after[-1]))
        return _Point(point.frame, paths.after[point.index][0], after, variables)

    def _callee(self, paths: CodePaths, index: int, stack: Stack, frame: FrameType) -> object:
        taken = paths.step(index, stack, is_jump=False)
        both = stack[max(len(taken) - 1, 0) :][:2]  # with a NULL, in front of it or behind it
        callee = next((each for each in reversed(both) if isinstance(each, Name)), None)
        return None if callee is None else self._object(callee, frame)

    def _object(self, name: Name, frame: FrameType) -> object:
        first, *attributes = name.path
        if name.is_local:
            value = self._find_local(frame, first)
        else:
            value = frame.f_globals.get(first, getattr(builtins, first, None))
        for attribute in attributes:
            if isinstance(value, ModuleType):
                value = vars(value).get(attribute)
            elif value is not None:
                value = inspect.getattr_static(value, attribute, None)
        return getattr(value, "__func__", value) if isinstance(value, (staticmethod, classmethod)) else value


def _failed(decided: _Decision | None) -> Health | None:
    """The verdict on a way that raises, or ends the process. Without a test of the value it fails with any answer."""
    return None if decided is None else Health.FAILS


def _known(value: object) -> object:
    return value if isinstance(value, (_Given, Constant)) else None


def _top(stack: Stack) -> object:
    return stack[-1] if stack else None


def _chosen(paths: CodePaths, index: int, condition: object) -> int | None:
    """The way that a branch takes; None if its condition is not known."""
    name = paths.instructions[index].opname
    if len(paths.after[index]) != 2 or not name.startswith(("POP_JUMP", "JUMP_IF")):
        return None
    if not isinstance(condition, (_Given, Constant, _Listed)):
        return None
    value = True if isinstance(condition, _Listed) else condition.value
    jumps = bool(value) == ("TRUE" in name)
    if name.endswith("NONE"):
        jumps = (value is None) != name.endswith("NOT_NONE")
    return paths.after[index][int(jumps)]


def _stored(
    argval: object, name: str, stack: Stack, after: Stack, variables: dict[str, object]
) -> tuple[Stack, dict[str, object]]:
    """The stack and the variables after values were stored."""
    names = argval if isinstance(argval, tuple) else (argval,)
    if name == "STORE_FAST_LOAD_FAST":
        changed = {**variables, str(names[0]): _top(stack)}
        return (*stack[:-1], changed.get(str(names[1]), Name((str(names[1]),), is_local=True))), changed
    return after, {**variables, **{str(each): value for each, value in zip(names, stack[::-1], strict=False)}}


def _appended(stack: Stack, depth: int, value: object) -> Stack:
    """The stack after a value was appended to the list that lies ``depth`` deep."""
    if not isinstance(value, (_Given, Constant)) or depth > len(stack):
        return stack
    before = stack[-depth]
    items = (*before.items, value) if isinstance(before, _Listed) else (None, value)
    return (*stack[: len(stack) - depth], _Listed(items), *stack[len(stack) - depth + 1 :])


_RESULTS = frozenset(
    {"BUILD_LIST", "BUILD_TUPLE", "TO_BOOL", "UNARY_NOT", "UNARY_NEGATIVE", "COMPARE_OP", "IS_OP", "BINARY_OP"}
)


def _result(name: str, sign: str, arg: int | None, stack: Stack, otherwise: object) -> object:
    """The value that an instruction of those leaves on top of the stack."""
    if name in ("BUILD_LIST", "BUILD_TUPLE") and arg:
        return _Listed(stack[-arg:])
    if name in ("TO_BOOL", "UNARY_NOT", "UNARY_NEGATIVE"):
        unary = {"TO_BOOL": bool, "UNARY_NOT": operator.not_}.get(name, operator.neg)
        return _applied(unary, stack[-1:])
    if name == "COMPARE_OP":
        return _applied(_COMPARISONS.get(sign.removeprefix("bool(").removesuffix(")")), stack[-2:])
    if name == "IS_OP":
        return _applied(operator.is_not if arg else operator.is_, stack[-2:])
    if name == "BINARY_OP":
        sign = sign.removesuffix("=")
        given = [value for value in stack[-2:] if isinstance(value, _Given)]
        if sign in ("&", "|") and len(given) == 1 and isinstance(given[0].value, bool):
            return given[0]  # as if the other decided nothing
        return _applied(_OPERATORS.get(sign), stack[-2:])
    return otherwise


def _called(callee: object, arguments: Sequence[object]) -> object:
    """The result of a call; None if it is not known."""
    if len(arguments) == 1 and isinstance(arguments[0], _Listed) and (callee is all or callee is any):
        return _reduced(callee, arguments[0])
    try:
        return _applied(callee, arguments) if arguments and callee in _PURE else None
    except TypeError:  # not hashable
        return None


def _reduced(callee: object, listed: _Listed) -> object:
    """The result of ``any`` or ``all`` of a list if the elements that are not known decide nothing."""
    known = [item for item in listed.items if isinstance(item, (_Given, Constant))]
    return _Given(callee(item.value for item in known)) if known and callable(callee) else None


def _applied(function: object, values: Iterable[object]) -> object:
    values = list(values)
    if not callable(function) or not all(isinstance(value, (_Given, Constant)) for value in values):
        return None
    try:
        result = function(*[value.value for value in values])  # type: ignore[attr-defined]
    except Exception:  # the script's own would raise
        return None
    return _Given(result) if any(isinstance(value, _Given) for value in values) else Constant(result)


def _never_returns(callee: object) -> bool:
    """Return whether a function always raises, or ends the process."""
    if isinstance(callee, FunctionType):
        code = callee.__code__
        if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
            return False
        paths = paths_of(code)
        return not any(paths.instructions[index].opname in RETURNS for index in paths.reached((0,), frozenset()))
    return type(callee).__name__ == "Quitter" or any(callee is end for end in _ENDS)
