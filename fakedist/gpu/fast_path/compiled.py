"""Loads the fast path and tells it what the recorder and the value engine know."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable

from torch._ops import OpOverload

from fakedist.errors import SetupError
from fakedist.gpu.fast_path.build import ensure_fast_path
from fakedist.gpu.fast_path.history import Read, begin_history, read_history
from fakedist.gpu.fast_path.marks import CompiledMarker
from fakedist.gpu.fast_path.objects import find_objects_by_type
from fakedist.gpu.fast_path.rules import EVERYTHING, Flag, rule_of
from fakedist.gpu.fast_path.trace import CompiledTags
from fakedist.gpu.values import ValueEngine
from fakedist.gpu.values.contents import HOST_LIMIT_BYTES, LIMIT_BYTES, MASK_LIMIT_BYTES
from fakedist.gpu.values.following import FEW, MANY
from fakedist.gpu.values.operators import Operator
from fakedist.run.records import OperationsRecord


class _Limits(ctypes.Structure):
    """``Limits`` of fast_path.cpp, field by field."""

    _fields_ = [
        (name, ctypes.c_int64) for name in ("limit_bytes", "mask_limit_bytes", "host_limit_bytes", "few", "many")
    ]


class _Where(ctypes.Structure):
    """``Where`` of fast_path.cpp, field by field."""

    _fields_ = [(name, ctypes.c_int64) for name in ("scope", "version", "needs", "grad", "low", "high")]
    scope: int
    version: int
    needs: int
    grad: int
    low: int
    high: int


#: What ``record.numbering.Whereabouts`` has.
_Whereabouts = tuple[int, int, int, bool, int, int]
#: For the number of a matrix product: the address of its output, and the bytes of its operands.
_Gemms = dict[int, tuple[int, ...]]
_Ask = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Where))
_Tell = ctypes.PYFUNCTYPE(None, ctypes.c_uint64, ctypes.c_uint64)


class CompiledFastPath:
    """Implements protocol ``record.numbering.FastPath``. A process has one at a time.

    Args:
        engine: Runs the other operations. None if torch runs all of them alone.

    Attributes:
        types: Finds Python's objects by their types. None in a Python whose objects have another layout.

    Raises:
        SetupError: It cannot be built.
    """

    #: No tensor has this key, and no other code registers kernels for it.
    python_key = "TESTING_ONLY_GenericMode"

    def __init__(self, engine: ValueEngine | None) -> None:
        # PyDLL keeps the GIL: these calls take less time than releasing it would.
        library = self._library = ctypes.PyDLL(str(ensure_fast_path()))
        self._engine = engine
        self._next = library.fakedist_fast_number
        self._next.argtypes, self._next.restype = [ctypes.c_uint32, ctypes.c_uint32], ctypes.c_int64
        self._known = library.fakedist_fast_known
        self._known.argtypes, self._known.restype = [ctypes.c_void_p, ctypes.c_int], None
        library.fakedist_fast_begin.argtypes = [ctypes.c_void_p, ctypes.c_void_p, _Ask, _Tell]
        library.fakedist_fast_rule.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint32, *[ctypes.c_int] * 2]
        library.fakedist_fast_take.argtypes = [ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p]
        library.fakedist_fast_gemms.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        library.fakedist_fast_passed.restype = ctypes.c_int64
        for name in ("fakedist_fast_count", "fakedist_fast_gemms"):
            getattr(library, name).restype = ctypes.c_size_t
        self.marker = CompiledMarker(library)
        self.types = find_objects_by_type(library)
        self._limits = _Limits(LIMIT_BYTES, MASK_LIMIT_BYTES, HOST_LIMIT_BYTES, FEW, MANY)
        self._first = 0
        self._gemms: _Gemms = {}
        self._kept: tuple[object, ...] = ()

    def begin(self, cells: ctypes.Structure, where: Callable[[], _Whereabouts]) -> None:
        """Begin a run. Nothing runs here yet.

        Args:
            cells: ``record.numbering.Cells``, which are kept up to date.
            where: Asked in the thread of an operation.
        """

        def ask(found: ctypes._Pointer[_Where]) -> int:
            try:
                here, out = where(), found.contents  # sooner than making a structure of it
                out.scope, out.version, out.needs, out.grad, out.low, out.high = here
            except Exception:  # Python runs the operation and meets the error again
                return 1
            return 0

        def tell(storage: int, address: int) -> None:
            if self._engine is not None:
                self._engine.host.shares.know_loss(storage, address)

        callbacks = _Ask(ask), _Tell(tell)
        self._kept = (cells, *callbacks)
        self._first = ctypes.c_int64.from_address(ctypes.addressof(cells)).value
        self._library.fakedist_fast_begin(ctypes.addressof(cells), ctypes.addressof(self._limits), *callbacks)
        self.marker.begin(cells)
        begin_history(self._library)
        if self._engine is not None:
            watch = self._engine.host.watch
            watch.told, watch.replayed = self._known, self._library.fakedist_fast_replays

    def install(self, wanted: bool) -> None:
        """Become the kernel of the dispatch key, or cease to be."""
        self._library.fakedist_fast_install(int(wanted))

    def switch(self, on: bool) -> None:
        """Say whether operations may run here. Otherwise all of them go to Python."""
        self._library.fakedist_fast_switch(int(on))

    def new_kind(self, func: OpOverload, number: int, *, is_view: bool, is_gemm: bool) -> None:
        """An operator was seen for the first time. Its later calls may run here."""
        operator = Operator(func)
        rule = EVERYTHING if self._engine is None else rule_of(operator, self._engine.composites)
        flags = rule.flags | (Flag.IS_VIEW if is_view else Flag.NONE) | (Flag.IS_GEMM if is_gemm else Flag.NONE)
        flags |= Flag.LOOKS_ON if operator.is_view else Flag.NONE
        name, overload = func._schema.name.encode(), func._schema.overload_name.encode()
        self._library.fakedist_fast_rule(name, overload, number, rule.method, flags)

    def tags(self) -> CompiledTags:
        """The tags of a timed step's operations, those that run here included."""
        return CompiledTags(self._library)

    @property
    def passed(self) -> int:
        """How many operations ran here."""
        return int(self._library.fakedist_fast_passed())

    def number(self, kind: int, scope: int) -> int:
        """Record the next operation and return its number."""
        op: int = self._next(kind, scope)
        return op

    def gemm(self, op: int, numbers: tuple[int, ...]) -> None:
        """Record a matrix product: the address of its output, and the bytes of its operands."""
        self._gemms[op] = numbers

    def take(self) -> OperationsRecord:
        """The operations since the last call."""
        count = self._library.fakedist_fast_count()
        kinds, scopes = (ctypes.c_uint32 * count)(), (ctypes.c_uint32 * count)()
        self._library.fakedist_fast_take(count, kinds, scopes)
        first, self._first = self._first, self._first + count
        return OperationsRecord(first, bytes(kinds), bytes(scopes))

    def take_gemms(self) -> _Gemms:
        """The matrix products since the last call."""
        taken, self._gemms = self._gemms, {}
        room = (ctypes.c_int64 * self._library.fakedist_fast_gemms(None, 0))()
        at, end = 0, self._library.fakedist_fast_gemms(room, len(room))
        numbers = room[:]
        while at < end:
            after = at + 1 + numbers[at]
            taken[numbers[at + 1]] = tuple(numbers[at + 2 : after])
            at = after
        return taken

    def watch_history(self) -> None:
        """The allocator's history has begun, or begun again after it was read. CUDA is initialised."""
        self._library.fakedist_history_watch()

    def stop_history(self) -> None:
        """The history has ended."""
        self._library.fakedist_history_stop()

    def read_history(self, gemms: Iterable[int], highest: int) -> list[Read] | None:
        """The allocator's new history of each device that has any. CUDA is initialised. None if torch cannot tell it.

        Args:
            gemms: The operations that are products of matrices.
            highest: The highest operation so far.
        """
        return read_history(self._library, gemms, highest)


def make_fast_path(engine: ValueEngine | None) -> CompiledFastPath | None:
    """The fast path; None where it cannot be built, and Python runs everything with the same results."""
    try:
        return CompiledFastPath(engine)
    except SetupError:
        return None
