"""Holds marks until they are taken: in Python, or in compiled code that also locates the tensors."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from fakedist.record.pieces import Piece
from fakedist.run.encoding import columns_of
from fakedist.run.memory_records import MarksRecord
from fakedist.run.schema import CATEGORIES

_STATE_CODE = CATEGORIES.index("optimizer_state")
WHAT_BITS = 3


class What(enum.IntEnum):
    """What to mark of a tensor. The same numbers as in gpu/fast_path/marks.cpp."""

    PARAMETER = 0
    GRADIENT = 1
    STATE = 2  # once
    ITS_GRADIENT = 3
    PARAMETER_AND_ITS_GRADIENT = 4


#: Marks one tensor in Python: ``locate(tensor, wanted)``. What and for which layer is one number, because thousands of
#: them go to compiled code at once: ``layer << WHAT_BITS | what``. The layer may be -1.
Locate = Callable[[torch.Tensor, int], None]


class Marker(Protocol):
    """Makes marks. gpu/fast_path implements it, too."""

    def mark(self, op: int, piece: Piece, category: int, layer: int) -> None:
        """Mark a piece of a block as allocated by an operation up to ``op``. ``category`` is its code."""

    def mark_state(self, tensor: torch.Tensor, piece: Piece, layer: int) -> None:
        """Mark a piece of an optimizer's tensor as state, unless the same was marked before."""

    def mark_tensor(self, tensor: torch.Tensor, wanted: int, locate: Locate) -> None:
        """Mark a tensor where it is now. What cannot be located here, ``locate`` marks."""

    def mark_tensors(self, tensors: Sequence[torch.Tensor], wanted: Sequence[int], locate: Locate) -> None:
        """Mark tensors where they are now, in order. What cannot be located here, ``locate`` marks."""

    def bytes_of(self, tensors: Sequence[torch.Tensor], wanted: Sequence[int]) -> int | None:
        """Bytes of these tensors, and of gradients where those are wanted. No piece counts twice.

        None if one of them cannot be located here.
        """

    def take_marks(self) -> MarksRecord:
        """The marks since the last call."""


class _Cells(Protocol):
    """What is read of ``record.numbering.Cells``."""

    op: int


class PythonMarker:
    """Marks what is located in Python.

    Args:
        cells: Number of the next operation.
    """

    def __init__(self, cells: _Cells) -> None:
        self._cells = cells
        self._states: set[tuple[int, int, Piece]] = set()
        self._rows = array("q")  # one after the other: thousands of tuples would keep the cycle collector busy

    def mark(self, op: int, piece: Piece, category: int, layer: int) -> None:
        """Mark a piece of a block."""
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
        for tensor, each in zip(tensors, wanted, strict=True):
            locate(tensor, each)

    def bytes_of(self, tensors: Sequence[torch.Tensor], wanted: Sequence[int]) -> int | None:
        """None: they cannot be located here."""
        return None

    def take_marks(self) -> MarksRecord:
        """The marks since the last call."""
        rows, self._rows = self._rows, array("q")
        codes = columns_of(MarksRecord)
        columns = [array(code, rows[place :: len(codes)]) for place, code in enumerate(codes.values())]
        return MarksRecord(*(column.tobytes() for column in columns))
