"""Lets a run go on beyond the virtual GPU's memory, so that it shows how much the rank needs.

The driver asks here about each request that does not fit after the caching allocator has freed its caches, which is
where a real run gets its error. The script gets one only if it handles it. Torch calls its observers
only before it raises, so they do not hear of a request that is granted.

Running code handles it in a ``try`` or a ``with`` of a frame that waits for it. A handler does if it names
``OutOfMemoryError``. So does one of ``RuntimeError`` that looks for the text "out of memory" or that raises nothing
again, and one of ``Exception`` or of everything that looks for the text. It looks if the text is in it, or in a
function that it calls with the error. Without a file's source, a function with a handler looks if the text or the name
is anywhere in it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple, Protocol

import torch

from fakedist.frames import OURS, local_value, script_lines
from fakedist.patch import patched, present
from fakedist.record.device_memory import take_snapshot
from fakedist.record.position import Position
from fakedist.rundir.collector import no_collector
from fakedist.rundir.encoding import Record
from fakedist.rundir.memory_records import BeyondCapacityRecord

_SET, _GET = "_cuda_setMemoryFraction", "_cuda_getMemoryFraction"
_BEGIN = (
    "_cuda_beginAllocateToPool",
    "_cuda_beginAllocateCurrentStreamToPool",
    "_cuda_beginAllocateCurrentThreadToPool",
)
_END = "_cuda_endAllocateToPool"


class Capacity(Protocol):
    """The memory of virtual GPUs; gpu/virtual.py implements it."""

    def go_beyond(self, decide: Callable[[int, int, int, int], bool] | None) -> None:
        """Ask ``decide(device, bytes, limit_bytes, thread)`` whether to grant a request that does not fit."""

    def limit(self, device: int, bytes_: int) -> None:
        """Let a device's memory end at so many bytes."""

    def asked_once(self, more: int) -> None:
        """From now on (1), or no longer (-1), a refused request is not repeated."""


@contextmanager
def beyond_capacity(capacity: Capacity, append: Callable[[Record], None], position: Position) -> Iterator[None]:
    """Grant what does not fit unless the script handles the error, and record the first such request.

    ``torch.cuda.set_per_process_memory_fraction`` is enforced by the driver meanwhile, because the allocator would
    raise by itself.

    Raises:
        RecordingError: This version of torch lacks a function that is needed.
    """
    is_recorded = False

    def decide(device: int, bytes_: int, limit_bytes: int, thread: int) -> bool:
        nonlocal is_recorded
        with no_collector():  # a tensor that is freed here would wait for the allocator, which waits for the answer
            frames = _frames_of([thread, position.calls_backward])
            try:
                if any(map(is_handled, frames)):
                    return False
                if not is_recorded:
                    is_recorded = True
                    stack = next(filter(None, map(script_lines, frames)), [])
                    append(BeyondCapacityRecord(device, bytes_, limit_bytes, position.op - 1, stack))
                return True
            finally:
                frames.clear()

    capacity.go_beyond(decide)
    try:
        with _fractions(capacity), _pools(capacity):
            yield
    finally:
        capacity.go_beyond(None)


def _frames_of(threads: Sequence[int | None]) -> list[FrameType]:
    """The innermost frames of threads that run Python code. Whoever keeps a frame keeps its tensors."""
    frames = sys._current_frames()
    try:
        return [frames[thread] for thread in dict.fromkeys(threads) if thread in frames]
    finally:
        frames.clear()  # this function's own frame, too: a cycle


@contextmanager
def _fractions(capacity: Capacity) -> Iterator[None]:
    fractions: dict[int, float] = {}

    def set_fraction(fraction: float, device: int) -> None:
        # With a threshold, the allocator collects garbage by the fraction that it knows.
        settings = take_snapshot().get("allocator_settings", {})
        if settings.get("garbage_collection_threshold"):
            originals[_SET](fraction, device)
            return
        fractions[device] = fraction
        capacity.limit(device, int(fraction * torch.cuda.get_device_properties(device).total_memory))

    def get_fraction(device: int) -> float:
        known: float = fractions[device] if device in fractions else originals[_GET](device)
        return known

    originals: dict[str, Any] = {name: present(torch._C, name) for name in (_SET, _GET)}
    try:
        with patched(torch._C, _SET, set_fraction), patched(torch._C, _GET, get_fraction):
            yield
    finally:
        for device in fractions:
            capacity.limit(device, 0)


@contextmanager
def _pools(capacity: Capacity) -> Iterator[None]:
    """Tell the driver while allocations go to a private pool: the allocator frees nothing then, and asks once."""

    def counted(original: Callable[..., object], more: int) -> Callable[..., object]:
        def call(*args: object) -> object:
            result = original(*args)
            capacity.asked_once(more)
            return result

        return call

    with ExitStack() as stack:
        for name, more in (*((name, 1) for name in _BEGIN), (_END, -1)):
            call = counted(present(torch._C, name), more)
            for owner in (torch._C, torch.cuda.memory):
                if hasattr(owner, name):
                    stack.enter_context(patched(owner, name, call))
        yield


_NAME, _TEXT = "OutOfMemoryError", "out of memory"
_MOST_CALLS = 2  # from the handler to the function that has the text, less one
_UNKNOWN = object()
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Guard = ast.Try | ast.TryStar | ast.With | ast.AsyncWith
#: A handler catches the error and looks for it, or catches it and keeps it from all others, or neither.
_HANDLES, _SWALLOWS, _PASSES = range(3)


def is_handled(frame: FrameType | None) -> bool:
    """Return whether a frame, or one that called it, handles an out-of-memory error that is raised in it now."""
    while frame is not None:
        if frame.f_code.co_exceptiontable and not frame.f_code.co_filename.startswith(OURS):
            what = _frame_does(frame)
            if what != _PASSES:
                return what == _HANDLES
        frame = frame.f_back
    return False


def _frame_does(frame: FrameType) -> int:
    guards = _guards_at(frame.f_code, frame.f_lasti)
    if guards is None:
        return _HANDLES if _mentions(frame.f_code) else _PASSES
    does = (_guard_does(guard, frame) for guard in guards)
    return next((what for what in does if what != _PASSES), _PASSES)


# ---- the guards around an instruction


class _Guarded(NamedTuple):
    """A ``try`` or ``with``, and where its body begins and ends: lines and columns."""

    guard: _Guard
    begin: tuple[int, int]
    end: tuple[int, int]


@functools.lru_cache(maxsize=4096)
def _guards_at(code: CodeType, instruction: int) -> list[_Guard] | None:
    """The guards around an instruction (a byte offset), innermost first; None without the source."""
    guards = _guards_of_file(code.co_filename)
    position = list(code.co_positions())[instruction // 2]
    if guards is None or position[0] is None:
        return None
    at = (position[0], position[2] or 0)
    of_code = guards.get((code.co_name, code.co_firstlineno), [])
    return [guarded.guard for guarded in reversed(of_code) if guarded.begin <= at < guarded.end]


@functools.lru_cache(maxsize=256)
def _guards_of_file(filename: str) -> dict[tuple[str, int], list[_Guarded]] | None:
    """The guards of each function by its name and first line, outer ones first; None without the source."""
    lines = linecache.getlines(filename)
    try:
        tree = ast.parse("".join(lines)) if lines else None
    except (SyntaxError, ValueError):
        return None
    if tree is None:
        return None
    found: dict[tuple[str, int], list[_Guarded]] = {}
    _collect(tree, ("<module>", 1), found)
    return found


def _collect(node: ast.AST, function: tuple[str, int], found: dict[tuple[str, int], list[_Guarded]]) -> None:
    if isinstance(node, _Guard):
        first, last = node.body[0], node.body[-1]
        end = (last.end_lineno or last.lineno, last.end_col_offset or 0)
        found.setdefault(function, []).append(_Guarded(node, (first.lineno, first.col_offset), end))
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (_Function, ast.ClassDef)):
            line = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
            _collect(child, (child.name, line), found)
        elif not isinstance(child, ast.Lambda):
            _collect(child, function, found)


# ---- what a guard does with the error


def _guard_does(guard: _Guard, frame: FrameType) -> int:
    if isinstance(guard, (ast.With, ast.AsyncWith)):
        calls = [item.context_expr for item in guard.items if isinstance(item.context_expr, ast.Call)]
        return _HANDLES if any(_context_handles(call, frame) for call in calls) else _PASSES
    for handler in guard.handlers:
        if (caught := _catches(handler.type, frame)) is None:
            continue
        if caught is torch.OutOfMemoryError or _looks(handler, frame):
            return _HANDLES
        if any(isinstance(node, ast.Raise) for node in _nodes(handler.body)):
            return _PASSES
        return _HANDLES if caught is RuntimeError else _SWALLOWS
    return _PASSES


def _context_handles(call: ast.Call, frame: FrameType) -> bool:
    """Such as ``suppress(torch.OutOfMemoryError)``, or a context manager of the script's own that looks."""
    if any(_class(argument, frame) in (torch.OutOfMemoryError, RuntimeError) for argument in call.args):
        return True
    manager = _resolve(call.func, frame)
    if isinstance(manager, type):
        manager = inspect.getattr_static(manager, "__exit__", None)
    function = inspect.unwrap(manager) if callable(manager) else None
    return isinstance(function, FunctionType) and _mentions(function.__code__)


def _catches(expression: ast.expr | None, frame: FrameType) -> type[BaseException] | None:
    """The class by which a handler catches the error, the narrowest first; None if it does not."""
    if expression is None:
        return BaseException
    parts = expression.elts if isinstance(expression, ast.Tuple) else [expression]
    classes = {_class(part, frame) for part in parts}
    return next((kind for kind in torch.OutOfMemoryError.__mro__ if kind in classes), None)


def _class(expression: ast.expr, frame: FrameType) -> object:
    found = _resolve(expression, frame)
    last = getattr(expression, "attr", getattr(expression, "id", ""))
    return torch.OutOfMemoryError if found is _UNKNOWN and last == _NAME else found if isinstance(found, type) else None


def _looks(handler: ast.ExceptHandler, frame: FrameType) -> bool:
    for node in _nodes(handler.body):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _TEXT in node.value.lower():
            return True
        if _NAME in (getattr(node, "attr", ""), getattr(node, "id", "")):
            return True
        if isinstance(node, ast.Call) and handler.name in _names(node.args):
            called = _resolve(node.func, frame)
            if isinstance(called, FunctionType) and _calls_mention(called):
                return True
    return False


def _calls_mention(function: FunctionType, depth: int = _MOST_CALLS) -> bool:
    if _mentions(function.__code__):
        return True
    called = (function.__globals__.get(name) for name in function.__code__.co_names)
    return depth > 0 and any(isinstance(other, FunctionType) and _calls_mention(other, depth - 1) for other in called)


def _mentions(code: CodeType) -> bool:
    return _NAME in code.co_names or any(_has_text(constant) for constant in code.co_consts)


def _has_text(constant: object) -> bool:
    if isinstance(constant, str):
        return _TEXT in constant.lower()
    if isinstance(constant, (tuple, frozenset)):
        return any(map(_has_text, constant))
    return isinstance(constant, CodeType) and _mentions(constant)


def _nodes(statements: Iterable[ast.AST]) -> Iterator[ast.AST]:
    return (node for statement in statements for node in ast.walk(statement))


def _names(expressions: Iterable[ast.expr]) -> set[str | None]:
    return {node.id for node in _nodes(expressions) if isinstance(node, ast.Name)}


def _resolve(expression: ast.expr, frame: FrameType) -> object:
    """The value of a name or of an attribute, without running code of the script's own; _UNKNOWN if it has none."""
    if isinstance(expression, ast.Name):
        for names in (frame.f_globals, frame.f_builtins):
            if expression.id in names:
                found: object = names[expression.id]
                return found
        return local_value(frame, expression.id, _UNKNOWN)
    if isinstance(expression, ast.Attribute):
        owner = _resolve(expression.value, frame)
        if isinstance(owner, ModuleType):
            return vars(owner).get(expression.attr, _UNKNOWN)
        if owner is not _UNKNOWN:
            held = inspect.getattr_static(owner, expression.attr, _UNKNOWN)
            return getattr(held, "__func__", held) if isinstance(held, (staticmethod, classmethod)) else held
    return _UNKNOWN
