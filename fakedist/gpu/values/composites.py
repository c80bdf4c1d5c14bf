"""PyTorch's composite operations that read values midway: a count of a mask, a checked argument.

On the device they would read memory that no kernel wrote. Some are always one operation to the dispatcher, such as the
backward of ``masked_scatter``. Most are one only under ``torch.inference_mode``, where autograd does not decompose them
first. The engine runs the operations inside all of them (:mod:`fakedist.gpu.values.inside`). The names are those that
``tests/integration/test_values_composites.py`` found to copy from the device.
"""

from __future__ import annotations

import math

import torch

from fakedist.gpu.values.arguments import PLAIN, Arguments, Keywords, as_device, device_tensors, tensor_at
from fakedist.gpu.values.contents import is_small
from fakedist.gpu.values.host import Host
from fakedist.gpu.values.operators import Method, Operator

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
#: The range of nearly all normally distributed values.
_NORMAL = (-4.0, 4.0)


class Composites:
    """Runs those operations.

    Args:
        host: The device memory's values.
        inside: Runs an operation and passes those inside it to the engine.
        kernel: Runs an operation that reads no values midway.
    """

    def __init__(self, host: Host, inside: Method, kernel: Method) -> None:
        self._host = host
        self._inside = inside
        self._kernel = kernel

    def method(self, operator: Operator) -> Method | None:
        """Return the function that runs an operator; None if it is not one of these."""
        if not operator.is_kernel:
            return None
        if _is_made_of_reads(operator):
            return self._inside
        special: dict[str, Method] = {
            "_coalesce": self._coalesced,
            "coalesce": self._coalesced,
            "ctc_loss": self._measured,
            "histc": self._histogram,
            "masked_scatter": self._scattered,
            "masked_scatter_": self._scattered,
            "masked_scatter_backward": self._counted,
            "segment_reduce": self._unchecked,
        }
        if operator.name in special:
            return special[operator.name]
        return self.perhaps_viewed if operator.is_view and _is_composite(operator) else None

    def _coalesced(self, operator: Operator, args: Arguments, kwargs: Keywords) -> object:
        source = tensor_at(args, 0)
        if not source.is_cuda or source.is_coalesced():
            return operator.func(*args, **kwargs)
        return _coalesce(self._host, operator.full_name, source)

    def _histogram(self, operator: Operator, args: Arguments, kwargs: Keywords) -> object:
        """``histc`` without a range reads the extremes."""
        source = tensor_at(args, 0)
        low, high = (operator.argument(name, args, kwargs) for name in ("min", "max"))
        if low == high and source.is_cuda and source.numel():
            bins = operator.argument("bins", args, kwargs)
            args = (source, bins, *_extremes(self._host, operator.full_name, source))
            kwargs = {name: value for name, value in kwargs.items() if name not in ("bins", "min", "max")}
        return self._kernel(operator, args, kwargs)

    def _unchecked(self, operator: Operator, args: Arguments, kwargs: Keywords) -> object:
        """``segment_reduce`` checks its arguments unless it is told not to."""
        unchecked = kwargs | {"unsafe": True} if tensor_at(args, 0).is_cuda else kwargs
        return self._kernel(operator, args, unchecked)

    def _scattered(self, operator: Operator, args: Arguments, kwargs: Keywords) -> object:
        _fit_mask(self._host, tensor_at(args, 1), tensor_at(args, 0).numel(), tensor_at(args, 2).numel())
        return self._kernel(operator, args, kwargs)

    def _counted(self, operator: Operator, args: Arguments, kwargs: Keywords) -> object:
        """The backward of ``masked_scatter`` counts what the mask chose."""
        sizes = args[2]
        assert isinstance(sizes, (list, tuple))
        _fit_mask(self._host, tensor_at(args, 1), tensor_at(args, 0).numel(), math.prod(sizes))
        return self._inside(operator, args, kwargs)

    def _measured(self, operator: Operator, args: Arguments, kwargs: Keywords) -> object:
        """``ctc_loss`` copies its lengths to the host. It is one operation only in inference mode."""
        lengths = [value for value in args[2:4] if isinstance(value, torch.Tensor)]
        if lengths and all(map(self._host.is_seen, lengths)):
            settled = (self._host.settle(value, operator.full_name) if value.is_cuda else value for value in lengths)
            args = (*args[:2], *settled, *args[4:])
        return self._kernel(operator, args, kwargs)

    def perhaps_viewed(self, operator: Operator, args: Arguments, kwargs: Keywords) -> object:
        """``to``, ``reshape``, ``contiguous``: one operation only in inference mode. The result is a view or a copy."""
        source = args[0] if args else None
        if not isinstance(source, torch.Tensor) or type(source).__torch_dispatch__ is not PLAIN:
            return operator.func(*args, **kwargs)
        if _goes_to_host(operator, args, kwargs):
            return self._inside(operator, args, kwargs)
        if source.is_cuda:
            return self._kernel(operator, args, kwargs)
        result = operator.func(*args, **kwargs)
        if (
            isinstance(result, torch.Tensor)
            and result.is_cuda
            and is_small(result)
            and not self._host.is_hollow(source)
        ):
            self._host.write(result, source)
        return result


def _is_made_of_reads(operator: Operator) -> bool:
    """Whether an operator reads values midway."""
    return operator.name in _MADE_OF_READS or operator.full_name in _OVERLOADS


def _is_composite(operator: Operator) -> bool:
    """Whether autograd decomposes an operator, so that the dispatcher sees it whole only in inference mode."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.qualified_name, "CompositeImplicitAutograd")


def _goes_to_host(operator: Operator, args: Arguments, kwargs: Keywords) -> bool:
    """Whether ``to()``, as one operation, copies a device tensor to the host."""
    if operator.name != "to" or not tensor_at(args, 0).is_cuda:
        return False
    target = as_device(operator.argument("device", args, kwargs))
    if target is None and isinstance(other := operator.argument("other", args, kwargs), torch.Tensor):
        target = other.device
    return target is not None and target.type == "cpu"


def _extremes(host: Host, name: str, tensor: torch.Tensor) -> tuple[float, float]:
    """The range of a histogram of all values: that of normally distributed values if the tensor is large."""
    if is_small(tensor):
        values = host.settle(tensor, name)
        low, high = float(values.min()), float(values.max())
    else:
        host.inventions.count(name, 2)
        low, high = _NORMAL
    return (low - 1, high + 1) if low == high else (low, high)  # as PyTorch's kernel does


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
