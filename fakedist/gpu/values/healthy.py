"""Finds the answer that a healthy job would give where its code tests a value that no kernel computed.

From the instruction that reads the value, the code is followed with each answer that it may have: through variables,
attributes, comparisons, the functions that get it, and the returns to those that called. Other variables have the
values that they have now. An answer after which every way raises, or ends the process,
is not a healthy job's. Neither is one that leads around a loop whose other way leaves it.
"""

from __future__ import annotations

import dis
import enum
import inspect
import math
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
)

from fakedist.gpu.values.code_paths import RAISES, RETURNS, CodePaths, Constant, Name, Result, Stack, paths_of
from fakedist.gpu.values.symbolic import (
    ANSWERING,
    GROWING,
    QUITTER,
    RAISED,
    RESULTS,
    TRUE,
    Current,
    Given,
    Listed,
    Rows,
    appended,
    applied,
    assigned,
    attribute_named,
    attribute_of,
    callee_of,
    chosen_way,
    global_object,
    holds,
    imported,
    is_paused,
    iterated,
    known_value,
    mentions_given,
    name_of,
    never_returns,
    of_generator,
    result_of_call,
    result_of_instruction,
    stored,
    top_of,
    unpacked,
)

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
#: The functions around an instruction that a walk has entered.
_MOST_ENTERED = 4
#: How often the outlook of a read is found anew because variables have changed. Then they may have any value.
_MOST_CHANGES = 32
#: The name of an attribute begins with it whose object is known, whatever variables it is in.
_OBJECT = "@"
#: Variables of these are followed by value.
_PLAIN = (bool, int, float, str)
_CONTAINERS = (list, dict, set, tuple, deque)
_SIZES = frozenset({"shape", "ndim", "nbytes", "size", "numel", "dim"})
_ADDS = frozenset({"append", "add", "appendleft"})
_CHANGES = frozenset(
    {"extend", "insert", "update", "setdefault", "pop", "popleft", "popitem", "remove", "discard", "clear"}
)

#: Functions of torch that raise if their first argument is false.
_CHECKS = frozenset({"_assert", "_check", "_check_value", "_check_index", "_check_type"})
#: Functions of positive numbers.
_OF_POSITIVE = (math.log, math.log2, math.log10, math.sqrt)
#: Functions that wait for the user to type.
_WAITS = frozenset({"breakpoint", "set_trace"})
#: Functions that end this process, which may be replaced by others that watch it.
_KILLS = frozenset({("os", "kill"), ("os", "killpg"), ("os", "abort"), ("os", "_exit"), ("signal", "raise_signal")})
#: A truth value or a number that a script reads.
Number = bool | int | float
#: The same, or how many rows it gets.
Answer = Number | Rows
_NOTHING: Mapping[str, object] = {}


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

    answer: Answer
    avoids: Health
    is_tested: bool


#: How a variable of a running function is found; the default if it cannot be.
FindLocal = Callable[[FrameType, str], object]


@dataclass
class _Kept:
    """An outlook, and the variables with whose values it was found."""

    outlook: Outlook
    used: dict[tuple[int, Name], object]
    times: int


class Healthy:
    """Finds healthy answers, and keeps those of truth values by where they were read."""

    def __init__(self, find_local: FindLocal) -> None:
        self._find_local = find_local
        self._kept: dict[tuple[object, ...], _Kept] = {}
        #: What the last reads gave, by function and instruction.
        self._answers: dict[tuple[int, int], Answer] = {}
        self._uses_answers = False

    def outlook(self, frame: FrameType, answer: Answer) -> Outlook:
        """Return what a read should give in a frame that is at the reading instruction."""
        where = _whereabouts(frame)
        is_truth = isinstance(answer, bool)
        key = (where, answer if is_truth else None)
        kept = self._kept.get(key)
        if kept is not None and self._is_as_before(frame, kept.used):
            self._answers[_instruction(frame)] = kept.outlook.answer if is_truth else answer
            return kept.outlook if is_truth else replace(kept.outlook, answer=answer)
        times = 1 if kept is None else kept.times + 1
        used: dict[tuple[int, Name], object] | None = {} if times <= _MOST_CHANGES else None
        outlook = self._found(frame, answer, used)
        if len(self._answers) >= _MOST_KEPT:
            self._answers.clear()
        self._answers[_instruction(frame)] = outlook.answer
        if (is_truth or not outlook.is_tested) and not self._uses_answers:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[key] = _Kept(outlook, used or {}, times)
        return outlook

    def _is_as_before(self, frame: FrameType, used: Mapping[tuple[int, Name], object]) -> bool:
        frames = _callers(frame)
        now = {key: _value_now(_object(key[1], frames[key[0]], self._find_local)) for key in used}
        return now == used

    def _found(self, frame: FrameType, answer: Answer, used: dict[tuple[int, Name], object] | None) -> Outlook:
        """The outlook, and in ``used`` the variables that decided; with None, no variable has a known value."""
        first = _Walk(frame, answer, self._find_local, used, self._answers)
        verdict = first.verdict()
        self._uses_answers = bool(first.answers_used) or first.may_raise or first.reads_items
        if not first.ways and not first.is_compared:
            return Outlook(answer, Health.FINE, is_tested=False)
        best, avoided, is_tested = answer, verdict, first.is_compared
        numbers = (*first.answers_used, *first.numbers)
        for other in [not answer] if isinstance(answer, bool) else _others(frame, answer, numbers):
            walk = _Walk(frame, other, self._find_local, used, self._answers)
            of_other = walk.verdict()
            is_tested |= walk.ways != first.ways
            avoided = max(avoided, of_other)
            if of_other < verdict:
                best, verdict = other, of_other
        return Outlook(best, avoided if avoided > verdict else Health.FINE, is_tested=is_tested)


def _instruction(frame: FrameType) -> tuple[int, int]:
    """A running function and its instruction that reads."""
    paths = paths_of(frame.f_code)
    index = paths.running(frame)
    return id(frame), index + int(index >= 0 and paths.instructions[index].opname == "PRECALL")


def _whereabouts(frame: FrameType | None) -> tuple[tuple[CodeType, int], ...]:
    callers: list[tuple[CodeType, int]] = []
    while frame is not None and len(callers) < _MOST_CALLERS:
        callers.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(callers)


def _callers(frame: FrameType | None) -> list[FrameType]:
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _others(frame: FrameType, answer: Answer, compared: Iterable[Number]) -> list[Answer]:
    """Other numbers that a read could give: simple ones, and those next to what it is compared with, or in the code."""
    if isinstance(answer, Rows):
        return [Rows(0 if answer else 1)]
    numbers: list[Number] = list(compared)
    caller: FrameType | None = frame
    while caller is not None and len(numbers) < _MOST_NUMBERS:
        numbers += [value for value in caller.f_code.co_consts if type(value) in (int, float)]
        caller = caller.f_back
    near = [value for number in numbers[:_MOST_NUMBERS] for value in (number, number - 1, number + 1, number / 2)]
    kind = type(answer)
    found = [kind(value) for value in (-answer, 0, 1, *near, *_EVEN_LARGER) if math.isfinite(value)]
    return list(dict.fromkeys(value for value in found if value != answer))


@dataclass(frozen=True, eq=False)
class _Entered:
    """A function that a walk has entered at a call: it never ran. ``objects`` has those of its parameters."""

    f_code: CodeType
    f_globals: dict[str, object]
    caller: _Point
    depth: int
    objects: dict[str, object]


@dataclass(frozen=True)
class _Point:
    """Where a walk is: in front of an instruction of a function."""

    frame: FrameType | _Entered
    index: int
    stack: Stack
    variables: dict[str, object]


@dataclass(frozen=True)
class _Decision:
    """The function and the instruction that tested the value last; nothing has been stored since if it is fresh."""

    frame: FrameType | _Entered
    index: int
    is_same_statement: bool = True

    def continues_at(self, point: _Point, paths: CodePaths) -> bool:
        """Whether a test comes after this one in the source, with nothing stored between them."""
        return (
            self.is_same_statement and self.frame is point.frame and paths.begin(self.index) < paths.begin(point.index)
        )


class _Walk:
    """Follows the code after a read that gives ``answer``."""

    def __init__(
        self,
        frame: FrameType,
        answer: Answer,
        find_local: FindLocal,
        used: dict[tuple[int, Name], object] | None,
        answers: Mapping[tuple[int, int], Answer],
    ) -> None:
        #: Where the value was tested, and the ways that followed.
        self.ways: list[tuple[CodeType, int, int]] = []
        #: Whether it was compared with something that is not known.
        self.is_compared = False
        #: The numbers that it was compared with.
        self.numbers: list[Number] = []
        #: What earlier reads gave that is used together with this one.
        self.answers_used: list[int | float] = []
        #: Whether its number decides whether something raises.
        self.may_raise = False
        #: Whether an item of a container decided, which may change.
        self.reads_items = False
        self._answers = answers
        self._end: Health | None = None
        self._used = used
        self._frames = _callers(frame)
        self._depths = {id(caller): depth for depth, caller in enumerate(self._frames)}
        self._entered: list[_Entered] = []
        self._frame, self._answer = frame, answer
        self._read = paths_of(frame.f_code).running(frame)
        self._find_local = find_local
        self._steps = self._branches = 0
        self._seen: set[tuple[object, ...]] = set()

    def verdict(self) -> Health:
        """How healthy the job is with this answer."""
        point = self._resumed(self._frame, Given(self._answer))
        found = None if point is None else self._way(point, None)
        return Health.FINE if found is None else found

    def _value_of(self, depth: int, name: Name) -> object:
        return _value_now(self._object(name, self._frames[depth]))

    def _resumed(
        self,
        frame: FrameType | None,
        value: object,
        assigned: Mapping[str, object] = _NOTHING,
    ) -> _Point | None:
        """Go on in a function whose current instruction gets a value, as its result or as what it tests.

        ``assigned`` are variables of the function that returns it.
        """
        shared = {} if frame is None else _shared(assigned, frame.f_code)
        if frame is None or (value is None and not shared):
            return None
        paths = paths_of(frame.f_code)
        index = paths.running(frame)
        if index >= 0 and paths.instructions[index].opname == "PRECALL":
            index += 1
        stack = paths.stacks[index] if index >= 0 else None
        if stack is None:
            return None
        here = _Point(frame, index, stack, shared)
        stack = tuple(self._present(each, here) for each in stack[:-1]) + stack[-1:]
        here = replace(here, stack=stack)
        name = paths.instructions[index].opname
        if name.startswith(("POP_JUMP", "JUMP_IF")) or name in ("TO_BOOL", "UNARY_NOT"):
            return _Point(frame, index, (*stack[:-1], value), shared)
        if name == "CONTAINS_OP" and paths.instructions[index].arg and isinstance(value, Given):
            value = Given(not value.value)
        if name == "SEND" or (name == "FOR_ITER" and value == Listed(())):  # a coroutine or a generator has ended
            ended = self._at(here, paths, paths.after[index][1])
            return replace(ended, stack=(*ended.stack[:-1], value)) if name == "SEND" else ended
        if name.startswith("CALL"):
            made = top_of(stack)
            of_made = callee_of(paths, made.index, paths.stacks[made.index] or ()) if isinstance(made, Result) else None
            if self._called_object(of_made, frame) is filter:
                value = Given(list(GROWING * bool(value.value))) if isinstance(value, Given) else None
            else:
                callee = self._called_object(callee_of(paths, index, stack), frame)
                num_others = max((paths.instructions[index].arg or 0) - 1, 0)
                value = of_generator(callee, value, stack[len(stack) - num_others :])
        if value is RAISED:
            self._end = Health.FAILS
            return None
        if paths.instructions[index + 1].opname == "POP_TOP" and not shared:
            return None  # nothing uses it
        return _Point(frame, index + 1, (*paths.step(index, stack, is_jump=False)[:-1], value), shared)

    def _present(self, value: object, point: _Point) -> object:
        """A value that was put on the stack before the read: a variable, or what an earlier read gave."""
        if isinstance(value, Result) and isinstance(point.frame, FrameType):
            answer = self._answers.get((id(point.frame), value.index))
            self.answers_used += [answer] if isinstance(answer, (int, float)) else []
            return None if answer is None else Constant(answer)
        return self._loaded(value, point) if isinstance(value, Name) and value.is_local else value

    def _way(self, point: _Point | None, decided: _Decision | None, left: int = _MOST_STEPS) -> Health | None:
        """How healthy a way is; None where another has been followed from here."""
        while point is not None:
            paths = paths_of(point.frame.f_code)
            if self._steps > 0 and point.frame is self._frame and point.index == self._read:
                return None  # it would get the same answer
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
            is_decided = decided is not None
            is_chosen = is_decided and point.frame.f_code.co_name == "<genexpr>"  # (x for x in all if good(x))
            if name in RETURNS or (name == "YIELD_VALUE" and (is_chosen or isinstance(top_of(point.stack), Given))):
                self._end = None
                point = self._returned(point, paths, is_decided=is_decided, is_chosen=is_chosen)
                if self._end is not None:
                    return self._end
                continue
            if len(paths.after[point.index]) < 2:
                if decided is not None and name.startswith(("STORE_", "POP_TOP")):
                    decided = replace(decided, is_same_statement=False)
                self._end = None
                point = self._next(point, paths)
                if point is None:
                    return _failed(decided) if self._end is None else self._end
                continue
            if name == "FOR_ITER" and isinstance(items := top_of(point.stack), Listed):
                point = self._iterated(point, paths, items)
                continue
            condition = self._settled(top_of(point.stack), point)
            is_current = isinstance(condition, Current)
            if is_current and any(paths.stays(point.index, way) for way in paths.after[point.index]):
                way = chosen_way(paths, point.index, condition)
                if decided is not None and way is not None and self._goes_around(point, paths, way, condition):
                    return Health.STAYS
                condition = None  # a loop's counter has another value in another round
            self._depend_on((condition,))
            if (way := chosen_way(paths, point.index, condition)) is None:
                return self._fork(point, paths, decided, left)
            if isinstance(condition, Given) or (isinstance(condition, Listed) and decided is not None):
                self.ways.append((point.frame.f_code, point.index, way))
                decided, left = _Decision(point.frame, point.index), _MOST_STEPS_AFTER
                if paths.stays(point.index, way):
                    return Health.STAYS
            elif decided is not None and decided.frame is point.frame and paths.stays(point.index, way, decided.index):
                return Health.STAYS
            point = self._at(point, paths, way)
        return Health.FINE

    def _depend_on(self, values: Iterable[object]) -> None:
        """Remember the present values of variables that decide."""
        names = [each for value in values if isinstance(value, Current) for each in value.names]
        if self._used is not None:
            self._used.update({(depth, name): self._value_of(depth, name) for depth, name in names})

    def _goes_around(self, point: _Point, paths: CodePaths, way: int, condition: object) -> bool:
        """Whether a way leads around a loop to the read, and nothing on it changes what keeps the loop going."""
        depth = self._depths.get(id(point.frame))
        names = [name for at, name in condition.names if at == depth] if isinstance(condition, Current) else []
        loop = next((loop for loop in paths.loops if point.index in loop.body), None)
        if depth is None or loop is None or not names or not paths.stays(point.index, way):
            return False
        read = paths.running(self._frames[depth])
        between = paths.reached((way,), frozenset({read})) & loop.body
        variables = {name.path[0] for name in names}
        variables |= {f"{_OBJECT}{id(self._object(name, point.frame))}" for name in names}
        if variables & {place.partition(".")[0].partition("[")[0] for place in point.variables}:
            return False
        held = {name.path[0] for name in names if type(self._object(name, point.frame)) in _CONTAINERS}
        touching = [instruction for index in between if (instruction := paths.instructions[index])]
        return read in loop.body and not any(
            {instruction.argval, *(instruction.argval if isinstance(instruction.argval, tuple) else ())}
            & (variables if instruction.opname.startswith("STORE") else held)
            for instruction in touching
            if instruction.opname.startswith(("STORE_", "LOAD_")) and instruction.argval.__hash__
        )

    def _iterated(self, point: _Point, paths: CodePaths, items: Listed) -> _Point:
        """The next round of a loop over a list, or the end of it."""
        after, target = paths.after[point.index]
        if not items.items:
            return _Point(point.frame, target, paths.step(point.index, point.stack, is_jump=True), point.variables)
        stack = (*point.stack[:-1], Listed(items.items[1:]), items.items[0])
        return _Point(point.frame, after, stack, point.variables)

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
        stack = paths.step(point.index, point.stack, is_jump=way == paths.target(point.index))
        return replace(point, index=way, stack=stack)

    def _returned(self, point: _Point, paths: CodePaths, *, is_decided: bool, is_chosen: bool) -> _Point | None:
        instruction = paths.instructions[point.index]
        is_generator = bool(point.frame.f_code.co_flags & inspect.CO_GENERATOR)
        is_end = instruction.opname in RETURNS
        if is_generator == is_end and not (is_chosen and is_end):
            return None  # a generator that ends, or a coroutine that waits
        value = Constant(instruction.argval) if instruction.opname == "RETURN_CONST" else top_of(point.stack)
        if is_chosen:  # none, or one more
            value = Listed(()) if is_end else value if isinstance(value, (Given, Constant)) else TRUE
        value = _answered(value, is_decided=is_decided)
        if isinstance(point.frame, _Entered):
            caller = point.frame.caller
            after = paths_of(caller.frame.f_code).step(caller.index, caller.stack, is_jump=False)
            variables = {**caller.variables, **_shared(point.variables, caller.frame.f_code)}
            return _Point(caller.frame, caller.index + 1, (*after[:-1], value), variables)
        return self._resumed(point.frame.f_back, value, point.variables)

    def _next(self, point: _Point, paths: CodePaths) -> _Point | None:
        """The point after an instruction that only one follows; None if it ends the process or raises."""
        instruction, stack, variables = paths.instructions[point.index], point.stack, point.variables
        name = instruction.opname
        after = paths.step(point.index, stack, is_jump=paths.target(point.index) is not None)
        if name in ("STORE_ATTR", "STORE_SUBSCR"):
            place, value = self._place(name, instruction.argval, point), stack[-2 if name == "STORE_ATTR" else -3]
            held = name_of(top_of(stack[:-1])) if name == "STORE_SUBSCR" else None
            if held is not None and (place is None or isinstance(self._object(held, point.frame), dict)):
                variables = assigned(variables, self._contents(held, point), Listed((*GROWING, value)))
            variables = variables if place is None else assigned(variables, place, value)
        elif name.startswith("STORE_"):
            after, variables = stored(instruction.argval, name, stack, after, variables)
        elif name == "GET_ITER":
            after = (*stack[:-1], iterated(top_of(stack)))
        elif name in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(owner := top_of(stack), (Given, Listed)):
            after = (*stack[:-1], *(attribute_of(owner, instruction.argval),) * (len(after) - len(stack) + 1))
        elif name.startswith(_LOADS) and len(after) >= len(stack):
            kept = len(stack) - int(name in ("LOAD_ATTR", "LOAD_METHOD"))
            after = (*stack[:kept], *(self._loaded(value, point) for value in after[kept:]))
        elif name in _APPENDS:
            after = appended(after, instruction.arg or 1, top_of(stack))
        elif name in ("UNPACK_SEQUENCE", "UNPACK_EX"):
            number = instruction.arg or 0
            counts = (number, None) if name == "UNPACK_SEQUENCE" else (number & 0xFF, number >> 8)
            after = (*stack[:-1], *unpacked(top_of(stack), *counts))
        elif name.startswith("CALL"):
            called = self._called(paths, point, after)
            if not isinstance(called, tuple):
                return called
            after, variables = called
        elif name.startswith("IMPORT_"):
            after = (*after[:-1], imported(name, instruction.argval, top_of(stack)))
        elif name == "BINARY_SUBSCR":
            after = (*after[:-1], self._item(instruction, point))
        elif after and name in RESULTS:
            is_given = any(isinstance(value, Given) for value in stack[-2:])
            self._depend_on(stack[-2:] if is_given else ())
            self.is_compared |= name == "COMPARE_OP" and is_given and None in map(known_value, stack[-2:])
            if name == "COMPARE_OP" and is_given:
                constants = [value.value for value in stack[-2:] if isinstance(value, Constant)]
                self.numbers += [value for value in constants if isinstance(value, (int, float))]
            if name in ("TO_BOOL", "UNARY_NOT"):
                stack = (*stack[:-1], self._settled(stack[-1], point))
            if name.startswith("BUILD_"):
                stack = tuple(self._as_function(value, point) for value in stack)
            after = (
                *after[:-1],
                result_of_instruction(instruction.opname, instruction.argrepr, instruction.arg, stack, after[-1]),
            )
        self.may_raise |= name == "BINARY_OP" and "/" in instruction.argrepr and isinstance(stack[-1], Given)
        if top_of(after) is RAISED:
            self.ways.append((point.frame.f_code, point.index, -1))
            self._end = Health.FAILS
            return None
        return _Point(point.frame, paths.after[point.index][0], after, variables)

    def _called(self, paths: CodePaths, point: _Point, after: Stack) -> tuple[Stack, dict[str, object]] | _Point | None:
        """The stack and the variables after a call, or the first point in it; None if it does not return."""
        stack, variables = point.stack, point.variables
        callee = callee_of(paths, point.index, stack)
        function = self._called_object(callee, point.frame)
        passed, keywords = self._passed(paths, point)
        is_exit = function is sys.exit or type(function).__name__ == QUITTER
        if is_exit and passed and isinstance(code := passed[0], (Given, Current)) and not code.value:
            self._end = Health.FINE  # sys.exit(main())
        if never_returns(function) or (
            isinstance(callee, Name) and (callee.path[-1] in _WAITS or callee.path[-2:] in _KILLS)
        ):
            return None
        if self.ways and getattr(function, "__code__", None) is self._frame.f_code:
            self._end = Health.STAYS  # it tries again
            return None
        is_check = isinstance(callee, Name) and callee.path[-1] in _CHECKS and mentions_given(top_of(passed[:1]))
        self.ways += [(point.frame.f_code, point.index, 0)] * is_check
        if not is_check and (entered := self._entering(callee, function, passed, keywords, point)) is not None:
            return entered
        if isinstance(callee, Name) and callee.path[-1] in _ADDS | _CHANGES and len(callee.path) > 1:
            owner = replace(callee, path=callee.path[:-1])
            variables = self._changed(owner, callee.path[-1], passed, keywords, point)
        self._depend_on(passed if any(map(mentions_given, passed)) else ())
        result = result_of_call(function if isinstance(callee, (Name, Constant)) else callee, passed, keywords)
        self.may_raise |= any(function is each for each in _OF_POSITIVE) and mentions_given(top_of(passed))
        result = applied(holds, passed[:1]) if is_check else result or self._measured(callee, passed, point)
        return (*after[:-1], result), variables

    def _passed(self, paths: CodePaths, point: _Point) -> tuple[tuple[object, ...], dict[str, object]]:
        """The arguments of a call, by position and by name; none if it unpacks something."""
        instruction, stack = paths.instructions[point.index], point.stack
        if instruction.opname not in ("CALL", "CALL_KW"):
            return (), {}
        if instruction.opname == "CALL_KW":  # of Python 3.13
            names, stack = stack[-1].value, stack[:-1]  # type: ignore[attr-defined]
        else:
            before = next(each for each in paths.instructions[: point.index][::-1] if each.opname != "PRECALL")
            names = paths.code.co_consts[before.arg or 0] if before.opname == "KW_NAMES" else ()
        values = tuple(self._settled(value, point) for value in stack[len(stack) - (instruction.arg or 0) :])
        by_position = len(values) - len(names)
        return values[:by_position], dict(zip(names, values[by_position:], strict=True))

    def _changed(
        self, owner: Name, method: str, passed: Sequence[object], keywords: Mapping[str, object], point: _Point
    ) -> dict[str, object]:
        """The variables after a method has changed a container, of which little is known."""
        place = self._contents(owner, point)
        before = point.variables.get(place)
        added = tuple(passed[-1:]) if method in _ADDS | {"insert", "setdefault"} else ()
        if method in ("extend", "update"):
            more = top_of(tuple(passed))
            added = (*(more.items if isinstance(more, Listed) else ()), *keywords.values())
        items = (*(before.items if isinstance(before, Listed) else GROWING), *added)
        named = {f"{place}[{key!r}]": value for key, value in keywords.items()}
        if method == "setdefault" and isinstance(key := top_of(tuple(passed[:1])), Constant):
            named[f"{place}[{key.value!r}]"] = passed[-1]
        return {**assigned(point.variables, place, Listed(items) if added else None), **named}

    def _contents(self, name: Name, point: _Point) -> str:
        """How a walk calls what is in a container: after the object, which may have several names, if there is one."""
        place = self._key(name, point)
        held = None if place in point.variables else self._object(name, point.frame)
        return f"{_OBJECT}{id(held)}" if isinstance(held, _CONTAINERS) else place

    def _as_function(self, value: object, point: _Point) -> object:
        """A function or class instead of its name."""
        held = self._object(value, point.frame) if isinstance(value, Name) else None
        return Constant(held) if isinstance(held, _CALLABLE) else value

    def _key(self, name: Name, point: _Point) -> str:
        """How a walk calls a variable, or an attribute of an object."""
        owner = self._object(replace(name, path=name.path[:-1]), point.frame) if len(name.path) > 1 else None
        return ".".join(name.path) if owner is None else f"{_OBJECT}{id(owner)}.{name.path[-1]}"

    def _place(self, name: str, attribute: object, point: _Point) -> str | None:
        """The attribute or the item that an instruction is about; None if that is not known."""
        stack = point.stack
        owner = name_of(top_of(stack if name == "STORE_ATTR" else stack[:-1]))
        if owner is None:
            return None
        if name == "STORE_ATTR":
            return self._key(replace(owner, path=(*owner.path, str(attribute))), point)
        return f"{self._contents(owner, point)}[{stack[-1].value!r}]" if type(stack[-1]) is Constant else None

    def _loaded(self, value: object, point: _Point) -> object:
        """A variable or an attribute: of the walk, else its present value if that is plain, else its name."""
        if not isinstance(value, Name):
            return value
        for place in (self._key(value, point), self._contents(value, point)):
            if place in point.variables:
                held = point.variables[place]
                return replace(held, name=value) if isinstance(held, Listed) else held
        return self._current(value, point, _PLAIN)

    def _settled(self, value: object, point: _Point) -> object:
        """A value that is tested: of a container, its length."""
        return self._current(value, point, _CONTAINERS) if isinstance(value, Name) else value

    def _current(self, name: Name, point: _Point, kinds: tuple[type, ...]) -> object:
        found = None if self._used is None else self._object(name, point.frame)
        if type(found) not in kinds and not isinstance(found, enum.Enum):
            return name
        depth = self._depths.get(id(point.frame))
        return Current(_value_now(found), frozenset() if depth is None else frozenset({(depth, name)}))

    def _item(self, instruction: dis.Instruction, point: _Point) -> object:
        place = self._place(instruction.opname, None, point)
        if place in point.variables:
            return point.variables[place]
        container, index = point.stack[-2:]
        if isinstance(container, Name) and container.path[-1] == "shape":
            container = self._measured(container, (), point)
        if isinstance(container, Listed) and isinstance(index, (Constant, Given)) and isinstance(index.value, int):
            items = container.items
            item = items[index.value] if -len(items) <= index.value < len(items) else None
            return Given(item.value) if isinstance(index, Given) and isinstance(item, Constant) else item
        held = self._object(container, point.frame) if isinstance(container, Name) else None
        is_held = type(held) in (list, dict, tuple)
        item = applied(operator.getitem, (Constant(held) if is_held else container, index))
        self.reads_items |= is_held
        is_simple = isinstance(item, (Constant, Given)) and isinstance(item.value, (*_PLAIN, *_CALLABLE))
        return item if is_simple or not is_held else None

    def _measured(self, name: object, arguments: Sequence[object], point: _Point) -> object:
        """A size that C code knows: ``len(x)``, ``x.shape``, ``x.numel()``; None if it is something else."""
        if not isinstance(name, Name) or not all(isinstance(value, Constant) for value in arguments):
            return None
        if name.path == ("len",):
            return arguments[0] if len(arguments) == 1 and isinstance(arguments[0], Current) else None
        owner = self._object(replace(name, path=name.path[:-1]), point.frame) if name.path[-1] in _SIZES else None
        member = None if owner is None else inspect.getattr_static(type(owner), name.path[-1], None)
        if isinstance(member, GetSetDescriptorType):
            return Constant(getattr(owner, name.path[-1]))
        return applied(getattr(owner, name.path[-1]), arguments) if isinstance(member, MethodDescriptorType) else None

    def _entering(
        self,
        callee: object,
        function: object,
        passed: tuple[object, ...],
        keywords: Mapping[str, object],
        point: _Point,
    ) -> _Point | None:
        """The first instruction of a function of Python that gets the value; None if it cannot be followed."""
        depth = point.frame.depth + 1 if isinstance(point.frame, _Entered) else 0
        if not isinstance(function, FunctionType) or depth >= _MOST_ENTERED or is_paused(function.__code__):
            return None
        code = function.__code__
        owner = None
        if isinstance(callee, Name) and len(callee.path) > 1:
            owner = self._object(replace(callee, path=callee.path[:-1]), point.frame)
        is_bound = owner is not None and not isinstance(owner, (ModuleType, type))
        is_changed = is_bound and any(place.startswith(f"{_OBJECT}{id(owner)}.") for place in point.variables)
        if isinstance(method := getattr(callee, "value", None), MethodType):
            passed, is_bound = (Given(method.__self__), *passed), False
        if not is_changed and not any(
            isinstance(value, Listed) or mentions_given(value) for value in (*passed, *keywords.values())
        ):
            return None
        names = code.co_varnames[: code.co_argcount]
        usual = {
            **dict(zip(names[::-1], (function.__defaults__ or ())[::-1], strict=False)),
            **(function.__kwdefaults__ or {}),
        }
        positional = [None] * is_bound + [None if isinstance(value, Name) else value for value in passed]
        named: dict[str, object] = {name: Constant(value) for name, value in usual.items() if type(value) in _PLAIN}
        named |= {**dict(zip(names, positional, strict=False)), **keywords}
        variables = {name: value for name, value in named.items() if value is not None}
        if code.co_flags & inspect.CO_VARARGS:
            variables[code.co_varnames[code.co_argcount + code.co_kwonlyargcount]] = Listed(
                tuple(positional[len(names) :])
            )
        objects = {
            name: self._object(value, point.frame)
            for name, value in (*zip(names[is_bound:], passed, strict=False), *keywords.items())
            if isinstance(value, Name)
        }
        objects |= {names[0]: owner} if is_bound and names else {}
        variables |= {place: value for place, value in point.variables.items() if place[0] == _OBJECT}
        frame = _Entered(code, function.__globals__, point, depth, objects)
        self._entered.append(frame)
        return _Point(frame, 0, (), variables)

    def _called_object(self, callee: object, frame: FrameType | _Entered) -> object:
        if isinstance(callee, (Constant, Given)):
            is_answered = isinstance(getattr(callee.value, "__self__", None), ANSWERING)
            return None if is_answered else getattr(callee.value, "__func__", callee.value)
        return self._object(callee, frame) if isinstance(callee, Name) else None

    def _object(self, name: Name, frame: FrameType | _Entered) -> object:
        return _object(name, frame, self._find_local)


def _object(name: Name, frame: FrameType | _Entered, find_local: FindLocal) -> object:
    """The object that a name stands for in a frame; None if it cannot be found without running code."""
    if not name.is_local:
        return global_object(name, frame.f_globals)
    first = name.path[0]
    return attribute_named(frame.objects.get(first) if isinstance(frame, _Entered) else find_local(frame, first), name)


def _value_now(value: object) -> object:
    """A plain value, or the length of a container."""
    is_plain = type(value) in _PLAIN or isinstance(value, enum.Enum)
    return len(value) if isinstance(value, _CONTAINERS) else value if is_plain else None


def _answered(value: object, *, is_decided: bool) -> object:
    """A function's result as its caller gets it; None if it is not known."""
    if is_decided and isinstance(value, Constant):
        return Given(value.value)  # another answer may have returned another
    return value if isinstance(value, (Given, Constant, Listed)) else None


def _shared(variables: Mapping[str, object], code: CodeType) -> dict[str, object]:
    """The variables that another function has, too, and attributes of objects."""
    own = {*code.co_cellvars, *code.co_freevars}
    return {name: value for name, value in variables.items() if name[0] == _OBJECT or name in own}


def _failed(decided: _Decision | None) -> Health | None:
    """The verdict on a way that raises, or ends the process. Without a test of the value it fails with any answer."""
    return None if decided is None else Health.FAILS


_CALLABLE = (FunctionType, BuiltinFunctionType, type)
_LOADS = ("LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_ATTR", "LOAD_METHOD")
_APPENDS = ("LIST_APPEND", "SET_ADD", "MAP_ADD")
