"""Operations whose result, or its size, the host reads from the device. Missing values are made up now.

On the device these would copy back a count that no kernel computed, so the host computes them, and the device gets a
result of that size. For masks too large to hold values, the share of true elements decides the count: the known share
(:mod:`fakedist.gpu.values.shares`), else one half.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import arange, empty, full

from fakedist.gpu.values.arguments import Arguments, Keywords, device_tensors, tensor_at
from fakedist.gpu.values.contents import is_small
from fakedist.gpu.values.host import Host
from fakedist.gpu.values.operators import Operator
from fakedist.gpu.values.scans import selected

#: Operators that read values on the host, although their schema does not show it: multinomial checks probabilities
#: with ``item()``.
READS = {"_local_scalar_dense", "equal", "is_nonzero", "item", "allclose", "multinomial"}
#: Operators that take masks, which their kernels convert to positions.
INDEXING = {"index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put", "_index_put_impl_"}
_MASKS = (torch.bool, torch.uint8)


def _broadcast_numel(*shapes: torch.Size) -> int:
    """Elements of tensors of these shapes, broadcast against each other. torch's own function imports SymPy."""
    dims = itertools.zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
    return math.prod(next((size for size in sizes if size != 1), 1) for sizes in dims)


def _selected(args: list[object]) -> torch.Tensor | None:
    values, mask = args
    assert isinstance(values, torch.Tensor)
    assert isinstance(mask, torch.Tensor)
    return selected(values, mask) if mask.dtype == torch.bool else None  # torch raises for other masks


class HostReads:
    """Answers those operations.

    Args:
        host: The device memory's values.
    """

    def __init__(self, host: Host) -> None:
        self._host = host

    def answer(self, operator: Operator, args: Arguments, kwargs: Keywords) -> object:
        """Run an operation that reads device tensors. ``kwargs`` are for the host."""
        tensors = device_tensors((args, tuple(kwargs.values())))
        result = self._answer(operator, args, kwargs, tensors)
        if isinstance(result, int) and not all(map(self._is_sure, tensors)):
            return self._host.inventions.decide(result)
        return result

    def _is_sure(self, tensor: torch.Tensor) -> bool:
        """Whether kernels computed a tensor that was read, or what is known about it decides the answer."""
        if is_small(tensor):
            return self._host.taints.of(tensor) is None
        return self._host.shares.of(tensor) in (0.0, 1.0)

    def _answer(self, operator: Operator, args: Arguments, kwargs: Keywords, tensors: list[torch.Tensor]) -> object:
        if operator.name in ("_local_scalar_dense", "item"):
            return operator.func(self._element(tensor_at(args, 0), operator.full_name))
        if operator.name == "multinomial" and not self._host.holds(probabilities := tensor_at(args, 0)):
            self._host.shares.know_non_negative(probabilities)
        if not all(is_small(tensor) for tensor in tensors):
            return self._estimate(operator, args, kwargs)
        for tensor in tensors:
            if operator.name == "multinomial":  # the script reads what it picks; the probabilities only decide it
                self._host.complete(tensor)
            else:
                self._host.settle(tensor, operator.full_name)
        return self._on_host(operator, self._host.arguments(args), kwargs, tensors)

    def indices(self, operator: Operator, args: Arguments) -> Arguments:
        """Arguments of an indexing operation with positions instead of masks, as its kernel converts them first."""
        indices = args[1]
        assert isinstance(indices, (list, tuple))
        if not any(isinstance(index, torch.Tensor) and index.dtype in _MASKS for index in indices):
            return args
        found: list[object] = []
        values = tensor_at(args, 2) if len(args) > 2 else None
        wanted = values.shape[0] if values is not None and values.numel() > 1 and values.dim() else None
        for index in indices:
            if isinstance(index, torch.Tensor) and index.dtype in _MASKS:
                found.extend(self._positions(index, operator.full_name, wanted).unbind(1))
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

    def _on_host(self, operator: Operator, args: list[object], kwargs: Keywords, tensors: list[torch.Tensor]) -> object:
        device = tensors[0].device
        computed = _selected(args) if operator.name == "masked_select" and not kwargs else None
        if computed is None:
            computed = operator.func(*args, **self._host.keywords(kwargs))
        taint = self._host.taint(tensors)
        if isinstance(computed, torch.Tensor):
            return self._host.to_device(computed, device, taint)
        if isinstance(computed, (tuple, list)):
            return type(computed)(self._host.to_device(tensor, device, taint) for tensor in computed)
        return computed

    def _positions(self, mask: torch.Tensor, operation: str, wanted: int | None) -> torch.Tensor:
        """``mask.nonzero()`` on the device. A large mask gives ``wanted`` rows, if that number is given."""
        if is_small(mask):
            if not mask.is_cuda:
                return mask.nonzero()
            taint = self._host.taint((mask,))
            return self._host.to_device(self._host.settle(mask, operation).nonzero(), mask.device, taint)
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

    def _estimate(self, operator: Operator, args: Arguments, kwargs: Keywords) -> object:
        """The answer if not all tensors are small."""
        first, operation = tensor_at(args, 0), operator.full_name
        if operator.name == "nonzero":
            return self._positions(first, operation, None)
        if operator.name == "masked_select":
            mask = tensor_at(args, 1)
            repeats = _broadcast_numel(first.shape, mask.shape) // max(1, mask.numel())
            return first.new_empty((self._count(mask, operation) * repeats,))
        if operator.name == "multinomial":
            picked = self._on_host(operator, [self._stand_in(value, operation, 1.0) for value in args], kwargs, [first])
            self._host.inventions.count(operation, tensor_at((picked,), 0).numel())
            return picked
        self._host.inventions.count(operation, 1)
        if operator.name in ("equal", "allclose"):
            return first.shape == tensor_at(args, 1).shape
        if operator.name == "bincount":
            least = operator.argument("minlength", args, kwargs)
            bins = max(1, least if isinstance(least, int) else 0)
            even = full((bins,), first.numel() // bins)
            even[: first.numel() % bins] += 1
            return self._host.to_device(even, first.device)
        return self._on_host(operator, [self._stand_in(value, operation, 0.0) for value in args], kwargs, [first])

    def _stand_in(self, value: object, operation: str, number: float) -> object:
        """Return a host tensor for an argument. A large one repeats one number, which takes no memory."""
        if not isinstance(value, torch.Tensor) or not value.is_cuda:
            return value
        if is_small(value):
            return self._host.settle(value, operation)
        return full((), number).to(value.dtype).expand(value.shape)
