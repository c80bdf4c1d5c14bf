"""Locates tensors: the pieces of blocks of device memory that hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

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
    """A piece of a block of device memory.

    Attributes:
        address: Address of the block: a storage.
        start: The piece's first byte in it.
        size: Bytes.
    """

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
