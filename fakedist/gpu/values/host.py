"""The host's side of the virtual GPU's memory: what it holds, making up what it does not, arguments for CPU kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from fakedist.gpu.values.choices import spread
from fakedist.gpu.values.contents import Defined, host_view, is_small
from fakedist.gpu.values.inventions import Inventions
from fakedist.gpu.values.shares import Shares

_CPU = torch.device("cpu")
_PLAIN = torch.Tensor.__torch_dispatch__


class Host:
    """Reads and writes small device tensors as what they are: host memory.

    Args:
        seed: Of values that are made up.
        strict: Whether none may be.
    """

    def __init__(self, seed: int, *, strict: bool = False) -> None:
        self.defined = Defined()
        self.shares = Shares(self._seen)
        self.inventions = Inventions(seed, strict=strict)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a device tensor is small and has all its values."""
        return tensor.is_cuda and is_small(tensor) and self.defined.holds(tensor)

    def _seen(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return host_view(tensor) if self.holds(tensor) else None

    def write(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Give a small device tensor its values."""
        host_view(tensor).copy_(values)
        self.defined.define(tensor)

    def spoil(self, tensor: torch.Tensor) -> None:
        """A kernel that did not run should have written to a device tensor."""
        if is_small(tensor):
            self.defined.spoil(tensor)
        self.shares.forget(tensor)

    def settle(self, tensor: torch.Tensor, operation: str) -> torch.Tensor:
        """Host view of a small device tensor; what it does not hold is made up, and it holds that from now on."""
        host = host_view(tensor)
        if self.defined.holds(tensor):
            return host
        missing, share = self.defined.missing(tensor), self.shares.of(tensor)
        # Sums of the mask have counted on its share; of one element a share says nothing.
        if host.dtype == torch.bool and share is not None and host.numel() > 1 and missing.all():
            self.inventions.count(operation, host.numel())
            host.copy_(spread(host.shape, share))
        else:
            self.inventions.fill(host, missing, operation, non_negative=self.shares.is_non_negative(tensor))
        self.defined.define(tensor)
        return host

    def to_device(self, values: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A device tensor with these values, as far as it is small."""
        result = torch.empty_like(values, device=device)
        if is_small(result):
            self.write(result, values)
        return result

    def arguments(self, values: Iterable[Any]) -> list[Any]:
        """Arguments for a CPU kernel: host views in the place of device tensors."""
        found: list[Any] = []
        for value in values:
            if isinstance(value, torch.Tensor) and value.is_cuda:
                found.append(host_view(value))
            elif isinstance(value, (list, tuple)):
                found.append(self.arguments(value))
            else:
                found.append(_CPU if isinstance(value, torch.device) else value)
        return found

    def keywords(self, keywords: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments for a CPU kernel."""
        found = dict(zip(keywords, self.arguments(keywords.values()), strict=True))
        if found.get("device") is not None:
            found["device"] = _CPU
        found.pop("pin_memory", None)
        return found


def plain_tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Tensors with memory of their own, not wrappers (AsyncCollectiveTensor), not made of others (sparse)."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if type(value).__torch_dispatch__ is _PLAIN and value.layout is torch.strided:
                yield value
        elif isinstance(value, (list, tuple)):
            yield from plain_tensors(value)


def device_tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Those of :func:`plain_tensors` that are on a device."""
    return (tensor for tensor in plain_tensors(values) if tensor.is_cuda)
