"""The host's view of the virtual GPU's memory: which values it holds, making up missing ones, CPU kernel arguments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeGuard

import torch

from fakedist.gpu.values.arguments import Keywords
from fakedist.gpu.values.choices import spread
from fakedist.gpu.values.contents import (
    HOST_LIMIT_BYTES,
    LIMIT_BYTES,
    Defined,
    host_view,
    host_views,
    is_float,
    is_small,
)
from fakedist.gpu.values.inventions import Inventions
from fakedist.gpu.values.known import Storages, Taint, Watch
from fakedist.gpu.values.recipes import Recipe
from fakedist.gpu.values.scans import distinct
from fakedist.gpu.values.shares import Shares
from fakedist.gpu.values.storage import Holding, is_computed, storage_of, tell_holding, zero_memory
from fakedist.gpu.values.taints import Taints

_CPU = torch.device("cpu")
#: Most operations have no more inputs. Many are often parts of one buffer, as a router's counts of each expert are.
_FEW = 8


class Host:
    """Reads and writes small device tensors, whose memory is host memory.

    Args:
        seed: Seed of made-up values.
        strict: Raise InventedValueError instead of making up a value.

    Attributes:
        watch: Follows which storages something is known about.
        sweep: Drops what is known about storages that were freed.
    """

    def __init__(self, seed: int, *, strict: bool = False) -> None:
        self.watch = Watch()
        self.storages = Storages(self.watch)
        self.sweep = self.storages.sweep
        self.defined = Defined(self.storages)
        self.taints = Taints(self.storages)
        self.shares = Shares(self._seen, self.storages)
        self.inventions = Inventions(seed, strict=strict)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a device tensor is small and has all its values."""
        return tensor.is_cuda and is_small(tensor) and self.defined.holds(tensor)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether anything is known about the contents of a tensor's storage."""
        return self.storages.get_moved(tensor) is not None

    def is_hollow(self, value: object) -> TypeGuard[torch.Tensor]:
        """Whether a value is a tensor on the host that holds nothing (:mod:`fakedist.gpu.values.hollow`)."""
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or value.layout is not torch.strided:
            return False
        if is_float(value) and storage_of(value)[1] > HOST_LIMIT_BYTES:
            return True
        known = self.storages.get_moved(value)
        return known is not None and known.is_hollow

    def know_hollow(self, tensor: torch.Tensor) -> None:
        """Record that a tensor on the host holds nothing, whatever its size. Its memory keeps what it has."""
        self.storages.make(tensor).is_hollow = True

    def is_seen(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's values are on the host or can be made up there."""
        return not tensor.is_cuda or is_small(tensor)

    def _seen(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return host_view(tensor) if self.holds(tensor) else None

    def write(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Write values to a small device tensor."""
        host_view(tensor).copy_(values)
        self._define(tensor)

    def _define(self, tensor: torch.Tensor) -> None:
        known = self.defined.define(tensor)
        if known is not None and known.tainted is not None:
            self.taints.clear(tensor)

    def zero(self, tensors: Iterable[torch.Tensor]) -> None:
        """Write zeros to small device tensors."""
        for tensor in tensors:
            if not zero_memory(tensor):
                host_view(tensor).zero_()
            self._define(tensor)
            self.shares.forget(tensor)

    def spoil(self, tensor: torch.Tensor) -> None:
        """Drop what is known about a device tensor: a kernel that did not run should have written to it."""
        if is_small(tensor):
            self.defined.spoil(tensor)
            self.taints.clear(tensor)
        else:
            tell_holding(tensor, Holding.NOTHING)
        self.shares.forget(tensor)
        self.forget_recipe(tensor)

    def recipe(self, tensor: torch.Tensor) -> Recipe | None:
        """What a large device tensor's values follow from; None if that is not known."""
        known = self.storages.get(tensor) if tensor.is_cuda else None
        return known.recipe if known is not None and isinstance(known.recipe, Recipe) else None

    def know_recipe(self, tensor: torch.Tensor, recipe: Recipe) -> None:
        """Record what the values of a large device tensor follow from."""
        self.storages.make(tensor).recipe = recipe

    def forget_recipe(self, tensor: torch.Tensor) -> None:
        """Forget what a device tensor's values follow from: something was written to it."""
        if (known := self.storages.get_moved(tensor)) is not None and known.recipe is not None:
            known.recipe = None
            self.storages.tidy(known)

    def settle(self, tensor: torch.Tensor, operation: str) -> torch.Tensor:
        """Return the host view of a small device tensor that the script reads, and count its made-up values."""
        host = self.complete(tensor)
        if made_up := self.taints.read(distinct(tensor)):
            self.inventions.count(operation, made_up)
        return host

    def complete(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the host view of a small device tensor. Missing values are made up, and it holds them from now on."""
        whole = host_view(tensor)
        if self.defined.holds(tensor):
            return whole
        once = distinct(tensor)
        host = whole if once is tensor else host_view(once)
        if is_computed(once):
            self.defined.define(once)
            return whole
        missing, share = self.defined.missing(once), self.shares.of(once)
        # Sums of the mask have already used its share. A share says nothing about a single element.
        if host.dtype == torch.bool and share is not None and host.numel() > 1 and missing is None:
            host.copy_(spread(host.shape, share))
        else:
            is_loss = once.numel() == 1 and once.requires_grad
            non_negative = is_loss or self.shares.is_non_negative(once)
            self.inventions.draw_missing(host, missing, non_negative=non_negative)
        self.defined.define(once)
        self.taints.mark(once, Taint(), missing)
        return whole

    def taint(self, tensors: Iterable[torch.Tensor]) -> Taint | None:
        """The taint of values in device tensors that are made up or computed from made-up values; None without any."""
        if not self.taints:
            return None
        found = {taint for tensor in tensors if tensor.is_cuda and (taint := self.taints.of(tensor)) is not None}
        return found.pop() if len(found) == 1 else Taint(tuple(found)) if found else None

    def unlike(self, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """All but those in the buffer of an earlier one, if all of it holds values with the same taint or none."""
        if len(tensors) <= _FEW:
            yield from tensors
            return
        even: set[int] = set()
        for tensor in tensors:
            key, num_bytes = storage_of(tensor)
            if key not in even:
                known = self.storages.get(tensor)
                if known is not None and known.is_even and num_bytes <= LIMIT_BYTES and tensor.is_cuda:
                    even.add(key)
                yield tensor

    def to_device(self, values: torch.Tensor, device: torch.device, taint: Taint | None = None) -> torch.Tensor:
        """Return a device tensor with these values and their taint, or without values if it is not small."""
        result = torch.empty_like(values, device=device)
        if is_small(result):
            self.write(result, values)
            if taint is not None:
                self.taints.mark(result, taint)
        return result

    def arguments(self, values: Iterable[object]) -> list[object]:
        """Arguments for a CPU kernel: host views instead of device tensors."""
        found: list[object] = []
        for value in values:
            if isinstance(value, torch.Tensor):
                found.append(host_view(value) if value.is_cuda else value)
            elif isinstance(value, (list, tuple)):
                is_on_device = bool(value) and all(isinstance(each, torch.Tensor) and each.is_cuda for each in value)
                found.append(host_views(value) if is_on_device else self.arguments(value))
            else:
                found.append(_CPU if isinstance(value, torch.device) else value)
        return found

    def keywords(self, keywords: Keywords) -> Keywords:
        """Keyword arguments for a CPU kernel."""
        if not keywords:
            return {}
        found = dict(zip(keywords, self.arguments(keywords.values()), strict=True))
        if found.get("device") is not None:
            found["device"] = _CPU
        found.pop("pin_memory", None)
        return found
