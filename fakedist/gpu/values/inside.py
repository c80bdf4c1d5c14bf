"""Operations made of others: collectives, FSDP's copies, custom operators. The engine sees the operations inside.

``__torch_dispatch__`` runs an operation with its own mode off, so it does not see the operations inside. PyTorch's own
operations end in a kernel, but ``_c10d_functional.all_reduce`` ends in the process group, which is Python and changes
tensors with operations of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fakedist.gpu.values.host import device_tensors

_PLAIN = torch.Tensor.__torch_dispatch__
_get_mode, _FAKE = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE
_ON_DEVICE = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
_SPARSE = torch._C.DispatchKeySet(torch._C.DispatchKey.SparseCUDA)


class Inside(TorchDispatchMode):
    """Runs an operation and passes those inside it to ``execute``."""

    def __init__(self, execute: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._execute = execute

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation's device kernel with this mode on."""
        sparse = any(isinstance(value, torch.Tensor) and value.is_cuda and value.is_sparse for value in args)
        if not sparse and next(device_tensors((args, tuple(kwargs.values()))), None) is None:
            return func(*args, **kwargs)
        with self:
            return func.redispatch(_SPARSE if sparse else _ON_DEVICE, *args, **kwargs)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled regions run unchanged."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one of the operations inside."""
        if _get_mode(_FAKE) is not None or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **(kwargs or {}))
        if any(kind.__torch_dispatch__ is not _PLAIN for kind in types):
            return NotImplemented
        return self._execute(func, args, kwargs or {})
