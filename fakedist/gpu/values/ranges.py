"""``histc`` without a range and ``segment_reduce`` with its checks: kernels that read a few values."""

from __future__ import annotations

from typing import Any

from fakedist.gpu.values.contents import is_small
from fakedist.gpu.values.host import Host
from fakedist.gpu.values.kinds import Kind

#: The range of nearly all normally distributed values.
_NORMAL = (-4.0, 4.0)


def without_reads(host: Host, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return arguments with which the kernel does the same without reading values."""
    if kind.name == "segment_reduce":
        return args, kwargs | {"unsafe": True}
    low, high = (kind.argument(name, args, kwargs) for name in ("min", "max"))
    if low != high or not args[0].is_cuda or not args[0].numel():
        return args, kwargs
    if is_small(args[0]):
        values = host.settle(args[0], kind.full_name)
        low, high = float(values.min()), float(values.max())
    else:
        host.inventions.count(kind.full_name, 2)
        low, high = _NORMAL
    if low == high:  # as PyTorch's kernel does
        low, high = low - 1, high + 1
    bins = kind.argument("bins", args, kwargs)
    rest = {name: value for name, value in kwargs.items() if name not in ("bins", "min", "max")}
    return (args[0], bins, low, high), rest
