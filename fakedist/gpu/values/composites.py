"""PyTorch's composite operations that read values midway: a count of a mask, a checked argument.

On the device they would read memory that no kernel wrote. Some are always one operation to the dispatcher, such as the
backward of ``masked_scatter``. Most are one only under ``torch.inference_mode``, where autograd does not decompose them
first. The engine runs the operations inside all of them (:mod:`fakedist.gpu.values.inside`). The names are those that
``tests/integration/test_values_composites.py`` found to copy from the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fakedist.gpu.values.contents import is_small
from fakedist.gpu.values.hollow import is_hollow
from fakedist.gpu.values.host import Host, device_tensors
from fakedist.gpu.values.kinds import Kind
from fakedist.gpu.values.ranges import without_reads

_PLAIN = torch.Tensor.__torch_dispatch__
_Arguments = tuple[Any, ...]
_Keywords = dict[str, Any]

_MADE_OF_READS = {"argwhere", "combinations", "corrcoef", "cov", "cross_entropy_loss", "istft", "linalg_matrix_exp"}
_MADE_OF_READS |= {"matrix_exp", "nonzero_numpy", "one_hot", "quantile", "nanquantile"}
_MADE_OF_READS |= {"sparse_coo_tensor", "sparse_csr_tensor", "sparse_compressed_tensor", "_sparse_mm", "_sparse_sum"}
_MADE_OF_READS |= {"_nested_tensor_from_mask", "_nested_tensor_from_mask_left_aligned", "_to_cpu"}
_MADE_OF_READS |= {f"{prefix}{name}" for prefix in ("", "_") for name in ("to_sparse", "to_sparse_csr")}
_MADE_OF_READS |= {f"{prefix}to_sparse_{name}" for prefix in ("", "_") for name in ("csc", "bsr", "bsc")}
_MADE_OF_READS |= {"_validate_sparse_coo_tensor_args", "_validate_compressed_sparse_indices", "tensor_split"}
#: Other overloads of these read nothing.
_OVERLOADS = {"aten.where.default", "aten.repeat_interleave.self_Tensor"}
_OVERLOADS |= {
    f"aten.{name}.{overload}"
    for name in ("linspace", "logspace")
    for overload in ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")
}


class Composites:
    """Runs those operations.

    Args:
        host: The device memory's values.
        inside: Runs an operation and passes those inside it to the engine.
        kernel: Runs an operation that reads no values midway.
    """

    def __init__(
        self,
        host: Host,
        inside: Callable[[Any, _Arguments, _Keywords], Any],
        kernel: Callable[[Kind, Any, _Arguments, _Keywords], Any],
    ) -> None:
        self._host = host
        self._inside = inside
        self._kernel = kernel

    def route(self, kind: Kind) -> Callable[..., Any] | None:
        """Return the function that runs an operation; None if it is not one of these."""
        if not kind.is_kernel:
            return None
        if _is_made_of_reads(kind):
            return self._inside
        special = {
            "_coalesce": self._coalesced,
            "coalesce": self._coalesced,
            "ctc_loss": self._measured,
            "histc": self._ranged,
            "masked_scatter": self._scattered,
            "masked_scatter_": self._scattered,
            "masked_scatter_backward": self._counted,
            "segment_reduce": self._ranged,
        }.get(kind.name)
        if special is None and kind.is_view and _is_composite(kind):
            special = self._perhaps_viewed
        return None if special is None else partial(special, kind)

    def _coalesced(self, kind: Kind, func: Any, args: _Arguments, kwargs: _Keywords) -> Any:
        if not args[0].is_cuda or args[0].is_coalesced():
            return func(*args, **kwargs)
        return _coalesce(self._host, kind.full_name, args[0])

    def _ranged(self, kind: Kind, func: Any, args: _Arguments, kwargs: _Keywords) -> Any:
        if args[0].is_cuda:
            args, kwargs = without_reads(self._host, kind, args, kwargs)
        return self._kernel(kind, func, args, kwargs)

    def _scattered(self, kind: Kind, func: Any, args: _Arguments, kwargs: _Keywords) -> Any:
        _fit_mask(self._host, args[1], args[0].numel(), args[2].numel())
        return self._kernel(kind, func, args, kwargs)

    def _counted(self, kind: Kind, func: Any, args: _Arguments, kwargs: _Keywords) -> Any:
        """The backward of ``masked_scatter`` counts what the mask chose."""
        _fit_mask(self._host, args[1], args[0].numel(), math.prod(args[2]))
        return self._inside(func, args, kwargs)

    def _measured(self, kind: Kind, func: Any, args: _Arguments, kwargs: _Keywords) -> Any:
        """``ctc_loss`` copies its lengths to the host. It is one operation only in inference mode."""
        lengths = [value for value in args[2:4] if isinstance(value, torch.Tensor)]
        if lengths and all(map(self._host.is_seen, lengths)):
            settled = (self._host.settle(value, kind.full_name) if value.is_cuda else value for value in lengths)
            args = (*args[:2], *settled, *args[4:])
        return self._kernel(kind, func, args, kwargs)

    def _perhaps_viewed(self, kind: Kind, func: Any, args: _Arguments, kwargs: _Keywords) -> Any:
        """``to``, ``reshape``, ``contiguous``: one operation only in inference mode. The result is a view or a copy."""
        source = args[0] if args else None
        if not isinstance(source, torch.Tensor) or type(source).__torch_dispatch__ is not _PLAIN:
            return func(*args, **kwargs)
        if _goes_to_host(kind, args, kwargs):
            return self._inside(func, args, kwargs)
        if source.is_cuda:
            return self._kernel(kind, func, args, kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.is_cuda and is_small(result) and not is_hollow(source):
            self._host.write(result, source)
        return result


def _is_made_of_reads(kind: Kind) -> bool:
    """Whether an operation reads values midway."""
    return kind.name in _MADE_OF_READS or kind.full_name in _OVERLOADS


def _is_composite(kind: Kind) -> bool:
    """Whether autograd decomposes an operation, so that the dispatcher sees it whole only in inference mode."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(kind.qualified_name, "CompositeImplicitAutograd"))


def _goes_to_host(kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``to()``, as one operation, copies a device tensor to the host."""
    if kind.name != "to" or not args[0].is_cuda:
        return False
    target = kind.argument("device", args, kwargs)
    if target is None and isinstance(other := kind.argument("other", args, kwargs), torch.Tensor):
        target = other.device
    return target is not None and torch.device(target).type == "cpu"


def _fit_mask(host: Host, mask: torch.Tensor, num_places: int, num_values: int) -> None:
    """Record how many elements of a mask without values are true: ``masked_scatter`` has a value for each of them.

    Args:
        mask: The mask, on a device.
        num_places: Elements that the mask chooses among.
        num_values: Elements of the source.
    """
    share = min(1.0, num_values / max(1, num_places))
    if mask.is_cuda and not host.holds(mask) and (host.shares.of(mask) or 2.0) > share:
        host.shares.know(mask, share)


def _coalesce(host: Host, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a sparse tensor with each index once. Its kernel reads their number; many indices are taken as distinct.

    Raises:
        InventedValueError: ``strict`` is set and a value would be made up.
    """
    indices, values = tensor._indices(), tensor._values()
    if all(host.is_seen(part) for part in device_tensors((indices, values))):
        found = torch.sparse_coo_tensor(host.settle(indices, name), host.settle(values, name), tensor.shape).coalesce()
        indices = host.to_device(found._indices(), tensor.device)
        values = host.to_device(found._values(), tensor.device)
    else:
        host.inventions.count(name, 1)
        if host.is_seen(indices):
            unique = torch.unique(host.settle(indices, name), dim=1)
            indices = host.to_device(unique, tensor.device)
        else:
            indices = torch.empty_like(indices)
        values = values.new_empty((indices.shape[1], *values.shape[1:]))
    return torch.sparse_coo_tensor(indices, values, tensor.shape, is_coalesced=True, check_invariants=False)
