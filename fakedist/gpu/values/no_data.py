"""Large floats on the host: as on the virtual GPU, they hold no data and cost nothing.

Offloaded parameters and optimizer states, or models initialised on the host, may exceed this machine's memory. Their
pages stay untouched: operations return results of the right size, and values that are read are made up and counted. Nor
do results hold data that the device would not compute, such as the parameter in half precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import empty, zeros

from fakedist.gpu.values.contents import HOST_LIMIT_BYTES, LIMIT_BYTES, is_float
from fakedist.gpu.values.host import Host
from fakedist.gpu.values.inventions import script_line
from fakedist.gpu.values.means import NON_NEGATIVE
from fakedist.gpu.values.operators import Operator
from fakedist.gpu.values.tensors import Arguments, Keywords, as_device, plain_tensors, storage_of, tensor_at

_FACTORIES = {"zeros", "ones", "full", "rand", "randn", "normal", "linspace", "eye"}
_META = torch.device("meta")
_COPY = torch.ops.aten.copy_.default


class NoData:
    """Runs operations on large host floats without computing them; ``first_line`` is the script's line of the first."""

    def __init__(self, host: Host) -> None:
        self.operations = 0
        self.first_line = ("", 0)
        self._host = host

    def concerns(self, operator: Operator, args: Arguments, kwargs: Keywords) -> bool:
        """Return whether an operation reads, writes or creates such tensors."""
        for value in args:
            if isinstance(value, torch.Tensor):
                if not value.is_cuda and self._host.has_no_data(value):
                    return True
            elif _is_list_on_host(value) and any(map(self._host.has_no_data, value)):
                return True
        if operator.written_names and any(map(self._host.has_no_data, kwargs.values())):
            return True
        return operator.name in _FACTORIES and _makes_one(args, kwargs)

    def run(self, operator: Operator, args: Arguments, kwargs: Keywords) -> object:
        """Run an operation and return its written arguments, or results of the right size."""
        # The memory reads as zeros, which decide the size of what is dynamic.
        if operator.reshapes or (operator.dynamic and not operator.name.startswith("_local_scalar")):
            return operator.func(*args, **kwargs)
        self.count()
        if operator.written:
            return self._in_place(operator, args, kwargs)
        try:
            shaped = operator.func(*map(_on_meta, args), **_keywords_on_meta(kwargs))
        except Exception:  # the shapes depend on values
            return operator.func(*args, **kwargs)
        if isinstance(shaped, torch.Tensor) and not (shaped.is_floating_point() or shaped.is_complex()):
            self._host.inventions.count(operator.full_name, shaped.numel())
            return operator.func(
                *map(self._as_zeros, args), **kwargs
            )  # comparisons, isfinite: the memory reads as zeros
        pinned = bool(kwargs.get("pin_memory")) or operator.name == "_pin_memory"
        return self._made(shaped, operator, pinned)

    def take_element(self, tensor: torch.Tensor, operation: str) -> torch.Tensor:
        """Make up one element of such a tensor."""
        return self._host.inventions.element(tensor, operation)

    # Large copies between the host and the device, as copy_kernel_cuda makes them (aten/src/ATen/native/cuda/Copy.cu).
    # Unless both tensors are alike, torch makes a contiguous one on the host. A blocking copy converts types there.

    def upload(self, operator: Operator, args: Arguments, kwargs: Keywords) -> Arguments:
        """Arguments for a copy to the device, with what torch makes of the tensor on the host first."""
        is_blocking = not operator.argument("non_blocking", args, kwargs)
        if operator.name == "copy_":
            target, source = tensor_at(args, 0), tensor_at(args, 1)
            made = empty(target.shape, dtype=target.dtype if is_blocking else source.dtype, device=_META)
            is_alike = source.is_contiguous() or source.stride() == target.stride()
        else:
            source, wanted = tensor_at(args, 0), kwargs.get("dtype")
            dtype = wanted if isinstance(wanted, torch.dtype) and is_blocking else source.dtype
            made = torch.empty_like(source, dtype=dtype, device=_META)
            is_alike = source.stride() == made.stride()
        if (is_alike and made.dtype is source.dtype) or made.nbytes <= HOST_LIMIT_BYTES:
            return args
        staged = torch.empty_strided(made.shape, made.stride(), dtype=made.dtype)
        return tuple(staged if value is source else value for value in args)

    def download(self, operator: Operator, args: Arguments, kwargs: Keywords) -> torch.Tensor:
        """Copy a large device tensor to the host, where it is neither converted nor put in order."""
        is_blocking = not operator.argument("non_blocking", args, kwargs)
        if operator.name == "copy_":
            target, source = tensor_at(args, 0), tensor_at(args, 1)
        else:
            source, dtype = tensor_at(args, 0), kwargs.get("dtype")
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype is source.dtype:
                return _made_by(operator, args, kwargs)
            if not is_blocking or source.numel() * dtype.itemsize <= HOST_LIMIT_BYTES:
                return _made_by(operator, args, kwargs)
            order = kwargs.get("memory_format")
            target = torch.empty_like(
                source,
                dtype=dtype,
                device="cpu",
                memory_format=order if isinstance(order, torch.memory_format) else torch.preserve_format,
                pin_memory=bool(kwargs.get("pin_memory")),
            )
        is_same_type = target.dtype is source.dtype
        is_alike = is_same_type and target.stride() == source.stride()
        if (
            is_alike
            or (target.is_contiguous() and (is_same_type or not is_blocking))
            or not self._host.has_no_data(target)
        ):
            return _made_by(operator, args, kwargs)
        staged = empty(target.shape, dtype=source.dtype if is_blocking else target.dtype)
        _COPY(staged, source, not is_blocking)
        return target

    def count(self) -> None:
        """Count one operation that was not computed."""
        if not self.operations:
            self.first_line = script_line()
        self.operations += 1

    def _as_zeros(self, value: object) -> object:
        return zeros((), dtype=value.dtype).expand(value.shape) if self._host.has_no_data(value) else value

    def _in_place(self, operator: Operator, args: Arguments, kwargs: Keywords) -> object:
        lists = [value for value in args if isinstance(value, (list, tuple)) and value]
        lists = [value for value in lists if isinstance(value[0], torch.Tensor)]
        computed: set[int] = set()
        if lists:
            length = len(lists[0])
            lists = [listed for listed in lists if len(listed) == length]
            rest = [i for i in range(length) if not any(self._host.has_no_data(listed[i]) for listed in lists)]
            if rest:
                computed = {id(listed[i]) for listed in lists for i in rest}
                operator.func(*(_picked(value, rest, length) for value in args), **kwargs)
        outputs = {name: value for name, value in kwargs.items() if name in operator.written_names}
        _resize(operator, args, kwargs, outputs)
        for tensor in plain_tensors([*(args[i] for i in operator.written if i < len(args)), *outputs.values()]):
            if tensor.is_cuda:
                self._host.spoil(tensor)
            elif id(tensor) not in computed:
                self._fill(tensor, operator)
        returns = operator.func._schema.returns
        if not returns:
            return None
        written = [args[i] for i in operator.written if i < len(args)]
        written += outputs.values()
        return written[0] if len(returns) == 1 else tuple(written)

    def _made(self, shaped: object, operator: Operator, pinned: bool) -> object:
        if isinstance(shaped, (list, tuple)):
            return type(shaped)(self._made(value, operator, pinned) for value in shaped)
        if not isinstance(shaped, torch.Tensor):
            return shaped
        made = torch.empty_strided(shaped.shape, shaped.stride(), dtype=shaped.dtype, pin_memory=pinned)
        self._fill(made, operator)
        return made

    def _fill(self, tensor: torch.Tensor, operator: Operator) -> None:
        if self._host.has_no_data(tensor) or not tensor.numel():
            return
        if is_float(tensor) and storage_of(tensor)[1] > LIMIT_BYTES:
            tensor.zero_()
            self._host.mark_no_data(tensor)
            return
        self._host.inventions.fill(tensor, operator.full_name, non_negative=operator.name in NON_NEGATIVE)


def _made_by(operator: Operator, args: Arguments, kwargs: Keywords) -> torch.Tensor:
    result = operator.func(*args, **kwargs)
    assert isinstance(result, torch.Tensor)
    return result


def _is_list_on_host(value: object) -> TypeGuard[Sequence[torch.Tensor]]:
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return isinstance(value[0], torch.Tensor) and not value[0].is_cuda  # a list is on one device


def _makes_one(args: Arguments, kwargs: Keywords) -> bool:
    device, dtype = as_device(kwargs.get("device")), kwargs.get("dtype")
    if not isinstance(dtype, torch.dtype):
        dtype = torch.get_default_dtype()
    sizes = [value for value in args if isinstance(value, (list, tuple))]
    on_host = device is None or device.type == "cpu"
    return on_host and dtype.is_floating_point and any(math.prod(s) * dtype.itemsize > HOST_LIMIT_BYTES for s in sizes)


def _on_meta(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
    return [_on_meta(item) for item in value] if isinstance(value, (list, tuple)) else value


def _keywords_on_meta(keywords: Keywords) -> Keywords:
    converted = {name: _on_meta(value) for name, value in keywords.items()}
    if "device" in converted:
        converted["device"] = _META
    converted.pop("pin_memory", None)
    converted.pop("generator", None)
    return converted


def _resize(operator: Operator, args: Arguments, kwargs: Keywords, outputs: Keywords) -> None:
    if not outputs:
        return
    on_meta = _keywords_on_meta(kwargs)
    try:
        operator.func(*map(_on_meta, args), **on_meta)
    except Exception:  # the shapes depend on values
        return
    for name, output in outputs.items():
        shaped = on_meta[name]
        if isinstance(output, torch.Tensor) and isinstance(shaped, torch.Tensor) and shaped.shape != output.shape:
            output.resize_(shaped.shape).as_strided_(shaped.shape, shaped.stride())


def _picked(value: object, positions: list[int], length: int) -> object:
    if isinstance(value, (list, tuple)) and len(value) == length:
        return [value[i] for i in positions]
    return value
