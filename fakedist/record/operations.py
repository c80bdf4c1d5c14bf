"""Every operation that reaches a kernel, numbered: the number ties allocations to step, phase, layer and name."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from fakedist.record.compiled import is_tracing
from fakedist.record.position import Position

Execute = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

#: Operations that use a cuBLAS workspace, which the caching allocator gives and the library keeps.
_GEMMS = {"mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "_scaled_mm", "_scaled_mm_v2", "_grouped_mm"} | {
    "_scaled_grouped_mm", "_addmm_activation", "_int_mm", "linear", "addbmm", "addr", "vdot",
}  # fmt: skip


#: What ``__torch_dispatch__`` of plain tensors is; those appear among the types too.
_PLAIN = torch.Tensor.__torch_dispatch__


#: What is written down beside operations: what autograd adds up, and the graphs that Inductor compiled.
ACCUMULATE = "autograd::accumulate"
GRAPH = "inductor::graph"


class _Kind:
    """What is known of one operation: its number and how to treat it."""

    __slots__ = ("is_gemm", "is_view", "number")

    def __init__(self, number: int, func: Any) -> None:
        self.number = number
        # Views and the profiler's marks allocate nothing: what comes after belongs to the operation before.
        self.is_view = not isinstance(func, str) and (func.is_view or func.namespace == "profiler")
        self.is_gemm = not isinstance(func, str) and func._schema.name.removeprefix("aten::") in _GEMMS


class Operations(TorchDispatchMode):
    """Numbers each operation, writes down which it was and where, and tells the allocator's history its number.

    Args:
        position: Where the rank is.
        execute: Runs an operation: ``execute(func, args, kwargs) -> result``.
        tick: Called every 256 operations.
        tell_allocator: Sets the text that the allocator's history keeps with what this thread allocates from now on.

    Attributes:
        names: Operations (number, name) seen for the first time.
        gemms: For each GEMM, by its number: address of its output, then bytes of its operands.
    """

    def __init__(
        self, position: Position, execute: Execute, tick: Callable[[], None], tell_allocator: Callable[[str], None]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.names: list[tuple[int, str]] = []
        self.gemms: dict[int, tuple[int, ...]] = {}
        self._position = position
        self._execute = execute
        self._tick = tick
        self._kinds: dict[Any, _Kind] = {}
        self._operation, self._scope = array("I"), array("I")
        self._first = 0
        self._tell_allocator = tell_allocator
        self._graph: str | None = None

    #: Asked for by torch: higher-order operators (DTensor's random numbers are one) come here too.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled regions run as they are; their kernels are not operations."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Number one operation and run it. Tensor subclasses first turn it into operations on plain tensors."""
        if is_tracing():
            # DTensor asks a FakeTensorMode for shapes. That mode is below this one whenever it was entered: step aside.
            return func(*args, **(kwargs or {}))
        if isinstance(func, HigherOrderOperator):
            return self._run_higher_order(func, args, kwargs or {})
        if types and any(t.__torch_dispatch__ is not _PLAIN for t in types):
            return NotImplemented
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._new_kind(func)
        op = self._number(kind)
        if not op & 255:
            self._tick()
        result = self._execute(func, args, kwargs or {})
        if self._graph is not None:
            self._tell_allocator(self._graph)
        if kind.is_gemm and isinstance(result, torch.Tensor) and result.is_cuda:
            operands = [value.nbytes for value in args if isinstance(value, torch.Tensor)]
            self.gemms[op] = (result.data_ptr(), *operands)
        return result

    def step_aside(self) -> None:
        """Take this mode off the thread's stack, unless the script has put modes of its own there.

        What autograd adds up before it puts the mode back counts as one operation, ``autograd::accumulate``.
        """
        if torch._C._len_torch_dispatch_stack() == 1 and torch._C._get_dispatch_stack_at(0) is self:
            self._number_own(ACCUMULATE)
            torch._C._pop_torch_dispatch_stack(None)

    @contextmanager
    def graph(self) -> Iterator[None]:
        """A compiled graph runs: what it allocates between the operations that it calls is its own."""
        before, self._graph = self._graph, str(self._number_own(GRAPH))
        try:
            yield
        finally:
            self._graph = before

    def take(self) -> tuple[int, bytes, bytes]:
        """First operation number, operation ids and scope ids (uint32) since the last call."""
        first, operation, scope = self._first, self._operation.tobytes(), self._scope.tobytes()
        self._first += len(self._operation)
        self._operation, self._scope = array("I"), array("I")
        return first, operation, scope

    def _number(self, kind: _Kind) -> int:
        """Write down the next operation; its number."""
        position = self._position
        self._operation.append(kind.number)
        self._scope.append(position.scope())
        op = position.op
        position.op = op + 1
        if not kind.is_view:
            self._tell_allocator(str(op))
        return op

    def _number_own(self, name: str) -> int:
        return self._number(self._kinds.get(name) or self._new_kind(name))

    def _run_higher_order(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that runs operators: it is none itself, those inside are.

        torch._ops.HigherOrderOperator.__call__ without its first step, which would come back here.
        """
        key = torch._ops._compute_keyset(args, kwargs, func.non_fallthrough_keys).highestPriorityTypeId()
        if key == torch._C.DispatchKey.Python:
            return func(*args, **kwargs)
        with self:
            return func.dispatch(key, *args, **kwargs)

    def _new_kind(self, func: Any) -> _Kind:
        kind = self._kinds[func] = _Kind(len(self._kinds), func)
        self.names.append((kind.number, str(func)))
        return kind
