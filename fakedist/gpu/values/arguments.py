"""The arguments of an operation as torch's dispatcher passes them: the tensors among them, and their device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

Arguments = tuple[object, ...]
Keywords = dict[str, object]

#: The ``__torch_dispatch__`` of plain tensors. Wrapper subclasses have another.
PLAIN = torch.Tensor.__torch_dispatch__


def tensor_at(args: Arguments, position: int) -> torch.Tensor:
    """Return the argument at a position where the operator takes a tensor."""
    value = args[position]
    assert isinstance(value, torch.Tensor)
    return value


def as_device(value: object) -> torch.device | None:
    """The device that an argument names; None if the argument is missing."""
    if value is None:
        return None
    assert isinstance(value, (torch.device, str, int))
    return torch.device(value)


def as_generator(value: object) -> torch.Generator | None:
    """The random generator that an argument is; None if the argument is missing."""
    return value if isinstance(value, torch.Generator) else None


def tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """All tensors among values, also inside lists and tuples."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors(value)


def plain_tensors(values: Iterable[object]) -> list[torch.Tensor]:
    """Tensors with memory of their own: no wrappers (AsyncCollectiveTensor), none made of others (sparse)."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            if type(value).__torch_dispatch__ is PLAIN and value.layout is torch.strided and not value.is_nested:
                found.append(value)
        elif isinstance(value, (list, tuple)):
            found += plain_tensors(value)
    return found


def device_tensors(values: Iterable[object]) -> list[torch.Tensor]:
    """Those of :func:`plain_tensors` that are on a device."""
    return [tensor for tensor in plain_tensors(values) if tensor.is_cuda]


def cuda_device(args: Arguments, kwargs: Keywords) -> torch.device | None:
    """The CUDA device that an operation runs on; None for the host."""
    named = as_device(kwargs.get("device"))
    if named is not None and named.type != "cuda":
        return None
    for tensor in device_tensors(args):
        return tensor.device
    if named is None:
        return None
    return named if named.index is not None else torch.device("cuda", torch.cuda.current_device())
