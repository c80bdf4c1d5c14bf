"""Numbers operations: in Python, or in compiled code that also runs most of them (the fast path)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from torch._ops import OpOverload

from fakedist.record.alive import TypeFinder
from fakedist.record.marker import Cells, Marker
from fakedist.rundir.memory_records import (
    EventsRecord,
    HostBlocksRecord,
    NodeRunsRecord,
    NodesRecord,
    OperationStacksRecord,
)
from fakedist.rundir.records import OperationsRecord

#: For the number of a matrix product: the address of its output, and the bytes of its operands.
Gemms = dict[int, tuple[int, ...]]


class Whereabouts(NamedTuple):
    """The scope of what runs now in a thread, and its validity.

    Attributes:
        version: That of the position. -1 if the scope holds for this operation alone.
        needs: 0, or 1 if it also depends on the grad mode, or 2 if it depends on the autograd node too.
        low, high: The lowest sequence number of the node, and the number above its highest.
    """

    scope: int
    version: int
    needs: int = 0
    grad: bool = False
    low: int = 0
    high: int = 0


class Numbering(Protocol):
    """Numbers operations, and keeps their kinds and scopes until they are taken."""

    def number(self, kind: int, scope: int) -> int:
        """Record the next operation and return its number."""

    def gemm(self, op: int, numbers: tuple[int, ...]) -> None:
        """Record a matrix product: the address of its output, and the bytes of its operands."""

    def take(self) -> OperationsRecord:
        """The operations since the last call."""

    def take_gemms(self) -> Gemms:
        """The matrix products since the last call."""


#: The history of a device, with the numbers that frames and stacks have in the journal; (row, highest operation so far)
#: of each block that a product of matrices allocated; and the highest operation at the end.
Read = tuple[EventsRecord, list[tuple[int, int]], int]


class FastPath(Numbering, Protocol):
    """Compiled code (gpu/fast_path) that runs operations that do not need Python, and reads the allocator's history."""

    #: The dispatch key under which it expects the Python function that runs the others.
    python_key: str

    @property
    def marker(self) -> Marker:
        """Marks tensors."""

    @property
    def types(self) -> TypeFinder | None:
        """Finds Python's objects by their types, if it can."""

    def watch_history(self) -> None:
        """The history has begun, or begun again after it was read. CUDA must be initialised."""

    def stop_history(self) -> None:
        """The history has ended."""

    def read_history(self, gemms: Iterable[int], highest: int) -> list[Read] | None:
        """The history of each device that has any, to be read once and begun anew; None if torch cannot give it.

        ``gemms`` are the operations that are products of matrices, ``highest`` the highest operation so far.
        """

    @property
    def note_function(self) -> Callable[[bool], None]:
        """``note_function(is_made)``: as ``record.nodes.Nodes.function``."""

    @property
    def note_stack(self) -> Callable[[int], None]:
        """``note_stack(op)``: as ``record.nodes.Nodes.stack``."""

    def watch_views(self, wanted: bool) -> None:
        """Note the nodes that the views of ``record.nodes.VIEWS`` make, or leave these to another kernel."""

    def read_nodes(self) -> tuple[NodesRecord, NodeRunsRecord, OperationStacksRecord] | None:
        """As ``record.nodes.Nodes.take``, to be called after the history was read; None if torch cannot give them."""

    def watch_host(self, wanted: bool) -> bool:
        """Begin to watch the host's memory, or end. Returns whether it can be."""

    @property
    def host_moved(self) -> Callable[[int], None]:
        """``host_moved(place)``: the rank is in another step or phase."""

    @property
    def host_allocator(self) -> int:
        """Address of the CPU's allocator while it is watched."""

    @property
    def malloc_bytes(self) -> Callable[[], int]:
        """Bytes that malloc and the CPU's allocator have given to all of this process; -1 where that is not known."""

    def read_host(self) -> HostBlocksRecord | None:
        """Changes of the host's memory since the last call; None if torch cannot name the frames."""

    def begin(self, cells: Cells, where: Callable[[], Whereabouts]) -> None:
        """Begin a run, which keeps ``cells`` up to date and calls ``where`` in the thread of an operation."""

    def install(self, wanted: bool) -> None:
        """Become the kernel of the dispatch key, or cease to be."""

    def switch(self, on: bool) -> None:
        """Say whether operations may run here. Otherwise all of them go to Python."""

    def new_kind(self, func: OpOverload, number: int, *, is_view: bool, is_gemm: bool) -> None:
        """An operator was seen for the first time. Its later calls may run here."""


class PythonNumbering:
    """Numbers operations that all run in Python, and keeps ``cells`` up to date."""

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self._kinds, self._scopes = array("I"), array("I")
        self._first = cells.op
        self._gemms: Gemms = {}

    def number(self, kind: int, scope: int) -> int:
        """Record the next operation and return its number."""
        self._kinds.append(kind)
        self._scopes.append(scope)
        op = self._cells.op
        self._cells.op = op + 1
        return op

    def gemm(self, op: int, numbers: tuple[int, ...]) -> None:
        """Record a matrix product: the address of its output, and the bytes of its operands."""
        self._gemms[op] = numbers

    def take(self) -> OperationsRecord:
        """The operations since the last call."""
        taken = OperationsRecord(self._first, self._kinds.tobytes(), self._scopes.tobytes())
        self._first += len(self._kinds)
        self._kinds, self._scopes = array("I"), array("I")
        return taken

    def take_gemms(self) -> Gemms:
        """The matrix products since the last call."""
        taken, self._gemms = self._gemms, {}
        return taken
