"""The ways through a function's bytecode: its instructions, where each may lead, its loops, and its symbolic stacks.

Only what Python 3.11 to 3.13 have in common is named here: other instructions are known by the stack that they leave
(``dis.stack_effect``). A loop's condition is compiled twice, in front of the loop and at its end; both copies have
the same position in the source.
"""

from __future__ import annotations

import bisect
import dis
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType

#: Instructions after which the next does not follow.
RETURNS = frozenset({"RETURN_VALUE", "RETURN_CONST"})
RAISES = frozenset({"RAISE_VARARGS", "RERAISE"})
_JUMPS = frozenset({"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE"})
#: Loops that end by themselves, whatever their body does.
_ENDING = frozenset({"FOR_ITER", "SEND", "END_ASYNC_FOR", "GET_ANEXT"})
#: These load one or two values and leave the rest of the stack as it is.
_LOADS: tuple[str, ...] = (
    "LOAD_FAST",
    "LOAD_CONST",
    "LOAD_GLOBAL",
    "LOAD_NAME",
    "LOAD_DEREF",
    "LOAD_CLOSURE",
    "PUSH_NULL",
)
_LOADS += ("LOAD_ASSERTION_ERROR", "LOAD_BUILD_CLASS", "LOAD_CLASSDEREF")


#: These take values and leave the rest of the stack as it is.
_POPS: tuple[str, ...] = (
    "POP_",
    "END_FOR",
    "JUMP_IF_",
    "LIST_APPEND",
    "SET_ADD",
    "MAP_ADD",
    "STORE_FAST",
    "STORE_NAME",
    "STORE_GLOBAL",
    "STORE_DEREF",
    "FOR_ITER",
)

#: These leave the stack as it is. What PRECALL of Python 3.11 is said to take, its CALL takes.
_KEEPS = frozenset({"PRECALL", "KW_NAMES", "NOP", "CACHE", "RESUME", "EXTENDED_ARG", "MAKE_CELL", "COPY_FREE_VARS"})
_KEEPS |= {"DELETE_FAST", "DELETE_NAME", "DELETE_GLOBAL", "DELETE_DEREF", "SETUP_ANNOTATIONS"}


@dataclass(frozen=True)
class Name:
    """A value of the stack, as the source names it: ``("os", "_exit")``. It is a variable of the function if local."""

    path: tuple[str, ...]
    is_local: bool


@dataclass(frozen=True)
class Constant:
    """A constant on the stack."""

    value: object

    def __hash__(self) -> int:
        return hash(type(self.value))  # a dictionary has none


@dataclass(frozen=True)
class Result:
    """The result of the call at an index."""

    index: int


#: A container that is made empty.
EMPTY = Constant(())

#: What is known of each value on the stack, the topmost last.
Stack = tuple[object, ...]


@dataclass(frozen=True)
class Loop:
    """A loop: the index of its first instruction, and those of all."""

    header: int
    body: frozenset[int]


class CodePaths:
    """The instructions of a function, by index: ``after`` has where each leads, the next one first."""

    def __init__(self, code: CodeType) -> None:
        self.code = code
        self.instructions = list(dis.get_instructions(code))
        self._offsets = [instruction.offset for instruction in self.instructions]
        self.index_at = {instruction.offset: index for index, instruction in enumerate(self.instructions)}
        self.after = [self._after(index) for index in range(len(self.instructions))]
        self.stacks = self._stacks()

    def _after(self, index: int) -> tuple[int, ...]:
        instruction = self.instructions[index]
        if instruction.opname in RETURNS or instruction.opname in RAISES:
            return ()
        target = self.target(index)
        if instruction.opname in _JUMPS:
            return () if target is None else (target,)
        following = (index + 1,) if index + 1 < len(self.instructions) else ()
        return following if target is None else (*following, target)

    def target(self, index: int) -> int | None:
        """The index of the instruction that a jump leads to; None if it does not jump."""
        instruction = self.instructions[index]
        is_jump = instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs
        return self.index_at.get(instruction.argval) if is_jump else None

    def running(self, frame: FrameType) -> int:
        """The index of a frame's current instruction; -1 before the first.

        While it waits for a function of Python, a frame is at the end of the call, which has unused bytes.
        """
        return bisect.bisect_right(self._offsets, frame.f_lasti) - 1

    def _stacks(self) -> list[Stack | None]:
        """The stack in front of each instruction, as the first way that reaches it leaves it."""
        stacks: list[Stack | None] = [None] * len(self.instructions)
        waiting: list[tuple[int, Stack]] = [(0, ())]
        for entry in dis.Bytecode(self.code).exception_entries:  # type: ignore[attr-defined]
            depth = entry.depth + int(entry.lasti) + 1
            if (index := self.index_at.get(entry.target)) is not None:
                waiting.insert(0, (index, (None,) * depth))
        while waiting:
            index, stack = waiting.pop()
            if stacks[index] is not None:
                continue
            stacks[index] = stack
            target = self.target(index)
            waiting += [(after, self.step(index, stack, is_jump=after == target)) for after in self.after[index]]
        return stacks

    def step(self, index: int, stack: Stack, *, is_jump: bool) -> Stack:
        """The stack that an instruction leaves. Of a result, only names and constants are known."""
        instruction = self.instructions[index]
        name, arg = instruction.opname, instruction.arg or 0
        if name == "COPY":
            return (*stack, stack[-arg] if arg <= len(stack) else None)
        if name == "SWAP" and arg <= len(stack):
            changed = list(stack)
            changed[-1], changed[-arg] = changed[-arg], changed[-1]
            return tuple(changed)
        if name in _KEEPS or name in _JUMPS:
            return stack
        if name == "END_SEND":
            return (*stack[:-2], *stack[-1:])
        if name == "STORE_FAST_LOAD_FAST":  # of Python 3.13
            return (*stack[:-1], Name((instruction.argval[1],), is_local=True))
        if name in ("BUILD_LIST", "BUILD_MAP", "BUILD_SET") and not arg:
            return (*stack, EMPTY)
        effect = dis.stack_effect(instruction.opcode, instruction.arg, jump=is_jump)
        if name == "CALL":
            effect = -1 - arg
        if name.startswith(_LOADS):
            return (*stack, *self._loaded(instruction, effect))
        if name in ("LOAD_ATTR", "LOAD_METHOD"):
            return (*stack[:-1], *_filled(_attribute(stack[-1:], instruction.argval), effect + 1))
        if name.startswith(_POPS) and effect <= 0:
            return stack[:effect] if effect else stack
        if name == "FOR_ITER":
            return (*stack, None)
        after = _unknown(stack, effect)
        return (*after[:-1], Result(index)) if name == "CALL" else after

    def _loaded(self, instruction: dis.Instruction, effect: int) -> Iterable[object]:
        name, value = instruction.opname, instruction.argval
        if name == "LOAD_CONST":
            return (Constant(value),)
        if name.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE")):
            return [Name((each,), is_local=True) for each in (value if isinstance(value, tuple) else (value,))]
        if name in ("LOAD_GLOBAL", "LOAD_NAME"):
            return _filled(Name((value,), is_local=False), effect)
        return (None,) * effect

    @functools.cached_property
    def loops(self) -> list[Loop]:
        """All loops, from the innermost outwards. Jumps that lead back from what handles an exception make none."""
        before = self._before()
        bodies: dict[int, set[int]] = {}
        for index, afters in enumerate(self.after):
            for header in afters:
                if header <= index and index in (inside := self.reached((header,), frozenset())):
                    body = bodies.setdefault(header, {header})
                    waiting = [index]
                    while waiting:
                        if (earlier := waiting.pop()) in inside and earlier not in body:
                            body.add(earlier)
                            waiting += before[earlier]
        return sorted(
            (Loop(header, frozenset(body)) for header, body in bodies.items()), key=lambda loop: len(loop.body)
        )

    def _before(self) -> list[list[int]]:
        before: list[list[int]] = [[] for _ in self.instructions]
        for index, afters in enumerate(self.after):
            for after in afters:
                before[after].append(index)
        return before

    def reached(self, start: Sequence[int], barred: frozenset[int]) -> set[int]:
        """All instructions that ways from ``start`` reach without passing a barred one."""
        reached: set[int] = set()
        waiting = list(start)
        while waiting:
            if (index := waiting.pop()) not in reached and index not in barred:
                reached.add(index)
                waiting += self.after[index]
        return reached

    def copies(self, index: int) -> frozenset[int]:
        """The instructions that the same test of the source is compiled to."""
        position = self.instructions[index].positions
        if position is None or position.lineno is None or position.col_offset is None:
            return frozenset((index,))
        return frozenset(
            other
            for other, candidate in enumerate(self.instructions)
            if candidate.positions == position
            and candidate.opname not in _ENDING
            and self.target(other) is not None
            and len(self.after[other]) > 1
        )

    def begin(self, index: int) -> tuple[int, int]:
        """The line and column at which an instruction's source begins; (0, 0) if it is not known."""
        position = self.instructions[index].positions
        return (0, 0) if position is None else (position.lineno or 0, position.col_offset or 0)

    def stays(self, test: int, way: int, around: int | None = None) -> bool:
        """Return whether, after a test, one way leads around its loop while the other leaves it.

        Of a loop over an iterable that holds for neither: it ends by itself. The loop must have ``around`` in it.
        """
        copies, ways = self.copies(test), self.after[test]
        loop = next((loop for loop in self.loops if copies & loop.body), None)
        if loop is None or (around is not None and around not in loop.body):
            return False
        leaving = [self._leaves(loop, copies, each) for each in ways]
        return any(leaving) and not leaving[ways.index(way)]

    def _leaves(self, loop: Loop, copies: frozenset[int], way: int) -> bool:
        ends = self.instructions[loop.header].opname in _ENDING and not self._is_endless(loop.header)
        barred = copies if ends else copies | {loop.header}
        healthy = {index for index in self.reached((way,), barred) if self.instructions[index].opname not in RAISES}
        return bool(healthy - loop.body) and (way not in barred)

    def _is_endless(self, header: int) -> bool:
        """Return whether a loop is over ``itertools.count()``, ``cycle`` or ``iter(function, other)``."""
        made = next((index for index in range(header)[::-1] if self.instructions[index].opname == "CALL"), None)
        if made is None or self.instructions[header].opname != "FOR_ITER" or header - made > 2:
            return False
        stack, num_arguments = self.stacks[made] or (), self.instructions[made].arg or 0
        callees = [value.path[-1] for value in stack[-2 - num_arguments :][:2] if isinstance(value, Name)]
        return bool({"count", "cycle"} & {*callees}) or ("iter" in callees and num_arguments > 1)


def _filled(value: object, count: int) -> tuple[object, ...]:
    """A value with the NULL that some versions push before or after it: both count as the value."""
    return (value,) * max(count, 1)


def _attribute(top: Sequence[object], attribute: str) -> object:
    if top and isinstance(top[0], Name):
        return Name((*top[0].path, attribute), top[0].is_local)
    return None


def _unknown(stack: Stack, effect: int) -> Stack:
    """The stack after an instruction that takes what it does and leaves one result that is not known."""
    taken = max(1 - effect, 0) if effect < 1 else 1
    kept = stack[: max(len(stack) - taken, 0)]
    return kept + (None,) * max(len(stack) + effect - len(kept), 0)


@functools.lru_cache(maxsize=512)
def paths_of(code: CodeType) -> CodePaths:
    """The ways through a function."""
    return CodePaths(code)
