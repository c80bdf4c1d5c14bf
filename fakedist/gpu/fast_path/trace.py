"""The tags of operations that run in compiled code. Their demands are those of earlier calls, which ran in Python."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

from fakedist.gpu.demand.launch_demand import Tagged
from fakedist.gpu.demand.operation_demand import UNKNOWN, Demand
from fakedist.gpu.tags import Tags
from fakedist.run.rows import Place

_Ask = ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
#: ``Mode`` of trace.h.
_OFF, _ON, _PYTHON = 0, 1, 2
#: Numbers of each operation that ``fakedist_trace_take`` writes.
_NUM_NUMBERS = 4


class CompiledTags(Tags):
    """Tags of the fast path (trace.cpp).

    Args:
        library: The fast path's library.
    """

    is_compiled = True

    def __init__(self, library: ctypes.PyDLL) -> None:
        super().__init__()
        self._library = library
        for name in ("tag", "operation", "scope"):
            self._function(name).restype = ctypes.c_int64
        self._function("start").argtypes = [ctypes.c_void_p, _Ask]
        self._function("learns").argtypes = self._function("call").argtypes = [ctypes.c_int64]
        self._function("learn").argtypes = [ctypes.c_int64, ctypes.c_int64]
        self._function("count").restype = ctypes.c_size_t
        self._function("take").argtypes = [ctypes.c_size_t, ctypes.c_void_p]
        self.tag = self._function("tag")
        self.operation = self._function("operation")  # type: ignore[method-assign]
        self.take_scope = self._function("scope")  # type: ignore[method-assign]
        self.called = self._function("call")  # type: ignore[method-assign]
        self.forget_outsides = self._function("forget")  # type: ignore[method-assign]
        self._learned: list[tuple[str, Demand]] = []
        self._kept: object = None

    def _function(self, name: str) -> ctypes._NamedFuncPointer:
        function: ctypes._NamedFuncPointer = getattr(self._library, f"fakedist_trace_{name}")
        return function

    def begin(self, set_tag: int, outside: Callable[[int], int]) -> None:
        """Begin a run: nothing is learned yet."""
        self._learned = []
        self._kept = asked = _Ask(outside)
        self._function("start")(set_tag, asked)

    def switch(self, *, traced: bool, captured: bool) -> None:
        """Let compiled code run operations of a traced step, but none of a capture."""
        self._function("mode")(_PYTHON if captured else _ON if traced else _OFF)

    def learn(self, tag: int, operation: str, demand: Demand | None) -> None:
        """Learn what an operation demanded, if compiled code asked."""
        if not self._function("learns")(tag):
            return
        if demand is not None:
            self._learned.append((operation, demand))
        self._function("learn")(tag, -1 if demand is None else len(self._learned) - 1)

    def take(self, place_of: Callable[[int], Place]) -> Iterator[tuple[int, Tagged]]:
        """The operations since the last call. One that did not return demanded something unknown."""
        count = self._function("count")()
        numbers = (ctypes.c_int64 * (_NUM_NUMBERS * count))()
        self._function("take")(count, numbers)
        columns = [numbers[place::_NUM_NUMBERS] for place in range(_NUM_NUMBERS)]
        for tag, op, scope, demand in zip(*columns, strict=True):
            operation, known = self._learned[demand if demand >= 0 else -1 - demand]
            yield tag, Tagged(op, operation, place_of(scope), known if demand >= 0 else UNKNOWN)
