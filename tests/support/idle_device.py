"""A device that computes nothing, where there is no virtual GPU: host memory in which kernels leave 77 or ones.

As on the virtual GPU, a value that is right was computed by the engine. Memory that the engine sees as the host's
(``host_view``) cannot be resized; all other tensors say that they are on the device, unless :func:`stay` names them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._ops import OpOverload

from fakedist.gpu.values.engine import ValueEngine
from fakedist.gpu.values.tensors import Arguments, Keywords, flat
from fakedist.record.dispatch import every_operation

#: In memory that a kernel should have written.
GARBAGE = 77.0


#: While kernels are kept: the device that is on, if any.
_switch: list[IdleDevice | None] = []


@contextmanager
def kernels_kept() -> Iterator[None]:
    """Keep the kernels of torch's 3,700 operations, which :meth:`IdleDevice.on` registers otherwise each time."""

    def run(func: OpOverload, args: Arguments, kwargs: Keywords) -> object:
        (device,) = _switch
        return func(*args, **kwargs) if device is None else device.execute(func, args, kwargs)

    _switch.append(None)
    try:
        with every_operation(run):
            yield
    finally:
        _switch.clear()


@contextmanager
def _switched(device: IdleDevice) -> Iterator[None]:
    _switch[:] = [device]
    try:
        yield
    finally:
        _switch[:] = [None]


class IdleDevice(ValueEngine):
    """The engine of such a device. Operations run on it inside :meth:`on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, strict: bool = False) -> None:
        self.at_kernel = self._is_aside = False
        self._stay: list[torch.Tensor] = []
        self._kernels: dict[OpOverload, IdleKernel] = {}
        monkeypatch.setattr(torch.Tensor, "is_cuda", property(self._is_on_device))
        super().__init__(0, strict=strict)
        self.seed(0)
        generator = SimpleNamespace(initial_seed=lambda: self._seed, get_offset=lambda: self.offset)
        generator.set_offset = lambda offset: setattr(self, "offset", offset)
        monkeypatch.setattr(torch.cuda, "default_generators", (generator,))

    def seed(self, seed: int) -> None:
        """Seed the device's random generator."""
        self._seed, self.offset = seed, 0

    @contextmanager
    def on(self) -> Iterator[IdleDevice]:
        """Run this thread's operations on the device."""
        with _switched(self) if _switch else every_operation(self.execute):
            yield self

    def execute(self, func: OpOverload, args: Arguments, kwargs: Keywords) -> object:
        """Run an operation with the engine: its first kernel is the device's."""
        if self._is_aside:
            return func(*args, **kwargs)
        self.at_kernel = True
        try:
            return super().execute(self._kernels.setdefault(func, IdleKernel(func, self)), args, kwargs)  # type: ignore[call-overload]
        finally:
            self.at_kernel = False

    def stay(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the host."""
        self._stay.append(tensor)
        return tensor

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Look at the engine: what this thread computes meanwhile is not the script's."""
        self._is_aside = True
        try:
            yield
        finally:
            self._is_aside = False

    def known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A copy of the values that kernels computed; None if they did not compute all."""
        with self.aside():
            known = super().known(tensor)
            return None if known is None else known.clone()

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of the values that the script reads."""
        with self.aside():
            host = self.on_host(tensor)
            assert host is not None
            return host.clone()

    def not_sent(self, tensor: torch.Tensor, when_read: Callable[[], object]) -> bool:
        """As the engine does."""
        with self.aside():
            return super().not_sent(tensor, when_read)

    def made_up(self) -> dict[str, int]:
        """Values made up since the last call, by operation."""
        return {row.operation: row.num_values for row in self.invented()}

    def _is_on_device(self, tensor: torch.Tensor) -> bool:
        if tensor.layout is torch.sparse_coo:
            tensor = tensor._values()
        elif tensor.layout is not torch.strided:
            tensor = tensor.values()
        storage = tensor.untyped_storage()
        return storage.resizable() and all(storage._cdata != own.untyped_storage()._cdata for own in self._stay)


class IdleKernel:
    """An operator of the device: it returns memory for its results, and computes nothing."""

    def __init__(self, func: OpOverload, device: IdleDevice) -> None:
        self._func, self._device = func, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._func, name)

    def __str__(self) -> str:
        return str(self._func)

    def __call__(self, *args: object, **kwargs: object) -> object:
        given = [value for value in flat((args, kwargs.values())) if isinstance(value, torch.Tensor)]
        is_device, self._device.at_kernel = self._device.at_kernel, False
        if self._func is torch.ops.aten.index.Tensor and given[0].is_cuda:
            args = (given[0], [_inside(index, size) for index, size in zip(args[1], given[0].shape, strict=False)])  # type: ignore[call-overload]
        if not is_device or not all(tensor.is_cuda for tensor in given) or torch.Tag.dynamic_output_shape in self.tags:
            return self._func(*args, **kwargs)
        before = [tensor.clone() for tensor in given]
        result = self._func(*args, **kwargs)
        for tensor, values in zip(given, before, strict=True):
            if tensor.layout is torch.strided and tensor.shape == values.shape and 0 not in tensor.stride():
                tensor.copy_(values)
        storages = {tensor.untyped_storage()._cdata for tensor in given if tensor.layout is torch.strided}
        for made in flat((result,)):
            if self.is_view or not isinstance(made, torch.Tensor) or made.layout is not torch.strided:
                continue
            if made.untyped_storage()._cdata not in storages:
                made.fill_(GARBAGE if made.is_floating_point() or made.is_complex() else 1)
        return result


def _inside(index: torch.Tensor | None, size: int) -> torch.Tensor | None:
    """Positions that no kernel wrote, within their dimension: the host checks them."""
    return index.remainder(size) if index is not None and index.dtype is torch.int64 else index
