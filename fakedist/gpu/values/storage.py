"""A tensor's storage, looked at without touching it.

``tensor.untyped_storage()`` makes a Python object that stays for as long as the storage, and counts as a user of it.
Autograd adds gradients in place only where a storage has one user (``can_accumulate_inplace`` in
torch/csrc/autograd/input_buffer.cpp), so looking would cost the job a tensor. The two numbers are read from
``c10::TensorImpl`` and ``c10::StorageImpl`` instead, at places found with tensors whose storage is known.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import empty

from fakedist.errors import RecordingError

_PROBES = (123_457, 7_654_321)
_WORD = 8
_MAX_WORDS = 24
_read = ctypes.c_uint64.from_address


@functools.cache
def _places() -> tuple[int, int]:
    """Where a TensorImpl keeps its StorageImpl, and where that keeps its size: offsets in bytes."""
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
        raise RecordingError(f"torch {torch.__version__} keeps storages otherwise", "pip install torch==2.15.0")
    return min(common)


def storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Identity and bytes of a tensor's storage, as ``untyped_storage()._cdata`` and ``.nbytes()``; zeros if sparse.

    Raises:
        RecordingError: This torch lays them out in a way that was not foreseen.
    """
    in_tensor, in_storage = _places()
    storage = _read(tensor._cdata + in_tensor).value
    return (storage, _read(storage + in_storage).value) if storage else (0, 0)


def storage_address(tensor: torch.Tensor) -> int:
    """Where a tensor's storage begins; as ``untyped_storage().data_ptr()``."""
    return tensor.data_ptr() - int(tensor.storage_offset()) * tensor.element_size() if tensor.numel() else 0
