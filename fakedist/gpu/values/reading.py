"""Operations whose result, or its size, the host reads from the device. Missing values are made up now.

On the device these would copy back a count that no kernel computed, so the host computes them, and the device gets a
result of that size. For masks too large to hold values, the share of true elements decides the count: the known share
(:mod:`fakedist.gpu.values.shares`), else one half.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import arange, empty, full

from fakedist.gpu.values.contents import is_small
from fakedist.gpu.values.host import Host, device_tensors
from fakedist.gpu.values.kinds import Kind

#: These read values on the host without a sign of it in their schema: multinomial checks probabilities with ``item()``.
READS = {"_local_scalar_dense", "equal", "is_nonzero", "item", "allclose", "multinomial"}
INDEXING = {"index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put", "_index_put_impl_"}
_MASKS = (torch.bool, torch.uint8)


class Reading:
    """Answers those operations.

    Args:
        host: The device memory's values.
    """

    def __init__(self, host: Host) -> None:
        self._host = host

    def answer(self, kind: Kind, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that reads device tensors. ``kwargs`` are for the host."""
        tensors = list(device_tensors((args, tuple(kwargs.values()))))
        result = self._answer(kind, func, args, kwargs, tensors)
        if isinstance(result, int) and not all(map(self._is_sure, tensors)):
            return self._host.inventions.decide(result)
        return result

    def _is_sure(self, tensor: torch.Tensor) -> bool:
        """Whether kernels computed a tensor that was read, or what is known about it decides the answer."""
        if is_small(tensor):
            return self._host.doubts.of(tensor) is None
        return self._host.shares.of(tensor) in (0.0, 1.0)

    def _answer(
        self, kind: Kind, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> Any:
        if kind.name in ("_local_scalar_dense", "item"):
            return func(self._element(args[0], kind.full_name))
        if kind.name == "multinomial" and not self._host.holds(args[0]):
            self._host.shares.know_non_negative(args[0])  # probabilities
        if not all(is_small(tensor) for tensor in tensors):
            return self._estimate(kind, func, args, kwargs)
        for tensor in tensors:
            self._host.settle(tensor, kind.full_name)
        return self._on_host(func, self._host.arguments(args), self._host.keywords(kwargs), tensors[0].device)

    def indices(self, kind: Kind, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments of an indexing operation with positions instead of masks, as its kernel converts them first."""
        indices = args[1]
        if not any(isinstance(index, torch.Tensor) and index.dtype in _MASKS for index in indices):
            return args
        found: list[Any] = []
        for index in indices:
            if isinstance(index, torch.Tensor) and index.dtype in _MASKS:
                wanted = args[2].shape[0] if len(args) > 2 and args[2].numel() > 1 and args[2].dim() else None
                found.extend(self._positions(index, kind.full_name, wanted).unbind(1))
            else:
                found.append(index)
        return (args[0], found, *args[2:])

    def _element(self, tensor: torch.Tensor, operation: str) -> torch.Tensor:
        host = self._host
        if is_small(tensor):
            return host.settle(tensor, operation)
        share = host.shares.of(tensor)
        if share is not None and share in (0.0, 1.0):
            return full(tensor.shape, share).to(tensor.dtype)
        return host.inventions.element(tensor, operation, non_negative=host.shares.is_non_negative(tensor))

    def _on_host(self, func: Any, args: list[Any], kwargs: dict[str, Any], device: torch.device) -> Any:
        computed = func(*args, **kwargs)
        if isinstance(computed, torch.Tensor):
            return self._host.to_device(computed, device)
        if isinstance(computed, (tuple, list)):
            return type(computed)(self._host.to_device(tensor, device) for tensor in computed)
        return computed

    def _positions(self, mask: torch.Tensor, operation: str, wanted: int | None) -> torch.Tensor:
        """``mask.nonzero()`` on the device. A large mask gives ``wanted`` rows, if that number is given."""
        if is_small(mask):
            if not mask.is_cuda:
                return mask.nonzero()
            return self._host.to_device(self._host.settle(mask, operation).nonzero(), mask.device)
        count = self._count(mask, operation) if wanted is None else wanted
        rows = empty((count, mask.dim()), dtype=torch.int64, device=mask.device)
        if is_small(rows) and count:
            flat = arange(count) * (mask.numel() // count)
            self._host.write(rows, torch.stack(torch.unravel_index(flat, mask.shape), -1))
        return rows

    def _count(self, mask: torch.Tensor, operation: str) -> int:
        """How many elements of a mask are true."""
        if is_small(mask):
            return int(self._host.settle(mask, operation).count_nonzero())
        share = self._host.shares.of(mask)
        if share is None or not 0 <= share <= 1:
            share = 0.5
        if share not in (0.0, 1.0):
            self._host.inventions.count(operation, 1)
        return round(share * mask.numel())

    def _estimate(self, kind: Kind, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The answer if not all tensors are small."""
        first, operation = args[0], kind.full_name
        if kind.name == "nonzero":
            return self._positions(first, operation, None)
        if kind.name == "masked_select":
            repeats = torch.broadcast_shapes(first.shape, args[1].shape).numel() // max(1, args[1].numel())
            return first.new_empty((self._count(args[1], operation) * repeats,))
        self._host.inventions.count(operation, 1)
        if kind.name in ("equal", "allclose"):
            return first.shape == args[1].shape
        if kind.name == "bincount":
            bins = max(1, kind.argument("minlength", args, kwargs) or 0)
            even = full((bins,), first.numel() // bins)
            even[: first.numel() % bins] += 1
            return self._host.to_device(even, first.device)
        stand_ins = [self._stand_in(value, operation, kind.name == "multinomial") for value in args]
        return self._on_host(func, stand_ins, self._host.keywords(kwargs), first.device)

    def _stand_in(self, value: Any, operation: str, ones: bool) -> Any:
        """Return a host tensor for an argument. A large one repeats one number, which takes no memory."""
        if not isinstance(value, torch.Tensor) or not value.is_cuda:
            return value
        if is_small(value):
            return self._host.settle(value, operation)
        return full((), float(ones)).to(value.dtype).expand(value.shape)
