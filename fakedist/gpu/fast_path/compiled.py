"""Loads the fast path and gives it the facts of the recorder and the value engine.

A rule follows :mod:`fakedist.gpu.values.engine` case by case; the rest runs there.
"""

from __future__ import annotations

import ctypes
import enum
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter

import torch
from torch._ops import OpOverload

from fakedist.errors import SetupError
from fakedist.frames import OURS
from fakedist.gpu.demand.launch_demand import Tagged
from fakedist.gpu.demand.operation_demand import UNKNOWN, Demand
from fakedist.gpu.fast_path.build import FAST_PATH
from fakedist.gpu.launch_rows import Tags
from fakedist.gpu.values.composites import Composites
from fakedist.gpu.values.contents import HOST_LIMIT_BYTES, LIMIT_BYTES, MASK_LIMIT_BYTES
from fakedist.gpu.values.engine import ValueEngine
from fakedist.gpu.values.following import CONDENSING, FEW, MANY
from fakedist.gpu.values.host import INDEXING, READS
from fakedist.gpu.values.means import COUNTING, FOLLOWING, NON_NEGATIVE, followed_name
from fakedist.gpu.values.operators import LISTED, Operator
from fakedist.gpu.values.routing import CHOOSING
from fakedist.rundir.memory_records import (
    EventsRecord,
    HostBlocksRecord,
    MarksRecord,
    NodeRunsRecord,
    NodesRecord,
    OperationStacksRecord,
)
from fakedist.rundir.records import OperationsRecord
from fakedist.rundir.rows import FrameRow, Location, PoolRow
from fakedist.rundir.schema import CATEGORIES


class View(ctypes.Structure):
    """``View`` of view.h, field by field."""

    _fields_ = [("data", ctypes.c_void_p), ("size", ctypes.c_size_t)]
    data: int
    size: int

    def copied(self) -> bytes:
        """A copy of it."""
        return ctypes.string_at(self.data, self.size)


#: ``record.numbering.Read``
Read = tuple[EventsRecord, list[tuple[int, int]], int]
#: Columns of a device's events, in the order of history.cpp.
_NUM_COLUMNS = 12
#: Columns of autograd's nodes, in the order of ``Nodes`` there.
_NUM_NODE_COLUMNS = 12
#: Columns of the host's blocks, in the order of host.cpp.
_NUM_HOST_COLUMNS = 8


def begin_history(library: ctypes.CDLL) -> None:
    """Begin a run: no frame and no stack has a number."""
    library.fakedist_history_begin(OURS.encode(), str(torch._ops.__file__).encode())


def read_history(library: ctypes.CDLL, gemms: Iterable[int], highest: int) -> list[Read] | None:
    """The new history, as ``record.numbering.FastPath``. CUDA must be initialised."""
    operations = array("q", gemms)
    library.fakedist_history_read.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64]
    num_devices = library.fakedist_history_read(operations.buffer_info()[0], len(operations), highest)
    if num_devices < 0:
        return None
    return [read for read in (_events(library, device) for device in range(num_devices)) if read[0].action]


def _events(library: ctypes.CDLL, device: int) -> Read:
    views = (View * _NUM_COLUMNS)()
    library.fakedist_history_events.restype = ctypes.c_int64
    highest = library.fakedist_history_events(device, views)
    action, address, size, stream, time_us, op, stack, *others = (view.copied() for view in views)
    lengths, numbers, named, pools, products = others
    flat, pairs = memoryview(pools).cast("q").tolist(), memoryview(products).cast("q").tolist()
    record = EventsRecord(
        device,
        _frames(named),
        list(_stacks(memoryview(lengths).cast("I"), memoryview(numbers).cast("I").tolist())),
        action,
        address,
        size,
        stream,
        time_us,
        op,
        stack,
        pools=list(map(PoolRow, flat[::3], flat[1::3], flat[2::3])),
    )
    return record, list(zip(pairs[::2], pairs[1::2], strict=True)), highest


def read_nodes(library: ctypes.CDLL) -> tuple[NodesRecord, NodeRunsRecord, OperationStacksRecord] | None:
    """The new nodes of autograd's graph, as ``record.numbering.FastPath``."""
    views = (View * _NUM_NODE_COLUMNS)()
    if library.fakedist_nodes_read(views) < 0:
        return None
    columns = [view.copied() for view in views]
    lengths, numbers, named = columns[-3:]
    stacks = _stacks(memoryview(lengths).cast("I"), memoryview(numbers).cast("I").tolist())
    made = NodesRecord(_frames(named), list(stacks), *columns[:4])
    return made, NodeRunsRecord(*columns[4:7]), OperationStacksRecord(*columns[7:9])


def read_host(library: ctypes.CDLL) -> HostBlocksRecord | None:
    """Changes of the host's memory, as ``record.numbering.FastPath``."""
    views = (View * _NUM_HOST_COLUMNS)()
    if library.fakedist_host_read(views) < 0:
        return None
    *columns, lengths, numbers, named = (view.copied() for view in views)
    stacks = _stacks(memoryview(lengths).cast("I"), memoryview(numbers).cast("I").tolist())
    return HostBlocksRecord(_frames(named), list(stacks), *columns)


def _frames(named: bytes) -> list[FrameRow]:
    texts = named.decode().split("\0")[:-1]
    return list(map(FrameRow, texts[::3], map(int, texts[1::3]), texts[2::3]))


def _stacks(lengths: memoryview, numbers: list[int]) -> Iterator[tuple[int, ...]]:
    for length, end in zip(lengths, accumulate(lengths), strict=True):
        yield tuple(numbers[end - length : end])


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_cdata = attrgetter("_cdata")
_FEW = 3  # so many are passed faster one by one than as arrays
#: ``record.marker.Locate``
_Locate = Callable[[torch.Tensor, int], None]


class CompiledMarker:
    """Implements protocol ``record.marker.Marker``."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        number, at, size = ctypes.c_int64, ctypes.c_void_p, ctypes.c_size_t
        piece = [ctypes.c_uint64, number, number]
        self._mark = library.fakedist_mark
        self._mark.argtypes, self._mark.restype = [number, *piece, number, number], None
        library.fakedist_mark_state.argtypes = [at, *piece, number]
        self._mark_tensor = library.fakedist_mark_tensor
        self._mark_tensor.argtypes = [at, number]
        self._mark_tensors = library.fakedist_mark_tensors
        self._mark_tensors.argtypes, self._mark_tensors.restype = [at, at, size, size], size
        library.fakedist_marks_bytes.argtypes, library.fakedist_marks_bytes.restype = [at, at, size], number
        library.fakedist_marks_begin.argtypes = [at, at]
        library.fakedist_marks.restype = None

    def begin(self, cells: ctypes.Structure) -> None:
        """Begin a run. The first of the cells is the number of the next operation."""
        codes = (ctypes.c_int64 * 3)(*map(CATEGORIES.index, ("parameter", "gradient", "optimizer_state")))
        self._library.fakedist_marks_begin(ctypes.addressof(cells), codes)

    def mark(self, op: int, piece: tuple[int, int, int], category: int, layer: int) -> None:
        """Mark a piece of a block."""
        self._mark(op, *piece, category, layer)

    def mark_state(self, tensor: torch.Tensor, piece: tuple[int, int, int], layer: int) -> None:
        """Mark a piece of an optimizer's tensor as state, unless the same was marked before."""
        self._library.fakedist_mark_state(tensor._cdata, *piece, layer)

    def mark_tensor(self, tensor: torch.Tensor, wanted: int, locate: _Locate) -> None:
        """Mark a tensor where it is now."""
        if not self._mark_tensor((tensor if type(tensor) in _PLAIN else _held(tensor))._cdata, wanted):
            locate(tensor, wanted)

    def mark_tensors(self, tensors: Sequence[torch.Tensor], wanted: Sequence[int], locate: _Locate) -> None:
        """Mark tensors where they are now, in order."""
        if len(tensors) <= _FEW:
            for tensor, kind in zip(tensors, wanted, strict=True):
                self.mark_tensor(tensor, kind, locate)
            return
        addresses, kinds = _addresses(tensors), array("q", wanted)
        at, end = 0, len(tensors)
        while (at := self._mark_tensors(addresses.buffer_info()[0], kinds.buffer_info()[0], end, at)) < end:
            locate(tensors[at], wanted[at])
            at += 1

    def bytes_of(self, tensors: Sequence[torch.Tensor], wanted: Sequence[int]) -> int | None:
        """Bytes of these tensors, and of gradients where wanted, no piece twice; None if it cannot be known."""
        addresses, kinds = _addresses(tensors), array("q", wanted)
        num_bytes: int = self._library.fakedist_marks_bytes(
            addresses.buffer_info()[0], kinds.buffer_info()[0], len(tensors)
        )
        return None if num_bytes < 0 else num_bytes

    def take_marks(self) -> MarksRecord:
        """The marks since the last call."""
        views = (View * 6)()
        self._library.fakedist_marks(views)
        op, address, category, layer, start, size = (view.copied() for view in views)
        return MarksRecord(op, address, category, layer, start, size)


def _addresses(tensors: Sequence[torch.Tensor]) -> array[int]:
    return array("Q", map(_cdata, tensors if _PLAIN.issuperset(map(type, tensors)) else map(_held, tensors)))


def _held(tensor: torch.Tensor) -> torch.Tensor:
    inner: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return inner


#: Where CPython keeps an object's type (PyObject), a list's or dict's length, and a list's items (PyListObject).
_TYPE_AT, _SIZE_AT, _ITEMS_AT = 8, 16, 24
_WORD = 8
_MOST_TYPES = 1 << 15
_word = ctypes.c_size_t.from_address


class ObjectTypes:
    """Implements protocol ``record.alive.TypeFinder``."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        self._types, self._of = library.fakedist_objects_types, library.fakedist_objects_of
        self._types.argtypes, self._types.restype = [pointer, size, pointer, size], size
        self._of.argtypes, self._of.restype = [pointer, size, pointer, size, pointer], size
        self._holding = library.fakedist_objects_holding
        self._holding.argtypes, self._holding.restype = [pointer, size, pointer, size, pointer, size, pointer], size

    def types(self, objects: list[object]) -> list[type]:
        """The distinct types of objects."""
        room = min(len(objects), _MOST_TYPES)
        addresses = (ctypes.c_void_p * room)()
        count = self._types(_items(objects), len(objects), addresses, room)
        if count > room:
            return list({id(kind): kind for kind in map(type, objects)}.values())
        return [ctypes.cast(address, ctypes.py_object).value for address in addresses[:count] if address is not None]

    def of_types(self, objects: list[object], types: list[type]) -> list[object]:
        """Objects whose type is one of these, in the same order."""
        wanted = (ctypes.c_void_p * len(types))(*map(id, types))
        indices = (ctypes.c_uint32 * len(objects))()
        count = self._of(_items(objects), len(objects), wanted, len(types), indices)
        return [objects[index] for index in indices[:count]]

    def holding(self, objects: list[object], types: list[type], lengths: Set[int]) -> list[object]:
        """Objects of these types, all lists or dicts, that hold one of these numbers of items."""
        wanted = (ctypes.c_void_p * len(types))(*map(id, types))
        numbers = (ctypes.c_int64 * len(lengths))(*lengths)
        indices = (ctypes.c_uint32 * len(objects))()
        parameters = _items(objects), len(objects), wanted, len(types), numbers, len(lengths)
        return [objects[index] for index in indices[: self._holding(*parameters, indices)]]


def find_objects_by_type(library: ctypes.PyDLL) -> ObjectTypes | None:
    """The finder of objects by type; None in a Python whose objects have another layout."""
    probe: list[object] = [ctypes, [], "text"]
    if list.__basicsize__ < _ITEMS_AT + _WORD or _word(id(probe) + _SIZE_AT).value != 3:
        return None
    if _word(id({"one": 1, "two": 2}) + _SIZE_AT).value != 2:
        return None
    for index, item in enumerate(probe):
        if _word(id(item) + _TYPE_AT).value != id(type(item)) or _word(_items(probe) + index * _WORD).value != id(item):
            return None
    return ObjectTypes(library)


def _items(objects: list[object]) -> int:
    return _word(id(objects) + _ITEMS_AT).value


class Method(enum.IntEnum):
    """The decision of compiled code, by the numbers in ``fast_path.cpp``."""

    PYTHON = 0
    PLAIN = 1
    KERNEL = 2
    LISTS = 3


class Flag(enum.IntFlag):
    """Further checks, which ``fast_path.cpp`` explains."""

    NONE = 0
    FOLLOWED = 1
    HOST_ONLY = 2
    POSITIONS = 4
    COPIES = 8
    OVERWRITES = 16
    CONDENSES = 32
    COUNTS = 64
    MAKES_MASK = 128
    IS_VIEW = 256
    IS_GEMM = 512
    LOOKS_ON = 1024


@dataclass(frozen=True)
class Rule:
    """The conditions under which an operation may run in compiled code."""

    method: Method
    flags: Flag = Flag.NONE


#: Torch runs all operations alone: on a real GPU, and where no values are followed.
EVERYTHING = Rule(Method.PLAIN)


def rule_of(operator: Operator, composites: Composites) -> Rule:
    """The rule for an operator on the virtual GPU, whose small tensors have values."""
    name = operator.name
    if (method := composites.method(operator)) is not None:
        may_pass = method == composites.perhaps_viewed and _takes_one_tensor(operator)
        return Rule(Method.KERNEL if may_pass else Method.PYTHON)
    if name == "empty":
        return Rule(Method.PLAIN, Flag.MAKES_MASK)
    if operator.is_view or operator.empty or operator.is_idle:
        return Rule(Method.PLAIN)
    if not operator.is_kernel or operator.reads_midway:
        return Rule(Method.PYTHON)
    overwrites = Flag.OVERWRITES if operator.overwrites else Flag.NONE
    if name.startswith(LISTED):
        return Rule(Method.PYTHON) if name in NON_NEGATIVE else Rule(Method.LISTS, overwrites)
    if name in ("lift", "lift_fresh"):
        return Rule(Method.KERNEL, Flag.HOST_ONLY)
    followed = followed_name(name)
    is_certain = operator.followed and followed not in FOLLOWING
    is_read = name not in INDEXING and (operator.dynamic or name in READS)
    if is_read or is_certain or operator.like or name in CHOOSING:
        return Rule(Method.KERNEL, Flag.HOST_ONLY)
    flags = overwrites
    if operator.followed:
        flags |= Flag.FOLLOWED
    if followed in COUNTING:
        flags |= Flag.COUNTS
    if name in CONDENSING:
        flags |= Flag.CONDENSES
    if name in ("copy_", "_to_copy"):
        flags |= Flag.COPIES
    if name in INDEXING:
        flags |= Flag.POSITIONS
    return Rule(Method.KERNEL, flags)


def _takes_one_tensor(operator: Operator) -> bool:
    return sum("Tensor" in str(argument.type) for argument in operator.func._schema.arguments) == 1


_AskTag = ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
#: ``Mode`` of trace.h.
_OFF, _ON, _PYTHON = 0, 1, 2
#: Numbers of each operation that ``fakedist_trace_take`` writes.
_NUM_NUMBERS = 4


class CompiledTags(Tags):
    """Tags of the fast path (trace.cpp)."""

    is_compiled = True

    def __init__(self, library: ctypes.PyDLL) -> None:
        super().__init__()
        self._library = library
        for name in ("tag", "operation", "scope"):
            self._function(name).restype = ctypes.c_int64
        self._function("start").argtypes = [ctypes.c_void_p, _AskTag]
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
        self._kept = asked = _AskTag(outside)
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

    def take(self, location_of: Callable[[int], Location]) -> Iterator[tuple[int, Tagged]]:
        """The operations since the last call. One that did not return demanded something unknown."""
        count = self._function("count")()
        numbers = (ctypes.c_int64 * (_NUM_NUMBERS * count))()
        self._function("take")(count, numbers)
        columns = [numbers[column::_NUM_NUMBERS] for column in range(_NUM_NUMBERS)]
        for tag, op, scope, demand in zip(*columns, strict=True):
            operation, known = self._learned[demand if demand >= 0 else -1 - demand]
            yield tag, Tagged(op, operation, location_of(scope), known if demand >= 0 else UNKNOWN)


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
    """Implements protocol ``record.numbering.FastPath``, once in a process. SetupError if it cannot be built.

    ``engine`` runs other operations; if None, torch does. ``types`` is None if Python's objects have another layout.
    """

    #: No tensor has this key, and no other code registers kernels for it.
    python_key = "TESTING_ONLY_GenericMode"

    def __init__(self, engine: ValueEngine | None) -> None:
        # PyDLL keeps the GIL: these calls take less time than releasing it would.
        library = self._library = ctypes.PyDLL(str(FAST_PATH.ensure()))
        self._engine = engine
        if engine is not None:
            library.fakedist_host_reserve()
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
        self.note_function = library.fakedist_nodes_function
        self.note_function.argtypes, self.note_function.restype = [ctypes.c_int], None
        self.malloc_bytes = library.fakedist_host_malloc
        self.malloc_bytes.restype = ctypes.c_int64
        library.fakedist_host_allocator.restype = ctypes.c_void_p
        self.host_allocator: int = library.fakedist_host_allocator()
        self.host_moved = library.fakedist_host_moved
        self.host_moved.argtypes, self.host_moved.restype = [ctypes.c_int64], None
        self.note_stack = library.fakedist_nodes_called
        self.note_stack.argtypes, self.note_stack.restype = [ctypes.c_int64], None

    def begin(self, cells: ctypes.Structure, where: Callable[[], _Whereabouts]) -> None:
        """Begin a run with these ``record.numbering.Cells``, kept up to date. ``where`` is asked in each thread."""

        def ask(cell: ctypes._Pointer[_Where]) -> int:
            try:
                here, out = where(), cell.contents  # faster than making a structure of it
                out.scope, out.version, out.needs = here[:3]
                if out.needs:
                    out.grad, out.low, out.high = here[3:]
            except Exception:  # Python runs the operation and meets the error again
                return 1
            return 0

        def tell(storage: int, address: int) -> None:
            if self._engine is not None:
                self._engine.host.means.know_loss(storage, address)

        callbacks = _Ask(ask), _Tell(tell)
        self._kept = (cells, *callbacks)
        self._first = ctypes.c_int64.from_address(ctypes.addressof(cells)).value
        self._library.fakedist_fast_begin(ctypes.addressof(cells), ctypes.addressof(self._limits), *callbacks)
        self.marker.begin(cells)
        begin_history(self._library)
        if self._engine is not None:
            watch = self._engine.host.watch
            watch.changed, watch.replayed = self._known, self._library.fakedist_fast_replays

    def install(self, wanted: bool) -> None:
        """Become the kernel of the dispatch key, or cease to be."""
        self._library.fakedist_fast_install(int(wanted))

    def watch_views(self, wanted: bool) -> None:
        """Note the nodes that the views of ``record.nodes.VIEWS`` make, or leave these to another kernel."""
        self._library.fakedist_nodes_views(int(wanted))

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
        """Number of operations that ran here."""
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
        self._library.fakedist_fast_gemms(room, len(room))
        at, numbers = 0, room[:]
        while at < len(numbers):
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
        """The allocator's new history by device; None if torch does not have it. CUDA must be initialised.

        ``gemms`` are the operations that are products of matrices, ``highest`` the last operation.
        """
        return read_history(self._library, gemms, highest)

    def read_nodes(self) -> tuple[NodesRecord, NodeRunsRecord, OperationStacksRecord] | None:
        """The new nodes of autograd's graph and stacks of operations; None if torch cannot name their frames."""
        return read_nodes(self._library)

    def watch_host(self, wanted: bool) -> bool:
        """Begin to watch the host's memory, or end. Returns whether it can be."""
        return bool(self._library.fakedist_host_watch(int(wanted)))

    def read_host(self) -> HostBlocksRecord | None:
        """Changes of the host's memory since the last call; None if torch cannot name the frames."""
        return read_host(self._library)


def make_fast_path(engine: ValueEngine | None) -> CompiledFastPath | None:
    """The fast path; None where it cannot be built, and Python runs everything with the same results."""
    try:
        return CompiledFastPath(engine)
    except SetupError:
        return None
