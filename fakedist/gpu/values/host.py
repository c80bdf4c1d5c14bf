"""The host's view of the virtual GPU's memory, and the operations whose result, or its size, the host reads.

The device would copy back a count that no kernel computed, so the host computes it with missing values made up, and the
device gets a result of that size. Of masks too large to hold values, the known mean (:mod:`fakedist.gpu.values.means`)
decides the count, else one half.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeGuard

import torch
from torch import arange, empty, full

from fakedist.gpu.values.contents import (
    HOST_LIMIT_BYTES,
    LIMIT_BYTES,
    Defined,
    Storages,
    Taint,
    Taints,
    Watch,
    host_view,
    host_views,
    is_float,
    is_small,
)
from fakedist.gpu.values.inventions import Inventions, values_in
from fakedist.gpu.values.means import Means, spread
from fakedist.gpu.values.operators import Operator
from fakedist.gpu.values.recipes import Recipe
from fakedist.gpu.values.symbolic import Rows
from fakedist.gpu.values.tensors import (
    Arguments,
    Holding,
    Keywords,
    device_tensors,
    distinct,
    is_computed,
    report_holding,
    selected,
    storage_of,
    tensor_at,
    zero_memory,
)

_CPU = torch.device("cpu")
#: Most operations have no more inputs. Many are often parts of one buffer, as a router's counts of each expert are.
_FEW = 8


class Host:
    """Reads and writes small device tensors, whose memory is the host's; ``seed`` and ``strict`` as in the engine."""

    def __init__(self, seed: int, *, strict: bool = False) -> None:
        self.watch = Watch()
        self.storages = Storages(self.watch)
        self.sweep = self.storages.sweep
        self.defined = Defined(self.storages)
        self.taints = Taints(self.storages)
        self.means = Means(self._seen, self.storages)
        self.inventions = Inventions(seed, strict=strict)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a device tensor is small and has all its values."""
        return tensor.is_cuda and is_small(tensor) and self.defined.holds(tensor)

    def takes_copied(self, tensor: torch.Tensor) -> bool:
        """As :meth:`holds`, also of values that were copied past the engine, which it knows from now on."""
        if not self.holds(tensor) and tensor.is_cuda and is_small(tensor) and is_computed(tensor):
            self.defined.define(tensor)
        return self.holds(tensor)

    def has_no_data(self, value: object) -> TypeGuard[torch.Tensor]:
        """Return whether a value is a host tensor that holds nothing (:mod:`fakedist.gpu.values.no_data`)."""
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or value.layout is not torch.strided:
            return False
        if is_float(value) and storage_of(value)[1] > HOST_LIMIT_BYTES:
            return True
        known = self.storages.get_moved(value)
        return known is not None and known.has_no_data

    def mark_no_data(self, tensor: torch.Tensor) -> None:
        """Record that a tensor on the host holds nothing, whatever its size. Its memory keeps what it has."""
        self.storages.make(tensor).has_no_data = True

    def is_seen(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's values are on the host or can be made up there."""
        return not tensor.is_cuda or is_small(tensor)

    def _seen(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return host_view(tensor) if self.holds(tensor) else None

    def write(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Write values to a small device tensor."""
        if 0 in tensor.stride():  # each element of an expanded tensor once
            first = [slice(None) if stride else slice(1) for stride in tensor.stride()]
            tensor, values = distinct(tensor), values.expand(tensor.shape)[tuple(first)]
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
            self.means.forget(tensor)

    def spoil(self, tensor: torch.Tensor) -> None:
        """Drop what is known about a device tensor: a kernel that did not run should have written to it."""
        if is_small(tensor):
            self.defined.spoil(tensor)
            self.taints.clear(tensor)
        else:
            report_holding(tensor, Holding.NOTHING)
        self.means.forget(tensor)
        self.forget_recipe(tensor)

    def recipe(self, tensor: torch.Tensor) -> Recipe | None:
        """The recipe of a large device tensor's values; None without one."""
        known = self.storages.get(tensor) if tensor.is_cuda else None
        return known.recipe if known is not None and isinstance(known.recipe, Recipe) else None

    def know_recipe(self, tensor: torch.Tensor, recipe: Recipe) -> None:
        """Record the recipe of a large device tensor's values."""
        self.storages.make(tensor).recipe = recipe

    def forget_recipe(self, tensor: torch.Tensor) -> None:
        """Forget the recipe of a device tensor: something was written to it."""
        if (known := self.storages.get_moved(tensor)) is not None and known.recipe is not None:
            known.recipe = None
            self.storages.tidy(known)

    def settle(self, tensor: torch.Tensor, operation: str) -> torch.Tensor:
        """Return the host view of a small device tensor that the script reads, and count its made-up values."""
        host = self.complete(tensor)
        if made_up := self.taints.read(distinct(tensor)):
            self.inventions.count(operation, values_in(made_up, tensor))
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
        missing, mean = self.defined.missing(once), self.means.of(once)
        # Sums of the mask have already used its mean. A mean says nothing about a single element.
        if host.dtype == torch.bool and mean is not None and host.numel() > 1 and missing is None:
            host.copy_(spread(host.shape, mean))
        else:
            is_loss = once.numel() == 1 and once.requires_grad
            non_negative = is_loss or self.means.is_non_negative(once)
            self.inventions.draw_missing(host, missing, non_negative=non_negative)
            if missing is None:
                self.means.confine(once, host)
        self.defined.define(once)
        self.taints.mark(once, Taint(), missing)
        return whole

    def taint(self, tensors: Iterable[torch.Tensor]) -> Taint | None:
        """The taint of values in device tensors that are made up or computed from made-up values; None without any."""
        if not self.taints:
            return None
        taints = {taint for tensor in tensors if tensor.is_cuda and (taint := self.taints.of(tensor)) is not None}
        return taints.pop() if len(taints) == 1 else Taint(tuple(taints)) if taints else None

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
        converted: list[object] = []
        for value in values:
            if isinstance(value, torch.Tensor):
                converted.append(host_view(value) if value.is_cuda else value)
            elif isinstance(value, (list, tuple)):
                is_on_device = bool(value) and all(isinstance(item, torch.Tensor) and item.is_cuda for item in value)
                converted.append(host_views(value) if is_on_device else self.arguments(value))
            else:
                converted.append(_CPU if isinstance(value, torch.device) else value)
        return converted

    def keywords(self, keywords: Keywords) -> Keywords:
        """Keyword arguments for a CPU kernel."""
        if not keywords:
            return {}
        converted = dict(zip(keywords, self.arguments(keywords.values()), strict=True))
        if converted.get("device") is not None:
            converted["device"] = _CPU
        converted.pop("pin_memory", None)
        return converted


#: Operators that read values on the host, although their schema does not show it: multinomial checks probabilities
#: with ``item()``.
READS = {"_local_scalar_dense", "equal", "is_nonzero", "item", "allclose", "multinomial"}
#: Operators that take masks, which their kernels convert to positions.
INDEXING = {"index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put", "_index_put_impl_"}
_MASKS = (torch.bool, torch.uint8)


def is_mask(index: object) -> bool:
    """Whether an index is a mask, which a kernel's positions are counted from on the host."""
    return isinstance(index, torch.Tensor) and index.dtype in _MASKS


def _fills(operator: Operator, args: Arguments) -> bool:
    """Whether torch fills where a mask is set, and needs no positions: ``x[mask] = 0``."""
    indices, value = args[1], args[2] if len(args) > 2 else None
    assert isinstance(indices, (list, tuple))
    one_value = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_cuda
    one_index = sum(index is not None for index in indices) == 1
    return one_value and one_index and not operator.argument("accumulate", args, {})


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
    """Answers the operations whose result, or its size, the host reads."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def answer(self, operator: Operator, args: Arguments, kwargs: Keywords) -> object:
        """Run an operation that reads device tensors. ``kwargs`` are for the host."""
        if isinstance(out := kwargs.get("out"), torch.Tensor) and out.is_cuda:
            return self._put(out, self.answer(operator, args, kwargs | {"out": empty(0, dtype=out.dtype)}))
        tensors = device_tensors((args, tuple(kwargs.values())))
        self._host.inventions.begin_read()
        result = self._answer(operator, args, kwargs, tensors)
        if not isinstance(result, (int, float)) or all(map(self._is_sure, tensors)):
            return result
        decided = self._host.inventions.decide(result)
        if (
            not isinstance(decided, Rows)
            and decided != result
            and len(tensors) == 1
            and tensors[0].numel() == 1
            and is_small(tensors[0])
        ):
            host_view(tensors[0]).fill_(decided)  # so whatever else the script reads agrees with it
        return decided

    def _put(self, out: torch.Tensor, result: object) -> torch.Tensor:
        assert isinstance(result, torch.Tensor)
        out.resize_(result.shape)
        if self._host.holds(result):
            self._host.write(out, host_view(result))
        else:
            self._host.spoil(out)
        if (taint := self._host.taint((result,))) is not None:
            self._host.taints.mark(out, taint)
        return out

    def _is_sure(self, tensor: torch.Tensor) -> bool:
        if is_small(tensor):
            return self._host.taints.of(tensor) is None
        means = self._host.means
        return means.of(tensor) in (0.0, 1.0) and not means.is_assumed(tensor)

    def _answer(self, operator: Operator, args: Arguments, kwargs: Keywords, tensors: list[torch.Tensor]) -> object:
        if operator.name == "nonzero":
            return self._positions(tensor_at(args, 0), operator.full_name, None)
        if operator.name in ("_local_scalar_dense", "item"):
            return operator.func(self._element(tensor_at(args, 0), operator.full_name))
        if operator.name == "multinomial" and not self._host.holds(probabilities := tensor_at(args, 0)):
            self._host.means.know_non_negative(probabilities)
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
        if not any(map(is_mask, indices)) or _fills(operator, args):
            return args
        converted: list[object] = []
        values = tensor_at(args, 2) if len(args) > 2 else None
        wanted = values.shape[0] if values is not None and values.numel() > 1 and values.dim() else None
        for index in indices:
            if isinstance(index, torch.Tensor) and is_mask(index):
                converted.extend(self._positions(index, operator.full_name, wanted).unbind(1))
            else:
                converted.append(index)
        return (args[0], converted, *args[2:])

    def _element(self, tensor: torch.Tensor, operation: str) -> torch.Tensor:
        host = self._host
        if is_small(tensor):
            return host.settle(tensor, operation)
        mean = host.means.of(tensor)
        if mean is not None and mean in (0.0, 1.0):
            return full(tensor.shape, mean).to(tensor.dtype)
        drawn = host.inventions.element(tensor, operation, non_negative=host.means.is_non_negative(tensor))
        host.means.confine(tensor, drawn)
        return drawn

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
            settled, taint = self._host.settle(mask, operation), self._host.taint((mask,))
            if taint is not None and not self._rows(int(settled.count_nonzero())):
                settled.zero_()
            return self._host.to_device(settled.nonzero(), mask.device, taint)
        count = self._rows(self._count(mask, operation)) if wanted is None else wanted
        rows = empty((count, mask.dim()), dtype=torch.int64, device=mask.device)
        if is_small(rows) and count:
            flat = arange(count) * (mask.numel() // count)
            self._host.write(rows, torch.stack(torch.unravel_index(flat, mask.shape), -1))
        return rows

    def _rows(self, count: int) -> int:
        """As many rows as a healthy job would get, where it would not get so many."""
        decided = self._host.inventions.decide(Rows(count))
        return decided.count if isinstance(decided, Rows) else count

    def _count(self, mask: torch.Tensor, operation: str) -> int:
        if is_small(mask):
            return int(self._host.settle(mask, operation).count_nonzero())
        mean = self._host.means.of(mask)
        if mean is None or not 0 <= mean <= 1:
            mean = 0.5
        if mean not in (0.0, 1.0):
            self._host.inventions.count(operation, 1)
        return round(mean * mask.numel())

    def _estimate(self, operator: Operator, args: Arguments, kwargs: Keywords) -> object:
        first, operation = tensor_at(args, 0), operator.full_name
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
