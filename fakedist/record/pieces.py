"""Locates tensors: the pieces of blocks of device memory that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

#: A tensor of one of these types is one piece of one storage.
PLAIN = frozenset((torch.Tensor, nn.Parameter))


class Piece(NamedTuple):
    """A piece of a block of device memory.

    Attributes:
        address: Address of the block: a storage.
        start: The piece's first byte in it.
        size: Bytes.
    """

    address: int
    start: int
    size: int


def device_pieces(tensor: object) -> Sequence[Piece]:
    """Locate every CUDA tensor in a tensor or wrapper."""
    if tensor is None or not isinstance(tensor, torch.Tensor):
        return ()
    if type(tensor) not in PLAIN:
        local = getattr(tensor, "_local_tensor", None)  # DTensor
        if local is not None:
            return device_pieces(local)
        if hasattr(tensor, "__tensor_flatten__"):
            names = tensor.__tensor_flatten__()[0]
            return [piece for name in names for piece in device_pieces(getattr(tensor, name))]
    if not tensor.is_cuda or not (bytes_ := tensor.numel() * (width := tensor.element_size())):
        return ()
    # Not untyped_storage(): its Python object would count as a user of the storage from then on.
    start = int(tensor.storage_offset()) * width
    address = tensor.data_ptr() - start
    return (Piece(address, start, bytes_),) if address else ()  # a freed storage has none
