"""Marks tensors from compiled code."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence

import torch

from fakedist.gpu.fast_path.views import View
from fakedist.run.memory_records import MarksRecord
from fakedist.run.schema import CATEGORIES

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_FEW = 3  # so many are passed sooner one by one than as arrays
#: ``record.marker.Locate``
_Locate = Callable[[torch.Tensor, int], None]


class CompiledMarker:
    """Implements protocol ``record.marker.Marker``.

    Args:
        library: The compiled code.
    """

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
        library.fakedist_marks_clear.restype = library.fakedist_marks.restype = None

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
            for tensor, what in zip(tensors, wanted, strict=True):
                self.mark_tensor(tensor, what, locate)
            return
        places, each = _addresses(tensors), array("q", wanted)
        at, end = 0, len(tensors)
        while (at := self._mark_tensors(places.buffer_info()[0], each.buffer_info()[0], end, at)) < end:
            locate(tensors[at], wanted[at])
            at += 1

    def bytes_of(self, tensors: Sequence[torch.Tensor], wanted: Sequence[int]) -> int | None:
        """Bytes of these tensors, and of gradients where those are wanted. No piece counts twice.

        None if one of them cannot be located here.
        """
        places, each = _addresses(tensors), array("q", wanted)
        found: int = self._library.fakedist_marks_bytes(places.buffer_info()[0], each.buffer_info()[0], len(tensors))
        return None if found < 0 else found

    def take_marks(self) -> MarksRecord:
        """The marks since the last call."""
        views = (View * 6)()
        self._library.fakedist_marks(views)
        op, address, category, layer, start, size = (view.copied() for view in views)
        self._library.fakedist_marks_clear()
        return MarksRecord(op, address, category, layer, start, size)


def _addresses(tensors: Sequence[torch.Tensor]) -> array[int]:
    """Where C++ has each tensor."""
    return array("Q", [(tensor if type(tensor) in _PLAIN else _held(tensor))._cdata for tensor in tensors])


def _held(tensor: torch.Tensor) -> torch.Tensor:
    """What a DTensor holds; any other tensor itself."""
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found
