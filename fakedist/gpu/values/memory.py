"""Which device memory holds values, and how to reach it from the host."""

from __future__ import annotations

from typing import Any

import torch

#: Tensors in larger storages are not computed. Segments that hold data are of 2 MiB (the driver's memory.c); a router's
#: logits of 4,096 tokens and 16 experts fit.
LIMIT_BYTES = 256 << 10


def is_small(tensor: torch.Tensor) -> bool:
    """Whether a tensor's whole storage is small enough to be computed."""
    return tensor.untyped_storage().nbytes() <= LIMIT_BYTES


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the same memory: on the virtual GPU device memory is host memory."""
    storage = tensor.untyped_storage()
    bytes_ = storage.nbytes()
    if not bytes_ or not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    host: Any = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), bytes_)
    view = torch.empty(0, dtype=tensor.dtype)
    return view.set_(host, tensor.storage_offset(), tensor.size(), tensor.stride())


class Defined:
    """Which small storages hold values.

    A storage is known by its address; an operation that returns fresh memory says anew what that holds, so that what
    an earlier tensor left at the address does not count. Partly written storages keep one flag a byte.
    """

    def __init__(self) -> None:
        self._whole: set[int] = set()
        self._partly: dict[int, torch.Tensor] = {}
        self._non_negative: set[int] = set()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether every element holds a value."""
        address = tensor.untyped_storage().data_ptr()
        if address in self._whole or not tensor.numel():
            return True
        flags = self._partly.get(address)
        return flags is not None and bool(_elements(flags, tensor).all())

    def define(self, tensor: torch.Tensor, *, non_negative: bool = False) -> None:
        """Every element holds a value now."""
        storage = tensor.untyped_storage()
        address, bytes_ = storage.data_ptr(), storage.nbytes()
        if address in self._whole or not bytes_:
            return
        (self._non_negative.add if non_negative else self._non_negative.discard)(address)
        if _covers(tensor, bytes_):
            self._whole.add(address)
            self._partly.pop(address, None)
            return
        flags = self._partly.get(address)
        if flags is None or flags.numel() != bytes_:
            flags = self._partly[address] = torch.zeros(bytes_, dtype=torch.uint8)
        _elements(flags, tensor).fill_(1)

    def undefine(self, tensor: torch.Tensor, *, non_negative: bool = False) -> None:
        """No element holds a value any more; what is read from it later must be made up."""
        storage = tensor.untyped_storage()
        address, bytes_ = storage.data_ptr(), storage.nbytes()
        (self._non_negative.add if non_negative else self._non_negative.discard)(address)
        if _covers(tensor, bytes_):
            self._whole.discard(address)
            self._partly.pop(address, None)
            return
        if address in self._whole:
            self._whole.discard(address)
            self._partly[address] = torch.ones(bytes_, dtype=torch.uint8)
        if address in self._partly:
            _elements(self._partly[address], tensor).fill_(0)

    def forget(self, tensor: torch.Tensor) -> None:
        """The whole storage is fresh memory."""
        address = tensor.untyped_storage().data_ptr()
        self._whole.discard(address)
        self._partly.pop(address, None)
        self._non_negative.discard(address)

    def is_non_negative(self, tensor: torch.Tensor) -> bool:
        """Whether values made up for the tensor must not be negative."""
        return tensor.untyped_storage().data_ptr() in self._non_negative

    def missing(self, tensor: torch.Tensor) -> torch.Tensor:
        """Bool tensor of the same shape: elements that hold no value."""
        address = tensor.untyped_storage().data_ptr()
        flags = self._partly.get(address)
        if flags is None:
            return torch.full(tensor.shape, address not in self._whole, dtype=torch.bool)
        return _elements(flags, tensor)[..., 0] == 0


def _covers(tensor: torch.Tensor, storage_bytes: int) -> bool:
    """Whether a tensor has every byte of its storage; expanded ones repeat elements."""
    return tensor.numel() * tensor.element_size() >= storage_bytes and 0 not in tensor.stride()


def _elements(flags: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The flags of a tensor's elements: its shape, and one more axis for the bytes of an element."""
    size = tensor.element_size()
    strides = [stride * size for stride in tensor.stride()]
    return flags.as_strided([*tensor.shape, size], [*strides, 1], tensor.storage_offset() * size)
