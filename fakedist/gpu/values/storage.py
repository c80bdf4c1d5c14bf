"""Reads facts about a tensor's storage without taking a reference to it.

``tensor.untyped_storage()`` makes a Python object that lives as long as the storage and counts as a user of it.
Autograd adds gradients in place only if a storage has one user (``can_accumulate_inplace`` in
torch/csrc/autograd/input_buffer.cpp), so calling it would cost the job a tensor. Instead, the two numbers are read from
``c10::TensorImpl`` and ``c10::StorageImpl``, and a weak reference is added to the latter's count. The offsets are found
with tensors whose storage is known.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import empty

from fakedist.errors import RecordingError

_PROBES = (123_457, 7_654_321)
_WORD = 8
_MAX_WORDS = 24
#: ``c10::intrusive_ptr_target`` counts its owners in the lower half of a word, and weak references in the upper half.
_ONE_WEAK = 1 << 32
_read = ctypes.c_uint64.from_address
_free_weak_ref: Callable[[int], object] = torch.UntypedStorage._free_weak_ref


@functools.cache
def _offsets() -> tuple[int, int]:
    """Offsets in bytes: of the StorageImpl in a TensorImpl, and of the size in a StorageImpl."""
    found: list[set[tuple[int, int]]] = []
    for num_bytes in _PROBES:
        probe = empty(num_bytes, dtype=torch.uint8)
        storage = probe.untyped_storage()._cdata
        offsets = range(_WORD, _WORD * _MAX_WORDS, _WORD)
        in_tensor = [offset for offset in offsets if _read(probe._cdata + offset).value == storage]
        in_storage = [offset for offset in offsets if _read(storage + offset).value == num_bytes]
        found.append({(first, second) for first in in_tensor for second in in_storage})
    common = set.intersection(*found)
    if not common:
        raise RecordingError(
            f"torch {torch.__version__} has an unknown layout of storages", "pip install torch==2.15.0"
        )
    return min(common)


def storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Identity and bytes of a tensor's storage, as ``untyped_storage()._cdata`` and ``.nbytes()``; zeros if sparse.

    Raises:
        RecordingError: This torch has an unknown layout.
    """
    in_tensor, in_storage = _offsets()
    storage = _read(tensor._cdata + in_tensor).value
    return (storage, _read(storage + in_storage).value) if storage else (0, 0)


@functools.cache
def _weak_count() -> int:
    """Offset in bytes of the weak reference count in a StorageImpl."""
    storage = empty(_PROBES[0], dtype=torch.uint8).untyped_storage()
    offsets = range(_WORD, _WORD * _MAX_WORDS, _WORD)
    before = [_read(storage._cdata + offset).value for offset in offsets]
    storage._weak_ref()
    counted = [
        offset
        for offset, value in zip(offsets, before, strict=True)
        if _read(storage._cdata + offset).value - value == _ONE_WEAK
    ]
    _free_weak_ref(storage._cdata)
    if len(counted) != 1:
        raise RecordingError(
            f"torch {torch.__version__} counts references to storages in an unknown way", "pip install torch==2.15.0"
        )
    return counted[0]


@functools.cache
def _of_driver(name: str) -> Callable[..., object] | None:
    """A function of the virtual GPU's driver; None if the driver is not loaded."""
    return getattr(ctypes.CDLL(None), name, None)


def hold_weakly(tensor: torch.Tensor) -> None:
    """Keep a tensor's StorageImpl, not its memory, alive until ``UntypedStorage._free_weak_ref``.

    Raises:
        RecordingError: This torch counts references in an unknown way.
    """
    add = _of_driver("fakedist_add")
    if add is None:
        tensor.untyped_storage()._weak_ref()
    else:
        add(ctypes.c_void_p(storage_of(tensor)[0] + _weak_count()), ctypes.c_uint64(_ONE_WEAK))


def storage_address(tensor: torch.Tensor) -> int:
    """Where a tensor's storage begins: ``untyped_storage().data_ptr()``, but faster."""
    if not tensor.numel():
        return tensor.untyped_storage().data_ptr()  # data_ptr() of a tensor without elements is 0
    return tensor.data_ptr() - int(tensor.storage_offset()) * tensor.element_size()


def zero_memory(tensor: torch.Tensor) -> bool:
    """Write zeros to the memory of a contiguous device tensor. Pages that are not read then take no host memory.

    Returns:
        Whether they were written.
    """
    zero = _of_driver("fakedist_zero") if tensor.is_contiguous() and tensor.is_cuda else None
    if zero is None:
        return False
    return bool(zero(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)))
