"""Facts about device memory, storage by storage: the bytes that hold a value, and the values that are made up.

A value is made up when an operation first needs it, and stays in the tensor's memory, so later reads see the same. It
is counted when the script reads it, or reads a value computed from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

import torch
from torch import empty, ones, zeros

from fakedist.gpu.values.tensors import (
    Holding,
    all_true,
    any_true,
    find_know,
    find_losses,
    find_next_loss,
    hold_weakly,
    report_holding,
    report_taint,
    storage_address,
    storage_of,
)

_expired: Callable[[int], object] = torch.UntypedStorage._expired
_free_weak_ref: Callable[[int], object] = torch.UntypedStorage._free_weak_ref


class PickedIndices(NamedTuple):
    """Indices that an operation picked by made-up values among ``num_choices``, and the line of the script."""

    operation: str
    filename: str
    line: int
    num_choices: int


class Taint:
    """One origin of made-up values, with its parents' taints; ``when_read`` is called when a script first reads one."""

    __slots__ = ("_parents", "_when_read", "first_reader")

    def __init__(self, parents: tuple[Taint, ...] = (), when_read: Callable[[], object] | None = None) -> None:
        was_read = bool(parents) and all(parent.first_reader for parent in parents)
        #: The storage that the script read first; 0 if it has read none, -1 if the parents' values were read before.
        self.first_reader: int = -1 if was_read else 0
        self._parents: tuple[Taint, ...] = () if was_read else parents
        self._when_read = when_read

    def mark_read(self, first_reader: int) -> None:
        """Record that the script has read values of this origin from a storage."""
        waiting = [self]
        while waiting:
            taint = waiting.pop()
            if not taint.first_reader:
                taint.first_reader = first_reader
                if taint._when_read is not None:
                    taint._when_read()
                waiting.extend(taint._parents)
                taint._parents = ()


class TaintedBytes:
    """One storage: its taint, and a flag per byte. ``flags`` None: all tainted. ``counted`` True: of all."""

    __slots__ = ("counted", "flags", "taint")

    def __init__(self, taint: Taint, flags: torch.Tensor | None) -> None:
        self.taint = taint
        self.flags = flags
        self.counted: torch.Tensor | bool = False


class StorageFacts:
    """The known facts about the contents of one storage.

    Attributes:
        address: Of its memory. Facts about a storage that moved since (``resize_``) no longer apply.
        flags: One flag per byte, set where it holds a value, if it is not whole (``is_whole``).
        mean: Of all elements (:mod:`fakedist.gpu.values.means`).
        is_assumed: Whether the mean is made up: half of a mask that nothing is known about.
        writes_to_come: How many writes of kernels that no operation accounts for leave what is known: it is what they
            write.
        spread: Their bounds and distribution (:mod:`fakedist.gpu.values.spreads`).
        is_positive: If nothing is negative, whether nothing is zero either.
        has_no_data: Whether it is on the host and holds nothing, although it is small enough to be computed.
        choice: Picked indices that it holds, or that its values follow from (:mod:`fakedist.gpu.values.routing`).
    """

    def __init__(self, key: int, address: int) -> None:
        self.key = key
        self.moved_to(address)

    def moved_to(self, address: int) -> None:
        """Forget everything: the storage's memory is at this address now."""
        self.address = address
        self.is_whole = False
        self.flags: torch.Tensor | None = None
        self.tainted: TaintedBytes | None = None
        self.mean: float | None = None
        self.is_assumed = False
        self.writes_to_come = 0.0
        self.spread: object = None
        self.has_no_data = False
        self.recipe: object = None
        self.choice: PickedIndices | None = None
        self.is_positive: bool | None = None

    @property
    def is_nothing(self) -> bool:
        """Return whether nothing is known."""
        is_empty = not self.is_whole and self.flags is None and self.recipe is None and self.choice is None
        is_empty = is_empty and not self.has_no_data and self.spread is None
        return is_empty and self.tainted is None and self.mean is None and self.is_positive is None

    @property
    def is_even(self) -> bool:
        """Return whether all parts of the storage hold values, and have the same taint or none."""
        return self.is_whole and (self.tainted is None or self.tainted.flags is None)


class Watch:
    """Follows which storages something is known about.

    ``changed`` gets a storage's identity and 1 for a new fact, -1 for a dropped one. ``replayed`` is called when a CUDA
    graph may have put values where none are known. ``lost`` gets the address of a storage that a kernel wrote to, which
    no operation accounts for.
    """

    def __init__(self) -> None:
        self.changed: Callable[[int, int], object] = lambda storage, more: None
        self.replayed: Callable[[], object] = lambda: None
        self.lost: Callable[[int], object] = lambda address: None


class Storages:
    """The known facts, storage by storage. Memory freed and allocated again is another storage.

    A weak reference keeps the StorageImpl (not its memory) alive, so no other can take its address. What kernels wrote
    that no operation accounts for, the driver tells; its facts are gone before they are asked for.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._known: dict[int, StorageFacts] = {}
        self._at: dict[int, set[int]] = {}
        self._sweep_at = 4096
        self._losses, self._next_loss = find_losses(), find_next_loss()
        self._num_taken = 0

    def __len__(self) -> int:
        return len(self._known)

    def get(self, tensor: torch.Tensor) -> StorageFacts | None:
        """The facts about a tensor's storage; None without any."""
        if self._losses.value != self._num_taken:
            self.take_losses()
        known = self._known.get(storage_of(tensor)[0])
        return known if known is not None and known.address == storage_address(tensor) else None

    def get_moved(self, tensor: torch.Tensor) -> StorageFacts | None:
        """The facts about a tensor's storage, even if they are of where it was before: it may move back."""
        if self._losses.value != self._num_taken:
            self.take_losses()
        return self._known.get(storage_of(tensor)[0])

    def make(self, tensor: torch.Tensor) -> StorageFacts:
        """The facts about a tensor's storage, for another to be added."""
        if self._losses.value != self._num_taken:
            self.take_losses()
        key, address = storage_of(tensor)[0], storage_address(tensor)
        known = self._known.get(key)
        if known is None:
            hold_weakly(tensor)
            return self._add(key, address)
        if known.address != address:
            self._move(known, address)
        return known

    def make_at(self, key: int, address: int) -> StorageFacts:
        """Find or make the facts of a storage by its address. The caller hands over its weak reference."""
        if self._losses.value != self._num_taken:
            self.take_losses()
        known = self._known.get(key)
        if known is None:
            return self._add(key, address)
        _free_weak_ref(key)
        if known.address != address:
            self._move(known, address)
        return known

    def _add(self, key: int, address: int) -> StorageFacts:
        if len(self._known) >= self._sweep_at:
            self.sweep()
        self.watch.changed(key, 1)
        known = self._known[key] = StorageFacts(key, address)
        self._at.setdefault(address, set()).add(key)
        return known

    def _move(self, known: StorageFacts, address: int) -> None:
        self._leave(known)
        known.moved_to(address)
        self._at.setdefault(address, set()).add(known.key)

    def _leave(self, known: StorageFacts) -> None:
        keys = self._at.get(known.address, set())
        keys.discard(known.key)
        if not keys:
            self._at.pop(known.address, None)

    def take_losses(self) -> None:
        """Forget the facts about all storages that kernels wrote to since the last time."""
        self._num_taken = self._losses.value
        written: list[StorageFacts] = []
        while address := self._next_loss():
            self.watch.lost(address)
            for key in tuple(self._at.get(address, ())):
                if self._known[key].writes_to_come:
                    written.append(self._known[key])
                else:
                    self._remove(key)
        for known in written:
            known.writes_to_come = inf if known.writes_to_come == inf else 0.0

    def tidy(self, known: StorageFacts) -> None:
        """Some facts were dropped. Drop the rest too if nothing is left."""
        if known.is_nothing:
            self._remove(known.key)

    def _remove(self, key: int) -> None:
        if (known := self._known.pop(key, None)) is not None:
            self._leave(known)
            self.watch.changed(key, -1)
            _free_weak_ref(key)

    def sweep(self) -> None:
        """Drop what is known about storages that were freed."""
        for key in [key for key in list(self._known) if _expired(key)]:
            self._remove(key)
        self._sweep_at = 2 * len(self._known) + 4096


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
    """Return whether a tensor's whole storage is small enough to be computed."""
    num_bytes = storage_of(tensor)[1]
    return num_bytes <= LIMIT_BYTES or (num_bytes <= MASK_LIMIT_BYTES and not tensor.is_floating_point())


def is_float(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has real or complex floats."""
    return tensor.is_floating_point() or tensor.is_complex()


def is_large(tensor: torch.Tensor) -> bool:
    """Return whether a tensor of more than LIMIT_BYTES is on the device and too large to be computed."""
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
    views: list[torch.Tensor] = []
    last: tuple[int, torch.dtype] | None = None
    for tensor in tensors:
        this = (storage_of(tensor)[0], tensor.dtype)
        if this != last or not tensor.numel() or tensor.is_neg() or tensor.is_complex():
            views.append(host_view(tensor))
            last = this if tensor.numel() else None
        else:
            views.append(views[-1].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()))
    return views


def host_bytes(address: int, num_bytes: int) -> torch.Tensor:
    """Return a CPU tensor of bytes over device memory."""
    return empty(0, dtype=torch.uint8).set_(_host_storage(address, _CPU, num_bytes))


class Defined:
    """The small storages that hold values: entirely, or some of their bytes.

    ``written`` are bytes by address of the storage, of a CUDA graph being captured, ``lost`` the storages that kernels
    write in it which no operation accounts for; ``replayed`` are bytes of all replayed graphs. Transformer Engine sees
    their results through unknown storages: it makes tensors from addresses, so that the pool can reuse the memory.
    """

    def __init__(self, storages: Storages) -> None:
        self.written: dict[int, int] | None = None
        self.replayed: dict[int, int] = {}
        self.watch = storages.watch
        self.lost = set[int]()
        self._know = find_know()
        self._storages = storages
        self.take_losses = storages.take_losses
        self.watch.lost = self._lose

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether every element holds a value."""
        known = self._storages.get(tensor)
        if (known is not None and known.is_whole) or not tensor.numel():
            return True
        if known is not None and known.flags is not None:
            return all_true(elements(known.flags, tensor))
        if tensor._is_zerotensor():
            return True
        return bool(self.replayed) and 0 < storage_of(tensor)[1] <= self.replayed.get(storage_address(tensor), 0)

    def _lose(self, address: int) -> None:
        self.replayed.pop(address, None)
        if self.written is not None:
            self.written.pop(address, None)
            self.lost.add(address)

    def define(self, tensor: torch.Tensor) -> StorageFacts | None:
        """Record that every element holds a value now. Return what is known about the storage; None if it is empty."""
        num_bytes = storage_of(tensor)[1]
        if not num_bytes:
            return None
        known = self._storages.make(tensor)
        if self.written is not None:
            self.written[known.address] = num_bytes
        if not known.is_whole and covers(tensor, num_bytes):
            known.is_whole, known.flags = True, None
        if known.is_whole and tensor.numel() * tensor.element_size() == num_bytes:
            self._know(known.address, num_bytes, Holding.COMPUTED.value)
            return known
        if known.is_whole:
            report_holding(tensor, Holding.COMPUTED)
            return known
        if known.flags is None or known.flags.numel() != num_bytes:
            known.flags = zeros(num_bytes, dtype=torch.uint8)
        elements(known.flags, tensor).fill_(1)
        report_holding(tensor, Holding.COMPUTED, known.flags)
        return known

    def spoil(self, tensor: torch.Tensor) -> None:
        """Record that no element holds a value any more. What is read from it later must be made up."""
        if self.replayed:
            self.replayed.pop(storage_address(tensor), None)
        known = self._storages.get_moved(tensor)
        num_bytes = storage_of(tensor)[1]
        if known is None or covers(tensor, num_bytes) or known.address != storage_address(tensor):
            report_holding(tensor, Holding.NOTHING)
            if known is not None:
                known.is_whole, known.flags = False, None
                self._storages.tidy(known)
            return
        if known.is_whole:
            known.is_whole, known.flags = False, ones(num_bytes, dtype=torch.uint8)
        if known.flags is not None:
            elements(known.flags, tensor).fill_(0)
        report_holding(tensor, Holding.NOTHING, known.flags)

    def missing(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a mask of the elements that lack values, in the tensor's shape; None if no element holds a value."""
        known = self._storages.get(tensor)
        if known is None or known.flags is None:
            return None
        missing = (elements(known.flags, tensor) == 0).any(-1)
        return None if all_true(missing) else missing


def covers(tensor: torch.Tensor, storage_bytes: int) -> bool:
    """Return whether a tensor covers every byte of its storage. An expanded tensor repeats elements and does not."""
    return tensor.numel() * tensor.element_size() >= storage_bytes and 0 not in tensor.stride()


def elements(flags: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the flags of a tensor's elements: its shape, plus one axis for the bytes of an element."""
    size = tensor.element_size()
    strides = [stride * size for stride in tensor.stride()]
    return flags.as_strided([*tensor.shape, size], [*strides, 1], tensor.storage_offset() * size)


class Taints:
    """Remembers taints by storage. It is false as long as there has been none."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._were_any = False

    def __bool__(self) -> bool:
        return self._were_any

    def of(self, tensor: torch.Tensor) -> Taint | None:
        """The taint of a tensor's values; None if all of them were really computed."""
        tainted = self._tainted(tensor)
        return None if tainted is None else tainted.taint

    def _tainted(self, tensor: torch.Tensor) -> TaintedBytes | None:
        known = self._storages.get(tensor) if self._were_any else None
        tainted = None if known is None else known.tainted
        if tainted is None or (tainted.flags is not None and not any_true(elements(tainted.flags, tensor))):
            return None
        return tainted

    def mark(self, tensor: torch.Tensor, taint: Taint, where: torch.Tensor | None = None) -> None:
        """Give this taint to a tensor's values, or to those where a mask is true."""
        self._were_any = True
        report_taint(tensor)
        num_bytes = storage_of(tensor)[1]
        known = self._storages.make(tensor)
        if where is None and covers(tensor, num_bytes):
            known.tainted = TaintedBytes(taint, None)
            return
        tainted = known.tainted
        if tainted is None:
            tainted = known.tainted = TaintedBytes(taint, zeros(num_bytes, dtype=torch.uint8))
        elif tainted.taint is not taint:
            tainted.taint = Taint((tainted.taint, taint))
        if tainted.counted is True:
            tainted.counted = ones(num_bytes, dtype=torch.uint8)
        for flags, value in ((tainted.flags, 1), (tainted.counted, 0)):
            if isinstance(flags, torch.Tensor):
                marked = elements(flags, tensor)
                marked[... if where is None else where] = value

    def clear(self, tensor: torch.Tensor) -> None:
        """Remove the taint: a tensor's memory now holds really computed values, or none at all."""
        known = self._storages.get_moved(tensor) if self._were_any else None
        if known is None or known.tainted is None:
            return
        num_bytes = storage_of(tensor)[1]
        if covers(tensor, num_bytes) or known.address != storage_address(tensor):
            known.tainted = None
            self._storages.tidy(known)
            return
        if known.tainted.flags is None:
            known.tainted.flags = ones(num_bytes, dtype=torch.uint8)
        elements(known.tainted.flags, tensor).zero_()

    def read(self, tensor: torch.Tensor) -> int:
        """The script reads a tensor. Return how many of its values are made up and were not counted before."""
        tainted = self._tainted(tensor)
        if tainted is None:
            return 0
        key, num_bytes = storage_of(tensor)
        if tainted.taint.first_reader not in (0, key) or tainted.counted is True:
            return 0
        if tainted.counted is False and tainted.flags is None and covers(tensor, num_bytes):
            tainted.counted = True
            tainted.taint.mark_read(key)
            return tensor.numel()
        if tainted.counted is False:
            tainted.counted = zeros(num_bytes, dtype=torch.uint8)
        counted = elements(tainted.counted, tensor)
        fresh = counted[..., 0] == 0
        if tainted.flags is not None:
            fresh &= elements(tainted.flags, tensor)[..., 0] != 0
        counted.fill_(1)
        tainted.taint.mark_read(key)
        return int(fresh.count_nonzero())
