"""Operations made of others: collectives and custom operators, PyTorch's composites, and lists of tensors.

``__torch_dispatch__`` runs an operation with its own mode off, so it sees no operations inside. PyTorch's own end in a
kernel, but ``_c10d_functional.all_reduce`` ends in the process group, Python that changes tensors with operations of
its own. :class:`Inside` passes those to the engine.

Composites that read values midway (a count of a mask, a checked argument) would read memory that no kernel wrote. Some
are always one operation to the dispatcher (the backward of ``masked_scatter``); most only under
``torch.inference_mode``. The names are those that ``tests/integration/test_values_composites.py`` found to copy from
the device.

Of an operation on lists of tensors, as optimizers use, a position is computed if all its tensors hold values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import empty
from torch import tensor as new_tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from fakedist.gpu.values.contents import Taint, host_view, is_small
from fakedist.gpu.values.host import Host
from fakedist.gpu.values.means import NON_NEGATIVE
from fakedist.gpu.values.operators import Method, Operator
from fakedist.gpu.values.tensors import PLAIN, Arguments, Keywords, as_device, device_tensors, tensor_at, tensors

_get_mode, _FAKE = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE
#: How the names of dispatch keys begin for tensors that are not plain.
_LAYOUTS = {torch.sparse_coo: "Sparse"} | dict.fromkeys(
    (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc), "SparseCsr"
)


@functools.cache
def _kernels(device_type: str, kind: str) -> torch._C.DispatchKeySet:
    key = torch._C._dispatch_key_parse(kind + torch._C._dispatch_key_for_device(device_type))
    return torch._C.DispatchKeySet(key)


def _special(tensor: torch.Tensor) -> torch._C.DispatchKeySet | None:
    kind = "Quantized" if tensor.is_quantized else _LAYOUTS.get(tensor.layout)
    return None if kind is None or not tensor.is_cuda else _kernels(tensor.device.type, kind)


def _numbers_as_tensors(operator: Operator, args: Arguments) -> Arguments:
    """Arguments with tensors for the numbers that torch's own call would convert: ``sparse * 2``."""
    wanted = [str(argument.type) == "Tensor" for argument in operator.func._schema.arguments]
    return tuple(
        new_tensor(value) if is_tensor and isinstance(value, (bool, int, float, complex)) else value
        for value, is_tensor in zip(args, wanted, strict=False)
    )


class Inside(TorchDispatchMode):
    """Runs an operation and passes those inside it to ``execute``."""

    def __init__(self, execute: Callable[[OpOverload, Arguments, Keywords], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._execute = execute

    def run(self, operator: Operator, args: Arguments, kwargs: Keywords) -> object:
        """Run an operation's device kernel with this mode on."""
        kernels = next(filter(None, map(_special, tensors(args))), None)
        if kernels is not None:
            args = _numbers_as_tensors(operator, args)
        elif near := device_tensors((args, tuple(kwargs.values()))):
            kernels = _kernels(near[0].device.type, "")
        else:
            return operator.func(*args, **kwargs)
        with self:
            return operator.func.redispatch(kernels, *args, **kwargs)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled regions run unchanged."""
        return True

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Iterable[type[torch.Tensor]],
        args: Arguments = (),
        kwargs: Keywords | None = None,
    ) -> object:
        if _get_mode(_FAKE) is not None or not isinstance(func, OpOverload):
            return func(*args, **(kwargs or {}))
        if any(kind.__torch_dispatch__ is not PLAIN for kind in types):
            return NotImplemented
        result = self._execute(func, args, kwargs or {})
        if type(result) is list:  # torch takes no undefined tensor in a list from Python
            return [empty(0) if value is None else value for value in result]
        return result


_MADE_OF_READS = {"argwhere", "combinations", "corrcoef", "cov", "cross_entropy_loss", "istft"}
_MADE_OF_READS |= {"nonzero_numpy", "one_hot", "quantile", "nanquantile"}
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
#: Of longer ones, ``mode`` sorts each (aten/src/ATen/native/cuda/TensorModeKernel.cpp).
_LONGEST_ROW = 2048
#: The range of nearly all normally distributed values.
_NORMAL = (-4.0, 4.0)


class Composites:
    """Runs PyTorch's composites; ``inside`` passes inner operations to the engine, ``kernel`` runs the others."""

    def __init__(self, host: Host, inside: Method, kernel: Method) -> None:
        self._host = host
        self._inside = inside
        self._kernel = kernel

    def method(self, operator: Operator) -> Method | None:
        """Return the function that runs an operator; None if it is not one of these."""
        if not operator.is_kernel:
            return None
        if operator.name in _MADE_OF_READS or operator.full_name in _OVERLOADS:
            return self._inside
        special: dict[str, Method] = {
            "_coalesce": self._coalesced,
            "coalesce": self._coalesced,
            "ctc_loss": self._measured,
            "histc": self._histogram,
            "masked_scatter": self._scattered,
            "masked_scatter_": self._scattered,
            "masked_scatter_backward": self._counted,
            "mode": self._sorted,
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
        """``segment_reduce`` checks its arguments unless ``unsafe`` is set."""
        unchecked = kwargs | {"unsafe": True} if tensor_at(args, 0).is_cuda else kwargs
        return self._kernel(operator, args, unchecked)

    def _scattered(self, operator: Operator, args: Arguments, kwargs: Keywords) -> object:
        _fit_mask(self._host, tensor_at(args, 1), tensor_at(args, 0).numel(), tensor_at(args, 2).numel())
        return self._kernel(operator, args, kwargs)

    def _counted(self, operator: Operator, args: Arguments, kwargs: Keywords) -> object:
        """The backward of ``masked_scatter`` counts the true elements of the mask."""
        sizes = args[2]
        assert isinstance(sizes, (list, tuple))
        _fit_mask(self._host, tensor_at(args, 1), tensor_at(args, 0).numel(), math.prod(sizes))
        return self._inside(operator, args, kwargs)

    def _sorted(self, operator: Operator, args: Arguments, kwargs: Keywords) -> object:
        """``mode`` of long rows sorts each on the device, and fails if the host does not find its result there."""
        source, dim = tensor_at(args, 0), operator.argument("dim", args, kwargs)
        if not source.is_cuda or not source.dim() or source.shape[int(str(dim))] <= _LONGEST_ROW:
            return self._kernel(operator, args, kwargs)
        like = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta")
        shapes = operator.func(like, *args[1:], **kwargs)
        results = [empty(shape.shape, dtype=shape.dtype, device=source.device) for shape in shapes]
        if self._host.holds(source):
            for result, values in zip(results, operator.func(host_view(source), *args[1:], **kwargs), strict=True):
                self._host.write(result, values)
                if (taint := self._host.taint((source,))) is not None:
                    self._host.taints.mark(result, taint)
        return type(shapes)(results)

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
            and not self._host.has_no_data(source)
        ):
            self._host.write(result, source)
        return result


def _is_composite(operator: Operator) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.qualified_name, "CompositeImplicitAutograd")


def _goes_to_host(operator: Operator, args: Arguments, kwargs: Keywords) -> bool:
    if operator.name != "to" or not tensor_at(args, 0).is_cuda:
        return False
    target = as_device(operator.argument("device", args, kwargs))
    if target is None and isinstance(other := operator.argument("other", args, kwargs), torch.Tensor):
        target = other.device
    return target is not None and target.type == "cpu"


def _extremes(host: Host, name: str, tensor: torch.Tensor) -> tuple[float, float]:
    if is_small(tensor):
        values = host.settle(tensor, name)
        low, high = float(values.min()), float(values.max())
    else:
        host.inventions.count(name, 2)
        low, high = _NORMAL
    return (low - 1, high + 1) if low == high else (low, high)  # as PyTorch's kernel does


def _fit_mask(host: Host, mask: torch.Tensor, num_masked: int, num_values: int) -> None:
    """``masked_scatter`` has a value for each of the true elements."""
    mean = min(1.0, num_values / max(1, num_masked))
    if mask.is_cuda and not host.holds(mask) and (host.means.of(mask) or 2.0) > mean:
        host.means.know(mask, mean)


def _coalesce(host: Host, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a sparse tensor with each index once. Its kernel reads their number; many count as distinct."""
    indices, values = tensor._indices(), tensor._values()
    if all(host.is_seen(part) for part in device_tensors((indices, values))):
        coalesced = torch.sparse_coo_tensor(
            host.settle(indices, name), host.settle(values, name), tensor.shape
        ).coalesce()
        taint = host.taint(device_tensors((indices, values)))
        indices = host.to_device(coalesced._indices(), tensor.device, taint)
        values = host.to_device(coalesced._values(), tensor.device, taint)
    else:
        host.inventions.count(name, 1)
        if host.is_seen(indices):
            indices = host.to_device(torch.unique(host.settle(indices, name), dim=1), tensor.device)
        else:
            indices = torch.empty_like(indices)
        values = values.new_empty((indices.shape[1], *values.shape[1:]))
    return torch.sparse_coo_tensor(indices, values, tensor.shape, is_coalesced=True, check_invariants=False)


class Foreach:
    """Runs operations on lists of tensors."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def run(self, operator: Operator, args: Arguments, kwargs: Keywords) -> object:
        """Run on the device, and on the host for the positions that can be computed."""
        chosen = self._chosen(operator, args, kwargs)
        taints = self._taints(operator, args, kwargs, chosen)
        result = operator.func(*args, **kwargs)
        computed = self._compute(operator, args, kwargs, chosen) if chosen else None
        if chosen and computed is None:
            chosen = []
        done = set(chosen)
        for position in operator.written:
            written = args[position] if position < len(args) else ()
            if isinstance(written, (list, tuple)):
                self._mark(written, done)
                self._taint(written, taints, done)
        if isinstance(result, (list, tuple)):
            self._fill(operator, result, chosen, computed)
            self._taint(result, taints, done)
        return result

    def _taints(self, operator: Operator, args: Arguments, kwargs: Keywords, chosen: list[int]) -> dict[int, Taint]:
        host = self._host
        if not chosen or not host.taints:
            return {}
        ignored = operator.written if operator.overwrites else ()
        values = [*(value for i, value in enumerate(args) if i not in ignored), *kwargs.values()]
        shared = [value for value in values if isinstance(value, torch.Tensor)]
        lists = [v for v in values if isinstance(v, (list, tuple)) and v and isinstance(v[0], torch.Tensor)]
        taints = {i: host.taint((*shared, *(listed[i] for listed in lists if i < len(listed)))) for i in chosen}
        return {i: taint for i, taint in taints.items() if taint is not None}

    def _taint(self, results: Sequence[torch.Tensor], taints: dict[int, Taint], done: set[int]) -> None:
        for i, taint in taints.items():
            if i in done and i < len(results) and is_small(results[i]):  # an optimizer may lack this state
                self._host.taints.mark(results[i], taint)

    def _chosen(self, operator: Operator, args: Arguments, kwargs: Keywords) -> list[int]:
        near = [i for i, tensor in enumerate(_tensors(args)) if tensor.is_cuda and is_small(tensor)]
        if not near:
            return []
        ignored = operator.written if operator.overwrites else ()
        read = [value for i, value in enumerate(args) if i not in ignored]
        if operator.argument("is_first_step", args, kwargs):  # the kernel of SGD writes its momentum, and reads none
            momentum = operator.argument("momentum_buffer_list", args, kwargs)
            read = [value for value in read if value is not momentum]
        alone = [value for value in (*read, *kwargs.values()) if isinstance(value, torch.Tensor)]
        lists = [value for value in (*read, *kwargs.values()) if isinstance(value, (list, tuple)) and value]
        if not all(not tensor.is_cuda or self._host.holds(tensor) for tensor in alone):
            return []
        lists = [listed for listed in lists if isinstance(listed[0], torch.Tensor)]
        return [i for i in near if all(not listed[i].is_cuda or self._host.holds(listed[i]) for listed in lists)]

    def _compute(
        self, operator: Operator, args: Arguments, kwargs: Keywords, chosen: list[int]
    ) -> Sequence[torch.Tensor] | None:
        num_all = len(_tensors(args))

        def picked(value: object) -> object:
            if isinstance(value, (list, tuple)) and len(value) == num_all:
                return [picked_one(value[i]) for i in chosen]
            if isinstance(value, torch.Tensor) and not value.is_cuda and value.shape == (num_all,):
                return value[chosen]  # "scalars" of _foreach_addcdiv_.Tensor
            return picked_one(value)

        def picked_one(value: object) -> object:
            return host_view(value) if isinstance(value, torch.Tensor) and value.is_cuda else value

        try:
            named = {name: picked(value) for name, value in kwargs.items()}
            results: Sequence[torch.Tensor] | None = operator.func(*map(picked, args), **named)
        except Exception:  # no CPU kernel, or none for these types
            return None
        return () if results is None else results

    def _mark(self, written: Sequence[torch.Tensor], done: set[int]) -> None:
        for i, tensor in enumerate(written):
            if i in done:
                self._host.defined.define(tensor)
                self._host.taints.clear(tensor)
                self._host.means.forget(tensor)
            elif tensor.is_cuda:
                self._host.spoil(tensor)

    def _fill(
        self,
        operator: Operator,
        result: Sequence[torch.Tensor],
        chosen: list[int],
        computed: Sequence[torch.Tensor] | None,
    ) -> None:
        for i, values in zip(chosen, computed or (), strict=False):
            if is_small(result[i]):
                self._host.write(result[i], values)
        if operator.name in NON_NEGATIVE:
            for tensor in device_tensors(result):
                self._host.means.know_non_negative(tensor)


def _tensors(args: Arguments) -> Sequence[torch.Tensor]:
    """The first list of tensors. It need not be the first argument: ``_foreach_pow(2.0, exponents)``."""
    return next((value for value in args if isinstance(value, (list, tuple))), ())
