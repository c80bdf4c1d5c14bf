"""Locates tensors in blocks of device memory, and holds the marks on them, in Python or in compiled code."""

from __future__ import annotations

import ctypes
import enum
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import nn

from fakedist.rundir.encoding import columns_of
from fakedist.rundir.memory_records import MarksRecord
from fakedist.rundir.schema import CATEGORIES

#: A tensor of one of these types is one piece of one storage, or a sparse one of several.
PLAIN = frozenset((torch.Tensor, nn.Parameter))
#: The operations that return the tensors of which a sparse one is made.
_SPARSE_PARTS: dict[torch.layout, tuple[str, ...]] = {torch.sparse_coo: ("_indices", "_values")}
_SPARSE_PARTS |= dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values"))
_SPARSE_PARTS |= dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values"))
_COO = torch._C.DispatchKeySet(torch._C.DispatchKey.SparseCUDA)
_COMPRESSED = torch._C.DispatchKeySet(torch._C.DispatchKey.SparseCsrCUDA)
_is_transformed: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
_untransformed: Callable[[torch.Tensor], torch.Tensor] = torch._C._functorch.get_unwrapped


class Piece(NamedTuple):
    """``size`` bytes of a block of device memory (a storage) at ``address``, from the byte ``start`` on."""

    address: int
    start: int
    size: int


def inside_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that ``torch.func`` (``vmap``, ``grad``, ``jvp``) has wrapped, for example a whole batch of it."""
    while _is_transformed(tensor):
        tensor = _untransformed(tensor)
    return tensor


def device_pieces(tensor: object) -> Sequence[Piece]:
    """Locate every CUDA tensor in a tensor or wrapper."""
    if tensor is None or not isinstance(tensor, torch.Tensor):
        return ()
    tensor = inside_transforms(tensor)
    if type(tensor) not in PLAIN:
        local = getattr(tensor, "_local_tensor", None)  # DTensor
        if local is not None:
            return device_pieces(local)
        if hasattr(tensor, "__tensor_flatten__"):
            names = tensor.__tensor_flatten__()[0]
            return [piece for name in names for piece in device_pieces(getattr(tensor, name))]
    if tensor.layout is not torch.strided and tensor.is_cuda:
        return [piece for part in _sparse_parts(tensor) for piece in device_pieces(part)]
    if not tensor.is_cuda or not (bytes_ := tensor.numel() * (width := tensor.element_size())):
        return ()
    # Not untyped_storage(): its Python object would count as a user of the storage from then on.
    start = int(tensor.storage_offset()) * width
    address = tensor.data_ptr() - start
    return (Piece(address, start, bytes_),) if address else ()  # a freed storage has none


def _sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of which a sparse one on the device is made. No mode sees these operations, nor does the recorder."""
    names, kernels = _SPARSE_PARTS.get(tensor.layout, ()), _COO if tensor.is_sparse else _COMPRESSED
    return [getattr(torch.ops.aten, name).default.redispatch(kernels, tensor) for name in names]


_STATE_CODE = CATEGORIES.index("optimizer_state")
WHAT_BITS = 3


class What(enum.IntEnum):
    """The part of a tensor's memory to mark. gpu/fast_path/marks.cpp has the same numbers."""

    PARAMETER = 0
    GRADIENT = 1
    STATE = 2  # once
    ITS_GRADIENT = 3
    PARAMETER_AND_ITS_GRADIENT = 4


#: Marks one tensor in Python: ``locate(tensor, wanted)``. What to mark and for which layer is one number, because
#: thousands go to compiled code at once: ``layer << WHAT_BITS | what``. The layer may be -1.
Locate = Callable[[torch.Tensor, int], None]


class Marker(Protocol):
    """Makes marks. gpu/fast_path implements it, too."""

    def mark(self, op: int, piece: Piece, category: int, layer: int) -> None:
        """Mark a piece of a block as allocated by an operation up to ``op``. ``category`` is its code."""

    def mark_state(self, tensor: torch.Tensor, piece: Piece, layer: int) -> None:
        """Mark a piece of an optimizer's tensor as state, unless the same was marked before."""

    def mark_tensor(self, tensor: torch.Tensor, wanted: int, locate: Locate) -> None:
        """Mark a tensor where it is now; ``locate`` does so if it cannot be located here."""

    def mark_tensors(self, tensors: Sequence[torch.Tensor], wanted: Sequence[int], locate: Locate) -> None:
        """Mark tensors where they are now, in order; ``locate`` does so for those that cannot be located here."""

    def bytes_of(self, tensors: Sequence[torch.Tensor], wanted: Sequence[int]) -> int | None:
        """Bytes of these tensors, and of gradients where wanted, each piece once; None if one cannot be located."""

    def take_marks(self) -> MarksRecord:
        """The marks since the last call."""


class Cells(ctypes.Structure):
    """Numbers shared with compiled code: the next operation's, and a version that changes with the position."""

    _fields_ = [("op", ctypes.c_int64), ("version", ctypes.c_int64)]
    op: int
    version: int


class PythonMarker:
    """Marks tensors that are located in Python."""

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self._states: set[tuple[int, int, Piece]] = set()
        self._rows = array("q")  # one after the other: thousands of tuples would keep the cycle collector busy

    def mark(self, op: int, piece: Piece, category: int, layer: int) -> None:
        """Mark a piece of a block as allocated by an operation up to ``op``."""
        address, start, size = piece
        self._rows.extend((op, address, category, layer, start, size))

    def mark_state(self, tensor: torch.Tensor, piece: Piece, layer: int) -> None:
        """Mark a piece of an optimizer's tensor as state, unless the same was marked before."""
        state = (tensor._cdata, layer, piece)
        if state not in self._states:  # the owner may become known later
            self._states.add(state)
            self.mark(self._cells.op - 1, piece, _STATE_CODE, layer)

    def mark_tensor(self, tensor: torch.Tensor, wanted: int, locate: Locate) -> None:
        """Have a tensor located."""
        locate(tensor, wanted)

    def mark_tensors(self, tensors: Sequence[torch.Tensor], wanted: Sequence[int], locate: Locate) -> None:
        """Have tensors located."""
        for tensor, code in zip(tensors, wanted, strict=True):
            locate(tensor, code)

    def bytes_of(self, tensors: Sequence[torch.Tensor], wanted: Sequence[int]) -> int | None:
        """None: Python adds them up otherwise."""
        return None

    def take_marks(self) -> MarksRecord:
        """The marks since the last call."""
        rows, self._rows = self._rows, array("q")
        codes = columns_of(MarksRecord)
        columns = [array(code, rows[first :: len(codes)]) for first, code in enumerate(codes.values())]
        return MarksRecord(*(column.tobytes() for column in columns))
