"""Notes which operation made each node of autograd's graph, and which operations a node runs in a backward.

An operation of a backward has no line of the script, but the one that made its node had. Autograd numbers a thread's
nodes in order of creation, each just before the first operation that its operator runs. So the operation that sees a
new number made that node. Its line is that of its allocations, or if it has none, the line where it runs.
The operations of a timed step have their lines noted too: what they launch may allocate nothing.

The fast path (gpu/fast_path/nodes.cpp) does the same.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType, FrameType
from typing import NamedTuple

import torch
from torch import empty
from torch.autograd.function import BackwardCFunction

from fakedist.rundir.memory_records import NodeRunsRecord, NodesRecord, OperationStacksRecord
from fakedist.rundir.rows import FrameRow

#: Views whose nodes allocate in a backward. Those of others return views.
VIEWS = frozenset({
    "aten::as_strided", "aten::diagonal", "aten::expand", "aten::select.int", "aten::slice.Tensor",
    "aten::split.Tensor", "aten::split_with_sizes", "aten::unbind.int", "aten::unfold", "aten::view",
})  # fmt: skip
#: Numbers of nodes are lower, except AccumulateGrad's.
_LAST_NODE = 1 << 62
_next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr


class _Made(NamedTuple):
    op: int
    thread: int
    sequence: int
    stack: list[tuple[CodeType, int]] | None


class Nodes:
    """The nodes that Python notes, where no compiled code does. ``calling`` is the thread that calls a backward."""

    def __init__(self, calling: Callable[[], int | None]) -> None:
        self.is_on = False
        self._calling = calling
        self._made: list[_Made] = []
        self._called: list[tuple[int, list[tuple[CodeType, int]]]] = []
        self._ran = array("q"), array("Q"), array("q")
        self._threads = threading.local()

    def operation(self, op: int, *, allocates: bool) -> None:
        """Note the operation that begins in this thread. It may have made a node, and a node may run it."""
        if not self.is_on:
            return
        if self._is_new():
            self._add(op if allocates else -1, self._threads.next - 1)
        node = torch._C._current_autograd_node()
        if node is None or (sequence := node._sequence_nr()) >= _LAST_NODE:
            return
        if node.name().endswith("CopySlices"):  # made after the node of the operation that wrote to a view
            sequence -= 1
        for column, value in zip(self._ran, (op, self._calling() or threading.get_ident(), sequence), strict=True):
            column.append(value)

    def view(self) -> None:
        """Note the view that begins in this thread. It allocates nothing, but may have made a node."""
        if self.is_on and self._is_new():
            self._add(-1, self._threads.next - 1)

    def function(self, is_made: bool) -> None:
        """Note that this thread has made the node of an autograd function written in Python, or is about to."""
        if self.is_on:
            after = _next_node() + (not is_made)
            self._add(-1, after - 1)
            self._threads.next = after

    def stack(self, op: int) -> None:
        """Note the stack of an operation of a timed step, which begins in this thread."""
        if self.is_on:
            self._called.append((op, _stack()))

    def take(
        self, number_of: Callable[[list[FrameRow]], int]
    ) -> tuple[NodesRecord, NodeRunsRecord, OperationStacksRecord]:
        """The records since the last call, without frames and stacks; ``number_of`` returns a stack's number."""
        made, self._made = self._made, []
        called, self._called = self._called, []
        ran, self._ran = self._ran, (array("q"), array("Q"), array("q"))
        stacks = array("i", [-1 if row.stack is None else number_of(_frame_rows(row.stack)) for row in made])
        columns = array("q"), array("Q"), array("q")
        for row in made:
            for column, value in zip(columns, (row.op, row.thread, row.sequence), strict=True):
                column.append(value)
        op, thread, sequence = (column.tobytes() for column in columns)
        of_call = array("i", [number_of(_frame_rows(stack)) for _, stack in called])
        return (
            NodesRecord([], [], op, thread, sequence, stacks.tobytes()),
            NodeRunsRecord(*map(_packed, ran)),
            OperationStacksRecord(array("q", [op for op, _ in called]).tobytes(), of_call.tobytes()),
        )

    def _is_new(self) -> bool:
        sequence = _next_node()
        if not torch.is_grad_enabled() or vars(self._threads).get("next") == sequence:
            return False
        self._threads.next = sequence
        return sequence > 0

    def _add(self, op: int, sequence: int) -> None:
        self._made.append(_Made(op, threading.get_ident(), sequence, _stack() if op < 0 else None))


def _packed(column: array[int]) -> bytes:
    return column.tobytes()


def _stack() -> list[tuple[CodeType, int]]:
    frame: FrameType | None = sys._getframe(1)
    stack: list[tuple[CodeType, int]] = []
    while frame is not None:
        stack.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return stack


def _frame_rows(stack: list[tuple[CodeType, int]]) -> list[FrameRow]:
    return [FrameRow(code.co_filename, line, code.co_name) for code, line in stack]


@contextmanager
def watched_functions(note: Callable[[bool], None]) -> Iterator[None]:
    """Call ``note(is_made)`` when the context of an autograd function written in Python is made, next to its node."""
    numbers: list[int] = []
    with _at_contexts(lambda: numbers.append(_next_node())):
        result = _Probe.apply(empty(0, device="cpu", requires_grad=True))
    is_made = result.grad_fn._sequence_nr() < numbers[0]  # later releases make the node first
    with _at_contexts(partial(note, is_made)):
        yield


class _Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)


@contextmanager
def _at_contexts(call: Callable[[], None]) -> Iterator[None]:
    # An attribute without __get__ is called without the instance, and one in C has no Python frame for Dynamo to trace.
    BackwardCFunction.__init__ = partial(call)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del BackwardCFunction.__init__
