"""What is known about the contents of device memory, storage by storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import empty, ones, zeros

from fakedist.gpu.values.scans import all_true
from fakedist.gpu.values.storage import hold_weakly, storage_address, storage_of

#: Floats in larger storages are not computed. A router's logits for 4,096 tokens and 16 experts fit, and a product of
#: matrices of this size takes the host a millisecond.
LIMIT_BYTES = 256 << 10
#: Token ids, counts and masks may be larger: up to the size that the caching allocator puts into its small segments
#: (kSmallSize in c10/core/AllocatorConfig.h), which hold data (the driver's memory.c).
MASK_LIMIT_BYTES = 1 << 20

Fact = TypeVar("Fact")
_expired: Callable[[int], object] = torch.UntypedStorage._expired
_free_weak_ref: Callable[[int], object] = torch.UntypedStorage._free_weak_ref


def is_small(tensor: torch.Tensor) -> bool:
    """Whether a tensor's whole storage is small enough to be computed."""
    num_bytes = storage_of(tensor)[1]
    return num_bytes <= LIMIT_BYTES or (num_bytes <= MASK_LIMIT_BYTES and not tensor.is_floating_point())


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor over the same memory. On the virtual GPU, device memory is host memory."""
    num_bytes = storage_of(tensor)[1]
    if not num_bytes or not tensor.numel():
        return empty(tensor.shape, dtype=tensor.dtype)
    storage = _host_storage(storage_address(tensor), num_bytes)
    view = empty(0, dtype=tensor.dtype)
    return view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def host_bytes(address: int, num_bytes: int) -> torch.Tensor:
    """Return a CPU tensor of bytes over device memory."""
    return empty(0, dtype=torch.uint8).set_(_host_storage(address, num_bytes))


def _host_storage(address: int, num_bytes: int) -> torch.types.Storage:
    return torch._C._construct_storage_from_data_pointer(address, torch.device("cpu"), num_bytes)


class Watch:
    """Follows which storages something is known about.

    Attributes:
        told: Called with a storage's identity and 1 for a new fact, -1 for one that was dropped.
        replayed: Called when a CUDA graph was replayed: memory may now hold values that no storage is known for.
    """

    def __init__(self) -> None:
        self.told: Callable[[int, int], object] = lambda storage, more: None
        self.replayed: Callable[[], object] = lambda: None


class Storages(Generic[Fact]):
    """Facts by storage.

    Memory that is freed and allocated again is another storage, and the old facts do not apply to it. A weak reference
    keeps the StorageImpl (not its memory) alive, so no other can take its address.

    Args:
        watch: Follows the storages.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._facts: dict[int, tuple[int, Fact]] = {}
        self._sweep_at = 4096

    def __len__(self) -> int:
        return len(self._facts)

    def get(self, tensor: torch.Tensor) -> Fact | None:
        """The fact about a tensor's storage; None if unknown, or if the storage has moved since (``resize_``)."""
        found = self._facts.get(storage_of(tensor)[0])
        return found[1] if found is not None and found[0] == storage_address(tensor) else None

    def put(self, tensor: torch.Tensor, fact: Fact) -> None:
        """Store a fact about a tensor's storage."""
        key = storage_of(tensor)[0]
        if key not in self._facts:
            hold_weakly(tensor)
            self._add(key)
        self._facts[key] = (storage_address(tensor), fact)

    def put_at(self, key: int, address: int, fact: Fact) -> None:
        """Store a fact about a storage at an address. Its weak reference is the caller's, who leaves it here."""
        if key in self._facts:
            _free_weak_ref(key)
        else:
            self._add(key)
        self._facts[key] = (address, fact)

    def _add(self, key: int) -> None:
        if len(self._facts) >= self._sweep_at:
            self._sweep()
        self._watch.told(key, 1)

    def drop(self, tensor: torch.Tensor) -> None:
        """Drop the fact about a tensor's storage."""
        key = storage_of(tensor)[0]
        self._remove(key)

    def _remove(self, key: int) -> None:
        if self._facts.pop(key, None) is not None:
            self._watch.told(key, -1)
            _free_weak_ref(key)

    def _sweep(self) -> None:
        for key in [key for key in list(self._facts) if _expired(key)]:
            self._remove(key)
        self._sweep_at = 2 * len(self._facts) + 4096


class Defined:
    """Which small storages hold values: entirely, or with one flag per byte.

    Args:
        watch: Follows those storages.

    Attributes:
        written: While a CUDA graph is captured, where values were written: bytes by address of the storage.
        replayed: The same for all graphs that were replayed. Their results are often seen through unknown storages:
            Transformer Engine makes tensors from the addresses, so that the pool can reuse the memory.
    """

    def __init__(self, watch: Watch) -> None:
        self.written: dict[int, int] | None = None
        self.replayed: dict[int, int] = {}
        self.watch = watch
        self._flags: Storages[torch.Tensor] = Storages(watch)
        self._whole: Storages[bool] = Storages(watch)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether every element holds a value."""
        if self._whole.get(tensor) or not tensor.numel():
            return True
        flags = self._flags.get(tensor)
        if flags is None and self.replayed:
            return 0 < storage_of(tensor)[1] <= self.replayed.get(storage_address(tensor), 0)
        return flags is not None and all_true(elements(flags, tensor))

    def define(self, tensor: torch.Tensor) -> None:
        """Record that every element holds a value now."""
        num_bytes = storage_of(tensor)[1]
        if num_bytes and self.written is not None:
            self.written[storage_address(tensor)] = num_bytes
        if not num_bytes or self._whole.get(tensor):
            return
        if covers(tensor, num_bytes):
            self._whole.put(tensor, True)
            self._flags.drop(tensor)
            return
        flags = self._flags.get(tensor)
        if flags is None or flags.numel() != num_bytes:
            flags = zeros(num_bytes, dtype=torch.uint8)
            self._flags.put(tensor, flags)
        elements(flags, tensor).fill_(1)

    def spoil(self, tensor: torch.Tensor) -> None:
        """Record that no element holds a value any more. What is read from it later must be made up."""
        num_bytes = storage_of(tensor)[1]
        if self.replayed:
            self.replayed.pop(storage_address(tensor), None)
        if covers(tensor, num_bytes):
            self._whole.drop(tensor)
            self._flags.drop(tensor)
            return
        if self._whole.get(tensor):
            self._whole.drop(tensor)
            self._flags.put(tensor, ones(num_bytes, dtype=torch.uint8))
        flags = self._flags.get(tensor)
        if flags is not None:
            elements(flags, tensor).fill_(0)

    def missing(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Where a tensor that lacks values lacks them: a mask of its shape. None if no element holds a value."""
        flags = self._flags.get(tensor)
        if flags is None:
            return None
        missing = (elements(flags, tensor) == 0).any(-1)
        return None if all_true(missing) else missing


def covers(tensor: torch.Tensor, storage_bytes: int) -> bool:
    """Whether a tensor covers every byte of its storage. An expanded tensor does not: it repeats elements."""
    return tensor.numel() * tensor.element_size() >= storage_bytes and 0 not in tensor.stride()


def elements(flags: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the flags of a tensor's elements: its shape, plus one axis for the bytes of an element."""
    size = tensor.element_size()
    strides = [stride * size for stride in tensor.stride()]
    return flags.as_strided([*tensor.shape, size], [*strides, 1], tensor.storage_offset() * size)
