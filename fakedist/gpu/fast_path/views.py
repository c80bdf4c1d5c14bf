"""Columns that compiled code lends to Python."""

from __future__ import annotations

import ctypes


class View(ctypes.Structure):
    """``View`` of view.h, field by field."""

    _fields_ = [("data", ctypes.c_void_p), ("size", ctypes.c_size_t)]
    data: int
    size: int

    def copied(self) -> bytes:
        """A copy of it."""
        return ctypes.string_at(self.data, self.size)
