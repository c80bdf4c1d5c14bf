"""Numbers every operation that reaches a kernel. The number ties allocations to step, phase, layer and name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch._ops import OpOverload

from fakedist.record.alive import find_types_with
from fakedist.record.dispatch import Interception, every_operation
from fakedist.record.graph_layers import PlacedGraph
from fakedist.record.nodes import Nodes, watched_functions
from fakedist.record.numbering import FastPath, Numbering, PythonNumbering
from fakedist.record.position import Position
from fakedist.record.tracer import OperationTracer
from fakedist.rundir.rows import Location, OperationRow

Execute = Callable[[OpOverload, tuple[object, ...], dict[str, object]], object]

#: Operations that use a cuBLAS workspace, which the caching allocator allocates and the library keeps.
_GEMMS = {"mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "_scaled_mm", "_scaled_mm_v2", "_grouped_mm"} | {
    "_scaled_grouped_mm", "_addmm_activation", "_int_mm", "linear", "addbmm", "addr", "vdot",
}  # fmt: skip

#: The name under which runs of Inductor's compiled graphs are recorded among the operations.
GRAPH = "inductor::graph"
#: The same of waits outside of torch's operations.
WAIT = "cuda::synchronize"


class _Kind:
    __slots__ = ("allocates", "is_gemm", "is_view", "name", "number")

    def __init__(self, number: int, func: OpOverload | str) -> None:
        self.number = number
        self.name = str(func)
        # Views and the profiler's marks allocate nothing, so what follows them belongs to the operation before.
        self.is_view = not isinstance(func, str) and (func.is_view or func.namespace == "profiler")
        self.allocates = not self.is_view and not (isinstance(func, OpOverload) and func._schema.is_mutable)
        self.is_gemm = not isinstance(func, str) and func._schema.name.removeprefix("aten::") in _GEMMS


class _InGraph(threading.local):
    """The compiled graph that this thread runs: its call's number, its facts, what precedes its operations, and the
    run of the part that computes integers.
    """

    op = ""
    placed: PlacedGraph | None = None
    settle: Callable[[tuple[object, ...]], None] = staticmethod(lambda args: None)
    integers: tuple[PlacedGraph, Any] | None = None


class Operations:
    """Numbers each operation, records its kind and scope, and passes its number to the allocator's history.

    Numbering lasts as long as the context.

    Args:
        execute: Runs an operation: ``execute(func, args, kwargs) -> result``.
        tick: Called every 256 operations.
        number_allocations: Sets the text that the allocator's history keeps with this thread's next allocations.
        fast_path: Runs operations that do not need Python. None runs all of them here.
    """

    def __init__(
        self,
        position: Position,
        execute: Execute,
        tick: Callable[[], None],
        number_allocations: Callable[[str], None],
        *,
        fast_path: FastPath | None = None,
    ) -> None:
        self.names: list[OperationRow] = []
        self._fast_path = fast_path
        self.numbering: Numbering = fast_path or PythonNumbering(position.cells)
        self._number_next = self.numbering.number
        self.nodes = Nodes(lambda: position.calls_backward)
        self._note_stack = self.nodes.stack if fast_path is None else fast_path.note_stack
        self._cuda_is_on = False
        self._records = True
        self.tracer: OperationTracer | None = None
        self._interception: Interception | None = None
        self._position = position
        self._execute = execute
        self._tick = tick
        self._kinds: dict[OpOverload | str, _Kind] = {}
        self._number_allocations = number_allocations
        self._report_result: Callable[[object], None] | None = None
        self.here = _InGraph()
        self._graphs: set[int] = set()  # that run, in all threads
        self._exit = ExitStack()

    def __enter__(self) -> Operations:
        if self._fast_path is not None:
            self._fast_path.begin(self._position.cells, self._position.whereabouts)
            find_types_with(self._fast_path.types)
        note_function = self.nodes.function if self._fast_path is None else self._fast_path.note_function
        self._exit.enter_context(watched_functions(note_function))
        self._interception = self._exit.enter_context(every_operation(self.run, self._fast_path, self.nodes.view))
        self.trace(self.tracer)
        return self

    def __exit__(self, *_: object) -> None:
        self._interception = None
        self._switch()
        self._exit.close()

    def also_this_thread(self) -> None:
        """Number the operations of another thread than the one that began. Call this in that thread."""
        if self._interception is not None:
            self._interception.this_thread()

    def trace(self, tracer: OperationTracer | None) -> None:
        """Report each operation to ``tracer`` from now on, views too: each takes host time, which is estimated."""
        self.tracer = tracer
        if self._interception is not None:
            self._interception.see_views(tracer is not None)
        self._switch()

    def cuda_begins(self, execute: Execute, number_allocations: Callable[[str], None]) -> None:
        """From now on, run operations with ``execute`` and pass their numbers to the allocator."""
        self._execute, self._number_allocations = execute, number_allocations
        self._cuda_is_on = True
        self._switch()

    def report_results(self, report: Callable[[object], None] | None) -> None:
        """From now on, call ``report`` with the result of each operation; None calls nothing."""
        self._report_result = report
        self._switch()

    def stop_recording(self) -> None:
        """From now on, only run operations. They are neither numbered nor recorded."""
        self._records = False
        self._switch()

    def _switch(self) -> None:
        """Use the fast path while operations are recorded and only the allocator needs their numbers."""
        with self._position.lock:
            is_on = self._interception is not None and self._cuda_is_on and self._records
            if self._fast_path is not None:
                needs_python = (self.tracer is not None and not self.tracer.is_compiled) or bool(self._graphs)
                needs_python = needs_python or self._report_result is not None
                self._fast_path.switch(is_on and not needs_python)
            else:
                self.nodes.is_on = is_on

    def run(self, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Number one operation and run it."""
        if not self._records:
            return self._execute(func, args, kwargs)
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._new_kind(func)
        scope = self._scope_now()
        op = self._number(kind, scope)
        if (here := self.here).placed is not None:
            here.settle(args)
        if not op & 255:
            self._tick()  # may drain the numbers
        tracer = self.tracer
        if tracer is None:
            result = self._execute(func, args, kwargs)
        else:
            tag = tracer.operation(op, kind.name, self._position.places[scope])
            result = self._execute(func, args, kwargs)
            tracer.done(tag, func, args, kwargs, result)
        if here.op:
            self._number_allocations(here.op)
        if self._report_result is not None:
            self._report_result(result)
        if kind.is_gemm and isinstance(result, torch.Tensor) and result.is_cuda and result.layout is torch.strided:
            operands = [t.nbytes for t in args if isinstance(t, torch.Tensor) and t.layout is torch.strided]
            self.numbering.gemm(op, (result.data_ptr(), *operands))
        return result

    @contextmanager
    def graph(
        self, begins: Callable[[int], PlacedGraph | None], settle: Callable[[tuple[object, ...]], None]
    ) -> Iterator[PlacedGraph | None]:
        """Number the run of a compiled graph. What it allocates between the operations that it calls is its own.

        ``begins(op)`` returns the facts about the graph, which this yields. ``settle(args)`` precedes each operation.
        """
        op = self._number(self._kinds.get(GRAPH) or self._new_kind(GRAPH), self._scope_now())
        here = self.here
        before = here.op, here.placed, here.settle
        self._graphs.add(op)
        self._switch()
        here.op, here.placed, here.settle = str(op), begins(op), settle
        self._report_to_tracer(op, GRAPH)
        try:
            yield here.placed
        finally:
            here.op, here.placed, here.settle = before
            self._graphs.discard(op)
            self._switch()
            self._report_to_tracer(int(here.op or -1), GRAPH if here.op else "")

    def unseen(self) -> AbstractContextManager[object]:
        """The context for what is not the job's: it reaches torch's kernels alone."""
        return nullcontext() if self._interception is None else self._interception.unseen()

    def waiting(self) -> AbstractContextManager[None]:
        """The context for a wait that the script itself asks for. It is numbered, so its line is known."""
        tracer = self.tracer
        if tracer is None or not self._records:
            return nullcontext()
        scope = self._scope_now()
        op = self._number_next((self._kinds.get(WAIT) or self._new_kind(WAIT)).number, scope)
        self._note_stack(op)
        return tracer.waiting(op, self._position.places[scope])

    def position_in_graph(self) -> Location | None:
        """The position of what a compiled graph launches now in this thread. None outside one."""
        return None if self.here.placed is None else self._position.places[self._scope_now()]

    def _report_to_tracer(self, op: int, operation: str) -> None:
        if self.tracer is not None:
            self.tracer.graph(op, operation, self._position.places[self._position.scope()])

    def _number(self, kind: _Kind, scope: int) -> int:
        op = self._number_next(kind.number, scope)
        self.nodes.operation(op, allocates=kind.allocates)
        if not kind.is_view:
            self._number_allocations(str(op))
            if self.tracer is not None:
                self._note_stack(op)
        return op

    def _scope_now(self) -> int:
        placed = self.here.placed
        return self._position.scope(None if placed is None else placed.part_here())

    def _new_kind(self, func: OpOverload | str) -> _Kind:
        with self._position.lock:
            if func not in self._kinds:  # another thread may have met it meanwhile
                kind = self._kinds[func] = _Kind(len(self._kinds), func)
                self.names.append(OperationRow(kind.number, str(func)))
                if self._fast_path is not None and isinstance(func, OpOverload):
                    self._fast_path.new_kind(func, kind.number, is_view=kind.is_view, is_gemm=kind.is_gemm)
            return self._kinds[func]
