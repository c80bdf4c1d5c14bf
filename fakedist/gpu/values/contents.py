"""What is known about the contents of device memory, storage by storage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import empty, ones, zeros

from fakedist.gpu.values.known import Known, Storages
from fakedist.gpu.values.scans import all_true
from fakedist.gpu.values.storage import (
    Holding,
    find_know,
    find_losses,
    num_lost,
    storage_address,
    storage_of,
    tell_holding,
)

#: Floats in larger storages are not computed. A router's logits for 4,096 tokens and 16 experts fit, and a product of
#: matrices of this size takes the host a millisecond.
LIMIT_BYTES = 256 << 10
#: Token ids, counts and masks may be larger: up to the size that the caching allocator puts into its small segments
#: (kSmallSize in c10/core/AllocatorConfig.h), which hold data (the driver's memory.c).
MASK_LIMIT_BYTES = 1 << 20
#: Larger floats on the host are not computed either. A model has few parameters between LIMIT_BYTES and this size, and
#: scripts read such tensors.
HOST_LIMIT_BYTES = 4 << 20

_CPU = torch.device("cpu")
_host_storage = torch._C._construct_storage_from_data_pointer


def is_small(tensor: torch.Tensor) -> bool:
    """Whether a tensor's whole storage is small enough to be computed."""
    num_bytes = storage_of(tensor)[1]
    return num_bytes <= LIMIT_BYTES or (num_bytes <= MASK_LIMIT_BYTES and not tensor.is_floating_point())


def is_float(tensor: torch.Tensor) -> bool:
    """Whether a tensor has real or complex floats."""
    return tensor.is_floating_point() or tensor.is_complex()


def is_large(tensor: torch.Tensor) -> bool:
    """Whether a tensor of more than LIMIT_BYTES is on the device and too large to be computed."""
    return tensor.is_cuda and (tensor.is_floating_point() or tensor.nbytes > MASK_LIMIT_BYTES)


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor over the same memory. On the virtual GPU, device memory is host memory."""
    num_bytes = storage_of(tensor)[1]
    if not num_bytes or not tensor.numel():
        return empty(tensor.shape, dtype=tensor.dtype)
    if not (address := tensor.data_ptr()):  # a ZeroTensor, which forward-mode derivatives make, has no memory
        return zeros((), dtype=tensor.dtype).expand(tensor.shape)
    offset = int(tensor.storage_offset())
    storage = _host_storage(address - offset * tensor.element_size(), _CPU, num_bytes)
    if tensor.is_quantized:
        return _quantized_like(tensor).set_(storage, offset, tensor.size(), tensor.stride())
    view = empty(0, dtype=tensor.dtype).set_(storage, offset, tensor.size(), tensor.stride())
    # Views may be lazy: their memory holds the conjugate or the negative of their values.
    if tensor.is_neg():
        view = torch._neg_view(view)
    return view.conj() if tensor.is_conj() else view


def _quantized_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor without elements that is quantized as a device tensor is."""
    if tensor.qscheme() == torch.per_tensor_affine:
        scale, zero_point = tensor.q_scale(), tensor.q_zero_point()
        return torch._empty_affine_quantized((0,), scale=scale, zero_point=zero_point, dtype=tensor.dtype)
    axis = tensor.q_per_channel_axis()
    scales, zero_points = host_view(tensor.q_per_channel_scales()), host_view(tensor.q_per_channel_zero_points())
    shape = [0] * tensor.dim()
    shape[axis] = len(scales)
    return torch._empty_per_channel_affine_quantized(
        shape, scales=scales, zero_points=zero_points, axis=axis, dtype=tensor.dtype
    )


def host_views(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return CPU tensors over the same memory. Pieces of one buffer take a quarter of the time of other tensors."""
    found: list[torch.Tensor] = []
    last: tuple[int, torch.dtype] | None = None
    for tensor in tensors:
        this = (storage_of(tensor)[0], tensor.dtype)
        if this != last or not tensor.numel() or tensor.is_neg() or tensor.is_complex():
            found.append(host_view(tensor))
            last = this if tensor.numel() else None
        else:
            found.append(found[-1].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()))
    return found


def host_bytes(address: int, num_bytes: int) -> torch.Tensor:
    """Return a CPU tensor of bytes over device memory."""
    return empty(0, dtype=torch.uint8).set_(_host_storage(address, _CPU, num_bytes))


class Defined:
    """Which small storages hold values: entirely, or some of their bytes.

    Args:
        storages: What is known about them.

    Attributes:
        written: While a CUDA graph is captured, where values were written: bytes by address of the storage.
        replayed: The same for all graphs that were replayed. Their results are often seen through unknown storages:
            Transformer Engine makes tensors from the addresses, so that the pool can reuse the memory.
    """

    def __init__(self, storages: Storages) -> None:
        self.written: dict[int, int] | None = None
        self.replayed: dict[int, int] = {}
        self.watch = storages.watch
        self._losses, self._know = find_losses(), find_know()
        self._storages = storages

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether every element holds a value."""
        known = self._storages.get(tensor)
        if known is not None and known.losses != (losses := self._losses.value):
            self._find_lost(known, storage_of(tensor)[1])
            known.losses = losses
        if (known is not None and known.is_whole) or not tensor.numel():
            return True
        if known is not None and known.flags is not None:
            return all_true(elements(known.flags, tensor))
        if tensor._is_zerotensor():
            return True
        return bool(self.replayed) and 0 < storage_of(tensor)[1] <= self.replayed.get(storage_address(tensor), 0)

    def _find_lost(self, known: Known, num_bytes: int) -> None:
        """Drop values where an extension's kernel, or another thread's, has written since."""
        expected = num_bytes if known.is_whole else 0 if known.flags is None else int(known.flags.count_nonzero())
        if num_bytes - num_lost(known.address, num_bytes) < expected:
            known.is_whole, known.flags, known.tainted = False, None, None

    def define(self, tensor: torch.Tensor) -> Known | None:
        """Record that every element holds a value now. Return what is known about the storage; None if it is empty."""
        num_bytes = storage_of(tensor)[1]
        if not num_bytes:
            return None
        if self.written is not None:
            self.written[storage_address(tensor)] = num_bytes
        known = self._storages.make(tensor)
        if not known.is_whole and covers(tensor, num_bytes):
            known.is_whole, known.flags = True, None
        if known.is_whole and tensor.numel() * tensor.element_size() == num_bytes:
            self._know(known.address, num_bytes, Holding.COMPUTED.value)
            return known
        if known.is_whole:
            tell_holding(tensor, Holding.COMPUTED)
            return known
        if known.flags is None or known.flags.numel() != num_bytes:
            known.flags = zeros(num_bytes, dtype=torch.uint8)
        elements(known.flags, tensor).fill_(1)
        tell_holding(tensor, Holding.COMPUTED, known.flags)
        return known

    def spoil(self, tensor: torch.Tensor) -> None:
        """Record that no element holds a value any more. What is read from it later must be made up."""
        if self.replayed:
            self.replayed.pop(storage_address(tensor), None)
        known = self._storages.get_moved(tensor)
        num_bytes = storage_of(tensor)[1]
        if known is None or covers(tensor, num_bytes) or known.address != storage_address(tensor):
            tell_holding(tensor, Holding.NOTHING)
            if known is not None:
                known.is_whole, known.flags = False, None
                self._storages.tidy(known)
            return
        if known.is_whole:
            known.is_whole, known.flags = False, ones(num_bytes, dtype=torch.uint8)
        if known.flags is not None:
            elements(known.flags, tensor).fill_(0)
        tell_holding(tensor, Holding.NOTHING, known.flags)

    def missing(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Where a tensor that lacks values lacks them: a mask of its shape. None if no element holds a value."""
        known = self._storages.get(tensor)
        if known is None or known.flags is None:
            return None
        missing = (elements(known.flags, tensor) == 0).any(-1)
        return None if all_true(missing) else missing


def covers(tensor: torch.Tensor, storage_bytes: int) -> bool:
    """Whether a tensor covers every byte of its storage. An expanded tensor does not: it repeats elements."""
    return tensor.numel() * tensor.element_size() >= storage_bytes and 0 not in tensor.stride()


def elements(flags: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the flags of a tensor's elements: its shape, plus one axis for the bytes of an element."""
    size = tensor.element_size()
    strides = [stride * size for stride in tensor.stride()]
    return flags.as_strided([*tensor.shape, size], [*strides, 1], tensor.storage_offset() * size)
