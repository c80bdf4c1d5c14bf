"""The virtual GPU's log of launches: the work given to the streams, in the order in which the host gave it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from enum import IntEnum

from fakedist.gpu.driver.build import ensure_driver


class LaunchKind(IntEnum):
    """``enum launch_kind`` of driver/launches.h."""

    KERNEL = 0
    PRODUCT = 1
    LIBRARY = 2
    COPY = 3
    FILL = 4
    COLLECTIVE = 5
    STREAM_RECORDS = 6
    STREAM_WAITS = 7
    HOST_WAITS = 8
    HOST_WAITS_FOR_DEVICE = 9
    HOST_READS = 10
    ALLOCATOR_IS_REFUSED = 11
    ALLOCATOR_MALLOCS = 12
    ALLOCATOR_FREES = 13
    ALLOCATOR_MAPS = 14
    ALLOCATOR_UNMAPS = 15


TO_DEVICE, TO_HOST, WITHIN_DEVICE = 1, 2, 3
#: ``enum product_scaling`` of driver/launches.h: by how many values of an operand share a scale.
SCALINGS = ("", "tensor", "row", "block")


class Launch(ctypes.Structure):
    """``struct launch`` of driver/launches.h, which documents the fields."""

    _fields_ = [
        ("stream", ctypes.c_uint64),
        ("name_address", ctypes.c_uint64),
        ("tag", ctypes.c_int64),
        ("call", ctypes.c_int64),
        ("event", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        *((name, ctypes.c_int64) for name in ("m", "n", "k", "batch")),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        *((name, ctypes.c_int32) for name in ("kind", "device", "direction")),
        *((name, ctypes.c_int32) for name in ("a_type", "b_type", "d_type", "compute", "graph", "pinned", "thread")),
        *((name, ctypes.c_uint8) for name in ("transposed_a", "transposed_b", "accumulates", "scaling")),
        ("at_ns", ctypes.c_uint64),
    ]


class LaunchLog:
    """The driver's log. The driver must be loaded (:func:`fakedist.gpu.virtual.virtual_gpu`)."""

    def __init__(self) -> None:
        # PyDLL keeps the GIL: these calls take less time than releasing it would.
        library = ctypes.PyDLL(str(ensure_driver()))
        for name in ("fakedist_tag", "fakedist_tag_call"):
            getattr(library, name).argtypes = [ctypes.c_int64]
        library.fakedist_log_collective.argtypes = [ctypes.c_void_p]
        library.fakedist_log_read.argtypes = [ctypes.c_uint64, ctypes.c_void_p]
        library.fakedist_last_grid.restype = ctypes.POINTER(ctypes.c_uint * 3)
        library.fakedist_launches.restype = library.fakedist_num_launches.restype = ctypes.c_size_t
        #: ``tag(number)``: what this thread launches from now on carries this tag; -1 for none.
        self.tag = library.fakedist_tag
        #: Address of that function, for compiled code.
        self.tag_address = ctypes.cast(library.fakedist_tag, ctypes.c_void_p).value or 0
        #: ``tag_call(number)``: what this thread launches from now on is part of this collective; -1 for none.
        self.tag_call = library.fakedist_tag_call
        self._library = library
        self._names: dict[int, str] = {}
        self._demangle = _demangler()

    def begin(self) -> None:
        """Begin a new log."""
        self._library.fakedist_log_launches(1)

    def end(self) -> ctypes.Array[Launch]:
        """End the log and return what was launched since it began. Each access makes the launch anew."""
        self._library.fakedist_log_launches(0)
        first = ctypes.POINTER(Launch)()
        count = self._library.fakedist_launches(ctypes.byref(first))
        log: ctypes.Array[Launch] = (Launch * count).from_buffer_copy(
            ctypes.string_at(first, count * ctypes.sizeof(Launch))
        )
        return log

    def num_launches(self) -> int:
        """Number of launches in the log now."""
        return int(self._library.fakedist_num_launches())

    def last_grid(self) -> tuple[int, ...]:
        """The grid of the kernel that this thread launched last."""
        return tuple(self._library.fakedist_last_grid().contents)

    def collective(self, stream: int) -> None:
        """The collective of :attr:`tag_call` begins on a stream."""
        self._library.fakedist_log_collective(stream)

    def read(self, num_bytes: int, stream: int) -> None:
        """The host reads ``num_bytes`` of what a stream computed, and waits for them."""
        self._library.fakedist_log_read(num_bytes, stream)

    def name(self, launch: Launch) -> str:
        """The kernel's name as in its source, or the library's function; empty if unknown."""
        address = int(launch.name_address)
        text = self._names.get(address)
        if text is None:
            text = self._demangle(ctypes.string_at(address)) if address else ""
            self._names[address] = text
        return text


def _demangler() -> Callable[[bytes], str]:
    runtime, library = ctypes.CDLL(None), ctypes.CDLL("libstdc++.so.6")
    demangle, free = library.__getattr__("__cxa_demangle"), runtime.free
    demangle.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
    demangle.restype = ctypes.c_void_p
    free.argtypes = [ctypes.c_void_p]

    def text(mangled: bytes) -> str:
        status = ctypes.c_int()
        made = demangle(mangled, None, None, ctypes.byref(status)) if mangled.startswith(b"_Z") else None
        if not made:
            return mangled.decode(errors="replace")
        source_name = ctypes.string_at(made).decode(errors="replace")
        free(made)
        return source_name

    return text
